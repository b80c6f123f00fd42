"""The prefix index: exact while it fits, an undercount when it is bounded, never an overcount."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mooncake_store.prefix_index import PrefixIndex, PrefixMatch
from tests.mooncake_store.makers import chain


def by_hand(holders_of: dict[bytes, set[str]], keys: Sequence[bytes]) -> PrefixMatch:
    """The definition, word by word."""
    runs = {}
    for holder in {name for names in holders_of.values() for name in names}:
        run = 0
        while run < len(keys) and holder in holders_of.get(keys[run], ()):
            run += 1
        if run:
            runs[holder] = run
    union = 0
    while union < len(keys) and holders_of.get(keys[union]):
        union += 1
    best = max(runs.values(), default=0)
    first = min((name for name, run in runs.items() if run == best), default=None)
    return PrefixMatch(runs, best, first, union)


def test_each_holder_counts_as_far_as_it_has_every_block() -> None:
    index = PrefixIndex()
    keys = chain(5)
    for holder, blocks in {"a": [0, 1], "b": [0, 1, 2], "c": [1, 2, 3], "d": [0, 2]}.items():
        for block in blocks:
            index.add(keys[block], holder)
    match = index.match(keys)
    assert match.blocks_by_holder == {"a": 2, "b": 3, "d": 1}
    assert (match.best_holder, match.best_blocks, match.union_blocks) == ("b", 3, 4)
    assert match.blocks("c") == 0


def test_equal_prefixes_go_to_the_smaller_name() -> None:
    index = PrefixIndex()
    keys = chain(2)
    for holder in ("s2", "s1", "s3"):
        for key in keys:
            index.add(key, holder)
    assert index.match(keys).best_holder == "s1"


def test_nothing_matches_an_empty_index_or_an_empty_prompt() -> None:
    index = PrefixIndex()
    nothing = PrefixMatch({}, 0, None, 0)
    assert index.match(chain(3)) == nothing
    index.add(chain(1)[0], "a")
    assert index.match([]) == nothing
    assert index.match(chain(3, "b")) == nothing


def test_a_full_index_forgets_the_oldest_block() -> None:
    index = PrefixIndex(blocks_max=3)
    keys = chain(4)
    for key in keys:
        index.add(key, "a")
        index.check()
    assert len(index) == 3 and keys[0] not in index
    index.remove(keys[0], "a")  # its removal arrives later: no error
    index.check()


def test_the_bits_of_holders_that_left_are_used_again() -> None:
    index = PrefixIndex()
    key = chain(1)[0]
    for life in range(1_000):  # a thousand restarts must not make thousand-bit maps
        index.add(key, f"node{life}")
        index.drop_holder(f"node{life}")
    index.add(key, "last")
    assert index.number("last") <= 1, "numbers are not used again"
    index.check()


@pytest.mark.parametrize("blocks_max", [10_000, 25])
def test_random_changes_match_the_definition(seed: int, blocks_max: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(blocks_max)
    keys = chain(40)
    holders = [f"s{i}" for i in range(6)]
    expected: dict[bytes, set[str]] = {key: set() for key in keys}
    for step in range(3_000):
        key, holder = rng.choice(keys[: rng.randint(1, 40)]), rng.choice(holders)
        chance = rng.random()
        if chance < 0.65:
            index.add(key, holder)
            expected[key].add(holder)
        elif chance < 0.985:
            index.remove(key, holder)
            expected[key].discard(holder)
        elif chance < 0.998:
            index.drop_holder(holder)
            for names in expected.values():
                names.discard(holder)
        else:
            index.clear()
            expected = {key: set() for key in keys}
        index.check()
        if blocks_max >= len(keys):
            assert index.match(keys) == by_hand(expected, keys), f"step {step}"
        for each in keys:
            known = set(index.holders(each))
            assert known <= expected[each], "overcounts"
            assert known == expected[each] or blocks_max < len(keys)
            if not known and blocks_max < len(keys):
                expected[each] = set()  # forgotten for good: what is added later counts anew
