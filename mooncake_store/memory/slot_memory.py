"""The slots of a segment: each has a 64-byte header and a payload.

A header names the block in the slot and shows whether the block is complete. Its `generation` is a
number that is larger for each later use of the slot. The writer of the slot writes the header.
After a restart of the directory, the node lists its blocks from the headers. A header ends with a
checksum of its fields, which detects a partly written header.

A segment consists of units, each with a header. The header of a block is that of its first unit,
and the writer of a block first clears the headers of its other units. Blocks of several sizes share
the memory, so a later block may begin inside an older one. Then a header is inside the older block,
which shows readers that the older block is invalid.

After the headers, each unit has a cell. The cells of a block's units contain the digests of its
layers. The block's checksum verifies the digests (digests.py), so no writer clears old digests.

Not here: the address of a slot (layout.py), the choice of a slot (directory/), which blocks of a
node's inventory the directory accepts (inventory.py).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import xxhash

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.layout import (
    DIGEST_BYTES,
    HEADER_BYTES,
    STATE_EPHEMERAL,
    STATE_READY,
    STATE_WRITING,
    Geometry,
)
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.digests import checksum_of
from mooncake_store.native import library
from mooncake_store.records.blocks import GENERATION_MAX

MAGIC = b"MKV2"  # a new format needs a new magic, so that other releases find no header
# magic, state, generation, block key, checksum, length, ephemeral, layers
FIELDS = struct.Struct("<4sIQ16sQQII")
_PREFIX = struct.Struct("<4sIQ16s")
_BEGUN = struct.Struct("<4sIQ")
_SELF = struct.Struct("<Q")
assert FIELDS.size + _SELF.size == HEADER_BYTES, FIELDS.size
Block = tuple[bytes, int, int, int, int, int]  # block key, slot, generation, checksum, bytes, state
KEY_AT = 16
_COLUMNS = np.dtype(
    [("magic", "<u4"), ("state", "<u4"), ("generation", "<u8"), ("key", "V16"),
     ("checksum", "<u8"), ("length_bytes", "<u8"), ("ephemeral", "<u4"), ("layers", "<u4"),
     ("own", "<u8")]
)  # fmt: skip
assert _COLUMNS.fields is not None and _COLUMNS.fields["key"][1] == KEY_AT
assert _COLUMNS.itemsize == HEADER_BYTES == FIELDS.size + _COLUMNS["own"].itemsize


class SlotHeader(NamedTuple):
    """The header of one use of a slot."""

    state: int  # STATE_WRITING: payload incomplete; STATE_READY: payload complete
    generation: int  # number of this use of the slot; below GENERATION_MAX
    key: bytes  # block key, 16 bytes
    checksum: int  # of the payload (digests.py); in STATE_WRITING instead the writer's lease in ms
    length_bytes: int  # size of the payload
    is_ephemeral: bool = False  # whether the block is freed with its last lease
    layers: int = 0  # number of layers whose digests `checksum` covers; 0: it covers the payload

    @classmethod
    def writing(
        cls,
        generation: int,
        key: bytes,
        length_bytes: int,
        lease_s: float,
        is_ephemeral: bool = False,
    ) -> SlotHeader:
        """The header of a slot that is being filled. It contains the duration of the writer's
        lease, because a restarted directory quarantines the slot for that time (inventory.py)."""
        lease_ms = int(lease_s * 1_000)
        return cls(STATE_WRITING, generation, key, lease_ms, length_bytes, is_ephemeral)

    def pack(self) -> bytes:
        assert len(self.key) == 16, f"a key has 16 bytes, this one {len(self.key)}"
        fields = FIELDS.pack(
            MAGIC,
            self.state,
            self.generation,
            self.key,
            self.checksum,
            self.length_bytes,
            self.is_ephemeral,
            self.layers,
        )
        return fields + _SELF.pack(xxhash.xxh3_64_intdigest(fields))

    @staticmethod
    def unpack(raw: bytes | memoryview) -> SlotHeader | None:
        """The header in these 64 bytes; None if the magic or the header's checksum is wrong."""
        assert len(raw) == HEADER_BYTES, f"a header has {HEADER_BYTES} bytes, got {len(raw)}"
        magic, state, generation, key, checksum, length_bytes, ephemeral, layers = (
            FIELDS.unpack_from(raw)
        )
        (own,) = _SELF.unpack_from(raw, FIELDS.size)
        if magic != MAGIC or own != xxhash.xxh3_64_intdigest(bytes(raw[: FIELDS.size])):
            return None
        return SlotHeader(state, generation, key, checksum, length_bytes, bool(ephemeral), layers)


def ready_prefix(generation: int, key: bytes) -> bytes:
    """The first bytes of a header with STATE_READY. They identify the block and this use."""
    return _PREFIX.pack(MAGIC, STATE_READY, generation, key)


def begun_prefix(generation: int) -> bytes:
    """The first bytes of a header with STATE_WRITING. They identify this use of the slot."""
    return _BEGUN.pack(MAGIC, STATE_WRITING, generation)


def write_headers(
    view: ByteArray, offsets: Sequence[int], headers: Sequence[SlotHeader], zero_bytes: int = 0
) -> None:
    """Write each header at its offset, followed by `zero_bytes` zeros. All headers belong to one
    put: they differ only in generation, block key and checksum."""
    if not headers:
        return
    if min(offsets) < 0 or max(offsets) + HEADER_BYTES + zero_bytes > view.nbytes:
        raise ValueError(f"headers at {min(offsets)} to {max(offsets)} exceed {view.nbytes} bytes")
    native = _native_headers()
    if native is None:
        for offset, header in zip(offsets, headers, strict=True):
            raw = header.pack().ljust(HEADER_BYTES + zero_bytes, b"\0")
            view[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)
        return
    columns = struct.Struct(f"{len(headers)}Q")
    native(
        len(headers),
        view.ctypes.data,
        columns.pack(*offsets),
        columns.pack(*[header.generation for header in headers]),
        b"".join([header.key for header in headers]),
        columns.pack(*[header.checksum for header in headers]),
        headers[0].pack(),
        zero_bytes,
    )


@functools.cache
def _native_headers() -> library.NativeFunction | None:
    word, pointer = ctypes.c_uint64, ctypes.c_void_p
    raw = ctypes.c_char_p
    arguments = [word, pointer, raw, raw, raw, raw, raw, word]
    return library.quick_function("slot_headers", None, arguments)


class SlotMemory:
    """Headers, digests and payloads of the segment that is mapped at `view`."""

    def __init__(self, view: ByteArray, shape: Geometry) -> None:
        self.view, self.shape = view, shape

    def header(self, slot: int) -> SlotHeader | None:
        start = self.shape.header_offset_bytes(slot)
        return SlotHeader.unpack(self.view[start : start + HEADER_BYTES].tobytes())

    def write_header(self, slot: int, header: SlotHeader) -> None:
        """Write the header. With STATE_WRITING, also clear the headers of the other units."""
        heads, raw = self.shape.headers(slot, header.length_bytes), header.pack()
        if header.state == STATE_WRITING:
            raw = raw.ljust(heads.stop - heads.start, b"\0")
        self.view[heads.start : heads.start + len(raw)] = np.frombuffer(raw, np.uint8)

    def write_headers(self, slots: Sequence[int], headers: Sequence[SlotHeader]) -> None:
        """Write the headers of one put, each as `write_header` does."""
        if headers:
            heads = self.shape.headers(0, headers[0].length_bytes)
            is_begun = headers[0].state == STATE_WRITING
            offsets = [slot * HEADER_BYTES for slot in slots]
            write_headers(self.view, offsets, headers, (heads.stop - HEADER_BYTES) * is_begun)

    def is_newer(self, slot: int, generation: int) -> bool:
        """True if the slot has a valid header of a later generation. The writer of `generation`
        must then not write, because its bytes would overwrite another block."""
        start = self.shape.header_offset_bytes(slot)
        there = _PREFIX.unpack_from(self.view.data, start)[2]
        # fast path without verification, because this runs for each block of a put
        if there <= generation:
            return False
        header = self.header(slot)
        return header is not None and generation < header.generation < GENERATION_MAX

    def is_ready(self, slot: int, generation: int, key: bytes) -> bool:
        """True if the slot holds this complete block, and no other header is inside the block."""
        header = self.header(slot)
        return (
            header is not None
            and header.state == STATE_READY
            and (header.generation, header.key) == (generation, key)
            and not self.view[self.shape.headers(slot, header.length_bytes)][HEADER_BYTES:].any()
        )

    def is_being_written(self, slot: int, generation: int) -> bool:
        """True if this use of the slot is still being filled. Reads only the first fields of the
        header, because a pipeline stage calls this method for each layer of each block."""
        start = self.shape.header_offset_bytes(slot)
        return _BEGUN.unpack_from(self.view.data, start) == (MAGIC, STATE_WRITING, generation)

    def checksum(self, slot: int, size_bytes: int, layers: int = 0) -> int:
        """The checksum of this payload as a block with `layers` layers."""
        return checksum_of(self.payload(slot, size_bytes), layers)

    def write_digests(self, slot: int, size_bytes: int, digests: bytes) -> None:
        """Write the packed layer digests into the cells of the block's units. If the cells are too
        small, nothing is written, and readers can verify only the whole block."""
        cell = self.shape.digests(slot, size_bytes, len(digests) // DIGEST_BYTES)
        if cell is not None:
            self.view[cell] = np.frombuffer(digests, np.uint8)

    def payload(self, slot: int, size_bytes: int) -> ByteArray:
        start = self.shape.slot_offset_bytes(slot)
        return self.view[start : start + size_bytes]

    def blocks(self) -> list[Block]:
        """The blocks of all valid headers, in the order of their slots. Only headers with the magic
        are verified one by one, because a segment of a terabyte has millions of headers."""
        table = self.view[: self.shape.units * HEADER_BYTES].view(_COLUMNS)
        slots = np.flatnonzero(table["magic"] == int.from_bytes(MAGIC, "little"))
        # A copy, because writers may change headers. Partly written headers fail their checksum.
        rows = table[slots]
        raw, digest = rows.tobytes(), xxhash.xxh3_64_intdigest
        starts = range(0, len(raw), HEADER_BYTES)
        found = [digest(raw[start : start + FIELDS.size]) for start in starts]
        is_whole = np.array(found, np.uint64) == rows["own"]
        keys = [raw[start + KEY_AT : start + KEY_AT + KEY_BYTES] for start in starts]
        rows, slots = rows[is_whole], slots[is_whole]
        rows["state"][(rows["state"] == STATE_READY) & (rows["ephemeral"] != 0)] = STATE_EPHEMERAL
        names = "generation", "checksum", "length_bytes", "state"
        columns = [rows[name].tolist() for name in names]
        # plain tuples: a million NamedTuples take a second more, mostly in the garbage collector
        return list(zip(compress(keys, is_whole), slots.tolist(), *columns, strict=True))
