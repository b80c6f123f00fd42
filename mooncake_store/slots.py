"""The slots of one segment: free, used or quarantined, each use under a fresh generation.

A generation names one use of one slot. NIXL cannot revoke access, so a late reader or writer can
always touch a slot that has a new owner; the generation (and the checksum) is how everybody
notices. Generations come from one counter of the whole directory, so they never repeat, neither
after a slot is freed nor after a node came back.

A slot whose writer vanished is quarantined: its bytes may still be written by a transfer in
flight, so it is not handed out again until some time has passed.

Not here: what a slot holds (holder.py), where it lies in the segment (layout.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

# Slot and Copy are NamedTuples, not dataclasses: a lookup of 1,000 keys makes or decodes thousands,
# and a frozen dataclass costs five times as much to build. On the wire they are short arrays.


class Slot(NamedTuple):
    """A place that its writer may fill: one use of one slot."""

    node_id: str
    slot: int
    generation: int


class Copy(NamedTuple):
    """A place where a block can be read."""

    node_id: str
    slot: int
    generation: int
    checksum: int  # xxh3_64 of the block's bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to `allocate`: per key a fresh slot, or None because the key needs none here."""

    slots: tuple[Slot | None, ...]
    covered: int  # leading keys that are there, are being written, or got a slot

    @property
    def full(self) -> bool:
        """Room ran out at key `covered`: this key and all after it got nothing."""
        return self.covered < len(self.slots)


class SlotPool:
    """Every slot is free, used or quarantined, exactly one of them."""

    def __init__(self, slots: int, generations: Iterator[int]) -> None:
        assert slots >= 0, f"a segment with {slots} slots"
        self._generations = generations
        self._current = [-1] * slots  # generation of a used slot, else -1
        self._free = list(range(slots - 1, -1, -1))  # low slots first: they are mapped first
        self._quarantine: list[tuple[float, int]] = []  # heap of (until_s, slot)
        self._latest = -1

    @property
    def slots(self) -> int:
        return len(self._current)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def quarantined_slots(self) -> int:
        return len(self._quarantine)

    @property
    def used_slots(self) -> int:
        return len(self._current) - len(self._free) - len(self._quarantine)

    def take(self) -> tuple[int, int] | None:
        """A free slot and the generation of this use; None when there is no free slot."""
        if not self._free:
            return None
        slot = self._free.pop()
        generation = next(self._generations)
        assert generation > self._latest, f"generation {generation} after {self._latest}"
        self._latest = self._current[slot] = generation
        return slot, generation

    def free(self, slot: int, generation: int) -> None:
        self._end_use(slot, generation)
        self._free.append(slot)

    def quarantine(self, slot: int, generation: int, until_s: float) -> None:
        """End this use, but do not hand the slot out before `until_s`."""
        self._end_use(slot, generation)
        heappush(self._quarantine, (until_s, slot))

    def end_quarantines(self, now_s: float) -> None:
        while self._quarantine and self._quarantine[0][0] <= now_s:
            self._free.append(heappop(self._quarantine)[1])

    def _end_use(self, slot: int, generation: int) -> None:
        current = self._current[slot]
        assert current == generation, f"slot {slot} is at generation {current}, not {generation}"
        self._current[slot] = -1

    def generation(self, slot: int) -> int | None:
        """The generation of the slot's present use; None when it is not used."""
        current = self._current[slot]
        return None if current < 0 else current

    def check(self) -> None:
        """Prove the invariants."""
        idle = [*self._free, *(slot for _, slot in self._quarantine)]
        assert len(idle) == len(set(idle)), "a slot is free or quarantined twice"
        used = {slot for slot, current in enumerate(self._current) if current >= 0}
        assert used.isdisjoint(idle), f"slots {sorted(used & set(idle))} are used and idle"
        assert len(used) + len(idle) == self.slots, "a slot is lost"
        generations = [self._current[slot] for slot in used]
        assert len(generations) == len(set(generations)), "two slots share a generation"
        assert max(generations, default=-1) <= self._latest, "a generation from the future"
