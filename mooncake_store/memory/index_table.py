"""The index replica of a host: the directory's index as a bounded hash table in a mapped file.

The directory lists the copies of each block. One storage node of the host writes the table from the
directory's events (node/index_writer.py). Readers need no messages and no locks. An entry describes
one copy of one block: block key, node, slot, generation, checksum, size. The checksum of the entry
itself comes last, so a reader ignores a partly written entry, whatever the memory order of the CPU.

    head      magic, number of buckets, epoch and sequence of the last applied event, and a stamp:
              the time up to which all events are applied
    names     the names of the nodes, each with a checksum; an entry has the number of a name + 1
    buckets   512 bytes each: 7 tags and 7 entries of 64 bytes

A block key hashes to two buckets. The tag of an entry is the hash of its block key with bit 0 set;
a tag of 0 marks a free entry. All tags of a bucket are in one cache line. If both buckets are full,
a new entry replaces one of a node on another host. If all entries there are of this host's nodes, a
new entry of this host's nodes replaces one of them, and other new entries are not stored.

The file belongs to one user (mode 0600). The writer holds an exclusive flock on the file until it
exits, so another node can take over. Readers search in C (native.c), or else with numpy.

Not here: the handling of a stale or wrong entry (client/index_reader.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import stat
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.memory.segment_file import (
    SegmentRefused,
    create_locked,
    is_hugetlbfs,
    try_lock,
    unlink_if_same,
)
from mooncake_store.native.library import NativeFunction, quick_function
from mooncake_store.records.blocks import Copy

SWITCH = "MOONCAKE_INDEX_REPLICA"  # environment variable; "off": this process uses no table
MAGIC = int.from_bytes(b"MKINDEX1", "little")  # a new format needs a new magic
COPIES_MAX = 2  # maximum number of entries of one block key; local copies have precedence
NODES_MAX = 1_024
BYTES_MIN, BYTES_MAX = 2**20, 2**30  # limits of the size of all buckets together
WAYS = 7  # entries of a bucket; their tags are in the first 64 bytes of the bucket
BUCKET_BYTES = 512
STALE_S = 1.0  # readers ignore a table with an older stamp; the writer stamps ten times a second

_WORD = 8
_BUCKET_WORDS = BUCKET_BYTES // _WORD
_ENTRY = struct.Struct("=16sQQQQQ")  # block key, generation, checksum, size, slot, node number + 1
_CHECK = struct.Struct("=Q")
_ENTRY_WORDS = (_ENTRY.size + _CHECK.size) // _WORD
_FOUND = struct.Struct("=16x6Q")
assert _ENTRY_WORDS * (WAYS + 1) == _BUCKET_WORDS
_AT_MAGIC, _AT_BUCKETS, _AT_EPOCH, _AT_SEQUENCE, _AT_STAMP_NS = range(5)
HEAD_BYTES = 4096
_NAME = struct.Struct("=H254s")
_NAME_BYTES = _NAME.size + _CHECK.size
_BUCKETS_AT = -(-(HEAD_BYTES + NODES_MAX * _NAME_BYTES) // 4096) * 4096
_FOR_KEYS, _TO_MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_MASK = 2**64 - 1
_PAIR = struct.Struct("=2Q")
Words = np.ndarray[Any, Any]


@functools.cache
def _native(name: str) -> NativeFunction | None:
    arguments = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p
    return quick_function(name, None, arguments)


def is_wanted() -> bool:
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no", "false")


def table_path(segment_path: str, directory: str) -> str:
    """The table's path: in the segment's folder, or in /dev/shm if that folder is a hugetlbfs."""
    folder = os.path.dirname(segment_path.split(":")[0]) or "."
    if is_hugetlbfs(folder):
        folder = "/dev/shm"
    name = hashlib.blake2b(directory.encode(), digest_size=6).hexdigest()
    return os.path.join(folder, f"{_prefix()}{name}")


def _prefix() -> str:
    return f"mooncake-index-{os.getuid()}-"


def remove_dead_tables(path: str) -> None:
    """Remove those tables of this user in the folder of `path` that have no living writer."""
    for each in Path(path).parent.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(each, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                is_ours = os.fstat(descriptor).st_uid == os.getuid()
                if is_ours and try_lock(descriptor, fcntl.LOCK_EX, keep=True):
                    unlink_if_same(str(each), descriptor)
            finally:
                os.close(descriptor)


def table_bytes(segment_bytes: int) -> int:
    """Bytes of all buckets: 1/128 of the segment, from BYTES_MIN to BYTES_MAX, a power of two."""
    wished = min(BYTES_MAX, max(BYTES_MIN, segment_bytes // 128))
    return 1 << (wished.bit_length() - 1)


def _hash(key: bytes) -> int:
    low, high = _PAIR.unpack(key)
    mixed: int = (low + high * _FOR_KEYS) * _TO_MIX & _MASK
    mixed ^= mixed >> 32
    mixed = mixed * _FOR_KEYS & _MASK
    return mixed ^ mixed >> 29


def _buckets_of(hashed: int, mask: int) -> tuple[int, int]:
    first, second = hashed & mask, (hashed >> 32) & mask
    return first, second ^ (first == second)


class IndexTable:
    """The writer's side of the table, for a single thread."""

    def __init__(self, path: str, size_bytes: int) -> None:
        """Create the table. `size_bytes`: of all buckets, a power of two. SegmentRefused: another
        living process writes this table, or its file cannot be created."""
        buckets = size_bytes // BUCKET_BYTES
        assert buckets >= 2 and buckets & (buckets - 1) == 0, size_bytes
        self.path = path
        self._mask = buckets - 1
        self._names: dict[str, int] = {}
        self._local: set[int] = set()  # numbers + 1 of the nodes of this host, as in entries
        self._turn = 0  # number of searches for an entry to replace; rotates the first candidate
        self.entries = 0
        _refuse_living(path)
        self._descriptor = create_locked(path)
        try:
            os.posix_fallocate(self._descriptor, 0, _BUCKETS_AT + size_bytes)
            self._memory = mmap.mmap(self._descriptor, _BUCKETS_AT + size_bytes)
        except OSError as error:
            unlink_if_same(path, self._descriptor)
            os.close(self._descriptor)
            raise SegmentRefused(f"no room for the index replica {path}: {error}") from error
        self._words = memoryview(self._memory).cast("Q")
        self._words[_AT_BUCKETS] = buckets
        self._words[_AT_MAGIC] = MAGIC

    @property
    def capacity(self) -> int:
        return (self._mask + 1) * WAYS

    def begin(self, epoch: int, sequence: int) -> None:
        """Empty the table. Readers do not use it until the next `stamp`."""
        self._words[_AT_STAMP_NS] = 0
        zeros = bytes(BYTES_MIN)
        for start in range(_BUCKETS_AT, len(self._memory), len(zeros)):
            end = min(start + len(zeros), len(self._memory))
            self._memory[start:end] = zeros[: end - start]
        self.entries = 0
        self.moved(epoch, sequence)

    def moved(self, epoch: int, sequence: int) -> None:
        """Record epoch and sequence number of the last applied event."""
        self._words[_AT_EPOCH], self._words[_AT_SEQUENCE] = epoch, sequence

    def stamp(self, boot_s: float) -> None:
        """Record that all events up to `boot_s` (seconds of CLOCK_BOOTTIME) are applied."""
        self._words[_AT_STAMP_NS] = int(boot_s * 1e9)

    def put(self, key: bytes, copy: Copy, is_local: bool) -> bool:
        """Add or replace this copy's entry. False: no room for the entry or for its node's name."""
        node = self._number(copy.node_id, is_local)
        if node is None:
            return False
        hashed = _hash(key)
        at = self._place(key, hashed, node)
        if at is None:
            return False
        fields = _ENTRY.pack(key, copy.generation, copy.checksum, copy.size_bytes, copy.slot, node)
        tag, start = self._tag_at(*at), _entry_at(*at)
        self.entries += not self._words[tag]
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
        self._memory[start : start + _ENTRY_WORDS * _WORD] = fields + check
        self._words[tag] = hashed | 1
        return True

    def drop(self, key: bytes, node_id: str) -> None:
        number = self._names.get(node_id)
        if number is None:
            return
        for at, node in self._of(key, _hash(key)):
            if node == number + 1:
                self._words[self._tag_at(*at)] = 0
                start = _entry_at(*at)
                self._memory[start : start + _ENTRY_WORDS * _WORD] = bytes(_ENTRY_WORDS * _WORD)
                self.entries -= 1

    def _place(self, key: bytes, hashed: int, node: int) -> tuple[int, int] | None:
        """The (bucket, position in it) for this copy's entry; None if it may replace no other."""
        there = self._of(key, hashed)
        for at, other in there:
            if other == node:
                return at
        is_local = node in self._local
        if len(there) >= COPIES_MAX:
            remote = [at for at, other in there if other not in self._local]
            return remote[0] if is_local and remote else None
        ways = [(bucket, way) for bucket in _buckets_of(hashed, self._mask) for way in range(WAYS)]
        # use the emptier one of the two buckets, so that both fill evenly
        free = [at for at in ways if not self._words[self._tag_at(*at)]]
        if free:
            first = [at for at in free if at[0] == ways[0][0]]
            return first[0] if 2 * len(first) >= len(free) else free[-1]
        self._turn += 1
        turned = ways[self._turn % len(ways) :] + ways[: self._turn % len(ways)]
        remote = [at for at in turned if self._node_of(at) not in self._local]
        return remote[0] if remote else turned[0] if is_local else None

    def _of(self, key: bytes, hashed: int) -> list[tuple[tuple[int, int], int]]:
        """The entries of this block key: ((bucket, position in it), number of the node plus 1)."""
        found, tag = [], hashed | 1
        for bucket in _buckets_of(hashed, self._mask):
            start = self._tag_at(bucket, 0)
            tags = self._words[start : start + WAYS].tolist()
            if tag not in tags:
                continue
            for way in range(WAYS):
                at = _entry_at(bucket, way)
                if tags[way] == tag and self._memory[at : at + KEY_BYTES] == key:
                    found.append(((bucket, way), self._node_of((bucket, way))))
        return found

    def _tag_at(self, bucket: int, way: int) -> int:
        return _BUCKETS_AT // _WORD + bucket * _BUCKET_WORDS + way

    def _node_of(self, at: tuple[int, int]) -> int:
        return self._words[_entry_at(*at) // _WORD + _ENTRY_WORDS - 2]

    def _number(self, node_id: str, is_local: bool) -> int | None:
        """The number of this node plus 1. None: its name is too long, or NODES_MAX is reached."""
        number = self._names.get(node_id)
        if number is None:
            raw = node_id.encode()
            if len(self._names) >= NODES_MAX or len(raw) > 254:
                return None
            number = self._names[node_id] = len(self._names)
            fields = _NAME.pack(len(raw), raw)
            start = HEAD_BYTES + number * _NAME_BYTES
            check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
            self._memory[start : start + _NAME_BYTES] = fields + check
        if is_local:
            self._local.add(number + 1)
        return number + 1

    def check(self) -> None:
        """Prove the invariants."""
        found: dict[tuple[bytes, int], int] = {}
        entries = 0
        for bucket in range(self._mask + 1):
            for way in range(WAYS):
                tag = self._words[self._tag_at(bucket, way)]
                start = _entry_at(bucket, way)
                raw = self._memory[start : start + _ENTRY_WORDS * _WORD]
                if not tag:
                    assert not any(raw), "an empty entry is not all zeros"
                    continue
                entries += 1
                key, node = raw[:KEY_BYTES], self._node_of((bucket, way))
                hashed = _hash(key)
                assert tag == hashed | 1 and bucket in _buckets_of(hashed, self._mask)
                assert (key, node) not in found, "a copy has two entries"
                assert _CHECK.unpack_from(raw, _ENTRY.size)[0] == xxhash.xxh3_64_intdigest(
                    raw[: _ENTRY.size]
                )
                found[key, node] = tag
        assert entries == self.entries, (entries, self.entries)
        assert all(count <= COPIES_MAX for count in Counter(key for key, _ in found).values())

    def close(self) -> None:
        """Clear the stamp, so that readers stop using the table. Then unlink the file. A second
        call has no effect."""
        if self._descriptor < 0:
            return
        self._words[_AT_STAMP_NS] = 0
        unlink_if_same(self.path, self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._words.release()
        self._memory.close()


def _refuse_living(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not try_lock(descriptor, fcntl.LOCK_SH, keep=False):
                raise SegmentRefused(f"another process writes {path}")
        finally:
            os.close(descriptor)


def _entry_at(bucket: int, way: int) -> int:
    return _BUCKETS_AT + bucket * BUCKET_BYTES + (way + 1) * _ENTRY_WORDS * _WORD


class IndexView:
    """A reader's side of the table. Thread-safe."""

    def __init__(self, path: str) -> None:
        """SegmentRefused: the table is missing, incomplete, or of another user or release."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentRefused(f"cannot open index replica {path}: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise SegmentRefused(f"other users own or can access the index replica {path}")
            if found.st_size <= _BUCKETS_AT:
                raise SegmentRefused(f"the index replica {path} is being created")
            self._memory = mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._memory).cast("Q")
        buckets = self._words[_AT_BUCKETS]
        is_whole = _BUCKETS_AT + buckets * BUCKET_BYTES == found.st_size
        if self._words[_AT_MAGIC] != MAGIC or not is_whole or buckets & (buckets - 1):
            raise SegmentRefused(f"the index replica {path} is incomplete or of another release")
        self._mask = buckets - 1
        words = np.frombuffer(self._memory, np.uint64, offset=_BUCKETS_AT)
        self._buckets = words.reshape(buckets, WAYS + 1, _ENTRY_WORDS)
        self._address = int(words.ctypes.data)
        self._names: list[str] = []

    def is_current(self, boot_s: float) -> bool:
        """True if the stamp is younger than STALE_S. `boot_s`: the time now by CLOCK_BOOTTIME."""
        return boot_s - STALE_S < self._words[_AT_STAMP_NS] / 1e9

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, sequence) of the last applied event."""
        return self._words[_AT_EPOCH], self._words[_AT_SEQUENCE]

    def exist(self, keys: bytes) -> bytes:
        """One byte for each of the joined block keys (16 bytes each): 1 if the key has an entry,
        else 0. Blocks without an entry may still have copies, which only the directory lists."""
        count, look = len(keys) // KEY_BYTES, _native("index_exist")
        if look is None:
            return self.exist_in_python(keys)
        found = ctypes.create_string_buffer(count)
        look(self._address, self._mask, keys, count, found)
        return found.raw

    def exist_in_python(self, keys: bytes) -> bytes:
        """The Python version of `index_exist` in native.c."""
        found = np.zeros(len(keys) // KEY_BYTES, np.uint8)
        found[self._entries(keys)[0]] = 1
        return found.tobytes()

    def find(self, keys: bytes) -> list[tuple[Copy, ...]]:
        """For each of the joined block keys, the copies that have an entry."""
        count, look = len(keys) // KEY_BYTES, _native("index_find")
        if look is None:
            return self.find_in_python(keys)
        entry_bytes = _ENTRY_WORDS * _WORD
        found = bytearray(count * COPIES_MAX * entry_bytes)
        place = (ctypes.c_char * len(found)).from_buffer(found) if found else None
        look(self._address, self._mask, keys, count, place)
        rows = _FOUND.iter_unpack(found)
        return [self._copies(each) for each in zip(*[rows] * COPIES_MAX, strict=True)]

    def find_in_python(self, keys: bytes) -> list[tuple[Copy, ...]]:
        numbers, entries = self._entries(keys)
        rows: list[list[Sequence[int]]] = [[] for _ in range(len(keys) // KEY_BYTES)]
        for number, row in zip(numbers.tolist(), entries[:, 2:].tolist(), strict=True):
            rows[number].append(row)
        return [self._copies(each[:COPIES_MAX]) for each in rows]

    def _copies(self, rows: Sequence[Sequence[int]]) -> tuple[Copy, ...]:
        return tuple(
            [
                Copy(name, slot, generation, checksum, size_bytes)
                for generation, checksum, size_bytes, slot, node, _ in rows
                if node and (name := self._name(node - 1))
            ]
        )

    def _entries(self, keys: bytes) -> tuple[Words, Words]:
        """Two arrays with a row per valid entry: the index of its key in `keys`; the entry."""
        pairs = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        hashed = _hashes(pairs)
        mask, shift = np.uint64(self._mask), np.uint64(32)
        first, second = hashed & mask, (hashed >> shift) & mask
        second ^= (first == second).astype(np.uint64)
        buckets = np.stack([first, second], axis=1)
        tags = self._buckets[buckets, 0, :WAYS]
        number, which, way = np.nonzero(tags == (hashed | np.uint64(1))[:, None, None])
        # this indexing copies the entries, because the writer may change the table at any time
        entries = self._buckets[buckets[number, which], way + 1]
        is_theirs = (entries[:, :2] == pairs[number]).all(axis=1)
        raw, size = entries.tobytes(), _ENTRY_WORDS * _WORD
        digest = xxhash.xxh3_64_intdigest
        checks = [digest(raw[at : at + _ENTRY.size]) for at in range(0, len(raw), size)]
        is_whole = is_theirs & (np.array(checks, np.uint64) == entries[:, -1])
        return number[is_whole], entries[is_whole]

    def _name(self, number: int) -> str:
        """The name of a node; "" if the name is unknown or being written."""
        if number < len(self._names):
            return self._names[number]
        names: list[str] = []
        for start in range(HEAD_BYTES, HEAD_BYTES + NODES_MAX * _NAME_BYTES, _NAME_BYTES):
            raw = self._memory[start : start + _NAME_BYTES]
            length, padded = _NAME.unpack_from(raw)
            (check,) = _CHECK.unpack_from(raw, _NAME.size)
            if not length or check != xxhash.xxh3_64_intdigest(raw[: _NAME.size]):
                break
            names.append(padded[:length].decode())
        self._names = names
        return names[number] if number < len(names) else ""


def _hashes(pairs: Words) -> Words:
    for_keys = np.uint64(_FOR_KEYS)
    mixed: Words = (pairs[:, 0] + pairs[:, 1] * for_keys) * np.uint64(_TO_MIX)
    mixed ^= mixed >> np.uint64(32)
    mixed *= for_keys
    mixed ^= mixed >> np.uint64(29)
    return mixed
