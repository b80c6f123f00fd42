"""PagePool: a page is free or taken, never both."""

from __future__ import annotations

import random

import pytest

from backends.engine.batching.pages import PagePool


def test_the_lowest_pages_are_handed_out_first() -> None:
    pool = PagePool(4)
    assert pool.take(2) == [0, 1]
    assert pool.take(1) == [2]
    pool.release([0])
    assert pool.take(2) == [0, 3]


def test_nothing_is_taken_when_not_all_pages_fit() -> None:
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.free_pages == 3


def test_a_page_released_twice_is_noticed() -> None:
    pool = PagePool(2)
    pool.release(pool.take(1) or [])
    with pytest.raises(AssertionError, match="page 0 released twice"):
        pool.release([0])


def test_two_thousand_random_steps_keep_the_invariants(seed: int) -> None:
    chance = random.Random(seed)
    pool = PagePool(50)
    held: list[list[int]] = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            pool.release(held.pop(chance.randrange(len(held))))
        else:
            pages = chance.randint(1, 12)
            taken = pool.take(pages)
            assert (taken is None) == (pages > 50 - sum(map(len, held)))
            if taken is not None:
                held.append(taken)
        assert pool.used_pages == sum(map(len, held))
        pool.check()
