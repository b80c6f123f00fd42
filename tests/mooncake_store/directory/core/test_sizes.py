"""Blocks of several sizes in one memory: who gives way to whom."""

from __future__ import annotations

import random

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.records.blocks import Slot
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with


def store(directory: Directory, keys: list[bytes], units: int, now_s: float, lease_s: float) -> int:
    """How many of them are stored; leased on for lease_s."""
    given = directory.allocate("s0", keys, "w", 5.0, False, now_s, units * BLOCK_BYTES)
    blocks = [
        (key, slot.slot, slot.generation, 1)
        for key, slot in zip(keys, given.slots, strict=True)
        if slot
    ]
    assert all(directory.commit("s0", blocks, "w", lease_s, now_s))
    directory.check()
    return len(blocks)


def stored(directory: Directory, keys: list[bytes], now_s: float) -> int:
    return sum(directory.exist(b"".join(keys), now_s))


def test_a_size_takes_memory_of_another_only_when_its_own_is_in_use() -> None:
    directory = directory_with("s0", slots=16)
    small, large = chain(12, "s"), chain(4, "l")
    assert store(directory, small, 1, 0.0, 0.0) == 12
    assert store(directory, large[:1], 4, 1.0, 0.0) == 1
    assert store(directory, large[1:2], 4, 2.0, 0.0) == 1, "in place of the other large one"
    assert stored(directory, small, 2.0) == 12
    directory.lookup(large[1:2], "reader", 60.0, 3.0)
    assert store(directory, large[2:3], 4, 3.0, 0.0) == 1, "in place of four small ones"
    assert stored(directory, small, 3.0) == 8
    assert stored(directory, large, 3.0) == 2


def test_a_large_block_takes_the_coldest_neighbours_that_nobody_uses() -> None:
    directory = directory_with("s0", slots=8)
    small = chain(8, "s")
    for number, key in enumerate(small):
        store(directory, [key], 1, float(number), 0.0)
    directory.node_report("s0", "n1", 8.0)
    directory.lookup(small[1:2], "reader", 60.0, 8.0)  # units 0 and 1 cannot go together now
    assert store(directory, chain(1, "l"), 3, 9.0, 0.0) == 1
    assert directory.exist(b"".join(small), 9.0) == bytes([1, 1, 0, 0, 0, 1, 1, 1])


def test_nothing_is_evicted_for_a_block_that_fits_nowhere() -> None:
    directory = directory_with("s0", slots=8)
    small = chain(8, "s")
    store(directory, small, 1, 0.0, 0.0)
    directory.lookup([small[2], small[5]], "reader", 60.0, 1.0, prefix_only=False)
    assert store(directory, chain(1, "l"), 4, 2.0, 0.0) == 0
    assert stored(directory, small, 2.0) == 8
    assert directory.stats(2.0).evictions == 0


def test_a_search_in_vain_is_not_repeated_at_once() -> None:
    directory = directory_with("s0", slots=40)
    small = chain(40, "s")
    store(directory, small, 1, 0.0, 0.0)
    directory.lookup(small[::2], "reader", 3.0, 1.0, prefix_only=False)
    assert store(directory, chain(1, "l"), 2, 1.0, 0.0) == 0
    directory.release("reader", 1.0)
    assert store(directory, chain(1, "l"), 2, 1.001, 0.0) == 0, "20 idle blocks: 2 ms later"
    assert store(directory, chain(1, "l"), 2, 1.003, 0.0) == 1


def test_pieces_of_several_sizes_are_joined_for_a_larger_one() -> None:
    directory = directory_with("s0", slots=8)
    assert store(directory, chain(2, "s"), 1, 0.0, 0.0) == 2
    assert store(directory, chain(3, "m"), 2, 1.0, 0.0) == 3
    assert store(directory, chain(1, "l"), 8, 2.0, 0.0) == 1
    assert directory.stats(2.0).evictions == 5


def test_soft_pinned_blocks_of_another_size_go_after_the_others() -> None:
    directory = directory_with("s0", slots=8)
    small = chain(8, "s")
    store(directory, small, 1, 0.0, 0.0)
    directory.pin(small[4:], "soft", 100.0, 0.0)
    assert store(directory, chain(1, "l"), 4, 1.0, 0.0) == 1
    assert directory.exist(b"".join(small), 1.0) == bytes([0] * 4 + [1] * 4)


def test_a_resting_slot_keeps_its_neighbours_from_being_joined() -> None:
    directory = directory_with("s0", slots=4)
    allocation = directory.allocate("s0", chain(4, "s"), "dead", 1.0, False, 0.0)
    slots = [slot for slot in allocation.slots if slot is not None]
    directory.abandon([slots[0], slots[2], slots[3]], "dead", 0.0)
    directory.release("dead", 0.0)
    assert store(directory, chain(1, "l"), 3, 1.0, 0.0) == 0
    assert store(directory, chain(1, "m"), 2, 1.0, 0.0) == 1
    assert directory.lookup(chain(1, "m"), "r", 0.0, 1.0)[0][0][:2] == ("s0", 2)


def test_sizes_come_and_go_without_losing_a_unit(seed: int) -> None:
    rng = random.Random(seed)
    directory = directory_with("s0", slots=24)
    writing: list[Slot] = []
    for step in range(1_500):
        now_s = step / 10
        directory.node_report("s0", "n1", now_s)
        units = rng.choice([1, 2, 3, 5, 8, 24])
        keys = chain(rng.randint(1, 3), f"{units:02d}{rng.randint(0, 3)}")
        given = directory.allocate("s0", keys, "w", 60.0, False, now_s, units * BLOCK_BYTES)
        writing += [slot for slot in given.slots if slot is not None]
        if rng.random() < 0.3:
            directory.abandon(rng.sample(writing, len(writing) // 2), "w", now_s)
            directory.release("w", now_s)
            writing.clear()
        else:
            blocks = [
                (key, slot.slot, slot.generation, 1)
                for key, slot in zip(keys, given.slots, strict=True)
                if slot
            ]
            directory.commit("s0", blocks, "w", rng.choice([0.0, 5.0]), now_s)
        directory.check()
    assert directory.stats(150.0).evictions > 100


def test_the_cheapest_neighbours_are_those_whose_last_one_comes_first() -> None:
    pool = SlotPool(8, BLOCK_BYTES)
    slots = [pool.take(1) for _ in range(8)]
    assert slots == list(range(8))
    assert pool.neighbours(3, [5, 0, 7, 6, 1, 2, 3, 4]) == [5, 6, 7]
    assert pool.neighbours(9, list(range(8))) is None
    assert pool.neighbours(2, [0, 2, 4, 6]) is None, "not beside each other"
    pool.free(3)
    assert pool.neighbours(2, [0, 2, 4, 6]) == [2], "with the free unit beside it"
