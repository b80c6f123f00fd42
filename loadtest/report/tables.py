"""The tables of a run's page: workloads, what was not served and why, the slowest requests."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.report.phases import phases_of, predicted_ttft_s
from loadtest.results.metrics import (
    COMPLETED,
    FAILED,
    REJECTED,
    RequestRecord,
    Summary,
    summarize,
)
from loadtest.results.recording import Recording
from loadtest.results.tables import duration

SLOWEST_MAX = 12
MESSAGE_CHARACTERS_MAX = 400
DECISION_CHARACTERS_MAX = 4_000


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    name: str
    requests: int
    rejected: int
    failed: int
    summary: Summary


@dataclass(frozen=True, slots=True)
class UnservedKind:
    """All requests that were not served for one reason."""

    outcome: str
    kind: str
    requests: int
    share: float
    first_s: float
    retry_after: str
    message: str  # of the first of them


@dataclass(frozen=True, slots=True)
class SlowRequest:
    record: RequestRecord
    predicted_s: float | None
    workers: str
    longest: str  # the phase that took most, and how long
    decision: str


def workloads(recording: Recording) -> list[WorkloadSummary]:
    """Empty unless the run mixed several."""
    parts = _mixed(recording)
    found = []
    for name, records in parts.items() if len(parts) > 1 else ():
        summary = summarize(records)
        found.append(
            WorkloadSummary(
                name=name,
                requests=len(records),
                rejected=sum(summary.rejections_by_reason.values()),
                failed=sum(summary.errors_by_kind.values()),
                summary=summary,
            )
        )
    return found


def by_workload(recording: Recording, field: str) -> dict[str, list[float]]:
    """The values of `field` (ttft_s, tbt_s) of answered requests, by workload."""
    return {name: values_of(part, field) for name, part in _mixed(recording).items()}


def _mixed(recording: Recording) -> dict[str, list[RequestRecord]]:
    """The requests of each workload; under "" when there is only one."""
    parts: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in recording.requests:
        parts[record.workload].append(record)
    if len(parts) < 2:
        return {"": recording.requests}
    return {name or "unnamed": part for name, part in sorted(parts.items())}


def values_of(records: Sequence[RequestRecord], field: str) -> list[float]:
    """Of the answered requests that have one."""
    values = (getattr(record, field) for record in records if record.outcome == COMPLETED)
    return [value for value in values if value is not None]


def unserved(records: Sequence[RequestRecord]) -> list[UnservedKind]:
    """Failures first, then the most frequent."""
    parts: dict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.finished_s):
        if record.outcome in (REJECTED, FAILED):
            parts[record.outcome, record.kind].append(record)
    found = []
    for (outcome, kind), part in parts.items():
        waits_s = [r.retry_after_s for r in part if r.retry_after_s is not None]
        found.append(
            UnservedKind(
                outcome=outcome,
                kind=kind or "unnamed",
                requests=len(part),
                share=len(part) / len(records),
                first_s=part[0].finished_s,
                retry_after=duration(statistics.median(waits_s)) if waits_s else "",
                message=cut(part[0].message, MESSAGE_CHARACTERS_MAX),
            )
        )
    return sorted(found, key=lambda row: (row.outcome != FAILED, -row.requests, row.kind))


def slowest(records: Sequence[RequestRecord]) -> list[SlowRequest]:
    """By TTFT; requests without a first token have none."""
    answered = [r for r in records if r.outcome == COMPLETED and r.ttft_s is not None]
    answered.sort(key=lambda record: -(record.ttft_s or 0.0))
    return [_slow(record) for record in answered[:SLOWEST_MAX]]


def _slow(record: RequestRecord) -> SlowRequest:
    phases = phases_of(record)
    longest = ""
    if phases is not None:
        name, value_s = max(phases.all.items(), key=lambda item: item[1])
        longest = f"{name} {duration(value_s)}"
    decision = record.decision or {}
    workers = [str(decision[role]) for role in ("prefill", "decode") if decision.get(role)]
    text = json.dumps(decision, indent=1, ensure_ascii=False, default=str) if decision else ""
    return SlowRequest(
        record=record,
        predicted_s=predicted_ttft_s(record),
        workers=cut(" → ".join(workers), 80),
        longest=longest,
        decision=cut(text, DECISION_CHARACTERS_MAX),
    )


def cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"
