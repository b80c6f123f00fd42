"""Slots: one state each, and generations that never repeat."""

from __future__ import annotations

import random
from itertools import count

import pytest

from mooncake_store.slots import SlotPool


def test_a_pool_hands_out_each_slot_once() -> None:
    pool = SlotPool(3, count())
    taken = [pool.take() for _ in range(4)]
    assert [each[0] for each in taken if each] == [0, 1, 2]
    assert taken[3] is None


def test_freeing_twice_is_our_bug_and_says_so() -> None:
    pool = SlotPool(1, count(5))
    assert pool.take() == (0, 5)
    pool.free(0, 5)
    with pytest.raises(AssertionError, match="slot 0 is at generation -1, not 5"):
        pool.free(0, 5)


def test_a_quarantined_slot_comes_back_only_after_its_time() -> None:
    pool = SlotPool(1, count())
    slot, generation = pool.take() or (0, 0)
    pool.quarantine(slot, generation, until_s=10.0)
    pool.end_quarantines(9.9)
    assert pool.take() is None
    pool.end_quarantines(10.0)
    assert pool.take() == (slot, generation + 1)


def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool(16, count(100))
    used: dict[int, int] = {}
    quarantined: dict[int, float] = {}
    seen: set[int] = set()
    now_s = 0.0
    for _ in range(3_000):
        now_s += rng.random()
        action = rng.choice(["take", "take", "free", "quarantine", "end"])
        if action == "take":
            taken = pool.take()
            assert (taken is None) == (len(used) + len(quarantined) == 16)
            if taken is not None:
                slot, generation = taken
                assert slot not in used and slot not in quarantined
                assert generation not in seen, "a generation came twice"
                seen.add(generation)
                used[slot] = generation
        elif action == "end":
            pool.end_quarantines(now_s)
            quarantined = {slot: until for slot, until in quarantined.items() if until > now_s}
        elif used:
            slot = rng.choice(sorted(used))
            if action == "free":
                pool.free(slot, used.pop(slot))
            else:
                quarantined[slot] = now_s + 5 * rng.random()
                pool.quarantine(slot, used.pop(slot), quarantined[slot])
        pool.check()
        assert pool.used_slots == len(used)
        assert pool.quarantined_slots == len(quarantined)
        assert pool.free_slots == 16 - len(used) - len(quarantined)
        assert all(pool.generation(slot) == used.get(slot) for slot in range(16))
