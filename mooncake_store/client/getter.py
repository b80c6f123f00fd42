"""Reads each block from its cheapest copy, and from the next copy if that read fails.

DRAM copies are read directly. Blocks that only an SSD has are first restored into DRAM by their
node, group by group. Each group is read while the node restores the next one.

Not here: the caller's arguments (client.py), verification (block_reader.py), the cost of a copy
(path_cost.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_store.client.block_reader import BlockReader, Want
from mooncake_store.client.restorer import LEASE_MARGIN_S, LeaseTerms, Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.transport import ByteSpan


@dataclass(eq=False)
class Getter:
    """Thread-safe."""

    _directory: DirectoryClient
    _nodes: KnownNodes
    _reader: BlockReader
    _restorer: Restorer
    _is_verified: bool

    def find(self, keys: Sequence[bytes]) -> list[tuple[Copy, ...]]:
        """The copies of each block, without a lease, because a lease would cost more time than a
        small read. The checksum or the header is checked after each read, so a block that
        disappears during the read is a miss."""
        return self._directory.lookup(keys, "", 0.0, prefix_only=False)

    def get_known(self, request: GetRequest, found: Sequence[tuple[Copy, ...]]) -> None:
        """Read the blocks from copies that the index replica lists (index_reader.py). The replica
        may be out of date, so a failed read here does not report a bad copy."""
        known = [request.fitting(index, copies) for index, copies in enumerate(found)]
        best = self._nodes.choose(known)
        chosen = {index: copy for index, copy in enumerate(best) if copy is not None}
        self._read(request, chosen, is_current=False)

    def get(self, request: GetRequest, found: Sequence[tuple[Copy, ...]], owner: str) -> None:
        """Read the blocks. Missing blocks are tried once more, with a lease of `owner`."""
        in_dram = [
            copies  # nearly always one copy, in DRAM
            if len(copies) == 1 and not copies[0].node_id.endswith(SSD_SUFFIX)
            else tuple(copy for copy in copies if not copy.node_id.endswith(SSD_SUFFIX))
            for copies in found
        ]
        self._try_all(request, in_dram, owner)
        missing = [
            index
            for index, is_here in enumerate(request.arrived)
            if not is_here and found[index] and request.targets[index] is not None
        ]
        if missing and request.left_s > 0:
            try:
                self._get_leased(request, missing, owner)
            finally:
                self._directory.release_later(owner)

    def _get_leased(self, request: GetRequest, missing: Sequence[int], owner: str) -> None:
        """Read blocks that disappeared during the unleased read, or that are only on SSDs."""
        lease_s = request.left_s + LEASE_MARGIN_S
        keys = [request.keys[index] for index in missing]
        again = self._directory.lookup(keys, owner, lease_s, prefix_only=False)
        found: list[tuple[Copy, ...]] = [()] * len(request.keys)
        for index, copies in zip(missing, again, strict=True):
            found[index] = request.fitting(index, copies)
        self._try_all(request, found, owner)

    def _try_all(self, request: GetRequest, found: Sequence[tuple[Copy, ...]], owner: str) -> None:
        left = list(found)
        while request.left_s > 0:  # each round tries another copy of each missing block
            best = self._nodes.choose(left)
            chosen = {index: copy for index, copy in enumerate(best) if copy is not None}
            if not chosen:
                break
            ssd = {i: copy for i, copy in chosen.items() if copy.node_id.endswith(SSD_SUFFIX)}
            self._read(request, {i: copy for i, copy in chosen.items() if i not in ssd})
            if ssd and request.left_s > 0:
                self._read_from_ssd(request, ssd, owner)
            if all(request.arrived):
                break
            left = [
                () if is_here else tuple(copy for copy in copies if copy is not chosen.get(index))
                for index, (copies, is_here) in enumerate(zip(left, request.arrived, strict=True))
            ]

    def _read_from_ssd(self, request: GetRequest, chosen: dict[int, Copy], owner: str) -> None:
        indices = list(chosen)
        keys, copies = [request.keys[i] for i in indices], [chosen[i] for i in indices]
        terms = LeaseTerms(owner, request.left_s + LEASE_MARGIN_S, request.until_s)
        for group in self._restorer.restore(keys, copies, terms):
            self._read(request, {indices[at]: copy for at, copy in group})

    def _read(self, request: GetRequest, chosen: dict[int, Copy], is_current: bool = True) -> None:
        if not chosen:
            return
        wants = []
        for index, copy in chosen.items():
            target = request.targets[index]
            assert target is not None
            is_sure = self._is_verified and target.nbytes == copy.size_bytes and copy.checksum != 0
            checksums = (copy.checksum,) if is_sure else ()
            span = ByteSpan(0, target.nbytes)
            # unverified reads check that the slot still holds the requested block
            key = b"" if is_sure else request.keys[index]
            wants.append(Want(copy, request.offset_bytes, (target, span), checksums, key=key))
        arrived = self._reader.read(wants, request.left_s, is_current)
        for index, is_here in zip(chosen, arrived, strict=True):
            request.arrived[index] = is_here


@dataclass(eq=False)
class GetRequest:
    """Blocks to be read, and which of them have arrived."""

    keys: Sequence[bytes]
    targets: Sequence[ByteArray | None]  # one per key; None: the block is not read
    offset_bytes: int  # in each block, of the first byte that is read
    until_s: float  # by time.monotonic()

    def __post_init__(self) -> None:
        self.arrived = [False] * len(self.keys)  # whether the bytes are in the target

    def fitting(self, index: int, copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        target = self.targets[index]
        if target is None:
            return ()
        end_bytes = self.offset_bytes + target.nbytes
        return tuple([copy for copy in copies if end_bytes <= copy.size_bytes])

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()
