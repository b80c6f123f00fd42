"""Memory cut into slots of several sizes: every unit in one place, whatever happens."""

from __future__ import annotations

import random

import pytest

from mooncake_store.directory.core.slots import LATE_S, SlotPool
from mooncake_store.records.blocks import Slot

UNIT = 4096


def test_a_pool_hands_out_each_slot_once() -> None:
    pool = SlotPool(3, UNIT)
    assert [pool.take(1) for _ in range(4)] == [0, 1, 2, None]


def test_freeing_twice_is_our_bug_and_the_check_says_so() -> None:
    pool = SlotPool(2, UNIT)
    slot = pool.take(1)
    assert slot is not None
    pool.free(slot)
    pool.free(slot)
    with pytest.raises(AssertionError):
        pool.check()


def test_a_quarantined_slot_comes_back_only_after_its_time() -> None:
    pool = SlotPool(1, UNIT)
    slot = pool.take(1)
    assert slot is not None
    pool.quarantine(slot, until_s=10.0)
    pool.end_quarantines(9.9)
    assert pool.take(1) is None
    pool.end_quarantines(10.0)
    assert pool.take(1) == slot


@pytest.mark.parametrize("units", [1, 3, 7, 64])
def test_one_size_alone_packs_the_memory_without_a_gap(units: int) -> None:
    pool = SlotPool(1_000, UNIT)
    taken = []
    while (slot := pool.take(units)) is not None:
        taken.append(slot)
    assert len(taken) == 1_000 // units
    assert taken == sorted(taken), "low slots first"
    pool.check()


def test_memory_of_one_size_serves_another_once_it_is_free() -> None:
    pool = SlotPool(64, UNIT)
    small = [pool.take(1) for _ in range(64)]
    assert pool.take(32) is None
    for slot in small[:32]:
        assert slot is not None
        pool.free(slot)
    assert pool.take(32) == 0
    pool.check()


def test_adopted_slots_are_taken_where_they_were() -> None:
    pool = SlotPool(16, UNIT)
    assert pool.adopt(4, 2) and pool.adopt(6, 2) and pool.adopt(9, 1)
    assert not pool.adopt(5, 1), "inside of another"
    assert not pool.adopt(3, 2), "overlaps another"
    assert not pool.adopt(15, 2), "beyond the end"
    assert not pool.adopt(-1, 1)
    pool.check()
    pool.free(4)
    assert pool.take(2) == 4, "freed as any other"
    pool.check()


def test_adopted_slots_form_slabs_as_small_as_any_other() -> None:
    pool = SlotPool(640, UNIT)
    assert all(pool.adopt(slot, 1) for slot in range(640))
    pool.check()
    assert pool.slab_of(9).start == 0 and pool.slab_of(10).start == 10
    for slot in range(20, 40):
        pool.free(slot)
    assert pool.take(20) == 20, "one slot in use does not hold all memory for its size"
    pool.check()


def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    units = rng.choice([16, 100, 257])
    pool = SlotPool(units, UNIT)
    used: dict[int, int] = {}  # slot -> units
    resting: dict[int, tuple[float, int]] = {}
    now_s = 0.0
    for _ in range(3_000):
        now_s += rng.random()
        action = rng.choice(["take", "take", "free", "quarantine", "end", "adopt"])
        size = rng.choice([1, 1, 2, 3, 8])
        if action == "take":
            slot = pool.take(size)
            if slot is not None:
                taken = set(range(slot, slot + size))
                for other, length in [*used.items(), *((s, n) for s, (_, n) in resting.items())]:
                    assert taken.isdisjoint(range(other, other + length)), "two blocks overlap"
                used[slot] = size
        elif action == "adopt":
            slot = rng.randrange(units)
            if pool.adopt(slot, size):
                assert slot not in used and slot not in resting
                used[slot] = size
        elif action == "end":
            pool.end_quarantines(now_s)
            resting = {slot: rest for slot, rest in resting.items() if rest[0] > now_s}
        elif used:
            slot = rng.choice(sorted(used))
            length = used.pop(slot)
            if action == "free":
                pool.free(slot)
            else:
                resting[slot] = now_s + 5 * rng.random(), length
                pool.quarantine(slot, resting[slot][0])
        pool.check()
        assert pool.used_units == sum(used.values())
        assert pool.quarantined_units == sum(length for _, length in resting.values())
    for slot in used:
        pool.free(slot)
    pool.end_quarantines(now_s + 10.0)
    assert pool.take(units) == 0, "everything is free and in one piece again"


def test_slots_that_were_quarantined_get_late_bytes_for_a_while() -> None:
    pool = SlotPool(8, UNIT)
    slots = [pool.take(2) for _ in range(4)]
    assert slots == [0, 2, 4, 6]
    pool.quarantine(2, until_s=10.0)
    for slot in (0, 4, 6):
        pool.free(slot)
    pool.end_quarantines(10.0)

    def late(numbers: list[int], units: int, now_s: float) -> tuple[int, ...]:
        return pool.late([None, *(Slot("s0", number, 1) for number in numbers)], units, now_s)

    assert late([0, 2, 4, 6], 2, 10.0) == (2,)
    assert pool.take(4) is not None, "another size may have it"
    assert late([0, 4], 4, 10.0) == (1,)
    assert late([0, 2], 2, 10.0 + LATE_S) == ()
    pool.check()
