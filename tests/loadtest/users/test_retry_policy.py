"""What a client does after an answer, a rejection, a failure."""

from __future__ import annotations

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.users.workloads import RETRY_AFTER_S_MAX, NextStep, next_step, retry_s


def record(outcome: str, retry_after_s: float | None = None) -> RequestRecord:
    return RequestRecord(0, "r", 0.0, 0.0, 1.0, 10, 3, outcome, retry_after_s=retry_after_s)


def test_after_an_answer_it_thinks_and_goes_on() -> None:
    assert next_step(record(COMPLETED), 3.0) == NextStep(3.0, is_answered=True)


def test_a_rejected_client_waits_as_long_as_it_was_told_and_asks_the_same() -> None:
    assert next_step(record(REJECTED, 7.5), 3.0) == NextStep(7.5, is_repeated=True)


def test_it_does_not_wait_for_ever() -> None:
    assert next_step(record(REJECTED, 1e6), 3.0) == NextStep(RETRY_AFTER_S_MAX, is_repeated=True)


def test_told_never_to_come_back_it_asks_something_else() -> None:
    assert next_step(record(REJECTED, 0.0), 3.0) == NextStep(3.0)


def test_after_a_failure_it_asks_something_else() -> None:
    assert next_step(record(FAILED), 3.0) == NextStep(3.0)
    assert retry_s(record(FAILED, 9.0)) == 0.0
