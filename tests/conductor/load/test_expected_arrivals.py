"""Requests that are yet to come are expected at the rate, and with the sizes, of late."""

import math
import random

import pytest

from conductor.load.decode_forecast import ExpectedArrivals

HALF_LIFE_S = 60.0


def steady(share: float, per_s: float, delay_s: float, until_s: float) -> ExpectedArrivals:
    found = ExpectedArrivals(share, HALF_LIFE_S)
    for number in range(int(until_s * per_s)):
        found.admitted(delay_s, 1_000, 4, number / per_s)
    return found


def test_nobody_is_expected_before_anybody_came_nor_for_now() -> None:
    assert ExpectedArrivals(1.0, HALF_LIFE_S).expected(10.0, 0.0, 1) == (0.0, 0.0, 0.0)
    assert steady(1.0, 2.0, 1.0, 600.0).expected(600.0, 600.0, 1) == (0.0, 0.0, 0.0)


def test_far_ahead_all_but_those_of_one_delay_will_have_joined() -> None:
    found = steady(1.0, 2.0, delay_s=3.0, until_s=900.0)
    sequences, tokens, pages = found.expected(960.0, 900.0, workers=4)
    assert sequences == pytest.approx(2.0 * (60.0 - 3.0) / 4, rel=0.02)
    assert tokens == pytest.approx(1_000 * sequences) and pages == pytest.approx(4 * sequences)


def test_in_the_first_moments_hardly_anybody_can_be_through() -> None:
    found = steady(1.0, 10.0, delay_s=5.0, until_s=900.0)
    soon, _, _ = found.expected(900.5, 900.0, 1)
    assert 0 < soon < 0.06 * 10.0 * 0.5, "half of (0.5 s / delay) of those that come"


def test_a_few_requests_right_after_the_start_are_no_flood() -> None:
    found = ExpectedArrivals(1.0, HALF_LIFE_S)
    for number in range(4):
        found.admitted(0.1, 100, 1, number * 0.01)
    assert found.expected(10.04, 0.04, 1)[0] < 1.0


def test_what_was_long_ago_is_forgotten() -> None:
    found = steady(1.0, 5.0, 1.0, 300.0)
    at_once, later = (found.expected(now_s + 10.0, now_s, 1)[0] for now_s in (300.0, 360.0))
    assert later == pytest.approx(at_once / 2, rel=1e-6)


def test_a_longer_wait_never_meets_fewer(seed: int) -> None:
    rng, now_s = random.Random(seed), 0.0
    found = ExpectedArrivals(rng.random(), HALF_LIFE_S)
    for _ in range(300):
        now_s += rng.expovariate(3.0)
        found.admitted(rng.expovariate(0.5), rng.randrange(1, 9_000), rng.randrange(1, 40), now_s)
        times = sorted(now_s + rng.expovariate(0.1) for _ in range(4))
        expected = [found.expected(at_s, now_s, 2)[0] for at_s in times]
        assert expected == sorted(expected) and all(map(math.isfinite, expected))
