"""Readings of the metrics page: what grew between two, and percentiles out of buckets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from backends.metrics.status.view import Change, parse, quantile
from backends.metrics.table import SECONDS
from tests.backends.metrics.status.pages import histogram, page

STEPS = 'mooncake_steps_total{model="%s"}'


def test_only_our_series_are_read_and_labels_pick_among_them() -> None:
    seen = page({STEPS % "a": 3, STEPS % "b": 4})
    assert set(seen.series) == {"mooncake_steps_total"}
    assert seen.total("mooncake_steps_total") == 7
    assert seen.total("mooncake_steps_total", model="b") == 4
    assert seen.by("mooncake_steps_total", "model") == {"a": 3, "b": 4}
    assert seen.total("mooncake_retries_total") == 0


def test_a_page_of_somebody_else_is_empty_and_garbage_is_refused() -> None:
    assert parse("# TYPE up gauge\nup 1\n", 0.0).is_empty
    with pytest.raises(ValueError):
        parse("mooncake_steps_total{model= 4\n", 0.0)


def test_rates_are_over_the_time_between_two_readings() -> None:
    change = Change(page({STEPS % "a": 30}, 12.0), page({STEPS % "a": 10}, 10.0))
    assert change.by("mooncake_steps_total", "model") == {"a": 20}
    assert change.rates("mooncake_steps_total", "model") == {"a": 10}


def test_without_an_earlier_reading_there_are_amounts_and_no_rates() -> None:
    change = Change(page({STEPS % "a": 30}, 12.0), None)
    assert change.total("mooncake_steps_total") == 30
    assert change.rates("mooncake_steps_total", "model") == {"a": 0.0}


def test_a_counter_that_fell_began_anew_and_a_new_one_began_at_0() -> None:
    change = Change(page({STEPS % "a": 4, STEPS % "b": 6}, 1.0), page({STEPS % "a": 100}))
    assert change.by("mooncake_steps_total", "model") == {"a": 4, "b": 6}


def test_a_percentile_is_interpolated_in_its_bucket() -> None:
    counts = {"0.1": 10, "0.2": 30, "+Inf": 30}
    assert quantile(counts, 0.5) == pytest.approx(0.125)
    assert quantile(counts, 1.0) == pytest.approx(0.2)
    assert quantile({"0.1": 0, "+Inf": 4}, 0.5) == 0.1  # at least that
    assert quantile({"0.1": 0, "+Inf": 0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_percentiles_of_the_newest_values_leave_the_older_ones_out() -> None:
    name = "mooncake_ttft_seconds"
    before = page(histogram(name, {"0.1": 100, "1": 100, "+Inf": 100}))
    now = page(histogram(name, {"0.1": 100, "1": 110, "+Inf": 110}), 1.0)
    assert Change(now, before).quantile(name, 0.5) == pytest.approx(0.55)
    assert Change(now, None).quantile(name, 0.5) < 0.1


def test_percentiles_from_our_buckets_are_within_a_third_of_the_values_own(seed: int) -> None:
    chance = random.Random(seed)
    for scale_s in (0.003, 0.05, 0.8, 12.0):
        values = [chance.lognormvariate(0, 0.7) * scale_s for _ in range(2000)]
        counts = {str(bound): sum(v <= bound for v in values) for bound in SECONDS}
        counts["+Inf"] = len(values)
        for q in (0.5, 0.9):
            assert quantile(counts, q) == pytest.approx(float(np.quantile(values, q)), rel=1 / 3)
