"""Eviction: the coldest first, and never the start of a chain before its end."""

from __future__ import annotations

import random

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.eviction import make_eviction
from mooncake_store.records.events import BlockAdded, BlockRemoved
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put


def test_random_use_keeps_the_order_of_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    keys = chain(40)
    order = make_eviction("lru")
    expected: list[bytes] = []
    for _ in range(3_000):
        key = rng.choice(keys)
        if key not in expected:
            order.add([key])
            expected.append(key)
        elif rng.random() < 0.6:
            order.touch(key)
            expected.remove(key)
            expected.append(key)
        else:
            order.discard([key])
            expected.remove(key)
        order.check()
        assert order.keys() == expected
        assert order.keys(1) == expected[:1]
        assert len(order) == len(expected)


def test_the_least_recently_used_chain_goes_first() -> None:
    directory = directory_with("s0", slots=6)
    old, new, fresh = chain(3, "old"), chain(3, "new"), chain(3, "fresh")
    put(directory, old, now_s=0.0)
    put(directory, new, now_s=1.0)
    assert len(directory.lookup(old, "reader", 0.0, 2.0)) == 3  # now `new` is the older one
    put(directory, fresh, now_s=3.0)
    assert len(directory.lookup(old, "reader", 0.0, 4.0)) == 3
    assert directory.lookup(new, "reader", 0.0, 4.0) == []


def test_of_a_chain_used_at_once_the_deepest_block_goes_first() -> None:
    directory = directory_with("s0", slots=6)
    keys = chain(6)
    put(directory, keys)
    for evicted in range(1, 6):
        put(directory, chain(1, f"o{evicted}"), now_s=evicted, is_released=False)
        left = directory.lookup(keys, "reader", 0.0, evicted, prefix_only=False)
        # The chain shrinks from its end, so all that is left of it can be found.
        assert [bool(places) for places in left] == [True] * (6 - evicted) + [False] * evicted


def test_a_chain_written_piece_by_piece_still_goes_from_its_end() -> None:
    directory = directory_with("s0", slots=6)
    keys = chain(6)
    for start in (0, 2, 4):  # chunked prefill: one owner, three allocations
        put(directory, keys[start : start + 2], owner="r1", now_s=start, is_released=False)
    directory.lookup(keys[:1], "r1", 5.0, 5.0)  # a late look at the start does not reorder it
    directory.release("r1", 6.0)
    put(directory, chain(3, "other"), now_s=7.0)
    assert len(directory.lookup(keys, "reader", 0.0, 8.0)) == 3


def test_the_last_copy_of_a_leased_block_is_never_evicted() -> None:
    directory = directory_with("s0", slots=4)
    held, idle = chain(2, "held"), chain(2, "idle")
    put(directory, held, now_s=0.0)
    put(directory, idle, now_s=1.0)
    directory.lookup(held, "reader", 60.0, 2.0)
    allocation = directory.allocate("s0", chain(4, "more"), "writer", 10.0, False, 3.0)
    directory.check()
    assert allocation.covered == 2 and allocation.full
    assert len(directory.lookup(held, "reader", 60.0, 4.0)) == 2
    assert directory.lookup(idle, "reader", 0.0, 4.0) == []


def test_what_is_there_is_not_evicted_for_the_rest_of_its_own_chain() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(6)
    put(directory, keys[:3])
    allocation = directory.allocate("s0", keys, "writer", 10.0, False, 1.0)
    directory.check()
    assert allocation.slots[:3] == (None, None, None)
    assert allocation.slots[3] is not None
    assert allocation.slots[4:] == (None, None)
    assert allocation.covered == 4 and allocation.full
    assert len(directory.lookup(keys, "reader", 0.0, 1.0)) == 3


def test_random_chains_are_evicted_by_last_use_then_depth(seed: int) -> None:
    rng = random.Random(seed)
    directory = Directory(7, DirectoryConfig(eviction="lru"))
    directory.register_node(node_info("s0", slots=20), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    chains = [chain(8, name) for name in "abcdef"]
    used: dict[bytes, tuple[float, int]] = {}  # key -> (when, minus its depth): smallest goes first
    for step in range(2_000):
        now_s, keys = float(step), rng.choice(chains)[: rng.randint(1, 8)]
        directory.node_report("s0", "n1", now_s)
        if rng.random() < 0.5:
            keys = keys[: len(directory.lookup(keys, "reader", 0.0, now_s))]
        else:
            before = directory.sequence
            # All of the chain that is there counts as used before anything is evicted for the rest.
            idle = {key: use for key, use in used.items() if key not in keys}
            put(directory, keys, now_s=now_s)
            for event in directory.events_since(before) or []:
                if isinstance(event, BlockRemoved):
                    assert event.key == min(idle, key=lambda key: idle[key]), f"step {step}"
                    del idle[event.key], used[event.key]
                else:
                    assert isinstance(event, BlockAdded)
        used.update({key: (now_s, -depth) for depth, key in enumerate(keys)})
