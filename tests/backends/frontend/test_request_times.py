"""What of a request's times becomes a metric, and that TBT is the load generator's."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from backends.errors import Cancelled, Forbidden, InvalidRequest, Overloaded, WorkerUnavailable
from backends.frontend.request_times import MESSAGES_PER_FLUSH, RequestTimes, end_of_span
from backends.metrics.page import Observations
from backends.metrics.table import METRICS
from conductor.messages import UNLIMITED, AppliedLimits, Prediction, Route, WorkerRef
from loadtest.results import metrics as loadtest_metrics

PREDICTED = Prediction(
    queue_s=0.1,
    transfer_s=0.0,
    prefill_s=0.2,
    handover_s=0.5,
    ttft_s=0.8,
    tbt_s=0.02,
    decode_sequences=3,
)


def route(limits: AppliedLimits) -> Route:
    worker = WorkerRef("w", "1", "s0", "")
    return Route("r", worker, worker, 0, 0, 0, None, PREDICTED, limits=limits)


def observed(observations: Observations) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value, labels in observations.drain():
        assert name in METRICS
        found[" ".join([name.removeprefix("mooncake_"), *labels.values()])].append(value)
    return found


def stream(
    messages: list[tuple[int, float]],
    is_stream: bool = True,
    error: Exception | None = None,
    limits: AppliedLimits = UNLIMITED,
) -> dict[str, list[float]]:
    """A request that came at 10.0, with (tokens, time) of each message."""
    observations = Observations()
    times = RequestTimes(observations, 10.0)
    times.is_stream = is_stream
    times.prefilled(route(limits), actual_s=0.2)
    for tokens, now_s in messages:
        times.sent(tokens, now_s)
    times.ended(error, now_s=20.0)
    return observed(observations)


def test_a_stream_of_three_tokens() -> None:
    found = stream([(1, 10.5), (1, 10.6), (1, 10.64)])
    assert found == {
        "ttft_seconds": [0.5],
        "tbt_seconds": [pytest.approx(0.1)],
        "token_intervals_total": [2],
        "token_interval_seconds_total": [pytest.approx(0.14)],
        "request_duration_seconds": [10.0],
        "requests_total answered": [1],
        "ttft_prediction_error_ratio": [pytest.approx(0.5)],  # 0.3 of queue and prefill, not 0.2
        "tbt_prediction_error_ratio": [pytest.approx(0.8)],
        "ttft_prediction_seconds_total predicted": [pytest.approx(0.3)],
        "ttft_prediction_seconds_total actual": [0.2],
        "tbt_prediction_seconds_total predicted": [0.02],
        "tbt_prediction_seconds_total actual": [pytest.approx(0.1)],
        "requests_within_slo_total": [1],
    }


def test_tbt_is_that_of_the_load_generator_however_tokens_are_packed(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        now_s, messages, times_s = 10.0, [], []
        for _ in range(chance.randint(2, 300)):
            tokens = chance.choice([1, 1, 1, 2, 5])
            now_s += chance.expovariate(100)
            messages.append((tokens, now_s))
            times_s += [now_s] * tokens
        found = stream(messages)
        assert found["tbt_seconds"] == [pytest.approx(loadtest_metrics.tbt_s(times_s))]
        assert sum(found["token_intervals_total"]) == len(times_s) - 1
        total_s = sum(found["token_interval_seconds_total"])
        assert total_s == pytest.approx(times_s[-1] - times_s[0])


def test_a_long_stream_is_counted_while_it_runs() -> None:
    observations = Observations()
    times = RequestTimes(observations, arrived_s=0.0)
    times.is_stream = True
    for n in range(MESSAGES_PER_FLUSH + 1):
        times.sent(1, float(n))
    assert observed(observations)["token_intervals_total"] == [MESSAGES_PER_FLUSH]


def test_nobody_sees_when_a_token_comes_that_is_not_streamed() -> None:
    found = stream([(1, 10.5), (9, 11.0)], is_stream=False)
    assert "ttft_seconds" in found and "request_duration_seconds" in found
    assert not [name for name in found if name.startswith(("tbt", "token"))]


def test_an_answer_of_one_token_has_no_tbt() -> None:
    assert "tbt_seconds" not in stream([(1, 10.5)])


def test_a_message_without_tokens_is_no_token() -> None:
    assert stream([(0, 10.1), (1, 10.5), (0, 12.0)])["ttft_seconds"] == [0.5]
    assert "token_intervals_total" not in stream([(1, 10.5), (0, 12.0)])


@pytest.mark.parametrize(
    ("ttft_s_max", "tbt_s_max", "is_stream", "is_within"),
    [
        (0.5, 0.2, True, True),
        (0.49, 0.2, True, False),
        (0.5, 0.09, True, False),
        (0.5, 0.09, False, True),
    ],
)
def test_goodput_is_what_met_both_limits(
    ttft_s_max: float, tbt_s_max: float, is_stream: bool, is_within: bool
) -> None:
    limits = AppliedLimits(ttft_s_max, tbt_s_max, math.inf, math.inf)
    messages = [(1, 10.5), (1, 10.6), (1, 10.64)]
    found = stream(messages, is_stream, limits=limits)
    assert found.get("requests_within_slo_total", []) == [1] * is_within
    assert "requests_within_slo_total" not in stream(messages, error=Cancelled("x"), limits=limits)


def test_a_client_that_left_counts_with_the_tokens_that_it_got() -> None:
    found = stream([(1, 10.5), (1, 10.6)], error=Cancelled("gone"))
    assert found["requests_total cancelled"] == [1]
    assert found["token_intervals_total"] == [1]
    assert not {"tbt_seconds", "request_duration_seconds"} & found.keys()


@pytest.mark.parametrize(("kind", "reason"), [("ttft_slo", "ttft_slo"), ("of_tomorrow", "other")])
def test_a_rejection_is_counted_by_a_reason_of_the_table(kind: str, reason: str) -> None:
    observations = Observations()
    RequestTimes(observations, 0.0).ended(Overloaded(kind, "full", 1.0), 0.1)
    found = observed(observations)
    assert found == {"requests_total rejected": [1], f"rejections_total {reason}": [1]}


def test_a_first_token_in_no_time_has_a_finite_error() -> None:
    observations = Observations()
    RequestTimes(observations, 0.0).prefilled(route(UNLIMITED), actual_s=0.0)
    [error] = observed(observations)["ttft_prediction_error_ratio"]
    assert 0 < error < float("inf")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, ""),
        (Overloaded("tenant_full", "tenant 'acme' has 9 requests in flight", 1.0), "tenant_full"),
        (InvalidRequest("messages[0] is 'my secret'; send an object"), "invalid_request"),
        (Forbidden("tenant 'acme' is no longer in the file of keys"), "forbidden"),
        (ValueError("cannot read 'my secret'"), "ValueError"),
        (WorkerUnavailable("p0 is gone"), "p0 is gone"),
    ],
)
def test_the_status_of_a_span_has_no_tenant_and_no_client_text(
    error: Exception | None, status: str
) -> None:
    found = end_of_span(error)
    assert status in found and "acme" not in found and "secret" not in found
