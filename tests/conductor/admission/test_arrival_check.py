"""The decode worker's admission re-check: by numbers that can be checked by hand."""

from __future__ import annotations

import random

from conductor.admission.arrival_check import RETRY_S_MAX, RETRY_S_MIN, BatchOnArrival, refusal
from conductor.estimates.estimates import DecodeEstimate

ESTIMATE = DecodeEstimate(base_s=0.010, per_sequence_s=0.001, per_context_token_s=1e-6)


def there(
    sequences: int, tokens_each: int = 1000, left: int = 100, speed: float = 1.0
) -> BatchOnArrival:
    return BatchOnArrival(sequences * tokens_each, [left] * sequences, speed)


def test_it_is_taken_as_long_as_the_step_with_it_keeps_the_limit() -> None:
    # With n there: 10 ms + (n + 1) * (1 ms + 1 ms). Limit 30 ms: n = 9 fits, n = 10 does not.
    assert refusal(there(9), 1000, ESTIMATE, 0.030) is None
    refused = refusal(there(10), 1000, ESTIMATE, 0.030)
    assert refused is not None and refused.kind == "decode_overload"
    assert "has 10 requests" in refused.reason and "0.032 s" in refused.reason


def test_an_empty_worker_takes_whatever_comes() -> None:
    assert refusal(there(0), 1_000_000, ESTIMATE, 0.001) is None


def test_without_a_limit_nothing_is_refused() -> None:
    assert refusal(there(1000), 1000, ESTIMATE, 0.0) is None


def test_a_worker_that_has_become_slow_refuses_earlier() -> None:
    assert refusal(there(5, speed=1.0), 1000, ESTIMATE, 0.030) is None
    assert refusal(there(5, speed=2.0), 1000, ESTIMATE, 0.030) is not None


def test_come_back_when_as_many_have_left_as_must() -> None:
    left = [100, 200, 300, *[400] * 9]
    crowd = BatchOnArrival(12_000, left)
    refused = refusal(crowd, 1000, ESTIMATE, 0.030)
    assert refused is not None  # three must leave: 300 steps of 34 ms
    assert abs(refused.retry_after_s - 300 * 0.034) < 1e-6


def test_what_never_fits_is_told_the_longest_wait() -> None:
    refused = refusal(there(2), 100_000, ESTIMATE, 0.030)
    assert refused is not None and refused.retry_after_s == RETRY_S_MAX


def test_more_load_never_turns_a_refusal_into_a_yes(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        tokens, limit_s = chance.randint(1, 5000), chance.uniform(0.011, 0.1)
        was_refused = False
        for sequences in range(0, 40, 3):
            found = refusal(there(sequences, chance.randint(900, 1000)), tokens, ESTIMATE, limit_s)
            assert found is None or RETRY_S_MIN <= found.retry_after_s <= RETRY_S_MAX
            assert found is not None or not was_refused
            was_refused = found is not None
