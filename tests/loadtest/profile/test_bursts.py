"""What a burst shows is told apart by where it shows."""

from __future__ import annotations

import pytest

from conductor.estimates.estimates import DecodeEstimate
from loadtest.profile.bursts import (
    BurstAnswer,
    decode_beside,
    handover_beside_s,
    queued_prompt_s,
)

STEP = DecodeEstimate(0.01, 0.0, 0.0)


def answer(first_s: float, gap_s: float, *steps_s: float, tokens: int = 100) -> BurstAnswer:
    times = [first_s, first_s + gap_s]
    for step_s in steps_s:
        times.append(times[-1] + step_s)
    return BurstAnswer(tokens, 0.0, times)


def test_in_a_burst_the_last_prompt_is_handed_over_beside_nothing() -> None:
    burst = [answer(1.0, 0.05), answer(1.2, 0.5), answer(1.1, 0.03)]
    assert handover_beside_s([burst], step_s=0.01) == pytest.approx(0.03)
    assert handover_beside_s([burst], step_s=0.5) == 0.0
    assert handover_beside_s([], step_s=0.01) == 0.0


def test_steps_are_compared_while_prompts_of_the_burst_are_computed() -> None:
    burst = [answer(1.0, 0.01, 0.02, 0.02, 0.02), answer(1.04, 0.01, 0.07)]
    assert decode_beside([burst], STEP) == pytest.approx(2.0), "the steps behind 1.04 do not count"
    late_together = [answer(1.0, 0.01, 0.04, 0.0, 0.04, 0.0), answer(1.2, 0.01, 0.07)]
    assert decode_beside([late_together], STEP) == pytest.approx(2.0)
    assert decode_beside([[answer(1.0, 0.01, 0.001), answer(9.0, 0.01)]], STEP) == 1.0
    assert decode_beside([], STEP) == 1.0


def test_what_prompts_take_behind_each_other_is_more_than_their_steps() -> None:
    burst = [answer(0.2, 0.1, 0.1), answer(0.5, 0.1)]  # decoding covers 0.3 to 0.4 of 0.5 s
    steps_s = 0.1
    found = queued_prompt_s([burst], lambda tokens: steps_s, 0.02, prefill_beside=2.0)
    assert found == pytest.approx((0.5 - 0.02 - (1 + 0.1 / 0.5) * 2 * steps_s) / 2)
    assert queued_prompt_s([burst], lambda tokens: 1.0, 0.02, 1.0) == 0.0
    assert queued_prompt_s([], lambda tokens: 1.0, 0.02, 1.0) == 0.0
