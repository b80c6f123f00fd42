"""What of a request stands in Locust's statistics."""

from __future__ import annotations

import pytest

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.users.run import StatisticsLine, lines


def record(outcome: str, *token_times_s: float, kind: str = "", message: str = "") -> RequestRecord:
    return RequestRecord(
        0, "r", 1.0, 1.0, 2.0, 10, 3, outcome, kind, message, token_times_s=token_times_s,
        workload="chat",
    )  # fmt: skip


def test_an_answer_is_one_request_with_its_ttft_and_tbt_on_lines_of_their_own() -> None:
    total, ttft, tbt = lines(record(COMPLETED, 1.5, 1.6, 1.9))
    assert total == StatisticsLine("total", "chat", 1_000.0, is_request=True)
    assert (ttft.kind, ttft.time_ms, ttft.is_request) == ("TTFT", pytest.approx(500.0), False)
    assert (tbt.kind, tbt.time_ms, tbt.is_request) == ("TBT", pytest.approx(300.0), False)


def test_an_answer_of_one_token_has_no_tbt() -> None:
    assert [line.kind for line in lines(record(COMPLETED, 1.5))] == ["total", "TTFT"]


def test_a_rejection_is_no_failure_and_has_no_response_time() -> None:
    assert lines(record(REJECTED, kind="ttft_slo", message="4.1 s")) == [
        StatisticsLine("rejected", "chat ttft_slo", None, is_request=True)
    ]


def test_a_failure_is_one_and_says_why() -> None:
    (line,) = lines(record(FAILED, 1.5, kind="timeout", message="too late"))
    assert (line.kind, line.failure) == ("total", "timeout: too late")
