"""The store for any process: put, get, exist, remove and change_replica of blocks of any size.

    with StoreClient("ipc:///run/mooncake/directory") as store:
        store.put([key], [array])           # numpy, torch (CPU), bytes, bytearray, mmap
        store.get_into([key], [array])      # [True]
        store.get([key])                    # [numpy array or None]

Block keys have 16 bytes (block_keys.py makes them from tokens; `key_of` from a name). Each call
takes many blocks. Bytes move directly between the caller's memory and the storage node's. By
default the client's own node is mapped, and others are reached by NIXL or TCP (known_nodes.py).

A block that cannot be read before the deadline is a miss (False, None). An invalid request or
deployment raises a typed error (errors.py). With checksums (the default) a read of a whole block is
verified, if the block was stored with a checksum. After any other read, the header of the block's
slot (its memory on the node) is checked. This detects another block in the slot, but no wrong bit.

Not here: a worker's KV with its layers (store.py), nodes and their failures (known_nodes.py).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from mooncake_store.block_keys import KEY_BYTES, check_keys
from mooncake_store.client.block_reader import BATCH_BYTES, BlockReader, HeaderReader
from mooncake_store.client.getter import GetRequest, Getter
from mooncake_store.client.index_reader import IndexReader
from mooncake_store.client.putter import Putter
from mooncake_store.client.replicas import Replicas
from mooncake_store.client.restorer import Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import RequestInvalid, StoreFull, StoreUnavailable
from mooncake_store.memory.buffers import ByteArray, as_bytes
from mooncake_store.memory.registrations import Registrations, Scratch
from mooncake_store.memory.segment import host_id
from mooncake_store.records.blocks import Copy
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.movers import Movers
from mooncake_store.transports.transport import ByteSpan

log = logging.getLogger("mooncake_store.client")
T = TypeVar("T")
DEADLINE_S = 10.0  # default of each call
DEADLINE_S_MAX = 3_500.0  # plus LEASE_MARGIN_S, it is less than the longest lease (3,600 s)
# Without checksums no batch needs to fit the CPU's cache, and fewer, longer batches are faster.
UNVERIFIED_BATCH_BYTES = 64 * 2**20
SHM = "/dev/shm/"  # default folder of the segments of this host's nodes


def key_of(name: str) -> bytes:
    """The block key of a named value: 16 bytes of the hash of its name."""
    return hashlib.blake2b(name.encode(), digest_size=KEY_BYTES, person=b"mooncake.name").digest()


def _of_one_size(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    """The copies that have the size of the first one. Another size means an obsolete copy."""
    if len(copies) < 2:
        return copies
    return tuple(copy for copy in copies if copy.size_bytes == copies[0].size_bytes)


def _arrays_for(found: Sequence[tuple[Copy, ...]]) -> list[ByteArray | None]:
    sizes = [copies[0].size_bytes if copies else 0 for copies in found]
    return [np.empty(size, np.uint8) if size else None for size in sizes]


class StoreClient:
    """Thread-safe. `node_id`: the client's own node; "": the first node of this host, by name.

    `is_verified`: False stores blocks without a checksum, and reads check only the slot's header.
    Such a read does not detect bytes of an abandoned transfer that arrived late. `transports`: a
    mode of known_nodes.py. `tenant`: its quota counts the stored blocks. `threads`: threads that
    move the bytes of one call (the caller's included), and as many that serve futures.
    """

    def __init__(
        self,
        address: str,
        node_id: str = "",
        transports: str = "auto",
        is_verified: bool = True,
        tenant: str = "",
        threads: int = 2,
    ) -> None:
        if threads < 1:
            raise RequestInvalid(f"threads is {threads}; give at least 1, the caller's own thread")
        self.directory = DirectoryClient(address)
        self._name = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._futures = ThreadPoolExecutor(threads, "store-client")  # starts threads when used
        try:
            self.node_id = node_id or self._node_of_this_host()
            self.nodes = KnownNodes(self.directory, self.node_id, transports)
        except BaseException:
            self.directory.close()
            raise
        self._registrations = Registrations(self.nodes)
        scratch = Scratch(self.nodes)
        self._movers = Movers(threads)
        self._putter = Putter(
            self.directory,
            self.nodes,
            self._registrations,
            scratch,
            self._movers,
            is_verified,
            tenant,
            self._name,
        )
        batch_bytes = BATCH_BYTES if is_verified else UNVERIFIED_BATCH_BYTES
        self._headers = HeaderReader(self.nodes, scratch)
        reader = BlockReader(self.nodes, self._report_bad, batch_bytes, self._movers, self._headers)
        self._restorer = Restorer(self.directory, self.nodes)
        self._getter = Getter(self.directory, self.nodes, reader, self._restorer, is_verified)
        self.replicas = Replicas(self.directory, self._restorer)
        self._index = IndexReader(self.directory, self.nodes)

    def _node_of_this_host(self) -> str:
        here = host_id(SHM)
        local = [info for info in self.directory.nodes() if info.host_id == here]
        return min((info.node_id for info in local if not info.is_ssd), default="")

    def register(self, buffer: Any) -> None:
        """Register memory that many calls use, until `unregister` or `close`."""
        self._registrations.add(as_bytes(buffer))

    def unregister(self, buffer: Any) -> None:
        self._registrations.drop(as_bytes(buffer))

    def pending(self) -> list[tuple[ByteArray, ByteSpan]]:
        """(memory, span in it) of local memory that a timed-out get may still write. Do not reuse
        this memory while it is listed."""
        return self.nodes.pending_targets()

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        node_id: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> list[bool]:
        """Store these blocks on `node_id`; "": on the client's own node, if it has one, else on a
        node that the directory chooses. False: no room, a failed transfer, or not written before
        the deadline. True also if that node has the block already, because equal keys mean equal
        content. Raises QuotaExceeded or StoreFull if no block could be stored, NodeUnknown, and
        LayoutMismatch if the node's memory is smaller than one block."""
        deadline_s = self._check_deadline(deadline_s)
        sources = [as_bytes(buffer) for buffer in buffers]
        self._check_keys(keys, len(sources))
        if not keys:
            return []
        if any(source.nbytes == 0 for source in sources):
            raise RequestInvalid("a block of 0 bytes cannot be stored")
        target = node_id or self.node_id or self._placed(keys)
        owner, until_s = self._owner(), time.monotonic() + deadline_s
        done = [False] * len(keys)
        by_size: dict[int, list[int]] = {}
        for index, source in enumerate(sources):
            by_size.setdefault(source.nbytes, []).append(index)
        error: StoreFull | None = None  # of the first size without room
        for indices in by_size.values():
            left_s = max(0.001, until_s - time.monotonic())
            chosen = [keys[i] for i in indices], [sources[i] for i in indices]
            try:
                stored = self._putter.put(target, *chosen, owner, left_s)
            except StoreFull as full:
                error = error or full
                continue
            for index, is_stored in zip(indices, stored, strict=True):
                done[index] = is_stored
        if error is not None and not any(done):
            raise error
        return done

    def _placed(self, keys: Sequence[bytes]) -> str:
        node_id = self.directory.place(keys[:1])[0]
        if not node_id:
            raise StoreFull("no storage node accepts blocks: start one (mooncake store serve)")
        return node_id

    def get(self, keys: Sequence[bytes], deadline_s: float = DEADLINE_S) -> list[ByteArray | None]:
        """The blocks as new uint8 arrays; None for a miss."""
        until_s = time.monotonic() + self._check_deadline(deadline_s)
        self._check_keys(keys, len(keys))
        known = [_of_one_size(copies) for copies in self._index.find(keys)]
        arrays = _arrays_for(known)
        arrived = self._get_known(GetRequest(keys, arrays, 0, until_s), known)
        if all(arrived):
            return arrays
        missing = [index for index, is_here in enumerate(arrived) if not is_here]
        keys = [keys[index] for index in missing]
        found = self._getter.find(keys)
        retry_arrays = _arrays_for(found)
        retry_arrived = self._get(GetRequest(keys, retry_arrays, 0, until_s), found)
        for index, array, is_here in zip(missing, retry_arrays, retry_arrived, strict=True):
            arrays[index] = array if is_here else None
        return arrays

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        offset_bytes: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> list[bool]:
        """Fill each buffer with its block from `offset_bytes` on. False: a miss; the content of the
        buffer is undefined, and after a timeout it may still change (`pending`). A buffer may be
        shorter than the rest of the block. Raises RequestInvalid if it is longer."""
        until_s = time.monotonic() + self._check_deadline(deadline_s)
        targets = [as_bytes(buffer, is_target=True) for buffer in buffers]
        self._check_keys(keys, len(targets))
        if not isinstance(offset_bytes, int) or offset_bytes < 0:
            raise RequestInvalid(f"offset_bytes is {offset_bytes}; a block starts at 0")
        request = GetRequest(keys, targets, offset_bytes, until_s)
        arrived = self._get_known(request, self._index.find(keys))
        if all(arrived):
            return arrived
        missing = [index for index, is_here in enumerate(arrived) if not is_here]
        keys, targets = [keys[index] for index in missing], [targets[index] for index in missing]
        found = self._getter.find(keys)
        for key, copies, target in zip(keys, found, targets, strict=True):
            if copies and offset_bytes + target.nbytes > copies[0].size_bytes:
                raise RequestInvalid(
                    f"block {key.hex()} has {copies[0].size_bytes} bytes; {target.nbytes} "
                    f"from {offset_bytes} on reach past its end: ask stat() for the size"
                )
        retry_arrived = self._get(GetRequest(keys, targets, offset_bytes, until_s), found)
        for index, is_here in zip(missing, retry_arrived, strict=True):
            arrived[index] = is_here
        return arrived

    def _get_known(self, request: GetRequest, known: Sequence[tuple[Copy, ...]]) -> list[bool]:
        """Read the blocks that this host's index replica lists, without asking the directory."""
        if any(known):
            pairs = zip(known, request.targets, strict=True)
            wanted = [target for copies, target in pairs if copies and target is not None]
            with self._registrations.covering(wanted):
                self._getter.get_known(request, known)
            results = zip(request.keys, request.arrived, strict=True)
            self._index.used([key for key, is_here in results if is_here])
        return request.arrived

    def _get(self, request: GetRequest, found: Sequence[tuple[Copy, ...]]) -> list[bool]:
        wanted = [target for target in request.targets if target is not None]
        with self._registrations.covering(wanted):
            self._getter.get(request, found, self._owner())
        return request.arrived

    def _report_bad(self, copy: Copy) -> None:
        header = self._headers.read(copy)
        log.warning("bad copy %s", copy)
        if header is not None and header.generation == copy.generation:
            self._index.removed([header.key])
            self.directory.drop_copy(header.key, copy.node_id, copy.generation)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """True for block keys with a copy on any node. No lease is taken, and no use is recorded.
        Evictions and other clients' removals are seen after 3.5 s at most (index_reader.py). A
        block that the directory lists is never reported as missing."""
        return self._index.exist(keys)

    def stat(self, keys: Sequence[bytes]) -> list[tuple[Copy, ...]]:
        """The copies of each block, with node, size and checksum, DRAM before SSD; () for a block
        without copies. The call counts as a use of the blocks."""
        self._check_keys(keys, len(keys))
        return self.directory.lookup(list(keys), self._owner(), 0.0, prefix_only=False)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove all copies of these blocks that are not leased. False: a leased copy is left;
        retry later."""
        self._check_keys(keys, len(keys))
        self._index.removed(keys)
        return self.directory.remove(list(keys))

    def change_replica(
        self,
        keys: Sequence[bytes],
        add: Sequence[str] = (),
        drop: Sequence[str] = (),
        deadline_s: float = DEADLINE_S,
        source: str = "",
    ) -> list[bool]:
        """Copy these blocks to the nodes `add`, then remove them from the nodes `drop`. `source`:
        the node to read from if it has the block; "": any node. False if the block is on no node,
        or not on every node of `add`; no copy is removed then. False also if all its copies are on
        `drop` (none is removed), or if a copy on `drop` is leased (this copy stays). Raises
        NodeUnknown, or RequestInvalid if a node of `add` cannot pull blocks."""
        self._check_keys(keys, len(keys))
        deadline_s = self._check_deadline(deadline_s)
        return self.replicas.change(keys, add, drop, self._owner(), deadline_s, source)

    def put_async(self, *arguments: Any, **named: Any) -> Future[list[bool]]:
        """As `put`; the deadline starts when a thread takes the call."""
        return self._submit(self.put, *arguments, **named)

    def get_async(self, *arguments: Any, **named: Any) -> Future[list[ByteArray | None]]:
        return self._submit(self.get, *arguments, **named)

    def get_into_async(self, *arguments: Any, **named: Any) -> Future[list[bool]]:
        return self._submit(self.get_into, *arguments, **named)

    def _submit(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        try:
            return self._futures.submit(call, *arguments, **named)
        except RuntimeError as error:  # after close()
            raise StoreUnavailable(f"this client of the store is closed: {error}") from error

    def _check_deadline(self, deadline_s: float) -> float:
        """The deadline, at most DEADLINE_S_MAX. Raises RequestInvalid if it is not above 0."""
        if not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise RequestInvalid(f"deadline_s is {deadline_s!r}; give seconds, more than 0")
        return min(float(deadline_s), DEADLINE_S_MAX)

    def _owner(self) -> str:
        return f"{self._name}/{next(self._numbers)}"

    def _check_keys(self, keys: Sequence[bytes], buffers: int) -> None:
        check_keys(keys)
        if len(keys) != buffers:
            raise RequestInvalid(f"{len(keys)} keys and {buffers} buffers: give one buffer per key")

    def close(self) -> None:
        """Finish the calls made as futures, then close. No other call may be in progress."""
        self._futures.shutdown(wait=True)
        self._putter.close()
        self._restorer.close()
        self._movers.close()
        self._index.close()
        self.nodes.close()
        self.directory.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
