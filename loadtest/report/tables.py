"""The tables of a run's page: times, workloads, prompt lengths, failures, the slowest requests.

Each function returns a list, empty without data.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence

from loadtest.report.page import NOTHING, FoldedText, PageTable
from loadtest.results.lengths import LengthBucket
from loadtest.results.metrics import (
    COMPLETED,
    FAILED,
    REJECTED,
    RequestRecord,
    Spread,
    Summary,
    summarize,
)
from loadtest.results.phases import PhaseSpread, phases_of, predicted_ttft_s
from loadtest.results.recording import Recording
from loadtest.results.tables import duration, lag_s

SLOWEST_MAX = 12
MESSAGE_CHARACTERS_MAX = 400
DECISION_CHARACTERS_MAX = 4_000


def times(summary: Summary) -> list[PageTable]:
    if summary.ttft_s is None:
        return []
    spreads = {
        "TTFT": summary.ttft_s,
        "TBT": summary.tbt_s,
        "whole request": summary.latency_s,
        "sender lag (all requests)": lag_s(summary),
    }
    columns = ("answered requests", "mean", "p50", "p90", "p99", "max", "requests")
    rows = [
        (name, *_of_spread(spread), f"{spread.count:,}")
        for name, spread in spreads.items()
        if spread is not None
    ]
    return [PageTable(columns, rows)]


def workloads(recording: Recording) -> list[PageTable]:
    """Empty unless the run mixed several."""
    parts = _mixed(recording)
    if len(parts) < 2:
        return []
    columns = (
        "workload",
        "requests",
        "answered",
        "rejected",
        "failed",
        "TTFT p50",
        "p90",
        "p99",
        "TBT p50",
        "p90",
        "hit rate",
    )
    rows = []
    for name, records in parts.items():
        summary = summarize(records)
        ttft, tbt = summary.ttft_s, summary.tbt_s
        counts = (
            len(records),
            summary.completed,
            sum(summary.rejections_by_reason.values()),
            sum(summary.errors_by_kind.values()),
        )
        rows.append(
            (
                name,
                *(f"{count:,}" for count in counts),
                *((_time(ttft.p50), _time(ttft.p90), _time(ttft.p99)) if ttft else [NOTHING] * 3),
                *((_time(tbt.p50), _time(tbt.p90)) if tbt else [NOTHING] * 2),
                _share(summary.hit_rate),
            )
        )
    return [PageTable(columns, rows)]


def prompt_lengths(buckets: Sequence[LengthBucket]) -> list[PageTable]:
    if not buckets:
        return []
    rows = [
        {
            "prompt tokens": f"{b.tokens_from:,} to {b.tokens_to - 1:,}",
            "requests": f"{b.requests:,}",
            "answered": f"{b.answered:,}",
            "rejected": f"{b.rejected:,}",
            "failed": f"{b.failed:,}",
            "TTFT in time": _share(b.share(b.first_in_time)),
            "TBT in time": _share(b.share(b.fluent)),
            "within both": _share(b.share(b.within)),
            "TTFT p90": _time(b.ttft_p90_s),
            "TBT p90": _time(b.tbt_p90_s),
        }
        for b in buckets
    ]
    caption = "Shares are of all requests sent with prompts of this length."
    return [PageTable.of(rows, caption=caption)]


def phases(found: Sequence[PhaseSpread]) -> list[PageTable]:
    if not found:
        return []
    columns = ("phase", "share", "total", "mean", "p50", "p90", "p99", "max")
    rows = [
        (row.name, f"{row.share:.1%}", duration(row.total_s), *_of_spread(row.spread))
        for row in found
    ]
    caption = (
        f"Of {found[0].spread.count:,} requests. Share and total: of all the time that these "
        "requests took, from sending to the last token. The percentiles are of each phase alone, "
        "so that a column does not add up."
    )
    return [PageTable(columns, rows, title="Phases in numbers", caption=caption)]


def _of_spread(spread: Spread) -> list[str]:
    return [duration(v) for v in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)]


def _time(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)


def _share(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


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
    values = (getattr(record, field) for record in records if record.outcome == COMPLETED)
    return [value for value in values if value is not None]


def unserved(records: Sequence[RequestRecord]) -> list[PageTable]:
    """Failures first, then rejections; each by frequency."""
    parts: dict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.finished_s):
        if record.outcome in (REJECTED, FAILED):
            parts[record.outcome, record.kind].append(record)
    if not parts:
        return []
    order = sorted(
        parts.items(), key=lambda item: (item[0][0] != FAILED, -len(item[1]), item[0][1])
    )
    rows = []
    for (outcome, kind), part in order:
        waits_s = [r.retry_after_s for r in part if r.retry_after_s is not None]
        rows.append(
            {
                "outcome": outcome,
                "kind": kind or "unnamed",
                "requests": f"{len(part):,}",
                "of all": _share(len(part) / len(records)),
                "first at": duration(part[0].finished_s),
                "retry after (median)": duration(statistics.median(waits_s))
                if waits_s
                else NOTHING,
                "first message": cut(part[0].message, MESSAGE_CHARACTERS_MAX),
            }
        )
    return [PageTable.of(rows, left=(0, 1, 6))]


def slowest(records: Sequence[RequestRecord]) -> list[PageTable]:
    """By TTFT; requests without a first token are left out."""
    answered = [r for r in records if r.outcome == COMPLETED and r.ttft_s is not None]
    answered.sort(key=lambda record: -(record.ttft_s or 0.0))
    if not answered:
        return []
    caption = (
        'Prompt, cached and answer in tokens. "sent at" counts from the begin of the run. A click '
        "on the workers shows the conductor's decision."
    )
    rows = [_slow(record) for record in answered[:SLOWEST_MAX]]
    return [PageTable.of(rows, caption=caption, left=(0, 9, 10), is_dense=True)]


def _slow(record: RequestRecord) -> dict[str, str | FoldedText]:
    found = phases_of(record)
    longest = NOTHING
    if found is not None:
        name, value_s = max(found.all.items(), key=lambda item: item[1])
        longest = f"{name} {duration(value_s)}"
    cached = NOTHING if record.cached_tokens is None else f"{record.cached_tokens:,}"
    return {
        "request": f"{record.request_id} {record.workload}".rstrip(),
        "sent at": duration(record.sent_s),
        "prompt": f"{record.prompt_tokens:,}",
        "cached": cached,
        "answer": f"{record.tokens:,}",
        "TTFT": _time(record.ttft_s),
        "predicted": _time(predicted_ttft_s(record)),
        "TBT": _time(record.tbt_s),
        "whole": duration(record.latency_s),
        "longest phase": longest,
        "prefill → decode": _decision(record),
    }


def _decision(record: RequestRecord) -> str | FoldedText:
    decision = record.decision
    if not decision:
        return "not asked"
    workers = [str(decision[role]) for role in ("prefill", "decode") if decision.get(role)]
    text = json.dumps(decision, indent=1, ensure_ascii=False, default=str)
    summary = cut(" → ".join(workers), 80) or "decision"
    return FoldedText(summary, cut(text, DECISION_CHARACTERS_MAX))


def cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"
