"""Three numbers per copy, in columns: slot, generation, checksum.

As attributes they would be three Python integers of 32 to 48 bytes per copy; in a column they are
20 bytes together. At ten million copies that is most of a gigabyte. Rows that are given back are
used again, so the columns are as long as the most copies there ever were at once.

Not here: the copies (holder.py).
"""

from __future__ import annotations

from array import array


class Rows:
    """Columns of the copies of one holder."""

    def __init__(self) -> None:
        self.slot = array("L")
        self.generation = array("Q")
        self.checksum = array("Q")
        self._free = array("L")

    def __len__(self) -> int:
        return len(self.slot) - len(self._free)

    def take(self, slot: int, generation: int) -> int:
        """A row for a new copy; its checksum is 0."""
        if self._free:
            row = self._free.pop()
            self.slot[row], self.generation[row], self.checksum[row] = slot, generation, 0
            return row
        self.slot.append(slot)
        self.generation.append(generation)
        self.checksum.append(0)
        return len(self.slot) - 1

    def give(self, row: int) -> None:
        self._free.append(row)

    def check(self) -> None:
        """Prove the invariants."""
        assert len(self.slot) == len(self.generation) == len(self.checksum)
        assert len(set(self._free)) == len(self._free), "a row is free twice"
        assert all(row < len(self.slot) for row in self._free)
