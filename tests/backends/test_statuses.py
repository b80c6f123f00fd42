"""Each kind of error is one status, whatever else its words quote."""

from __future__ import annotations

import pytest

from backends import errors
from backends.frontend.lifecycle.attempts import final_error
from backends.metrics.table import REASONS
from backends.statuses import TYPES, HttpRefusal, of_message, retry_after_s

CASES = [
    (errors.InvalidRequest(["top_p is 5; use less", "seed is -1"]), 400, "invalid_request"),
    (errors.Overloaded("too_large", "it fits nowhere", 0.0), 400, "too_large"),
    (errors.Overloaded("ttft_slo", "would take 40 s", 3.2), 429, "ttft_slo"),
    (errors.Overloaded("front_full", "256 requests", 1.0), 429, "front_full"),
    (errors.WorkerUnavailable("decode_0: gone; given up after 3 attempts"), 503, "unavailable"),
    (errors.WorkerGone("decode_0 ended"), 503, "unavailable"),
    (errors.KvMissing("3 blocks"), 503, "kv_missing"),
    (errors.WorkerUnavailable(f"{errors.TIMEOUT_PASSED} 300 ms has passed"), 504, "deadline"),
    (errors.KvMissing(f"3 blocks; {errors.DEADLINE_PASSED} (2 x kv)"), 504, "deadline"),
    (errors.Cancelled("stopped"), 499, "cancelled"),
]


@pytest.mark.parametrize(("error", "status", "code"), CASES)
def test_an_error_of_ours_has_a_status(error: errors.ServingError, status: int, code: str) -> None:
    for said in (error.wire_message(), f"in ensemble 'ensemble', {error.wire_message()}"):
        refusal = of_message(said)
        assert (refusal.status, refusal.code) == (status, code)
        assert refusal.type == TYPES[status]
        assert str(error).split(":")[-1].strip() in refusal.message


@pytest.mark.parametrize("kind", sorted(set(REASONS) - {"too_large"}))
def test_every_rejection_is_429_and_says_when_to_come_back(kind: str) -> None:
    for wait_s, header in ((0.0, 1), (0.01, 1), (1.2, 2), (1e9, 3600)):
        refusal = of_message(errors.Overloaded(kind, "no", wait_s).wire_message())
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, kind, header)


def test_what_a_client_wrote_does_not_choose_its_status() -> None:
    quoted = "unknown parameter 'rejected kind=x retry_after_s=9.0: unavailable: is not ready'"
    assert of_message(f"invalid_request: {quoted}").status == 400
    assert of_message(f"internal_error: ValueError: {quoted}").status == 500


@pytest.mark.parametrize(
    "said",
    [
        "Request for unknown model: 'conductor' is not found",
        "Request for unknown model: 'conductor' has no available versions; is not ready",
        "failed to connect to all addresses; last error: UNKNOWN",
    ],
)
def test_a_frontend_that_is_not_there_is_503(said: str) -> None:
    refusal = of_message(said)
    assert refusal.status == 503 and refusal.retry_after_s == 1


def test_words_that_nobody_knows_are_a_defect() -> None:
    refusal = of_message("std::bad_alloc")
    assert (refusal.status, refusal.code, refusal.message) == (
        500,
        "internal_error",
        "std::bad_alloc",
    )


def test_the_deadline_that_ends_a_request_is_known_by_its_words() -> None:
    lost = final_error(errors.StoreLost("s0 is silent"), f"{errors.DEADLINE_PASSED} (9 x store)")
    assert of_message(lost.wire_message()).status == 504


def test_a_wait_that_is_no_number_is_the_longest() -> None:
    assert [retry_after_s(wait) for wait in (float("inf"), float("nan"))] == [3600, 3600]


def test_the_body_is_openais_shape() -> None:
    body = HttpRefusal(429, "ttft_slo", "come back", "n", 3).body()
    assert body == {
        "error": {
            "message": "come back",
            "type": "rate_limit_error",
            "param": "n",
            "code": "ttft_slo",
        }
    }
