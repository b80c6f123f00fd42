"""What the clients saw over time: every request is counted once, in the bin it belongs to."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.report.timeline import (
    BINS_MAX,
    IN_FLIGHT_POINTS_MAX,
    Bins,
    bins_of,
    hit_rate,
    in_flight,
    per_second,
    tokens_per_second,
)
from loadtest.results.metrics import FAILED, REJECTED
from tests.loadtest.report.runs import answered, full, unserved


def bins(count: int) -> Bins:
    return Bins(1.0, np.arange(count + 1.0))


@pytest.mark.parametrize("last_s", [0.0, 0.003, 0.9, 20.0, 59.9, 3_600.0, 86_400.0 * 30])
def test_the_bins_hold_the_whole_run_and_are_not_too_many(last_s: float) -> None:
    bins = bins_of([answered(finished_s=last_s)])
    assert 1 <= bins.count <= BINS_MAX
    assert bins.edges_s[0] == 0.0 and bins.edges_s[-1] >= last_s
    widths_s = np.diff(bins.edges_s)
    assert widths_s[:-1] == pytest.approx(bins.width_s)
    assert bins.count == 1 or 0.5 <= widths_s[-1] / bins.width_s < 1.5


def test_every_request_is_counted_once_when_sent_and_once_when_it_ended() -> None:
    records = full().requests
    bins = bins_of(records)
    rates = per_second(records, bins)
    widths_s = np.diff(bins.edges_s)
    totals = {name: float(np.sum(values * widths_s)) for name, values in rates.items()}
    assert totals == pytest.approx({"sent": 12, "answered": 8, "rejected": 3, "failed": 1})
    tokens = tokens_per_second(records, bins)
    assert np.sum(tokens * widths_s) == pytest.approx(8 * 3)


def test_a_request_in_the_last_moment_or_before_the_first_is_not_lost() -> None:
    assert bins(3).counts([-0.1, 0.0, 2.999, 3.0, 9.0]).tolist() == [2.0, 0.0, 3.0]


def test_a_short_rest_is_no_bin_of_its_own() -> None:
    steady = [answered(i, sent_s=i / 10, finished_s=i / 10) for i in range(202)]
    rates = per_second(steady, bins_of(steady))["answered"]
    assert rates[-1] == pytest.approx(10.0, rel=0.2), "a rate, not the beginning of one"


def test_in_flight_is_what_was_sent_and_has_not_ended() -> None:
    records = [answered(0, finished_s=2.0), answered(1, finished_s=3.0), answered(2)]
    times_s, counts = in_flight(records)
    assert times_s.tolist() == [0.0, 1.0, 2.0, 2.0, 3.0, 3.1]
    assert counts.tolist() == [1, 2, 1, 2, 1, 0]  # one ends before the next begins


def test_a_long_run_keeps_its_peak_in_flight() -> None:
    burst = [answered(500, sent_s=500.5, finished_s=501.0) for _ in range(40)]
    records = [answered(i, finished_s=i + 0.5) for i in range(1_000)] + burst
    times_s, counts = in_flight(records)
    assert len(times_s) == IN_FLIGHT_POINTS_MAX and counts.max() == 40


def test_the_hit_rate_is_of_answers_that_say_what_was_cached() -> None:
    records = [
        answered(0),
        answered(1, cached_tokens=None),
        unserved(2, REJECTED, "x"),
        unserved(3, FAILED, "y"),
        answered(4, cached_tokens=0),
    ]
    found = hit_rate(records, bins(6), {0: 80, 4: 0})
    assert found is not None and found.ideal is not None
    assert found.rate[[0, 4]].tolist() == [0.64, 0.0]
    assert found.ideal[[0, 4]].tolist() == [0.8, 0.0]
    assert np.isnan(found.rate[[1, 2, 3, 5]]).all()
    assert hit_rate(records[1:4], bins(6), None) is None


def test_an_ideal_that_misses_a_request_is_no_ideal() -> None:
    found = hit_rate([answered(0), answered(1)], bins(2), {0: 80})
    assert found is not None and found.ideal is None
