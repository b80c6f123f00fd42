"""Reads the headers of slots of any node: whose block is that, and is it still the same one?

Not here: what a header is (slot_header.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mooncake_store.errors import TransferFailed
from mooncake_store.layout import HEADER_BYTES, geometry
from mooncake_store.memory.scratch import SIZE_BYTES, Scratch
from mooncake_store.memory.slot_header import SlotHeader, ready_prefix
from mooncake_store.slots import Copy
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.transport import LocalSpan, Span

DEADLINE_S = 0.5
AT_ONCE_MAX = SIZE_BYTES // HEADER_BYTES


class HeaderReader:
    """Thread-safe."""

    def __init__(self, nodes: KnownNodes, scratch: Scratch) -> None:
        self._nodes = nodes
        self._scratch = scratch

    def read(self, copy: Copy) -> SlotHeader | None:
        """The header of this copy's slot; None when it cannot be had or is none."""
        return self.read_all([copy])[0]

    def read_all(self, copies: Sequence[Copy]) -> list[SlotHeader | None]:
        return [(raw and SlotHeader.unpack(raw)) or None for raw in self._read_raw(copies)]

    def still(self, keys: Sequence[bytes], copies: Sequence[Copy]) -> list[bool]:
        """Does each slot still hold that very use of it, complete?"""
        expected = [
            ready_prefix(copy.generation, key) for key, copy in zip(keys, copies, strict=True)
        ]
        return [
            raw is not None and raw.startswith(prefix)
            for prefix, raw in zip(expected, self._read_raw(copies), strict=True)
        ]

    def _read_raw(self, copies: Sequence[Copy]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(copies)
        by_node: dict[str, list[int]] = {}
        for index, copy in enumerate(copies):
            by_node.setdefault(copy.node_id, []).append(index)
        for node_id, indices in by_node.items():
            for start in range(0, len(indices), AT_ONCE_MAX):
                self._read_node(node_id, copies, indices[start : start + AT_ONCE_MAX], found)
        return found

    def _read_node(
        self,
        node_id: str,
        copies: Sequence[Copy],
        indices: Sequence[int],
        found: list[bytes | None],
    ) -> None:
        info = self._nodes.usable(node_id)
        transport = self._nodes.transport(info) if info else None
        if info is None or transport is None:
            return
        shape = geometry(info.segment_bytes, info.unit_bytes)
        indices = [index for index in indices if shape.holds(copies[index].slot, 1)]
        if isinstance(transport, MappedTransport):
            with contextlib.suppress(TransferFailed), transport.owned(info) as view:
                for index in indices:
                    start = shape.header_offset_bytes(copies[index].slot)
                    found[index] = view[start : start + HEADER_BYTES].tobytes()
            return
        sources = [Span(shape.header_offset_bytes(copies[i].slot), HEADER_BYTES) for i in indices]
        try:
            with self._scratch.take(len(indices) * HEADER_BYTES) as buffer:
                targets: list[LocalSpan] = [
                    (buffer, Span(at * HEADER_BYTES, HEADER_BYTES)) for at in range(len(indices))
                ]
                transport.read(info, sources, targets, DEADLINE_S)
                raw = buffer[: len(indices) * HEADER_BYTES].tobytes()
            for at, index in enumerate(indices):
                found[index] = raw[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
        except TransferFailed:
            return
