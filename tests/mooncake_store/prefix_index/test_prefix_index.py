"""The prefix index: exact while it fits, an undercount when it is bounded, never an overcount."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mooncake_store.prefix_index.prefix_index import PAGE_KEYS, SWEPT_PER_CHANGE, PrefixIndex
from tests.mooncake_store.makers import chain


def by_hand(holders_of: dict[bytes, set[str]], keys: Sequence[bytes]) -> dict[str, int]:
    """The definition, word by word."""
    runs = {}
    for holder in {name for names in holders_of.values() for name in names}:
        run = 0
        while run < len(keys) and holder in holders_of.get(keys[run], ()):
            run += 1
        if run:
            runs[holder] = run
    return runs


def test_each_holder_counts_as_far_as_it_has_every_block() -> None:
    index = PrefixIndex()
    keys = chain(5)
    for holder, blocks in {"a": [0, 1], "b": [0, 1, 2], "c": [1, 2, 3], "d": [0, 2]}.items():
        for block in blocks:
            index.add_many([keys[block]], holder)
    assert index.match(keys) == {"a": 2, "b": 3, "d": 1}


def test_nothing_matches_an_empty_index_or_an_empty_prompt() -> None:
    index = PrefixIndex()
    assert index.match(chain(3)) == {}
    index.add_many([chain(1)[0]], "a")
    assert index.match([]) == {}
    assert index.match(chain(3, "b")) == {}


def test_a_full_index_forgets_the_oldest_block() -> None:
    index = PrefixIndex(blocks_max=3)
    keys = chain(4)
    for key in keys:
        index.add_many([key], "a")
        index.check()
    assert len(index) == 3 and keys[0] not in index
    index.remove_many([keys[0]], "a")  # its removal arrives later: no error
    index.check()


def test_the_bits_of_holders_that_left_are_used_again() -> None:
    index = PrefixIndex()
    key = chain(1)[0]
    for life in range(1_000):  # a thousand restarts must not make thousand-bit maps
        index.add_many([key], f"node{life}")
        index.drop_holder(f"node{life}")
    index.add_many([key], "last")
    assert index.number("last") <= 1, "numbers are not used again"
    index.check()


def test_a_dropped_holder_counts_for_nothing_at_once_and_is_swept_a_little_at_a_time() -> None:
    index, keys = PrefixIndex(), chain(20 * PAGE_KEYS)
    index.add_many(keys, "gone")
    index.add_many(keys[:3], "stays")
    index.drop_holder("gone")
    assert index.match(keys) == {"stays": 3}
    assert index.holders(keys[3]) == [] and keys[3] not in index
    left = len(index)
    assert left == len(keys), "dropping a holder walked its keys"
    for key in chain(20 * PAGE_KEYS, "b"):
        index.add_many([key], "stays")
        assert len(index) >= left - PAGE_KEYS - SWEPT_PER_CHANGE, "one change swept many keys"
        left = len(index)
    index.check()
    assert len(index) == 3 + 20 * PAGE_KEYS and index.number("new") == -1
    index.add_many([keys[0]], "new")
    assert index.number("new") == 0, "the number of the dropped holder is free again"


def test_a_cleared_index_is_empty_at_once_and_gives_its_memory_back_by_sweeping() -> None:
    index, keys = PrefixIndex(), chain(4 * PAGE_KEYS)
    index.add_many(keys, "a")
    index.clear()
    assert len(index) == 0 and index.find(keys) == [] and index.number("a") == -1
    index.add_many(keys[:2], "b")
    assert index.match(keys) == {"b": 2}
    while index.sweep(100):
        index.check()
    assert index._cleared == [] and index.match(keys) == {"b": 2}


def test_a_holder_that_comes_back_has_only_what_it_has_now() -> None:
    index, keys = PrefixIndex(), chain(6)
    index.add_many(keys, "a")
    index.drop_holder("a")
    index.add_many(keys[:2], "a")
    assert index.match(keys) == {"a": 2}
    index.remove_many(keys, "a")
    assert index.find(keys) == []
    index.check()


def test_a_full_index_forgets_without_looking_for_the_oldest() -> None:
    index = PrefixIndex(blocks_max=3 * PAGE_KEYS)
    keys = chain(20 * PAGE_KEYS)
    for key in keys:
        index.add_many([key], "a")
    index.check()
    assert [key in index for key in keys] == [n >= 17 * PAGE_KEYS for n in range(len(keys))]


@pytest.mark.parametrize("blocks_max", [10_000, 25])
def test_random_changes_match_the_definition(seed: int, blocks_max: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(blocks_max)
    keys = chain(40)
    holders = [f"s{i}" for i in range(12)]
    expected: dict[bytes, set[str]] = {key: set() for key in keys}
    numbers: dict[str, int] = {}
    version = -1
    for step in range(3_000):
        start = rng.randrange(40)
        some, holder = keys[start : start + rng.choice((1, 1, 3, 40))], rng.choice(holders)
        chance = rng.random()
        if chance < 0.55:
            index.add_many(some, holder)
            for key in some:
                expected[key].add(holder)
        elif chance < 0.95:
            index.remove_many(some, holder)
            for key in some:
                expected[key].discard(holder)
        elif chance < 0.99:
            index.drop_holder(holder)
            for names in expected.values():
                names.discard(holder)
        elif chance < 0.997:
            index.sweep(rng.randint(1, 60))
        else:
            index.clear()
            expected = {key: set() for key in keys}
        index.check()
        for each in keys:
            known = set(index.holders(each))
            assert known <= expected[each], "overcounts"
            assert known == expected[each] or blocks_max < len(keys)
            expected[each] = known  # forgotten for good: what is added later counts anew
        match = by_hand(expected, keys)
        assert index.match(keys) == match, f"step {step}"
        found = index.find(keys)
        blocks = index.blocks_by_number(found)
        counted = {index.name(n): int(blocks[n]) for n in blocks.nonzero()[0].tolist()}
        assert counted == match, f"step {step}"
        assert blocks[-1] == blocks[index.number("nobody")] == 0
        assert [depth for depth, _ in found] == sorted(set(match.values()))
        here = {name: index.number(name) for name in holders}
        if index.numbers_version == version:
            assert here == numbers, "a number changed unannounced"
        numbers, version = here, index.numbers_version
        taken = [number for number in here.values() if number >= 0]
        assert len(set(taken)) == len(taken) and max(taken, default=0) < 2 * len(holders)


@pytest.mark.parametrize("holders", [1, 7, 8, 9, 63, 64, 65, 300])
def test_the_array_counts_for_any_number_of_holders(seed: int, holders: int) -> None:
    rng, index, keys = random.Random(seed), PrefixIndex(), chain(30)
    have = {f"s{number}": rng.randint(1, 30) for number in range(holders)}
    for name, blocks in have.items():
        index.add_many(keys[:blocks], name)
    blocks = index.blocks_by_number(index.find(tuple(keys)))
    assert {name: int(blocks[index.number(name)]) for name in have} == have
    assert int(blocks.sum()) == sum(have.values()) and len(blocks) > holders
