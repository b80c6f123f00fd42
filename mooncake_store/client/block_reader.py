"""Blocks from wherever they are into local memory, each one verified; and the headers of slots.

A batch of blocks is split by node and then into parts of BATCH_BYTES: a part is verified while it
is still in the CPU's cache, which makes the checksum nearly free, and over TCP short batches are
the faster ones. One bad block never fails its neighbours; a failed node fails only its own blocks.

A header says whose block lies in a slot, and whether it is still the same one.

Not here: how bytes move (transport.py), which nodes there are (known_nodes.py), leases (store.py),
what a header is (slot_memory.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.layout import HEADER_BYTES, Geometry, geometry
from mooncake_store.memory.buffers import checksum, copy_and_sum
from mooncake_store.memory.registrations import SCRATCH_BYTES, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, ready_prefix
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan, Transport

log = logging.getLogger("mooncake_store.store")
BATCH_BYTES = 4 * 1024**2
ATTEMPTS_MAX = 2  # the second one only for a node that has a new incarnation


class Want(NamedTuple):
    """One span of one block: where it goes and what it must hash to."""

    copy: Copy
    start_bytes: int  # inside the block
    target: LocalSpan
    checksums: tuple[int, ...]  # of equal consecutive parts; empty: cannot be verified

    @property
    def end_bytes(self) -> int:
        """Where it ends inside the block."""
        return self.start_bytes + self.target[1].length_bytes

    def is_whole(self) -> bool:
        """Are the bytes in the target the ones that were promised?"""
        if not self.checksums:
            return True
        buffer, (start, length_bytes) = self.target
        part_bytes = length_bytes // len(self.checksums)
        for promised in self.checksums:
            if checksum(buffer[start : start + part_bytes]) != promised:
                return False
            start += part_bytes
        return True


class BlockReader:
    """Thread-safe."""

    def __init__(
        self,
        nodes: KnownNodes,
        on_bad_copy: Callable[[Copy], None],
        batch_bytes: int = BATCH_BYTES,
        movers: Movers | None = None,
    ) -> None:
        self._nodes = nodes
        self._movers = movers or Movers(1)
        self._batch_bytes = batch_bytes
        self._on_bad_copy = on_bad_copy

    def read(self, wants: Sequence[Want], deadline_s: float) -> list[bool]:
        """Which of them arrived whole. Raises only what the directory raises."""
        until_s = time.monotonic() + deadline_s
        arrived = [False] * len(wants)
        by_node: dict[str, list[int]] = {}
        for index, want in enumerate(wants):
            by_node.setdefault(want.copy.node_id, []).append(index)
        for node_id, indices in by_node.items():
            asked_bytes = sum(wants[index].target[1].length_bytes for index in indices)
            with self._nodes.traffic.moving(node_id, asked_bytes):
                for _ in range(ATTEMPTS_MAX):
                    missing = [index for index in indices if not arrived[index]]
                    if not self._read_node(node_id, wants, missing, arrived, until_s):
                        break
        return arrived

    def _read_node(
        self,
        node_id: str,
        wants: Sequence[Want],
        indices: Sequence[int],
        arrived: list[bool],
        until_s: float,
    ) -> bool:
        """Read these blocks of one node. True: it has a new incarnation, read again."""
        info = self._nodes.usable(node_id)
        transport = self._nodes.transport(info) if info else None
        if info is None or transport is None or info.is_ssd:
            return False  # what lies on an SSD is restored by its node first (restorer.py)
        shape = geometry(info.segment_bytes, info.unit_bytes)
        indices = [
            index
            for index in indices
            if shape.holds(wants[index].copy.slot, wants[index].end_bytes)
        ]
        try:
            if isinstance(transport, MappedTransport):  # verifies as it copies: one part
                parts, threads = [list(indices)], Movers(1)
            else:
                parts, threads = (
                    parts_of(
                        indices,
                        lambda index: wants[index].target[1].length_bytes,
                        self._part_bytes(wants, indices),
                    ),
                    self._movers,
                )

            def read_part(part: list[int]) -> None:
                self._read_part(transport, info, shape, wants, part, arrived, until_s)

            threads.each(read_part, parts)
        except TransferFailed as error:
            log.warning("node_id=%s read failed: %s", node_id, error)
            self._nodes.mark_bad(info)
            self._nodes.refresh()
            now = self._nodes.usable(node_id)
            return now is not None and now.incarnation != info.incarnation
        return False

    def _part_bytes(self, wants: Sequence[Want], indices: Sequence[int]) -> int:
        """So that every mover has a part, and none is longer than a batch."""
        total_bytes = sum(wants[index].target[1].length_bytes for index in indices)
        return min(self._batch_bytes, -(-total_bytes // self._movers.threads))

    def _read_part(
        self,
        transport: Transport,
        info: NodeInfo,
        shape: Geometry,
        wants: Sequence[Want],
        part: Sequence[int],
        arrived: list[bool],
        until_s: float,
    ) -> None:
        """Read and verify these; TransferFailed when they cannot be had."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:  # slow is not dead: the caller recomputes the rest
            log.warning("node_id=%s deadline passed, %d blocks missed", info.node_id, len(part))
            return
        chosen = [wants[index] for index in part]
        if isinstance(transport, MappedTransport):
            whole = _copied(transport, info, shape, chosen, left_s)
        else:
            sources = [
                ByteSpan(shape.slot_offset_bytes(copy.slot) + start_bytes, target[1].length_bytes)
                for copy, start_bytes, target, _ in chosen
            ]
            transport.read(info, sources, [want.target for want in chosen], left_s)
            whole = [want.is_whole() for want in chosen]
        for index, is_whole in zip(part, whole, strict=True):
            arrived[index] = is_whole
            if not is_whole:
                self._on_bad_copy(wants[index].copy)


def _copied(
    transport: MappedTransport,
    info: NodeInfo,
    shape: Geometry,
    wants: Sequence[Want],
    left_s: float,
) -> list[bool]:
    """Copy out of a mapped segment, the checksum computed on the way: which blocks are whole."""
    started_s = time.monotonic()
    whole, moved_bytes = [], 0
    with transport.owned(info) as view:
        for want in wants:
            buffer, (start, length_bytes) = want.target
            far = shape.slot_offset_bytes(want.copy.slot) + want.start_bytes
            near, source = buffer[start : start + length_bytes], view[far : far + length_bytes]
            if len(want.checksums) == 1:
                whole.append(copy_and_sum(near, source) == want.checksums[0])
            else:
                near[:] = source
                whole.append(want.is_whole())
            moved_bytes += length_bytes
            if time.monotonic() - started_s > left_s:
                raise TransferTimeout(
                    f"node {info.node_id}: copying {moved_bytes} bytes through shared memory took "
                    f"longer than {left_s:.3f} s: this host is short of CPU"
                )
    transport.note(True, moved_bytes, started_s)
    return whole


HEADERS_DEADLINE_S = 0.5


class HeaderReader:
    """Thread-safe."""

    def __init__(self, nodes: KnownNodes, scratch: Scratch) -> None:
        self._nodes = nodes
        self._scratch = scratch

    def read(self, copy: Copy) -> SlotHeader | None:
        """The header of this copy's slot; None when it cannot be had or is none."""
        return self.read_all([copy])[0]

    def read_all(self, copies: Sequence[Copy]) -> list[SlotHeader | None]:
        found = self._read_raw(copies, is_whole=False)
        return [(raw and SlotHeader.unpack(raw)) or None for raw in found]

    def still(self, keys: Sequence[bytes], copies: Sequence[Copy]) -> list[bool]:
        """Does each slot still hold that very use of it, complete? slot_memory.py says how."""
        expected = [
            ready_prefix(copy.generation, key) for key, copy in zip(keys, copies, strict=True)
        ]
        return [
            raw is not None
            and raw.startswith(prefix)
            and raw.count(0, HEADER_BYTES) == len(raw) - HEADER_BYTES
            for prefix, raw in zip(expected, self._read_raw(copies, is_whole=True), strict=True)
        ]

    def _read_raw(self, copies: Sequence[Copy], is_whole: bool) -> list[bytes | None]:
        """The headers of the first units, or of all of them."""
        found: list[bytes | None] = [None] * len(copies)
        by_node: dict[str, list[int]] = {}
        for index, copy in enumerate(copies):
            by_node.setdefault(copy.node_id, []).append(index)
        for node_id, indices in by_node.items():
            self._read_node(node_id, copies, indices, is_whole, found)
        return found

    def _read_node(
        self,
        node_id: str,
        copies: Sequence[Copy],
        indices: Sequence[int],
        is_whole: bool,
        found: list[bytes | None],
    ) -> None:
        info = self._nodes.usable(node_id)
        transport = self._nodes.transport(info) if info else None
        if info is None or transport is None:
            return
        shape = geometry(info.segment_bytes, info.unit_bytes)
        spans: dict[int, ByteSpan] = {}
        for index in indices:
            _, slot, _, _, size_bytes = copies[index]
            if shape.holds(slot, size_bytes):
                heads = shape.headers(slot, size_bytes)
                length_bytes = heads.stop - heads.start if is_whole else HEADER_BYTES
                spans[index] = ByteSpan(heads.start, length_bytes)
        if isinstance(transport, MappedTransport):
            with contextlib.suppress(TransferFailed), transport.owned(info) as view:
                for index, (start, length_bytes) in spans.items():
                    found[index] = view[start : start + length_bytes].tobytes()
            return
        with contextlib.suppress(TransferFailed):
            for part in _parts(spans):
                self._read_part(transport, info, part, found)

    def _read_part(
        self,
        transport: Transport,
        info: NodeInfo,
        part: dict[int, ByteSpan],
        found: list[bytes | None],
    ) -> None:
        total_bytes = sum(span.length_bytes for span in part.values())
        with self._scratch.take(total_bytes) as buffer:
            ends = list(accumulate(span.length_bytes for span in part.values()))
            targets: list[LocalSpan] = [
                (buffer, ByteSpan(end - span.length_bytes, span.length_bytes))
                for end, span in zip(ends, part.values(), strict=True)
            ]
            transport.read(info, list(part.values()), targets, HEADERS_DEADLINE_S)
            for index, (_, (start, length_bytes)) in zip(part, targets, strict=True):
                found[index] = buffer[start : start + length_bytes].tobytes()


def _parts(spans: dict[int, ByteSpan]) -> list[dict[int, ByteSpan]]:
    """As many at once as a scratch buffer holds."""
    parts: list[dict[int, ByteSpan]] = []
    left_bytes = 0
    for index, span in spans.items():
        if not parts or span.length_bytes > left_bytes:
            parts.append({})
            left_bytes = SCRATCH_BYTES
        parts[-1][index] = span
        left_bytes -= span.length_bytes
    return parts
