"""What the leak test calls a leak, on looks and pages made by hand."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from bench.harness.processes import Look, ProcessWatch
from bench.leaks import (
    REST,
    ComparedMinutes,
    growth_targets,
    in_use,
    load_rows,
    rest_rows,
    rss_target,
    run_mixed,
    think_s_for,
)
from loadtest.client.server import addresses_of
from loadtest.harness.server import CannotMeasure

WINDOWS = ComparedMinutes(second=(60.0, 120.0), last=(240.0, 300.0))
KEY = ("decode_0", 7)


def looks(rss_per_s: float = 0.0, until_s: int = 300) -> list[Look]:
    return [Look(float(t), int(1e8 + rss_per_s * t), 9, 30) for t in range(until_s + 1)]


def at_rest(threads: int = 9, descriptors: int = 30) -> dict[tuple[str, int], list[Look]]:
    return {KEY: [Look(0.0, 10**8, threads, descriptors)], ("node s0", 8): looks()[:1]}


def test_memory_that_stays_as_it_is_passes() -> None:
    assert rss_target(load_rows({KEY: looks()}, WINDOWS)).is_met is True


def test_four_percent_of_memory_between_the_minutes_are_a_leak_and_two_are_not() -> None:
    leaking = load_rows({KEY: looks(1e8 * 0.045 / 180), ("other", 8): looks()}, WINDOWS)
    assert rss_target(leaking).is_met is False
    assert "decode_0" in rss_target(leaking).why
    assert rss_target(load_rows({KEY: looks(1e8 * 0.02 / 180)}, WINDOWS)).is_met is True


def test_one_more_thread_at_rest_is_a_leak() -> None:
    threads, descriptors = growth_targets(
        "mixed", rest_rows("mixed", at_rest(), at_rest(10)), *REST
    )
    assert (threads.is_met, descriptors.is_met) == (False, True)
    assert "decode_0" in threads.why


def test_more_threads_in_the_last_minute_than_in_the_second_are_a_leak() -> None:
    seen = [Look(look.time_s, look.rss_bytes, 9 + (look.time_s > 200), 30) for look in looks()]
    threads, descriptors = growth_targets("load", load_rows({KEY: seen}, WINDOWS), "second", "last")
    assert (threads.is_met, descriptors.is_met) == (False, True)


def test_fewer_threads_of_one_process_do_not_make_up_for_another_s() -> None:
    after = at_rest(descriptors=31) | {("node s0", 8): [Look(0.0, 10**8, 1, 1)]}
    _, descriptors = growth_targets("mixed", rest_rows("mixed", at_rest(), after), *REST)
    assert descriptors.value == 1


def test_a_process_that_died_is_no_pass() -> None:
    target = rss_target(load_rows({KEY: looks(until_s=200), ("other", 8): looks()}, WINDOWS))
    assert target.is_met is None
    assert "decode_0 (7)" in target.why


def test_a_process_restarted_between_two_looks_at_rest_is_no_pass() -> None:
    rows = rest_rows("mixed", {KEY: looks()[:1]}, {("decode_0", 9): looks()[:1]})
    assert {target.is_met for target in growth_targets("mixed", rows, *REST)} == {None}
    assert {target.is_met for target in growth_targets("mixed", [], *REST)} == {None}


def test_what_is_in_use_is_shown_and_totals_are_not() -> None:
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


def test_users_think_as_long_as_their_rate_leaves_beside_the_answers() -> None:
    assert think_s_for(requests_per_s=4.0, users=20, answer_s=2.0) == 3.0
    assert think_s_for(requests_per_s=40.0, users=20, answer_s=2.0) == 0.0, "nobody asks faster"


def test_the_watch_sees_this_process_with_its_threads_and_descriptors() -> None:
    watch = ProcessWatch(os.getpid())
    watch.look()
    (seen,) = [looks for (_, pid), looks in watch.looks.items() if pid == os.getpid()]
    assert seen[0].rss_bytes > 2**20
    assert seen[0].threads >= 1 and seen[0].descriptors >= 1


@pytest.mark.slow
def test_a_server_that_is_not_there_is_said_by_the_process_that_sends() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        sent = process.submit(run_mixed, addresses_of("127.0.0.1:1"), 3, 1, 2)
        with pytest.raises(CannotMeasure, match=r"127\.0\.0\.1:1"):
            sent.result()
