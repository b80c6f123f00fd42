"""Reads the header of one slot of any node: whose block is that? Rare, so it is kept simple.

Not here: what a header is (slot_header.py).
"""

from __future__ import annotations

import threading

import numpy as np

from mooncake_store.errors import TransferFailed
from mooncake_store.known_nodes import KnownNodes
from mooncake_store.layout import HEADER_BYTES, geometry
from mooncake_store.slot_header import SlotHeader
from mooncake_store.slots import Copy
from mooncake_store.transport import Span

DEADLINE_S = 0.2


class HeaderReader:
    """Thread-safe: one header at a time."""

    def __init__(self, nodes: KnownNodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._buffer = np.zeros(HEADER_BYTES, np.uint8)
        nodes.register(self._buffer)

    def read(self, copy: Copy) -> SlotHeader | None:
        """The header of this copy's slot; None when it cannot be had or is none."""
        info = self._nodes.usable(copy.node_id)
        transport = self._nodes.transport(info) if info else None
        if info is None or transport is None or info.is_ssd:
            return None
        shape = geometry(info.segment_bytes, info.unit_bytes)
        if not shape.holds(copy.slot, 0):
            return None
        source = Span(shape.header_offset_bytes(copy.slot), HEADER_BYTES)
        with self._lock:
            target = (self._buffer, Span(0, HEADER_BYTES))
            try:
                transport.read(info, [source], [target], DEADLINE_S)
            except TransferFailed:
                return None
            return SlotHeader.unpack(self._buffer.tobytes())
