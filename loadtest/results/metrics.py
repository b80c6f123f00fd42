"""The measurements of each request, the numbers of a run, and its service levels.

Pure arithmetic on records.

* TTFT: from the sending of the request to its first token. How late it was sent (its lag) is the
  sender's fault and is reported beside it, never inside it.
* TBT of a request: the mean of the longest 10 % of the intervals between its tokens (FAST'25,
  section 5.1). An average over all (TPOT) would hide the stalls that a reader sees in a stream.
* Throughput: completed requests, and their tokens, over the time from the first sending to the
  last answer.
* Hit rate: cached tokens / prompt tokens, over completed requests that report `cached_tokens`.

* Goodput: completed requests whose TTFT and TBT both met their level; an answer of one token has
  no TBT and is judged by its TTFT alone. Rejected and failed requests meet nothing.

A request ends in exactly one of three ways: completed, rejected (the server chose not to serve it
and gave the reason), or failed (anything else; `kind` is the reason).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

TBT_LONGEST_SHARE = 0.1
LAG_S_NOTICED = 0.01  # a smaller lag may be noise of the clock
LAG_SHARE_MAX = 0.1  # of the median TTFT; above it, arrivals were not the trace's

COMPLETED = "completed"
REJECTED = "rejected"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client measured it. Times are seconds since the run began."""

    index: int
    request_id: str
    due_s: float
    sent_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens_asked: int
    outcome: str  # completed | rejected | failed
    kind: str = ""  # reason of a rejection or failure
    message: str = ""
    retry_after_s: float | None = None
    token_times_s: tuple[float, ...] = ()
    output_ids: tuple[int, ...] = ()
    cached_tokens: int | None = None  # None: the server did not report it
    finish_reason: str = ""
    decision: Mapping[str, object] | None = None
    workload: str = ""  # its workload in a mix: "chat", "burst", ...
    # Only of a record with nothing but its first and last token time (`compact`, and simulated
    # ones):
    generated_tokens: int | None = None  # number of tokens; None: `token_times_s` has all of them
    longest_intervals_s: float | None = None  # its TBT

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tbt_s(self) -> float | None:
        if self.generated_tokens is not None:
            return self.longest_intervals_s
        return tbt_s(self.token_times_s)

    @property
    def tokens(self) -> int:
        return len(self.token_times_s) if self.generated_tokens is None else self.generated_tokens


def compact(record: RequestRecord) -> RequestRecord:
    """The same numbers without the times between the first token and the last."""
    if record.generated_tokens is not None:
        return record
    return replace(
        record,
        generated_tokens=record.tokens,
        longest_intervals_s=record.tbt_s,
        token_times_s=(*record.token_times_s[:1], *record.token_times_s[1:][-1:]),
    )


def tbt_s(token_times_s: Sequence[float]) -> float | None:
    """Mean of the longest 10 % of the intervals (at least one); None with fewer than two tokens."""
    count = len(token_times_s) - 1
    if count < 1:
        return None
    longest = max(1, math.ceil(count * TBT_LONGEST_SHARE))
    intervals_s = np.diff(np.asarray(token_times_s, dtype=np.float64))
    return float(np.partition(intervals_s, count - longest)[count - longest :].mean())


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a measured quantity over requests; percentiles interpolate linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Sequence[float | None]) -> Spread | None:
    """The spread of the values that are not None; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(known, (50, 90, 99)))
    return Spread(len(known), float(np.mean(known)), p50, p90, p99, max(known))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. docs/reference/loadtest.md explains each as it is printed."""

    requests: int
    completed: int
    duration_s: float
    ttft_s: Spread | None
    tbt_s: Spread | None
    latency_s: Spread | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ideal_cached_tokens: int | None
    cached_over_ideal: float | None
    hit_rate: float | None
    ideal_hit_rate: float | None
    short_outputs: int  # completed answers with fewer tokens than requested
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    rejections_by_reason: dict[str, int] = field(default_factory=dict)
    sender_lag_s: Spread | None = None
    is_sender_late: bool = False
    # requests sent per second of the time in which they were sent
    offered_per_s: float | None = None


def summarize(
    records: Sequence[RequestRecord], ideal_cached_tokens: Mapping[int, int] | None = None
) -> Summary:
    """`ideal_cached_tokens`: request index -> cached tokens of an unlimited cache."""
    done = [record for record in records if record.outcome == COMPLETED]
    duration_s = run_duration_s(records)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    input_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.tokens for record in done)
    counted = [record for record in done if record.cached_tokens is not None]
    counted_tokens = sum(record.prompt_tokens for record in counted)
    cached = sum(record.cached_tokens or 0 for record in counted) if counted else None
    ideal = None
    if counted and ideal_cached_tokens is not None:
        ideal = sum(ideal_cached_tokens[record.index] for record in counted)
    ttft, lag = spread([r.ttft_s for r in done]), spread([record.lag_s for record in records])
    return Summary(
        requests=len(records),
        completed=len(done),
        duration_s=duration_s,
        ttft_s=ttft,
        tbt_s=spread([record.tbt_s for record in done]),
        latency_s=spread([record.latency_s for record in done]),
        requests_per_s=len(done) * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        ideal_cached_tokens=ideal,
        cached_over_ideal=_ratio(cached, ideal),
        hit_rate=_ratio(cached, counted_tokens),
        ideal_hit_rate=_ratio(ideal, counted_tokens),
        short_outputs=sum(r.tokens < r.output_tokens_asked for r in done),
        errors_by_kind=_kinds(records, FAILED),
        rejections_by_reason=_kinds(records, REJECTED),
        sender_lag_s=lag,
        is_sender_late=is_late(lag, ttft),
        offered_per_s=offered_per_s(records),
    )


def is_late(lag_s: Spread | None, ttft_s: Spread | None) -> bool:
    """Whether the sender was so late that the arrivals were no longer the trace's."""
    if lag_s is None:
        return False
    limit_s = LAG_SHARE_MAX * ttft_s.p50 if ttft_s else 0.0
    return lag_s.p99 > max(LAG_S_NOTICED, limit_s)


def offered_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Intervals between sendings over their total time; None with fewer than two moments."""
    sent_s = [record.sent_s for record in records]
    between_s = max(sent_s) - min(sent_s) if sent_s else 0.0
    return (len(sent_s) - 1) / between_s if between_s > 0 else None


def run_duration_s(records: Sequence[RequestRecord]) -> float:
    """From the first sending to the last answer; 0 without records."""
    if not records:
        return 0.0
    return max(r.finished_s for r in records) - min(r.sent_s for r in records)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None sets no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        return all(self.parts_met(record))

    def parts_met(self, record: RequestRecord) -> tuple[bool, bool]:
        """Whether it was answered within the TTFT limit, and answered within the TBT limit."""
        if record.outcome != COMPLETED or record.ttft_s is None:
            return False, False
        tbt = record.tbt_s if self.tbt_s is not None else None
        is_first_in_time = self.ttft_s is None or record.ttft_s <= self.ttft_s
        return is_first_in_time, tbt is None or self.tbt_s is None or tbt <= self.tbt_s


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met their level: number, rate over the run, share of all sent."""

    requests: int
    requests_per_s: float
    share: float


def goodput(
    records: Sequence[RequestRecord], slo: Slo, slo_by_workload: Mapping[str, Slo] | None = None
) -> Goodput:
    """`slo_by_workload` takes precedence over `slo` for the workloads that it names."""
    by_workload = slo_by_workload or {}
    good = sum(by_workload.get(record.workload, slo).is_met(record) for record in records)
    duration_s = run_duration_s(records)
    return Goodput(
        requests=good,
        requests_per_s=good / duration_s if duration_s > 0 else 0.0,
        share=good / len(records) if records else 0.0,
    )


def _kinds(records: Sequence[RequestRecord], outcome: str) -> dict[str, int]:
    kinds = Counter(record.kind for record in records if record.outcome == outcome)
    return dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
