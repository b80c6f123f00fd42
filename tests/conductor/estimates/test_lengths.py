"""Survival curves of answers: monotone, right for known distributions, not fooled by max_tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from conductor.estimates.lengths import EDGES, TENANTS_MAX, OutputLengths, residual

KEY = (0, "")


def at(made: OutputLengths, tokens: float, key: tuple[int, str] = KEY, now_s: float = 1e3) -> float:
    return float(np.interp(tokens, EDGES, made.curve(key, now_s)))


def learned(*lengths: float, is_cut: bool = False) -> OutputLengths:
    made = OutputLengths(128)
    for number, tokens in enumerate(lengths):
        made.learn(KEY, tokens, is_cut, number * 0.1)
    return made


def test_before_anything_is_learned_half_go_beyond_what_is_expected() -> None:
    made = OutputLengths(128)
    assert at(made, 128) == pytest.approx(0.5, abs=0.01)
    assert at(made, 1_280) == pytest.approx(1 / 11, rel=0.1)


def test_one_that_outlived_all_that_was_seen_is_expected_to_stay() -> None:
    made = learned(*[100] * 1_000)
    assert at(made, 5_200) / at(made, 5_000) > 0.9


def test_a_curve_comes_near_the_distribution_that_was_learned(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(5.5, 0.8) for _ in range(3_000)]
    made = learned(*lengths)
    for tokens in (10, 50, 150, 300, 600, 1_500):
        share = sum(n > tokens for n in lengths) / len(lengths)
        assert at(made, tokens) == pytest.approx(share, abs=0.03)
    mean = sum(min(n, 2_000) for n in lengths) / len(lengths)
    # The mean of what is cut at 2,000 tokens is the area under the curve up to there.
    area = sum(at(made, tokens) for tokens in range(2_000))
    assert area == pytest.approx(mean, rel=0.05)


def test_limits_of_clients_are_not_mistaken_for_lengths_of_answers(seed: int) -> None:
    rng, made = random.Random(seed), OutputLengths(128)
    for number in range(4_000):
        tokens, limit = rng.uniform(1, 800), rng.choice((100, 400, 1_000))
        made.learn(KEY, min(tokens, limit), tokens >= limit, number * 0.01)
    assert at(made, 400) == pytest.approx(0.5, abs=0.05), "two thirds were cut before"


def test_classes_differ_and_a_new_one_begins_as_all_together() -> None:
    made = OutputLengths(128)
    for number in range(400):
        made.learn((0, "chat"), 300, False, number * 0.1)
        made.learn((3, "batch"), 20, False, number * 0.1)
    assert at(made, 100, (0, "chat")) > 0.9 and at(made, 100, (3, "batch")) < 0.1
    assert 0.4 < at(made, 100, (1, "new")) < 0.6


def test_what_was_learned_fades() -> None:
    made = learned(*[1_000] * 100)
    for number in range(200):
        made.learn(KEY, 10, False, 4_000.0 + number)
    assert at(made, 100, now_s=4_300.0) < 0.15


def test_curves_never_rise_and_stay_between_0_and_1(seed: int) -> None:
    rng = random.Random(seed)
    made = OutputLengths(rng.randint(1, 1_000))
    for number in range(1_000):
        key = (rng.randrange(4), rng.choice("abc"))
        made.learn(
            key,
            rng.choice((0, 1, 2, 3, 1e5, 1e6, rng.expovariate(0.01))),
            rng.random() < 0.3,
            number * rng.choice((0.0, 0.1, 50.0)),
        )
        curve = made.curve(key, number * 60.0)
        assert curve[0] == 1.0 and (np.diff(curve) <= 0).all() and curve[-1] > 0
        rest = residual(curve)
        assert rest[0] == 1.0 and (np.diff(rest) <= 0).all() and rest[-1] == 0.0
        made.check()


def test_answers_met_at_random_are_long_ones() -> None:
    curve = learned(*[10] * 500, *[1_000] * 500).curve(KEY, 1e3)
    assert np.interp(500, EDGES, residual(curve)) > 0.4, "of 1,010 tokens 1,000 are of long ones"


def test_names_made_up_by_clients_share_a_class() -> None:
    made = OutputLengths(128)
    keys = {made.class_of(10, f"t{number}") for number in range(10 * TENANTS_MAX)}
    assert len(keys) <= TENANTS_MAX + 1
    assert made.class_of(10, "t0") == (0, "t0"), "a known one keeps its own"
    made.check()
