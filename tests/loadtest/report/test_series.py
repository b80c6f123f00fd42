"""From samples to lines: gauges, rates of counters, shares, and which worker is which."""

from __future__ import annotations

import math

from loadtest.report.timeline import (
    CONTEXT_TOKENS,
    PAGES_USED,
    PROMPT_TOKENS,
    TimeSeries,
    decode_workers,
    gauge,
    parsed,
    prefill_workers,
    rate,
    share,
)
from loadtest.results.recording import Sample
from tests.loadtest.report.runs import sample

OUTPUT_TOKENS = "mooncake_output_tokens_total"


def totals(*values: float) -> list[Sample]:
    key = 'mooncake_output_tokens_total{model="decode_0"}'
    return [Sample(float(i), {key: value}) for i, value in enumerate(values)]


def test_a_gauge_is_a_line_for_each_worker() -> None:
    samples = [sample(0.0), sample(1.5)]
    assert gauge(samples, PAGES_USED) == [
        TimeSeries("decode_0", (0.0, 1.5), (8.0, 8.0)),
        TimeSeries("prefill_0", (0.0, 1.5), (64.0, 64.0)),
    ]
    assert gauge(samples, "mooncake_pages") == []  # the beginning of a name is another name


def test_series_that_agree_in_the_label_are_added_up() -> None:
    samples = [sample(2.0, **{'mooncake_prompt_tokens_total{model="prefill_1",path="local"}': 7.0})]
    assert gauge(samples, PROMPT_TOKENS, by="path") == [
        TimeSeries("computed", (2.0,), (200.0,)),
        TimeSeries("local", (2.0,), (107.0,)),
    ]


def test_a_rate_is_growth_per_second_and_unknown_at_the_first_sample() -> None:
    (line,) = rate(totals(10.0, 30.0, 30.0), OUTPUT_TOKENS)
    assert math.isnan(line.values[0]) and line.values[1:] == (20.0, 0.0)
    assert rate(totals(10.0), OUTPUT_TOKENS) == []


def test_a_counter_that_began_anew_has_no_rate_there() -> None:
    (line,) = rate(totals(100.0, 130.0, 5.0, 25.0), OUTPUT_TOKENS)
    assert line.values[1] == 30.0 and math.isnan(line.values[2]) and line.values[3] == 20.0


def test_a_worker_that_is_away_for_a_sample_has_a_gap_and_not_a_zero() -> None:
    first, _, third = totals(10.0, 0.0, 30.0)
    (line,) = rate([first, Sample(1.0, {}), third], OUTPUT_TOKENS)
    assert line.times_s == (0.0, 2.0) and line.values[1] == 10.0


def test_a_share_needs_a_limit_at_the_same_time() -> None:
    samples = [sample(0.0), sample(1.0, **{'mooncake_pages_max{model="prefill_0"}': 0.0})]
    found = share(gauge(samples, PAGES_USED), gauge(samples, "mooncake_pages_max"))
    assert found[1:] == [TimeSeries("prefill_0", (0.0,), (0.25,))]


def test_a_worker_is_known_by_what_it_says_and_not_by_its_name() -> None:
    odd = Sample(
        0.0, {'mooncake_queue_tokens{model="left"}': 0.0, f'{CONTEXT_TOKENS}{{model="right"}}': 0.0}
    )
    assert (prefill_workers([odd]), decode_workers([odd])) == ({"left"}, {"right"})
    assert prefill_workers([]) == set()


def test_a_key_is_read_with_its_labels_whatever_stands_in_them() -> None:
    assert parsed('a_total{model="a, b=\\"c\\"",x="1"}') == (
        "a_total",
        {"model": 'a, b="c"', "x": "1"},
    )
    assert parsed("plain") == ("plain", {})
    assert parsed("broken{")[1] == {}
