"""What of a request stands in Locust's statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.users.run import RequestFailed, count


class LocustStatistics:
    """What `count` uses of Locust's environment; the real one replaces what other tests need."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.measured: dict[tuple[str, str], float] = {}
        self.events = SimpleNamespace(request=self)
        self.stats = SimpleNamespace(entries=self)

    def fire(self, **request: Any) -> None:
        self.requests.append(request)

    def __getitem__(self, line: tuple[str, str]) -> Any:
        return SimpleNamespace(log=lambda time_ms, _: self.measured.update({line: time_ms}))


def counted(
    outcome: str, *token_times_s: float, kind: str = "", message: str = ""
) -> LocustStatistics:
    record = RequestRecord(
        0,
        "r",
        1.0,
        1.0,
        2.0,
        10,
        3,
        outcome,
        kind,
        message,
        token_times_s=token_times_s,
        workload="chat",
    )
    statistics = LocustStatistics()
    count(statistics, record, 77)
    return statistics


def test_an_answer_is_one_request_with_its_ttft_and_tbt_on_lines_of_their_own() -> None:
    found = counted(COMPLETED, 1.5, 1.6, 1.9)
    (request,) = found.requests
    assert (request["request_type"], request["name"]) == ("total", "chat")
    assert (request["response_time"], request["response_length"]) == (1_000.0, 77)
    assert request["exception"] is None
    assert found.measured == {
        ("chat", "TTFT"): pytest.approx(500.0),
        ("chat", "TBT"): pytest.approx(300.0),
    }


def test_an_answer_of_one_token_has_no_tbt() -> None:
    assert counted(COMPLETED, 1.5).measured.keys() == {("chat", "TTFT")}


def test_a_rejection_is_no_failure_and_has_no_response_time() -> None:
    found = counted(REJECTED, kind="ttft_slo", message="4.1 s")
    (request,) = found.requests
    assert (request["request_type"], request["name"]) == ("rejected", "chat ttft_slo")
    assert request["response_time"] is None and request["exception"] is None
    assert not found.measured


def test_a_failure_is_one_and_says_why() -> None:
    found = counted(FAILED, 1.5, kind="timeout", message="too late")
    (request,) = found.requests
    assert (request["request_type"], request["name"]) == ("total", "chat")
    assert isinstance(request["exception"], RequestFailed)
    assert str(request["exception"]) == "timeout: too late"
    assert not found.measured, "its first token is not counted"
