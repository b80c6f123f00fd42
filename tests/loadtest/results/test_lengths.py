"""Goodput by prompt length: every request in one bucket, shares of all that were sent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loadtest.results.lengths import BUCKETS_MAX, by_length, length_edges, tokens_name
from loadtest.results.metrics import FAILED, REJECTED, Slo, goodput
from tests.loadtest.report.runs import answered, recording, unserved

SEED = 7


def mixed(count: int, seed: int = SEED):
    """Requests of many lengths, of which some are late, slow, rejected or failed."""
    rng = random.Random(seed)
    records = []
    for i in range(count):
        tokens = int(2 ** rng.uniform(3, 17))
        outcome = rng.choice(["late", "slow", "good", "good", REJECTED, FAILED])
        if outcome in (REJECTED, FAILED):
            records.append(unserved(i, outcome, "kind"))
        else:
            first_s = i + (2.0 if outcome == "late" else 0.5)
            step_s = 0.5 if outcome == "slow" else 0.05
            times_s = tuple(first_s + step_s * n for n in range(4))
            records.append(answered(i, token_times_s=times_s, finished_s=times_s[-1]))
        records[-1] = type(records[-1])(
            **{name: getattr(records[-1], name) for name in records[-1].__slots__}
            | {"prompt_tokens": tokens}
        )
    return records


def test_buckets_agree_with_counting_each_request_by_hand() -> None:
    records = mixed(500)
    buckets = by_length(recording(records, slo=Slo(1.0, 0.2)))
    for bucket in buckets:
        part = [r for r in records if bucket.tokens_from <= r.prompt_tokens < bucket.tokens_to]
        times = [r.token_times_s for r in part if r.token_times_s]
        sent = [r.sent_s for r in part if r.token_times_s]
        first = [t[0] - s <= 1.0 for t, s in zip(times, sent, strict=True)]
        fluent = [max(b - a for a, b in pairwise(t)) <= 0.2 for t in times]
        assert bucket.requests == len(part) and bucket.answered == len(times)
        assert bucket.rejected == sum(r.outcome == REJECTED for r in part)
        assert bucket.failed == sum(r.outcome == FAILED for r in part)
        assert (bucket.first_in_time, bucket.fluent) == (sum(first), sum(fluent))
        assert bucket.within == sum(a and b for a, b in zip(first, fluent, strict=True))
    assert sum(bucket.requests for bucket in buckets) == 500
    within = sum(bucket.within or 0 for bucket in buckets)
    assert 0 < within == goodput(records, Slo(1.0, 0.2)).requests


def test_each_workload_is_judged_by_its_own_level() -> None:
    records = [answered(i, workload="chat" if i % 2 else "burst") for i in range(10)]
    levels = {"chat": Slo(1.0, 1.0), "burst": Slo(0.1, None)}
    (bucket,) = by_length(recording(records, slo_by_workload=levels))
    assert (bucket.first_in_time, bucket.fluent, bucket.within) == (5, 10, 5)


def test_without_a_service_level_nothing_is_in_time_or_late() -> None:
    (bucket,) = by_length(recording([answered(0), unserved(1, REJECTED, "ttft_slo")]))
    assert (bucket.within, bucket.share(bucket.within)) == (None, None)
    assert (bucket.requests, bucket.rejected) == (2, 1)
    assert by_length(recording([])) == []


@pytest.mark.parametrize(
    ("lengths", "edges"),
    [
        ([100], [64, 128]),
        ([64, 127, 128], [64, 128, 256]),
        ([1], [1, 2]),
        ([0, 3], [0, 2, 4]),
        ([1, 10**9], [2**power for power in range(0, 31, 3)]),
    ],
)
def test_buckets_are_powers_of_two_around_all_lengths(lengths, edges) -> None:
    found = length_edges(lengths)
    assert found == edges and len(found) - 1 <= BUCKETS_MAX
    assert found[0] <= min(lengths) and max(lengths) < found[-1]


def test_tokens_are_named_as_people_say_them() -> None:
    assert [tokens_name(n) for n in (0, 64, 1000, 1024, 131072)] == [
        "0",
        "64",
        "1,000",
        "1K",
        "128K",
    ]
