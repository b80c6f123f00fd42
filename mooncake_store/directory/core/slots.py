"""The memory of one holder: units, cut into slots of several sizes; used, free or quarantined.

A *unit* is the smallest allocation (unit_bytes, a power of two). A *slot* is a run of units that
holds one block. The number of a slot is the number of its first unit, so the geometry of the memory
(layout.py) gives the byte address. Slots of one size are cut from *slabs*: runs of adjacent slots.
An empty slab is released when another size needs memory. Slots of a single size fill the memory
without a gap.

A slot whose writer vanished is quarantined, because a transfer to it may still be in flight: a
one-sided transfer (NIXL) cannot be revoked.

Not here: the contents and the generation of a slot (holder.py), the choice of the block to evict
(eviction/, copies.py).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from mooncake_store.records.blocks import Slot

SLABS_WISHED = 64  # least number of slabs that the memory is cut into, if blocks are small enough
SLAB_BYTES_MAX = 64 * 2**20  # largest slab, unless one block is larger
# Seconds after its quarantine in which a slot may still receive late bytes. This is twice the 15
# minutes for which Linux retransmits unacknowledged data of a TCP connection (tcp_retries2).
LATE_S = 1_800.0


@dataclass(slots=True, eq=False)
class Slab:
    """`slots` slots of `units` units each, starting at unit `start`."""

    start: int
    slots: int
    units: int
    fresh: int = 0  # the first `fresh` slots were used at least once; the later ones are all free
    freed: list[int] = field(default_factory=list)  # free slots among the first `fresh`
    used: int = 0  # slots in use or in quarantine

    @property
    def has_room(self) -> bool:
        return self.used < self.slots

    def take(self) -> int:
        self.used += 1
        if self.freed:
            return self.freed.pop()
        self.fresh += 1
        return self.start + (self.fresh - 1) * self.units

    def give(self, slot: int) -> None:
        self.used -= 1
        self.freed.append(slot)


class FreeRuns:
    """Runs of units outside all slabs, sorted; adjacent runs are joined."""

    def __init__(self, units: int) -> None:
        self.runs: list[tuple[int, int]] = [(0, units)] if units else []  # (start, length)

    def carve(self, least: int, wished: int) -> tuple[int, int] | None:
        """Take a run of `wished` units, or else the longest run that is a multiple of `least`:
        (start, length). None: no run has `least` units."""
        fitting = (i for i, (_, length) in enumerate(self.runs) if length >= wished)
        index = next(fitting, None)
        if index is None:
            index = max(range(len(self.runs)), key=lambda i: self.runs[i][1], default=None)
            if index is None or self.runs[index][1] < least:
                return None
        start, length = self.runs.pop(index)
        taken = min(wished, length // least * least)
        if taken < length:
            self.runs.insert(index, (start + taken, length - taken))
        return start, taken

    def cut(self, start: int, length: int) -> bool:
        """Take exactly these units; False when they are not all free."""
        index = bisect_right(self.runs, (start, float("inf"))) - 1
        if index < 0:
            return False
        run_start, run_length = self.runs[index]
        if start + length > run_start + run_length:
            return False
        left, right = start - run_start, run_start + run_length - start - length
        pieces = [(run_start, left)] * (left > 0) + [(start + length, right)] * (right > 0)
        self.runs[index : index + 1] = pieces
        return True

    def give(self, start: int, length: int) -> None:
        insort(self.runs, (start, length))
        index = bisect_right(self.runs, (start, length)) - 1
        for i in (index, index - 1):  # join with the next run, then with the previous one
            if 0 <= i < len(self.runs) - 1 and sum(self.runs[i]) == self.runs[i + 1][0]:
                joined = self.runs[i][0], self.runs[i][1] + self.runs[i + 1][1]
                self.runs[i : i + 2] = [joined]


class SlotPool:
    """Every unit is in a free run or in a slab. A slot of a slab is used, quarantined or free."""

    def __init__(self, units: int, unit_bytes: int) -> None:
        assert units >= 0 < unit_bytes, f"{units} units of {unit_bytes} bytes"
        self.units, self.unit_bytes = units, unit_bytes
        self.used_units = self.quarantined_units = 0
        self._runs = FreeRuns(units)
        self._starts: list[int] = []  # first units of the slabs, sorted
        self._slabs: dict[int, Slab] = {}  # start -> slab
        self._open: dict[int, list[Slab]] = {}  # units per slot -> slabs with room
        self._quarantine: list[tuple[float, int]] = []  # heap of (until_s, slot)
        self._late_until_s: dict[int, float] = {}  # unit -> end of quarantine + LATE_S, ascending

    @property
    def free_units(self) -> int:
        return self.units - self.used_units - self.quarantined_units

    def units_for(self, size_bytes: int) -> int:
        return max(1, -(-size_bytes // self.unit_bytes))

    def take(self, units: int) -> int | None:
        """A free slot of `units` units; None when there is none."""
        slabs = self._open.get(units)
        if not slabs:
            if self.units - self.used_units - self.quarantined_units < units:
                return None  # usual case: the memory is full, so there is no free run
            slab = self._new_slab(units)
            if slab is None:
                return None
            slabs = self._open.setdefault(units, [])
            slabs.append(slab)
        slab = slabs[-1]
        slot = slab.take()
        if slab.used == slab.slots:
            slabs.pop()
        self.used_units += units
        return slot

    def take_many(self, units: int, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count and (slot := self.take(units)) is not None:
            found.append(slot)
        return found

    def free(self, slot: int) -> None:
        self.used_units -= self._give(slot)

    def quarantine(self, slot: int, until_s: float) -> None:
        """End this use of the slot, and keep the slot from new uses until `until_s`."""
        units = self.slab_of(slot).units
        self.used_units -= units
        self.quarantined_units += units
        heappush(self._quarantine, (until_s, slot))

    def end_quarantines(self, now_s: float) -> bool:
        """Free the slots whose quarantine has ended. Returns False if there were none."""
        before = len(self._quarantine)
        while self._quarantine and self._quarantine[0][0] <= now_s:
            slot = heappop(self._quarantine)[1]
            units = self._give(slot)
            self.quarantined_units -= units
            for unit in range(slot, slot + units):
                self._late_until_s.pop(unit, None)
                self._late_until_s[unit] = now_s + LATE_S
        return len(self._quarantine) < before

    def late(self, slots: Sequence[Slot | None], units: int, now_s: float) -> tuple[int, ...]:
        """The indices of those slots, of `units` units each, that have a unit whose quarantine
        ended less than LATE_S ago. An abandoned transfer may still write into these slots."""
        late = self._late_until_s
        while late and next(iter(late.values())) <= now_s:
            del late[next(iter(late))]
        if not late:  # the usual case
            return ()
        return tuple(
            index
            for index, slot in enumerate(slots)
            if slot is not None and not late.keys().isdisjoint(range(slot.slot, slot.slot + units))
        )

    def adopt(self, slot: int, units: int) -> bool:
        """Mark a slot from an earlier directory as used; False when its units are taken or do not
        exist. The earlier slabs are unknown. Adjacent slots of one size form a new slab, up to the
        usual slab size, if they are adopted in ascending order."""
        if slot < 0 or slot + units > self.units or not self._runs.cut(slot, units):
            return False
        index = bisect_right(self._starts, slot) - 1
        left = self._slabs[self._starts[index]] if index >= 0 else None
        is_neighbour = left and left.units == units and left.start + left.slots * units == slot
        is_below_limit = left and (left.slots + 1) * units <= self._slab_units(units)
        if left and is_neighbour and is_below_limit and left.fresh == left.slots:
            left.slots, left.fresh, left.used = left.slots + 1, left.fresh + 1, left.used + 1
        else:
            self._add_slab(Slab(slot, 1, units, fresh=1, used=1))
        self.used_units += units
        return True

    def slab_of(self, slot: int) -> Slab:
        slab = self._slabs[self._starts[bisect_right(self._starts, slot) - 1]]
        assert (slot - slab.start) % slab.units == 0, f"{slot} is no slot of {slab}"
        return slab

    def neighbours(self, units: int, starts: Sequence[int]) -> list[int] | None:
        """The slabs to empty so that a slot of `units` can be cut; None when no choice suffices.
        `starts`: the slabs that may be emptied, the cheapest first. A slab is named by its first
        unit. Adjacent free memory is used as well. The result is the choice whose most expensive
        slab is the cheapest."""
        rank = {start: position for position, start in enumerate(starts)}
        pieces = [(start, length, -1) for start, length in self._runs.runs]
        for slab in self._slabs.values():
            if not slab.used or slab.start in rank:
                pieces.append((slab.start, slab.slots * slab.units, rank.get(slab.start, -1)))
        pieces.sort()
        best: tuple[int, list[int]] | None = None
        for i, (first, _, _) in enumerate(pieces):
            end, last, window = first, -1, list[int]()
            for start, length, position in pieces[i:]:
                if start != end or (best is not None and position >= best[0]):
                    break
                end, last = start + length, max(last, position)
                window += [start] if position >= 0 else []
                if end - first >= units:
                    best = last, window
                    break
        return best[1] if best else None

    def _give(self, slot: int) -> int:
        slab = self.slab_of(slot)
        if not slab.has_room:
            self._open.setdefault(slab.units, []).append(slab)
        slab.give(slot)
        return slab.units

    def _new_slab(self, units: int) -> Slab | None:
        wished = self._slab_units(units)
        run = self._runs.carve(units, wished)
        if run is None:
            self._release_empty_slabs()
            run = self._runs.carve(units, wished)
        if run is None:
            return None
        slab = Slab(run[0], run[1] // units, units)
        self._add_slab(slab)
        return slab

    def _slab_units(self, units: int) -> int:
        """The usual size, in units, of a slab with slots of `units` units each."""
        wished_units = min(self.units // SLABS_WISHED, SLAB_BYTES_MAX // self.unit_bytes)
        return max(1, wished_units // units) * units

    def _add_slab(self, slab: Slab) -> None:
        insort(self._starts, slab.start)
        self._slabs[slab.start] = slab

    def _release_empty_slabs(self) -> None:
        empty = [slab for slabs in self._open.values() for slab in slabs if not slab.used]
        if not empty:
            return
        for units, slabs in self._open.items():
            self._open[units] = [slab for slab in slabs if slab.used]
        for slab in empty:
            del self._slabs[slab.start]
            self._runs.give(slab.start, slab.slots * slab.units)
        self._starts = sorted(self._slabs)

    def used_slots(self) -> Iterator[int]:
        """Slots that are used or quarantined, for check()."""
        for slab in self._slabs.values():
            freed = set(slab.freed)
            ever = range(slab.start, slab.start + slab.fresh * slab.units, slab.units)
            yield from (slot for slot in ever if slot not in freed)

    def check(self) -> None:
        pieces = sorted(
            [*self._runs.runs, *((s.start, s.slots * s.units) for s in self._slabs.values())]
        )
        at = 0
        for start, length in pieces:
            assert start == at and length > 0, f"unit {at} is lost or duplicated: {pieces}"
            at = start + length
        assert at == self.units, "the end of the memory is lost"
        joined = zip(self._runs.runs, self._runs.runs[1:], strict=False)
        assert all(sum(left) < right[0] for left, right in joined), "free neighbours are apart"
        assert self._starts == sorted(self._slabs)
        quarantined = [slot for _, slot in self._quarantine]
        assert len(quarantined) == len(set(quarantined)), "a slot is quarantined twice"
        assert set(quarantined) <= set(self.used_slots()), "a quarantined slot is free"
        quarantined_units = sum(self.slab_of(slot).units for slot in quarantined)
        assert quarantined_units == self.quarantined_units
        times = list(self._late_until_s.values())
        assert times == sorted(times), "late units are out of order"
        busy = sum(slab.used * slab.units for slab in self._slabs.values())
        assert busy == self.used_units + self.quarantined_units, "used units are miscounted"
        for slab in self._slabs.values():
            assert 0 <= slab.used <= slab.slots and slab.fresh - len(slab.freed) == slab.used
            assert len(set(slab.freed)) == len(slab.freed), "a slot is free twice"
            is_open = slab in self._open.get(slab.units, [])
            assert is_open == slab.has_room, "a slab with room cannot be found, or a full one can"
