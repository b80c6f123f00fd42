"""The ratio of measured to estimated work."""

from __future__ import annotations

import pytest

from conductor.estimates.measured import RATIO_MAX, SpeedRatio


def test_nothing_measured_means_as_calibrated() -> None:
    assert SpeedRatio().at(0.0) == 1.0


def test_steady_slowness_is_found_and_fades_when_nothing_more_is_measured() -> None:
    made = SpeedRatio()
    for second in range(60):
        made.learn(2.0, 1.0, float(second))
    assert made.at(59.0) == pytest.approx(2.0, rel=0.03)
    assert 1.0 < made.at(300.0) < 1.25
    assert made.at(3_600.0) == pytest.approx(1.0)


def test_one_very_slow_prompt_does_not_count_for_more_than_an_outlier() -> None:
    made = SpeedRatio()
    made.learn(100.0, 0.05, 0.0)
    assert made.at(0.0) < 2.0


def test_the_ratio_stays_within_its_bounds() -> None:
    made = SpeedRatio()
    for second in range(100):
        made.learn(9.0, 1.0, float(second))
    assert made.at(99.0) == RATIO_MAX
    for second in range(100, 300):
        made.learn(0.0, 1.0, float(second))
    assert made.at(299.0) == 1 / RATIO_MAX
    made.learn(1.0, 0.0, 300.0)
    made.learn(-1.0, 1.0, 300.0)
    assert made.at(299.0) == 1 / RATIO_MAX
