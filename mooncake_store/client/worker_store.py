"""The methods of `Store` (store.py, which documents them) that a worker uses.

A worker looks a prefix up, reads its blocks into pages, allocates slots for new blocks, writes
them and commits them. Every block that a worker uses is leased to an `owner`, an id of the
request, until `release`. A lease that is not renewed ends after `lease_s`.

Threads: every method may be called from several threads at once.

Errors: a block that cannot be read in time is a miss (False or None), never an exception. The page
must not be used again while `pending_offsets` lists it. StoreUnavailable means that the directory
does not answer, and TransferFailed that the node of a slot has died or cannot be written from here.
After TransferTimeout from `write` or `commit`, bytes may still arrive, so the slots must not be
abandoned. After a restart of the directory or the local node, `allocate` attaches again by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_store.client.in_place import PlacedBlock, PlacedBlocks
from mooncake_store.client.layer_writer import WrittenBlock
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.blocks import Allocation, Copy, Slot
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.transport import ByteSpan, TransferCounters

Digests = tuple[int, ...]  # one per layer


@dataclass(frozen=True, slots=True)
class Fetched:
    blocks: int  # length of the prefix that has a copy in the local node now
    bytes_from: dict[str, int]  # received bytes by sending node


class WorkerStore(Protocol):
    node_id: str  # the worker's local storage node, on its host

    def register_buffer(self, buffer: ByteArray) -> None: ...
    def expect_threads(self, count: int) -> None: ...

    # Reading

    def lookup(
        self, keys: Sequence[bytes], owner: str, lease_s: float
    ) -> list[tuple[Copy, ...]]: ...
    def choose(
        self, found: Sequence[Sequence[Copy]], first: Sequence[str] = ()
    ) -> list[Copy | None]: ...
    def read(
        self,
        copies: Sequence[Copy],
        buffer: ByteArray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]: ...
    def fetch(
        self,
        keys: Sequence[bytes],
        copies: Sequence[Copy],
        owner: str,
        lease_s: float,
        deadline_s: float,
    ) -> Fetched: ...
    def layer_digests(self, copies: Sequence[Copy]) -> list[Digests | None]: ...
    def pending_offsets(self, buffer: ByteArray | None = None) -> list[ByteSpan]: ...

    # Writing, always in this order: allocate, write (or digest), commit or abandon

    def allocate(
        self,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool = False,
        size_bytes: int = 0,
        tenant: str = "",
    ) -> Allocation: ...
    def write(
        self,
        slots: Sequence[Slot],
        buffer: ByteArray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
    ) -> list[Digests | None]: ...
    def commit(self, blocks: Sequence[WrittenBlock], owner: str, lease_s: float) -> list[bool]: ...
    def abandon(self, slots: Sequence[Slot], owner: str) -> None: ...

    # Blocks that another process of this host reads or fills in the segment itself

    @property
    def mapped_node(self) -> NodeInfo | None: ...
    @property
    def keeps_digests(self) -> bool: ...
    def verify_in_place(self, copies: Sequence[Copy], deadline_s: float) -> PlacedBlocks: ...
    def is_in_place(self, incarnation: str, block: PlacedBlock) -> bool: ...
    def slots_in_place(self, slots: Sequence[Slot]) -> PlacedBlocks: ...
    def digest(self, slots: Sequence[Slot]) -> list[Digests | None]: ...

    # Leases, measurements, close

    def renew(self, owner: str, lease_s: float) -> bool: ...
    def release(self, owner: str) -> None: ...
    def measure_rates(self, patience_s: float = 0.0) -> Mapping[str, float]: ...
    def latencies_s(self) -> Mapping[str, float]: ...
    def counters(self) -> Mapping[str, TransferCounters]: ...
    def nic_counters(self) -> Mapping[str, NicCounters]: ...
    @property
    def restored_blocks(self) -> int: ...
    @property
    def agents_abandoned(self) -> int: ...
    def close(self) -> None: ...
