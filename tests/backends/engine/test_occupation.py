"""VRAM occupation cost is the exact integral of taken pages over time."""

from __future__ import annotations

import random

import pytest

from backends.engine.batching.pages import Occupation, PagePool


def test_pages_cost_for_as_long_as_they_are_taken() -> None:
    occupation = Occupation(now_s=5.0)
    assert occupation.page_seconds(100.0) == 0.0
    occupation.changed(4, 10.0)
    occupation.changed(6, 11.0)
    occupation.changed(0, 13.0)
    assert occupation.page_seconds(13.0) == occupation.page_seconds(99.0) == 4 * 1 + 6 * 2


def test_reading_changes_nothing() -> None:
    occupation = Occupation(0.0)
    occupation.changed(3, 0.0)
    assert [occupation.page_seconds(s) for s in (1.0, 1.0, 2.5)] == [3.0, 3.0, 7.5]


def test_it_equals_the_sum_over_requests_of_pages_times_residence(seed: int) -> None:
    chance = random.Random(seed)
    pool, now_s, held, cost = PagePool(50), 0.0, [], 0.0
    occupation = Occupation(now_s)
    pool.on_change = lambda used: occupation.changed(used, now_s)
    for _ in range(2000):
        now_s += chance.expovariate(10)
        if held and chance.random() < 0.5:
            since_s, pages = held.pop(chance.randrange(len(held)))
            pool.release(pages)
            cost += len(pages) * (now_s - since_s)
        elif pages := pool.take(chance.randint(1, 12)):
            held.append((now_s, pages))
    still = sum(len(pages) * (now_s - since_s) for since_s, pages in held)
    assert occupation.page_seconds(now_s) == pytest.approx(cost + still)
