"""Reads the headers of slots of any node: whose block is that, and is it still the same one?

Not here: what a header is (slot_memory.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate

from mooncake_store.errors import TransferFailed
from mooncake_store.layout import HEADER_BYTES, geometry
from mooncake_store.memory.registrations import SCRATCH_BYTES, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, ready_prefix
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.transport import LocalSpan, Span, Transport

DEADLINE_S = 0.5


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
        spans: dict[int, Span] = {}
        for index in indices:
            _, slot, _, _, size_bytes = copies[index]
            if shape.holds(slot, size_bytes):
                heads = shape.headers(slot, size_bytes)
                length_bytes = heads.stop - heads.start if is_whole else HEADER_BYTES
                spans[index] = Span(heads.start, length_bytes)
        if isinstance(transport, MappedTransport):
            with contextlib.suppress(TransferFailed), transport.owned(info) as view:
                for index, (start, length_bytes) in spans.items():
                    found[index] = view[start : start + length_bytes].tobytes()
            return
        with contextlib.suppress(TransferFailed):
            for part in _parts(spans):
                self._read_part(transport, info, part, found)

    def _read_part(
        self, transport: Transport, info: NodeInfo, part: dict[int, Span], found: list[bytes | None]
    ) -> None:
        total_bytes = sum(span.length_bytes for span in part.values())
        with self._scratch.take(total_bytes) as buffer:
            ends = list(accumulate(span.length_bytes for span in part.values()))
            targets: list[LocalSpan] = [
                (buffer, Span(end - span.length_bytes, span.length_bytes))
                for end, span in zip(ends, part.values(), strict=True)
            ]
            transport.read(info, list(part.values()), targets, DEADLINE_S)
            for index, (_, (start, length_bytes)) in zip(part, targets, strict=True):
                found[index] = buffer[start : start + length_bytes].tobytes()


def _parts(spans: dict[int, Span]) -> list[dict[int, Span]]:
    """As many at once as a scratch buffer holds."""
    parts: list[dict[int, Span]] = []
    left_bytes = 0
    for index, span in spans.items():
        if not parts or span.length_bytes > left_bytes:
            parts.append({})
            left_bytes = SCRATCH_BYTES
        parts[-1][index] = span
        left_bytes -= span.length_bytes
    return parts
