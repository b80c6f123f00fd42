"""A step that will not end is told from one that is slow, and from a process that stood still."""

from __future__ import annotations

import pytest

from backends.workers.step_times import GAP_S_MAX, HUNG_RATIO, HUNG_S_MIN, StepWatch, limit_s


def look(watch: StepWatch, from_s: float, to_s: float) -> float | None:
    """Once a second: when it is found hung."""
    now_s = from_s
    while now_s <= to_s:
        if watch.is_hung(now_s):
            return now_s
        now_s += 1.0
    return None


@pytest.mark.parametrize(
    ("predicted_s", "expected_s"),
    [(0.0, HUNG_S_MIN), (0.01, HUNG_S_MIN), (10.0, 10.0 * HUNG_RATIO)],
)
def test_the_limit_follows_the_prediction_and_is_half_a_minute_at_least(
    predicted_s: float, expected_s: float
) -> None:
    assert limit_s(predicted_s) == expected_s
    watch = StepWatch()
    look(watch, 90.0, 100.0)
    watch.began(100.0, predicted_s)
    found_s = look(watch, 101.0, 1_000.0)
    assert found_s is not None and expected_s < found_s - 100.0 <= expected_s + 1.0


def test_steps_that_end_are_no_hang_however_many_there_are() -> None:
    watch = StepWatch()
    for second in range(200):
        watch.began(float(second), 0.01)
        assert not watch.is_hung(second + 0.5)
        assert watch.age_s(second + 0.5) == 0.5
        watch.ended()
    assert watch.age_s(1_000.0) == 0.0
    assert look(watch, 200.0, 300.0) is None


def test_a_process_that_stood_still_is_not_hung_when_it_goes_on() -> None:
    watch = StepWatch()
    look(watch, 0.0, 10.0)
    watch.began(10.0)
    stopped_s = 10.0 + HUNG_S_MIN * 10
    assert look(watch, stopped_s, stopped_s + HUNG_S_MIN - 1.0) is None
    assert look(watch, stopped_s + HUNG_S_MIN, stopped_s + HUNG_S_MIN + 2.0) is not None
    assert GAP_S_MAX < HUNG_S_MIN


def test_an_engine_that_shows_no_steps_is_hung_when_it_is_busy_and_silent() -> None:
    watch = StepWatch()
    watch.progressed(0.0)  # nothing is under way
    assert look(watch, 0.0, 100.0) is None
    for second in range(100, 200):
        watch.is_busy(float(second), True)
        if second % 20 == 0:
            watch.progressed(float(second))
        assert not watch.is_hung(float(second))
    assert watch.age_s(200.0) == 20.0
    watch.is_busy(200.0, False)
    assert look(watch, 200.0, 300.0) is None
    watch.is_busy(300.0, True, 0.1)
    watch.is_busy(301.0, True, 10.0)  # it has got more to do
    assert look(watch, 301.0, 300.0 + 10.0 * HUNG_RATIO) is None
    assert look(watch, 301.0 + 10.0 * HUNG_RATIO, 999.0) is not None
