"""A mapped segment as headers and payloads of slots, for the node that owns it.

Not here: where slots lie (layout.py), the 64 bytes of a header (slot_header.py), whose slot it is
(directory.py).
"""

from __future__ import annotations

import numpy as np

from mooncake_store.layout import HEADER_BYTES, Geometry
from mooncake_store.memory.checksum import checksum
from mooncake_store.memory.header_scan import Block, scan
from mooncake_store.memory.segment import ByteArray
from mooncake_store.memory.slot_header import STATE_READY, STATE_WRITING, SlotHeader


class SlotMemory:
    """The slots of one segment."""

    def __init__(self, view: ByteArray, shape: Geometry) -> None:
        self.view, self.shape = view, shape

    def header(self, slot: int) -> SlotHeader | None:
        start = self.shape.header_offset_bytes(slot)
        return SlotHeader.unpack(self.view[start : start + HEADER_BYTES].tobytes())

    def write_header(self, slot: int, header: SlotHeader) -> None:
        """STATE_WRITING empties the headers of the block's other units, too."""
        heads, raw = self.shape.headers(slot, header.length_bytes), header.pack()
        if header.state == STATE_WRITING:
            raw = raw.ljust(heads.stop - heads.start, b"\0")
        self.view[heads.start : heads.start + len(raw)] = np.frombuffer(raw, np.uint8)

    def is_ready(self, slot: int, generation: int, key: bytes) -> bool:
        """Does that very use of the slot hold its block?"""
        header = self.header(slot)
        return (
            header is not None
            and header.state == STATE_READY
            and (header.generation, header.key) == (generation, key)
            and not self.view[self.shape.headers(slot, header.length_bytes)][HEADER_BYTES:].any()
        )

    def checksum(self, slot: int, size_bytes: int) -> int:
        """xxh3_64 of the payload."""
        start = self.shape.slot_offset_bytes(slot)
        return checksum(self.view[start : start + size_bytes])

    def blocks(self) -> list[Block]:
        """What all headers say."""
        return scan(self.view, self.shape)
