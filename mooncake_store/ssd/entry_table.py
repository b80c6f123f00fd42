"""Which blocks lie where on the SSD, as the manifest has told it so far. Nothing overlaps.

A byte for each unit says whether a block starts there, so the only neighbour that may reach into a
slot from below is found by one backward search of a byte string: no tree, one byte a unit.

Not here: the records on disk (records.py, manifest.py), who decides what is written (directory.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_store.ssd.records import DROP, Entry, Shape

_START = b"\x01"


class EntryTable:
    """The blocks of one SSD file, by slot."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._entries: dict[int, Entry] = {}
        self._starts = bytearray(shape.capacity_bytes // shape.unit_bytes)
        self._units_max = 1  # of any block so far: how far below a neighbour may start

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, slot: int) -> Entry | None:
        """The block that starts in this slot."""
        return self._entries.get(slot)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def overlapping(self, slot: int, size_bytes: int) -> list[Entry]:
        """The blocks that a block of that size in that slot would overwrite."""
        end = min(slot + self.shape.units_of(size_bytes), len(self._starts))
        found: list[Entry] = []
        below = self._starts.rfind(_START, max(0, slot - self._units_max), slot)
        if below >= 0:
            neighbour = self._entries[below]
            if below + self.shape.units_of(neighbour.size_bytes) > slot:
                found.append(neighbour)
        start = self._starts.find(_START, slot, end)
        while start >= 0:
            found.append(self._entries[start])
            start = self._starts.find(_START, start + 1, end)
        return found

    def put(self, entry: Entry) -> bool:
        """Take it in, and out what it overlaps. False when it does not fit or came too late."""
        if not self.shape.holds(entry):
            return False
        others = self.overlapping(entry.slot, entry.size_bytes)
        if any(other.generation > entry.generation for other in others):
            return False
        for other in others:
            self._remove(other.slot)
        self._entries[entry.slot] = entry
        self._starts[entry.slot] = 1
        self._units_max = max(self._units_max, self.shape.units_of(entry.size_bytes))
        return True

    def drop(self, slot: int, generation: int) -> bool:
        """Take out that use of the slot; another use of it stays."""
        entry = self._entries.get(slot)
        if entry is None or entry.generation != generation:
            return False
        self._remove(slot)
        return True

    def play(self, records: Iterable[tuple[int, Entry]]) -> None:
        """Do again what these records of a manifest say."""
        for kind, entry in records:
            if kind == DROP:
                self.drop(entry.slot, entry.generation)
            else:
                self.put(entry)

    def _remove(self, slot: int) -> None:
        del self._entries[slot]
        self._starts[slot] = 0

    def check(self) -> None:
        """Prove the invariants."""
        end = 0
        for slot, entry in sorted(self._entries.items()):
            units = self.shape.units_of(entry.size_bytes)
            assert slot == entry.slot >= end and self._starts[slot], (entry, end)
            assert self.shape.holds(entry) and units <= self._units_max, entry
            end = slot + units
        assert sum(self._starts) == len(self._entries)
