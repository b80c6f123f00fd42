"""Fading sums keep their rate, and neither age nor a long silence overflows them."""

from __future__ import annotations

import pytest

from conductor.estimates.forward_decay import ForwardDecay


def test_a_steady_rate_is_sum_by_weight_by_window() -> None:
    decay, total = ForwardDecay(60.0), 0.0
    for tick in range(100_000):
        now_s = tick * 0.5
        total /= decay.rescaled(now_s)
        total += 3.0 * decay.weight(now_s)
        if tick in (100, 5_000, 99_999):
            rate = total / decay.weight(now_s) / decay.window_s(now_s)
            assert rate == pytest.approx(6.0, rel=0.02)


def test_what_was_added_a_half_life_ago_counts_half() -> None:
    decay = ForwardDecay(10.0)
    assert decay.rescaled(5.0) == 1.0
    old = decay.weight(5.0)
    assert old / decay.weight(15.0) == pytest.approx(0.5)


def test_a_silence_of_a_year_leaves_nothing_and_breaks_nothing() -> None:
    decay = ForwardDecay(1.0)
    total = decay.weight(0.0) if decay.rescaled(0.0) else 0.0
    assert decay.weight(3e7) > 1e300 and decay.window_s(3e7) == pytest.approx(1 / 0.6931, rel=0.01)
    total /= decay.rescaled(3e7)
    assert total < 1e-300 and decay.weight(3e7) == 1.0
