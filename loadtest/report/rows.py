"""The rows of a report's tables: workloads, what was not served and why, the slowest requests."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.report.phases import PHASES, Phases, phases_of, predicted_ttft_s
from loadtest.results.metrics import (
    COMPLETED,
    FAILED,
    REJECTED,
    RequestRecord,
    Spread,
    Summary,
    spread,
    summarize,
)
from loadtest.results.recording import Recording, Setting
from loadtest.results.tables import duration

SLOWEST_MAX = 12
MESSAGE_LETTERS_MAX = 400
DECISION_LETTERS_MAX = 4_000


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: int
    rejected: int
    failed: int
    summary: Summary


@dataclass(frozen=True, slots=True)
class Refusal:
    """All requests that were not served for one reason."""

    outcome: str
    kind: str
    requests: int
    share: float
    first_s: float
    retry_after: str
    message: str  # of the first of them


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase over all requests that were measured."""

    name: str
    spread: Spread
    total_s: float
    share: float  # of all the time that these requests took


@dataclass(frozen=True, slots=True)
class Slow:
    record: RequestRecord
    predicted_s: float | None
    workers: str
    longest: str  # the phase that took most, and how long
    decision: str


def workloads(recording: Recording) -> list[Workload]:
    """Empty unless the run mixed several."""
    parts: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in recording.requests:
        parts[record.workload].append(record)
    if len(parts) < 2:
        return []
    found = []
    for name, records in sorted(parts.items()):
        summary = summarize(records)
        found.append(
            Workload(
                name=name or "unnamed",
                requests=len(records),
                rejected=sum(summary.rejections_by_reason.values()),
                failed=sum(summary.errors_by_kind.values()),
                summary=summary,
            )
        )
    return found


def by_workload(recording: Recording, field: str) -> dict[str, list[float]]:
    """The values of `field` (ttft_s, tbt_s) of answered requests, by workload."""
    parts: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in recording.requests:
        parts[record.workload].append(record)
    if len(parts) < 2:
        return {"": values_of(recording.requests, field)}
    return {name or "unnamed": values_of(part, field) for name, part in sorted(parts.items())}


def values_of(records: Sequence[RequestRecord], field: str) -> list[float]:
    """Of the answered requests that have one."""
    values = (getattr(record, field) for record in records if record.outcome == COMPLETED)
    return [value for value in values if value is not None]


def refusals(records: Sequence[RequestRecord]) -> list[Refusal]:
    """Failures first, then the most frequent."""
    parts: dict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.finished_s):
        if record.outcome in (REJECTED, FAILED):
            parts[record.outcome, record.kind].append(record)
    found = []
    for (outcome, kind), part in parts.items():
        waits_s = [r.retry_after_s for r in part if r.retry_after_s is not None]
        found.append(
            Refusal(
                outcome=outcome,
                kind=kind or "unnamed",
                requests=len(part),
                share=len(part) / len(records),
                first_s=part[0].finished_s,
                retry_after=duration(statistics.median(waits_s)) if waits_s else "",
                message=cut(part[0].message, MESSAGE_LETTERS_MAX),
            )
        )
    return sorted(found, key=lambda row: (row.outcome != FAILED, -row.requests, row.kind))


def phases(found: Sequence[Phases]) -> list[Phase]:
    """Empty when no request was measured."""
    rows = []
    whole_s = sum(sum(one.all.values()) for one in found)
    for name in PHASES:
        values = [one.all[name] for one in found]
        if (over := spread(values)) is not None:
            total_s = sum(values)
            rows.append(Phase(name, over, total_s, total_s / whole_s if whole_s else 0.0))
    return rows


def slowest(records: Sequence[RequestRecord]) -> list[Slow]:
    """By TTFT; requests without a first token have none."""
    answered = [r for r in records if r.outcome == COMPLETED and r.ttft_s is not None]
    answered.sort(key=lambda record: -(record.ttft_s or 0.0))
    return [_slow(record) for record in answered[:SLOWEST_MAX]]


def _slow(record: RequestRecord) -> Slow:
    phases = phases_of(record)
    longest = ""
    if phases is not None:
        name, value_s = max(phases.all.items(), key=lambda item: item[1])
        longest = f"{name} {duration(value_s)}"
    decision = record.decision or {}
    workers = [str(decision[role]) for role in ("prefill", "decode") if decision.get(role)]
    text = json.dumps(decision, indent=1, ensure_ascii=False, default=str) if decision else ""
    return Slow(
        record=record,
        predicted_s=predicted_ttft_s(record),
        workers=cut(" → ".join(workers), 80),
        longest=longest,
        decision=cut(text, DECISION_LETTERS_MAX),
    )


def differing(
    a: Mapping[str, Setting], b: Mapping[str, Setting]
) -> list[tuple[str, Setting, Setting]]:
    """(name, A's, B's) of each setting that is not the same in both."""
    return [
        (name, a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]


def settings_of(recording: Recording) -> dict[str, Setting]:
    """Everything that a run was asked to do, with its service level."""
    found: dict[str, Setting] = dict(recording.settings)
    levels = {"": recording.slo} if recording.slo is not None else {}
    levels |= {f" of {name}": slo for name, slo in recording.slo_by_workload.items()}
    for name, slo in levels.items():
        found |= {f"slo_ttft_s{name}": slo.ttft_s, f"slo_tbt_s{name}": slo.tbt_s}
    return found


def setting_text(value: Setting) -> str:
    return "not set" if value is None else str(value)


def cut(text: str, letters_max: int) -> str:
    return text if len(text) <= letters_max else text[: letters_max - 1] + "…"
