"""Results by prompt length: long prompts are the first to be late.

Buckets are powers of two around all lengths. Shares are of all requests that were sent, so rejected
requests lower the share of their bucket. Pure arithmetic.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, Slo, spread
from loadtest.results.recording import Recording, has_levels

BUCKETS_MAX = 13


class LengthBucket(msgspec.Struct, frozen=True):
    """Requests with `tokens_from` <= prompt tokens < `tokens_to`; None: no service level."""

    tokens_from: int
    tokens_to: int
    requests: int
    answered: int
    rejected: int
    failed: int
    first_in_time: int | None  # answered with TTFT within its limit
    fluent: int | None  # answered with TBT within its limit
    within: int | None  # both
    ttft_p90_s: float | None
    tbt_p90_s: float | None

    @property
    def span(self) -> tuple[int, int]:
        return self.tokens_from, self.tokens_to

    @property
    def name(self) -> str:
        return tokens_name(self.tokens_from)

    def share(self, count: int | None) -> float | None:
        return count / self.requests if count is not None and self.requests else None


def by_length(recording: Recording) -> list[LengthBucket]:
    """Empty for a run without requests."""
    records = recording.requests
    if not records:
        return []
    edges = length_edges([record.prompt_tokens for record in records])
    parts: list[list[RequestRecord]] = [[] for _ in edges[1:]]
    for record in records:
        parts[bisect_right(edges, record.prompt_tokens) - 1].append(record)
    return [
        _bucket(edges[at], edges[at + 1], part, recording if has_levels(recording) else None)
        for at, part in enumerate(parts)
    ]


def _bucket(
    tokens_from: int, tokens_to: int, part: Sequence[RequestRecord], levels: Recording | None
) -> LengthBucket:
    met: list[tuple[bool, bool]] = []
    if levels is not None:
        common = levels.slo or Slo()
        met = [levels.slo_by_workload.get(r.workload, common).parts_met(r) for r in part]
    done = [record for record in part if record.outcome == COMPLETED]
    ttft, tbt = spread([r.ttft_s for r in done]), spread([r.tbt_s for r in done])
    return LengthBucket(
        tokens_from=tokens_from,
        tokens_to=tokens_to,
        requests=len(part),
        answered=len(done),
        rejected=sum(record.outcome == REJECTED for record in part),
        failed=sum(record.outcome == FAILED for record in part),
        first_in_time=sum(first for first, _ in met) if levels is not None else None,
        fluent=sum(fluent for _, fluent in met) if levels is not None else None,
        within=sum(map(all, met)) if levels is not None else None,
        ttft_p90_s=ttft.p90 if ttft else None,
        tbt_p90_s=tbt.p90 if tbt else None,
    )


def length_edges(lengths: Sequence[int]) -> list[int]:
    """Powers of two around all lengths; wider steps when there would be too many."""
    low, high = max(1, min(lengths)), max(1, *lengths)
    first, last = low.bit_length() - 1, high.bit_length()
    step = math.ceil((last - first) / BUCKETS_MAX)
    edges = [2**power for power in range(first, last, step)]
    edges.append(2 ** (first + step * len(edges)))
    if min(lengths) < 1:  # a request without a prompt length
        edges[0] = min(lengths)
    return edges


def span_names(buckets: Iterable[LengthBucket]) -> dict[tuple[int, int], str]:
    """Each length span in the buckets of several runs, ascending, with its name: its start. Runs
    with buckets of different widths have overlapping spans, whose names include their end."""
    spans = sorted({bucket.span for bucket in buckets})
    if any(one[1] > other[0] for one, other in pairwise(spans)):
        return {span: " to ".join(map(tokens_name, span)) for span in spans}
    return {span: tokens_name(span[0]) for span in spans}


def tokens_name(tokens: int) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
