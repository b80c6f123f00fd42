"""What really lies in the memory of a holder, unit by unit, whatever the directory believes.

A unit holds a `Cell`: which block's bytes, and which unit of it. Whoever writes, writes here, late
writers too. A read returns the cells that are there, and its checksum is that of these cells.

Not here: what was promised of the memory (promises.py), who writes when (jobs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.ssd.entries import EntryTable, SsdEntry, SsdShape
from tests.fuzz.promises import Use

UNIT_BYTES = 4096
Cell = tuple[bytes, int]  # key, unit of the block
Block = tuple[bytes, int, int, int, int, int]  # as a node says it, see Directory.adopt


def units_of(size_bytes: int) -> int:
    return -(-size_bytes // UNIT_BYTES)


def content(key: bytes, size_bytes: int) -> list[Cell | None]:
    """What a block must read as."""
    return [(key, index) for index in range(units_of(size_bytes))]


class Checksums:
    """A checksum without collisions: different cells never have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[Cell | None, ...], int] = {}

    def of(self, cells: Sequence[Cell | None]) -> int:
        return self._known.setdefault(tuple(cells), len(self._known) + 1)


class Header(NamedTuple):
    """What stands before a block in DRAM."""

    state: int
    generation: int
    key: bytes
    checksum: int
    size_bytes: int


class Memory:
    """One segment (with headers) or one SSD file (with a manifest)."""

    def __init__(self, units: int, is_ssd: bool) -> None:
        self.units = units
        self.is_lost = False  # the node died and its segment with it; old mappings still see it
        self.cells: list[Cell | None] = [None] * units
        self.headers: list[Header | None] = [None] * units
        self.damaged: set[int] = set()  # generations that late writers wrote into
        shape = SsdShape(UNIT_BYTES, units * UNIT_BYTES)
        self.manifest = EntryTable(shape) if is_ssd else None
        self.granted: list[Use | None] = [None] * units  # to whom the directory gave it last

    def grant(self, use: Use) -> None:
        self.granted[use.slot : use.slot + use.units] = [use] * use.units

    def overlapping(self, slot: int, units: int) -> list[Use]:
        """The uses to which these units were given last."""
        found = self.granted[slot : slot + units]
        return list(dict.fromkeys(use for use in found if use is not None))

    def write(self, use: Use, index: int, cell: Cell | None) -> bool:
        """Unit `index` of a use. True: it was somebody else's by now, whose block is damaged."""
        unit = use.slot + index
        self.cells[unit] = cell
        return self._damages(use, unit)

    def write_header(self, use: Use, state: int, checksum: int) -> bool:
        """The first one also clears the headers of all units that the block will cover."""
        if state == STATE_WRITING:
            self.headers[use.slot : use.slot + use.units] = [None] * use.units
        header = Header(state, use.generation, use.key, checksum, use.size_bytes)
        self.headers[use.slot] = header
        return self._damages(use, use.slot)

    def _damages(self, use: Use, unit: int) -> bool:
        owner = self.granted[unit]
        if owner is None or owner.generation == use.generation:
            return False
        owner.is_damaged = True
        self.damaged |= self.claiming(unit) | {use.generation}
        return True

    def claiming(self, unit: int) -> set[int]:
        """Generations of the blocks that headers or manifest see in this unit."""
        return {
            block[2]
            for block in self.inventory()
            if block[1] <= unit < block[1] + units_of(block[4])
        }

    def is_ready(self, use: Use) -> bool:
        """Do the headers say so? One inside of it means that something else was written there."""
        first, *others = self.headers[use.slot : use.slot + use.units]
        is_it = first is not None and first[:2] == (STATE_READY, use.generation)
        return is_it and not any(others)

    def read(self, slot: int, units: int) -> list[Cell | None]:
        return self.cells[slot : slot + units]

    def entry(self, use: Use) -> SsdEntry | None:
        """What the manifest says of this use; None when nothing."""
        assert self.manifest is not None
        found = self.manifest.find(use.slot)
        return found if found and found.generation == use.generation else None

    def make_room(self, use: Use) -> None:
        """Older blocks that a write would overwrite are not found any more."""
        assert self.manifest is not None
        for entry in self.manifest.overlapping(use.slot, use.size_bytes):
            self.manifest.drop(entry.slot, entry.generation)

    def inventory(self) -> list[Block]:
        """What headers or manifest say; some of it was overwritten long ago."""
        if self.manifest is not None:
            self.manifest.check()
            return [
                (e.key, e.slot, e.generation, e.checksum, e.size_bytes, STATE_READY)
                for e in self.manifest.entries()
            ]
        return [
            (h.key, slot, h.generation, h.checksum, h.size_bytes, h.state)
            for slot, h in enumerate(self.headers)
            if h is not None
        ]


__all__ = ["STATE_READY", "STATE_WRITING", "Cell", "Checksums", "Memory", "content", "units_of"]
