"""What the leak test calls a leak, on looks and pages made by hand."""

from __future__ import annotations

import os

import pytest

from loadtest.bench.leaks import Windows, growth_targets, in_use, load_rows, rest_rows
from loadtest.bench.process_watch import Look, ProcessWatch

WINDOWS = Windows(second=(60.0, 120.0), last=(240.0, 300.0))
KEY = ("decode_0", 7)


def looks(rss_per_s: float = 0.0, threads_late: int = 9, until_s: int = 300) -> list[Look]:
    return [
        Look(float(t), int(1e8 + rss_per_s * t), 9 if t < 200 else threads_late, 30)
        for t in range(until_s + 1)
    ]


def verdicts(seen: list[Look]) -> dict[str, bool | None]:
    targets = growth_targets(load_rows({KEY: seen}, WINDOWS), "load")
    return {target.name: target.is_met for target in targets}


def test_a_process_that_stays_as_it_is_passes() -> None:
    assert set(verdicts(looks()).values()) == {True}


def test_four_percent_of_memory_between_the_minutes_are_a_leak_and_two_are_not() -> None:
    assert verdicts(looks(rss_per_s=1e8 * 0.045 / 180))["load_rss_last_over_second"] is False
    assert verdicts(looks(rss_per_s=1e8 * 0.02 / 180))["load_rss_last_over_second"] is True


def test_one_more_thread_is_a_leak() -> None:
    found = verdicts(looks(threads_late=10))
    assert found["load_threads_grown"] is False
    assert found["load_descriptors_grown"] is True


def test_a_process_that_died_is_no_pass() -> None:
    rows = load_rows({KEY: looks(until_s=200), ("conductor", 8): looks()}, WINDOWS)
    targets = growth_targets(rows, "load")
    assert {target.is_met for target in targets} == {None}
    assert "decode_0 (7)" in targets[0].why


def test_a_process_restarted_between_two_looks_at_rest_is_no_pass() -> None:
    rows = rest_rows({KEY: looks()[:1]}, {("decode_0", 9): looks()[:1]})
    assert {target.is_met for target in growth_targets(rows, "mixed")} == {None}


def test_what_is_in_use_is_told_and_totals_are_not() -> None:
    page = (
        "# TYPE mooncake_pages_used gauge\n"
        'mooncake_pages_used{model="decode_0"} 3\n'
        'mooncake_pages_used{model="decode_1"} 0\n'
        'mooncake_pages_max{model="decode_0"} 512\n'
        'mooncake_requests_total{model="conductor",outcome="answered"} 7\n'
    )
    assert in_use(page) == {'mooncake_pages_used{model="decode_0"}': 3.0}
    with pytest.raises(AssertionError, match="none of the gauges"):
        in_use("nv_inference_count 3\n")


def test_the_watch_sees_this_process_with_its_threads_and_descriptors() -> None:
    watch = ProcessWatch(os.getpid())
    watch.look()
    (mine,) = [seen for (_, pid), seen in watch.looks.items() if pid == os.getpid()]
    assert mine[0].rss_bytes > 2**20
    assert mine[0].threads >= 1 and mine[0].descriptors >= 1
