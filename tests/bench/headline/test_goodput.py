"""Good requests by both definitions, the numbers of a cell, and the search for the capacity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.headline import capacity
from bench.headline.client import command, details
from bench.headline.goodput import IdleTimes, RequestDetail, good_share, numbers, percentile
from bench.headline.traces import TraceRequest

IDLE = IdleTimes((100, 300), (0.1, 0.5), (0.01, 0.02))


def answered(
    ttft_s: float = 0.5, tpot_s: float = 0.02, prompt_tokens: int = 100, tokens: int = 11
) -> RequestDetail:
    latency_s = ttft_s + tpot_s * (tokens - 1)
    itls_s = (tpot_s,) * (tokens - 1)
    return RequestDetail(prompt_tokens, tokens, tokens, ttft_s, latency_s, itls_s)


REJECTED = RequestDetail(100, 11, 0, 0.0, 0.0, (), "Too Many Requests")


@pytest.mark.parametrize(
    ("detail", "share"),
    [
        (answered(2.0, 0.1), 1.0),
        (answered(2.001, 0.1), 0.0),
        (answered(0.1, 0.1001), 0.0),
        (answered(0.1, 0.0, tokens=1), 1.0),
    ],
)
def test_fixed_limits_are_two_seconds_and_100_ms_a_token(
    detail: RequestDetail, share: float
) -> None:
    assert good_share([detail]) == share


@pytest.mark.parametrize(
    ("detail", "share"),
    [
        (answered(1.0, 0.05), 1.0),
        (answered(1.001, 0.05), 0.0),
        (answered(1.0, 0.051), 0.0),
        (answered(3.0, 0.075, prompt_tokens=200), 1.0),  # between two measured lengths
        (answered(5.1, 0.05, prompt_tokens=900), 0.0),  # as the longest measured one
        (answered(0.9, 0.05, prompt_tokens=10), 1.0),
    ],
)
def test_paper_limits_are_multiples_of_the_idle_server(detail: RequestDetail, share: float) -> None:
    assert good_share([detail], IDLE) == share


def test_rejected_and_shortened_requests_are_not_good() -> None:
    short = RequestDetail(100, 11, 5, 0.1, 0.2, (0.01,) * 4)
    assert good_share([REJECTED, short, answered()]) == pytest.approx(1 / 3)


def test_idle_times_are_medians_by_length_and_refuse_a_failure() -> None:
    seen = [answered(ttft_s, 0.01, 64) for ttft_s in (0.3, 0.1, 0.2)]
    assert IdleTimes.of(seen).ttft_s == (0.2,)
    with pytest.raises(ValueError, match="Too Many Requests"):
        IdleTimes.of([REJECTED])


def test_numbers_count_all_requests_and_time_the_answered() -> None:
    found = numbers([answered(0.1), answered(0.3), answered(5.0), REJECTED], 2.0, IDLE)
    assert (found["requests"], found["answered"], found["failed"]) == (4, 3, 1)
    assert (found["goodput_fixed_per_s"], found["goodput_paper_per_s"]) == (1.0, 1.0)
    assert (found["ttft_mean_ms"], found["ttft_p50_ms"], found["ttft_p99_ms"]) == (
        1800.0,
        300.0,
        5000.0,
    )
    assert found["itl_p99_ms"] == 20.0


def test_numbers_without_an_answer_have_no_times() -> None:
    found = numbers([REJECTED], 1.0, None)
    assert found["ttft_mean_ms"] is None
    assert found["itl_p99_ms"] is None
    assert found["goodput_fixed_per_s"] == 0.0


def test_percentile_is_the_nearest_rank() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (50, 75, 99)] == [2.0, 3.0, 4.0]
    assert percentile([], 50) is None


FIRST_PER_S = 0.75


def test_the_search_begins_at_the_rate_of_a_server_without_concurrency() -> None:
    idle = IdleTimes((100, 300), (1.0, 3.0), (0.01, 0.02))
    requests = [TraceRequest(0.0, 100, 101, ()), TraceRequest(0.0, 300, 1, ())]
    assert capacity.serial_per_s(requests, idle) == 0.4  # 1 + 100 * 0.01 and 3 seconds


def searched(true_per_s: float) -> tuple[float, dict[float, float]]:
    """The found capacity of a server that is good up to `true_per_s`, and all that was tried."""
    tried: dict[float, float] = {}
    while (rate := capacity.next_rate(tried, FIRST_PER_S)) is not None:
        assert len(tried) < 20, "the search must end"
        tried[rate] = 1.0 if rate <= true_per_s else 0.5
    return capacity.capacity_per_s(tried), tried


def test_attainable_is_what_the_idle_server_answers_in_time() -> None:
    idle = IdleTimes((100, 300), (1.0, 3.0), (0.01, 0.02))
    requests = [TraceRequest(0.0, tokens, 1, ()) for tokens in (50, 200, 201, 300)]
    assert capacity.attainable_share(requests, idle) == 0.5
    with pytest.raises(ValueError, match="too slow"):
        capacity.attainable_share(requests[2:], idle)


@pytest.mark.parametrize("true_per_s", [0.2, 0.61, 0.8, 1.0, 3.7])
def test_search_ends_just_below_the_capacity(true_per_s: float) -> None:
    found, tried = searched(true_per_s)
    assert found <= true_per_s < found * capacity.PRECISION * 1.001
    assert len(tried) <= 4 + abs(math.log(true_per_s / FIRST_PER_S)) / math.log(capacity.STEP)


def test_an_interrupted_search_continues_with_the_tried_rates() -> None:
    _, tried = searched(0.61)
    first = dict(list(tried.items())[:2])
    assert capacity.next_rate(first, FIRST_PER_S) == list(tried)[2]


@pytest.mark.parametrize(
    "tried", [{0.8: 0.5, 0.571: 0.95, 0.676: 0.85}, {1.12: 0.95, 0.8: 0.85, 0.571: 0.9}]
)
def test_capacity_is_below_every_rate_that_failed(tried: Mapping[float, float]) -> None:
    assert capacity.capacity_per_s(tried) == 0.571


def test_a_server_that_no_rate_suits_is_refused() -> None:
    with pytest.raises(ValueError, match="busy with other work"):
        searched(0.0)


REQUESTS = [TraceRequest(0.0, 100, 3, (1, 2, 3, 4)), TraceRequest(1.0, 64, 3, (5, 6))]
RESULT = {
    "errors": ["", "Too Many Requests"],
    "ttfts": [0.2, 0.0],
    "latencies": [0.4, 0.0],
    "output_lens": [3, 0],
    "itls": [[0.1, 0.1], []],
}


def test_details_join_the_clients_lists_with_the_trace() -> None:
    first, second = details(RESULT, REQUESTS)
    assert (first.prompt_tokens, first.ttft_s, first.itls_s) == (100, 0.2, (0.1, 0.1))
    assert first.tpot_s == pytest.approx(0.1)
    assert (second.error, second.is_answered) == ("Too Many Requests", False)


def test_a_request_without_a_token_and_without_an_error_is_not_answered() -> None:
    [_, second] = details({**RESULT, "errors": ["", ""]}, REQUESTS)
    assert second.error == "no answer"


def test_a_result_with_missing_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="reported 2 requests, 1 were sent"):
        details(RESULT, REQUESTS[:1])


def test_the_client_replays_the_trace_at_its_own_times(tmp_path: Path) -> None:
    words = command(tmp_path / "bin", tmp_path, "http://127.0.0.1:1", 7)
    options = dict(itertools.pairwise(words))
    assert options["--dataset-name"] == "timed_trace"
    assert options["--timed-trace-chunk-hash-size"] == "16"
    assert options["--num-prompts"] == "7"
    assert options["--model"] == tmp_path.name  # as every system serves it
    assert "--request-rate" not in options
    assert "--save-detailed" in words
