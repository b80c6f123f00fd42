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
from mooncake_store.layout import HEADER_BYTES
from mooncake_store.memory.buffers import checksum, copy_and_sum
from mooncake_store.memory.registrations import SCRATCH_BYTES, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, ready_prefix
from mooncake_store.records.blocks import Copy
from mooncake_store.transports.known_nodes import KnownNodes, NodeAccess
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan

log = logging.getLogger("mooncake_store.store")
BATCH_BYTES = 4 * 1024**2
OTHER_HOST_LONGER = 2
HEADERS_DEADLINE_S = 0.5
ATTEMPTS_MAX = 2  # the second one only for a node that has a new incarnation


class Want(NamedTuple):
    """One span of one block: where it goes and what it must hash to."""

    copy: Copy
    start_bytes: int  # inside the block
    target: LocalSpan
    checksums: tuple[int, ...]  # of equal consecutive parts; empty: cannot be verified

    @property
    def length_bytes(self) -> int:
        return self.target[1].length_bytes

    @property
    def end_bytes(self) -> int:
        """Where it ends inside the block."""
        return self.start_bytes + self.length_bytes

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
        missing = dict(enumerate(wants))
        for node_id, indices in _by_node([want.copy for want in wants]).items():
            asked_bytes = sum(wants[index].length_bytes for index in indices)
            with self._nodes.traffic.moving(node_id, asked_bytes):
                for _ in range(ATTEMPTS_MAX):
                    chosen = [index for index in indices if index in missing]
                    if not self._read_node(node_id, chosen, missing, until_s):
                        break
        return [index not in missing for index in range(len(wants))]

    def _read_node(
        self, node_id: str, indices: Sequence[int], missing: dict[int, Want], until_s: float
    ) -> bool:
        """Read these blocks of one node, and take what arrives out of `missing`.

        True: it has a new incarnation, read again.
        """
        node = self._nodes.access(node_id)
        if node is None:
            return False  # what lies on an SSD is restored by its node first (restorer.py)
        indices = [
            index
            for index in indices
            if node.shape.holds(missing[index].copy.slot, missing[index].end_bytes)
        ]

        def read_part(part: Sequence[int]) -> None:
            self._read_part(node, part, missing, until_s)

        try:
            if isinstance(node.transport, MappedTransport):  # verifies as it copies: one part
                read_part(indices)
            else:
                lengths_bytes = {index: missing[index].length_bytes for index in indices}
                part_bytes = self._part_bytes(node, sum(lengths_bytes.values()))
                self._movers.each(
                    read_part, parts_of(indices, lengths_bytes.__getitem__, part_bytes)
                )
        except TransferFailed as error:
            log.warning("node_id=%s read failed: %s", node_id, error)
            self._nodes.mark_bad(node.info)
            self._nodes.refresh()
            now = self._nodes.usable(node_id)
            return now is not None and now.incarnation != node.info.incarnation
        return False

    def _part_bytes(self, node: NodeAccess, total_bytes: int) -> int:
        """So that every mover has a part, and none is longer than a batch.

        Batches from another host are longer: each wait at their ends costs more than the cache
        gives.
        """
        longer = 1 if self._nodes.is_same_host(node.info) else OTHER_HOST_LONGER
        return min(longer * self._batch_bytes, -(-total_bytes // self._movers.threads))

    def _read_part(
        self, node: NodeAccess, part: Sequence[int], missing: dict[int, Want], until_s: float
    ) -> None:
        """Read and verify these; TransferFailed when they cannot be had."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:  # slow is not dead: the caller recomputes the rest
            log.warning(
                "node_id=%s deadline passed, %d blocks missed", node.info.node_id, len(part)
            )
            return
        wants = [missing[index] for index in part]
        if isinstance(node.transport, MappedTransport):
            whole = _copied(node.transport, node, wants, left_s)
        else:
            sources = [
                ByteSpan(
                    node.shape.slot_offset_bytes(want.copy.slot) + want.start_bytes,
                    want.length_bytes,
                )
                for want in wants
            ]
            node.transport.read(node.info, sources, [want.target for want in wants], left_s)
            whole = [want.is_whole() for want in wants]
        for index, is_whole in zip(part, whole, strict=True):
            if is_whole:
                del missing[index]
            else:
                self._on_bad_copy(missing[index].copy)


def _copied(
    transport: MappedTransport, node: NodeAccess, wants: Sequence[Want], left_s: float
) -> list[bool]:
    """Copy out of a mapped segment, the checksum computed on the way: which blocks are whole."""
    started_s = time.monotonic()
    whole, moved_bytes = [], 0
    with transport.owned(node.info) as view:
        for want in wants:
            buffer, (start, length_bytes) = want.target
            far = node.shape.slot_offset_bytes(want.copy.slot) + want.start_bytes
            near, source = buffer[start : start + length_bytes], view[far : far + length_bytes]
            if len(want.checksums) == 1:
                whole.append(copy_and_sum(near, source) == want.checksums[0])
            else:
                near[:] = source
                whole.append(want.is_whole())
            moved_bytes += length_bytes
            if time.monotonic() - started_s > left_s:
                raise TransferTimeout(
                    f"node {node.info.node_id}: copying {moved_bytes} bytes through shared memory "
                    f"took longer than {left_s:.3f} s: this host is short of CPU"
                )
    transport.note(True, moved_bytes, started_s)
    return whole


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
        found: dict[int, bytes] = {}
        for node_id, indices in _by_node(copies).items():
            node = self._nodes.access(node_id)
            if node is None:
                continue
            spans: dict[int, ByteSpan] = {}
            for index in indices:
                _, slot, _, _, size_bytes = copies[index]
                if node.shape.holds(slot, size_bytes):
                    heads = node.shape.headers(slot, size_bytes)
                    length_bytes = heads.stop - heads.start if is_whole else HEADER_BYTES
                    spans[index] = ByteSpan(heads.start, length_bytes)
            with contextlib.suppress(TransferFailed):
                self._read_node(node, spans, found)
        return [found.get(index) for index in range(len(copies))]

    def _read_node(
        self, node: NodeAccess, spans: dict[int, ByteSpan], found: dict[int, bytes]
    ) -> None:
        if isinstance(node.transport, MappedTransport):
            with node.transport.owned(node.info) as view:
                for index, (start, length_bytes) in spans.items():
                    found[index] = view[start : start + length_bytes].tobytes()
            return
        for part in _parts(spans):
            self._read_part(node, part, found)

    def _read_part(
        self, node: NodeAccess, part: dict[int, ByteSpan], found: dict[int, bytes]
    ) -> None:
        total_bytes = sum(span.length_bytes for span in part.values())
        with self._scratch.take(total_bytes) as buffer:
            ends = list(accumulate(span.length_bytes for span in part.values()))
            targets: list[LocalSpan] = [
                (buffer, ByteSpan(end - span.length_bytes, span.length_bytes))
                for end, span in zip(ends, part.values(), strict=True)
            ]
            node.transport.read(node.info, list(part.values()), targets, HEADERS_DEADLINE_S)
            for index, (_, (start, length_bytes)) in zip(part, targets, strict=True):
                found[index] = buffer[start : start + length_bytes].tobytes()


def _by_node(copies: Sequence[Copy]) -> dict[str, list[int]]:
    """The numbers of these copies, by the node that has them."""
    found: dict[str, list[int]] = {}
    for index, copy in enumerate(copies):
        found.setdefault(copy.node_id, []).append(index)
    return found


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
