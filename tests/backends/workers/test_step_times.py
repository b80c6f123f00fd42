"""What a worker says of its recent steps: those of the batch that it has, not of one long gone."""

from __future__ import annotations

import pytest

from backends.workers.step_times import StepTimes


def test_the_first_step_is_the_recent_mean_and_not_a_fifth_of_it() -> None:
    steps = StepTimes()
    steps.took(0.010)
    assert steps.recent_s == pytest.approx(0.010)


def test_the_first_steps_count_alike_and_later_ones_fade() -> None:
    steps = StepTimes()
    for step_s in (0.010, 0.020, 0.030):
        steps.took(step_s)
    assert steps.recent_s == pytest.approx(0.020)
    for _ in range(100):
        steps.took(0.005)
    assert steps.recent_s == pytest.approx(0.005)


def test_a_batch_that_was_empty_does_not_look_as_slow_as_the_overload_before() -> None:
    steps = StepTimes()
    for _ in range(100):
        steps.took(0.080)  # thirty requests at once
    steps.batch_is_empty()
    assert steps.recent_s == 0.0, "nothing is known of the next batch"
    steps.took(0.006)  # one request
    assert steps.recent_s == pytest.approx(0.006)


def test_what_was_computed_in_all_survives_an_empty_batch() -> None:
    steps = StepTimes()
    steps.took(0.010)
    steps.batch_is_empty()
    steps.took(0.020)
    assert steps.steps == 2 and steps.total_s == pytest.approx(0.030)


def test_a_few_slow_steps_do_not_make_a_worker_slow() -> None:
    """A request comes when its own prefill has had the machine busy: the last steps were long."""
    steps = StepTimes()
    for _ in range(300):
        steps.took(0.010, 0.010)
    for _ in range(5):
        steps.took(0.015, 0.010)
    assert steps.recent_s > 0.013, "the recent mean follows them"
    assert steps.speed == pytest.approx(1.025, abs=0.005), "the mean of an answer hardly does"


def test_a_worker_that_stays_slow_is_known_to_be_after_an_answer() -> None:
    steps = StepTimes()
    for _ in range(300):
        steps.took(0.020, 0.010)
    assert steps.speed == pytest.approx(2.0, abs=0.05)


def test_speed_is_of_no_batch_and_what_it_was_under_load_fades_soon_after() -> None:
    steps = StepTimes()
    for _ in range(300):
        steps.took(0.080, 0.040)  # thirty requests, twice as long as estimated
    steps.batch_is_empty()
    assert steps.speed == pytest.approx(2.0, abs=0.05), "nobody has said otherwise yet"
    for _ in range(60):
        steps.took(0.006, 0.006)  # one request, as estimated
    assert steps.speed < 1.3


def test_a_step_that_was_held_up_counts_for_no_more_than_four() -> None:
    steps = StepTimes()
    for _ in range(300):
        steps.took(0.010, 0.010)
    steps.took(8.0, 0.010)  # the process was stopped
    assert steps.speed < 1.05
