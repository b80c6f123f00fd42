"""A limit carries the measured error of the predictions that it judges."""

from __future__ import annotations

import random

import pytest

from conductor.estimates.measured import Margin

SHORT, LONG = 1_000, 100_000


def learned(*samples: tuple[int, float, float], quantile: float = 0.9) -> Margin:
    made = Margin(quantile, limit_s=10.0, half_life_s=60.0)
    for number, (tokens, predicted_s, actual_s) in enumerate(samples):
        made.learn(tokens, predicted_s, actual_s, number * 0.01)
    made.check()
    return made


def test_nothing_measured_leaves_the_limit_as_it_is() -> None:
    assert learned().ratio(SHORT) == learned().ratio(LONG) == 1.0


def test_predictions_that_were_kept_or_beaten_leave_it_too() -> None:
    assert learned(*[(SHORT, 5.0, 4.0)] * 50).ratio(SHORT) == 1.0


def test_a_class_whose_predictions_are_too_low_has_a_lower_limit_and_only_that_class() -> None:
    made = learned(*[(LONG, 5.0, 7.0)] * 50)
    assert made.ratio(LONG) == pytest.approx(1.4, rel=0.1)
    assert made.ratio(LONG) >= 1.4, "rounded up, never down"
    assert made.ratio(SHORT) == 1.0


def test_small_predictions_say_nothing_about_large_ones() -> None:
    made = learned(*[(SHORT, 0.05, 0.4)] * 100, *[(SHORT, 5.0, 5.0)] * 20)
    assert made.ratio(SHORT) == 1.0


def test_one_surprise_does_not_close_the_door() -> None:
    assert learned((LONG, 0.5, 60.0)).ratio(LONG) == 1.0


def test_what_nobody_confirms_is_forgotten() -> None:
    made = learned(*[(LONG, 5.0, 20.0)] * 50)
    assert made.ratio(LONG) > 3
    made.fade(60.0)
    assert made.ratio(LONG) > 3, "much was measured"
    made.fade(1_200.0)
    assert made.ratio(LONG) == 1.0


def test_quantile_zero_turns_it_off() -> None:
    assert learned(*[(LONG, 5.0, 20.0)] * 50, quantile=0.0).ratio(LONG) == 1.0


def test_limits_hold_for_the_asked_share_of_noisy_predictions(seed: int) -> None:
    rng, made = random.Random(seed), Margin(0.9, limit_s=10.0, half_life_s=600.0)
    within = judged = 0
    for number in range(4_000):
        predicted_s = rng.uniform(0.1, 12.0)
        actual_s = predicted_s * rng.lognormvariate(0.1, 0.2)
        if number > 1_000 and 0.9 * 10.0 < predicted_s * made.ratio(LONG) <= 10.0:
            judged, within = judged + 1, within + (actual_s <= 10.0)
        made.learn(LONG, predicted_s, actual_s, number * 0.1)
    made.check()
    assert judged > 50 and within > 0.85 * judged, (within, judged)


def test_years_of_weights_stay_finite() -> None:
    made = Margin(0.9, limit_s=10.0, half_life_s=1.0)
    for day in range(200):
        made.learn(LONG, 5.0, 7.0, day * 86_400.0)
        made.check()
    assert made.ratio(LONG) >= 1.0
