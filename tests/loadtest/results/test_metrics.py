"""Every number of a run's summary, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from loadtest.results.metrics import (
    COMPLETED,
    FAILED,
    REJECTED,
    RequestRecord,
    Spread,
    spread,
    summarize,
    tbt_s,
)


def record(index: int = 0, **changes: object) -> RequestRecord:
    made = RequestRecord(
        index=index,
        request_id=f"r{index}",
        due_s=1.0,
        sent_s=1.0,
        finished_s=2.0,
        prompt_tokens=100,
        output_tokens_asked=3,
        outcome=COMPLETED,
        token_times_s=(1.5, 1.6, 2.0),
        output_ids=(7, 8, 9),
        cached_tokens=64,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_intervals() -> None:
    times = [0.0]
    for interval in [0.01] * 18 + [0.5, 0.3]:
        times.append(times[-1] + interval)
    assert tbt_s(times) == pytest.approx(0.4)  # 20 intervals: the two longest


def test_tbt_of_a_short_answer_is_its_longest_interval() -> None:
    assert tbt_s([0.0, 0.1, 0.4]) == pytest.approx(0.3)


def test_a_tenth_of_eleven_intervals_is_two_of_them() -> None:
    times = [0.0, 1.0, 1.5]
    times += [1.5 + 0.1 * step for step in range(1, 10)]
    assert tbt_s(times) == pytest.approx(0.75)


def test_an_answer_of_one_token_has_no_tbt() -> None:
    assert tbt_s([1.0]) is None and tbt_s([]) is None


def test_tokens_that_arrive_together_have_intervals_of_zero() -> None:
    assert tbt_s([0.0, 0.0, 0.2, 0.2]) == pytest.approx(0.2)


def test_a_spread_interpolates_between_values_and_skips_what_is_missing() -> None:
    assert spread([4.0, None, 1.0, 3.0, 2.0, 5.0]) == Spread(
        5, 3.0, 3.0, pytest.approx(4.6), pytest.approx(4.96), 5.0
    )
    assert spread([None]) is None


def test_ttft_counts_from_the_sending_and_the_lag_is_shown_apart() -> None:
    late = record(due_s=0.4)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.lag_s == pytest.approx(0.6)
    assert late.latency_s == pytest.approx(1.0)


def test_throughput_counts_completed_requests_over_the_whole_run() -> None:
    summary = summarize(
        [
            record(0, sent_s=1.0),
            record(1, finished_s=5.0),
            record(2, outcome=FAILED, kind="timeout", token_times_s=(1.2,)),
        ]
    )
    assert (summary.requests, summary.completed, summary.duration_s) == (3, 2, 4.0)
    assert summary.requests_per_s == 0.5
    assert (summary.input_tokens_per_s, summary.output_tokens_per_s) == (50.0, 1.5)


def test_the_load_is_the_intervals_between_requests_over_the_time_they_fill() -> None:
    assert summarize([record(0, sent_s=1.0), record(1, sent_s=2.0)]).offered_per_s == 1.0
    assert summarize([record(n, sent_s=n / 4) for n in range(9)]).offered_per_s == 4.0
    for alone in ([], [record(0)], [record(0), record(1)]):
        assert summarize(alone).offered_per_s is None


def test_hit_rates_compare_the_same_requests() -> None:
    summary = summarize(
        [record(0), record(1, cached_tokens=None), record(2, outcome=REJECTED, kind="ttft")],
        {0: 80, 1: 1_000, 2: 1_000},
    )
    assert (summary.cached_tokens, summary.ideal_cached_tokens) == (64, 80)
    assert (summary.hit_rate, summary.ideal_hit_rate) == (0.64, 0.8)
    assert summary.cached_over_ideal == 0.8


def test_a_server_that_does_not_say_what_it_cached_has_no_hit_rate() -> None:
    summary = summarize([record(cached_tokens=None)], {0: 80})
    assert summary.cached_tokens is None and summary.hit_rate is None
    assert summary.cached_over_ideal is None


def test_errors_and_rejections_are_counted_by_kind_most_frequent_first() -> None:
    ends = [(FAILED, "timeout"), (FAILED, "unreachable"), (FAILED, "unreachable"),
            (REJECTED, "tbt"), (REJECTED, "ttft")]  # fmt: skip
    summary = summarize([record(i, outcome=o, kind=k) for i, (o, k) in enumerate(ends)])
    assert list(summary.errors_by_kind.items()) == [("unreachable", 2), ("timeout", 1)]
    assert list(summary.rejections_by_reason.items()) == [("tbt", 1), ("ttft", 1)]
    assert summary.completed == 0 and summary.ttft_s is None


def test_an_answer_shorter_than_asked_is_counted() -> None:
    assert summarize([record(), record(1, output_tokens_asked=4)]).short_outputs == 1


@pytest.mark.parametrize(("lag", "late"), [(0.009, False), (0.04, False), (0.06, True)])
def test_the_sender_is_late_when_its_lag_is_a_tenth_of_the_ttft(lag: float, late: bool) -> None:
    assert summarize([record(due_s=1.0 - lag)]).is_sender_late is late


def test_a_run_without_any_request_has_a_summary() -> None:
    assert summarize([]).requests == 0
