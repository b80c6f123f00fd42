"""A storage node's segment as a connector's ranks map it: slots with headers, given away again.

Whoever gives a slot back has it filled anew at once, header first, as the store does it: a copy
that comes too late shows. Not here: the real store (tests/mooncake_store/).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from backends.engine.connected.block_pages import SlotUse, place_of
from backends.engine.connected.channel import ConnectorHost
from mooncake_store.layout import HEADER_BYTES
from mooncake_store.memory.segment import Segment
from tests.backends.engine.connected.listening import WAIT_S

HEADERS = 2  # of each slot: its block has two units


class Slots:
    """One incarnation of a node: a segment, and which of its slots are in use."""

    def __init__(
        self, host: ConnectorHost, path: Path, region: int, count: int, block_bytes: int
    ) -> None:
        self.region, self._host, self._block_bytes = region, host, block_bytes
        self._payload_at = count * HEADERS * HEADER_BYTES
        self._segment = Segment.create(str(path), self._payload_at + count * block_bytes)
        self.free = list(range(count))
        self.used: set[int] = set()
        self.is_alive = True
        self._generation = 0
        host.attach(region, str(path), self._segment.size_bytes, WAIT_S).result(WAIT_S)

    def fill(self, index: int, block: bytes = b"") -> tuple[int, int, SlotUse]:
        """A free slot, with that block of a request, or to be filled with it: its number, the
        block's place, and what its headers say now."""
        slot = self.free.pop()
        self.used.add(slot)
        first = self._head(slot)
        if block:
            self.payload(slot)[:] = np.frombuffer(block, np.uint8)
        use = SlotUse(
            index,
            place_of(self.region, slot * HEADERS * HEADER_BYTES),
            HEADERS * HEADER_BYTES,
            first,
            HEADER_BYTES,
        )
        return slot, place_of(self.region, self._payload_at + slot * self._block_bytes), use

    def give_back(self, slot: int) -> None:
        self.used.discard(slot)
        if self.is_alive:
            self.overwrite(slot)
            self.free.append(slot)

    def overwrite(self, slot: int) -> None:
        """By whoever has it next."""
        self._head(slot)
        self.payload(slot)[:] = 0xDD

    def die(self) -> None:
        """Its node, and its file; the memory stays with who has it mapped."""
        self.is_alive = False
        self._segment.close()

    def detach(self) -> None:
        self._host.detach(self.region)

    def _head(self, slot: int) -> bytes:
        self._generation += 1
        first = b"head" + self._generation.to_bytes(28, "little")
        start = slot * HEADERS * HEADER_BYTES
        self._segment.view[start : start + len(first)] = np.frombuffer(first, np.uint8)
        return first

    def payload(self, slot: int) -> np.ndarray:
        start = self._payload_at + slot * self._block_bytes
        return self._segment.view[start : start + self._block_bytes]
