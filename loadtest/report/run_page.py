"""The page of one run from any source: replay, Locust, a simulation, a plan.

The page is also the run's file: it embeds the recording, for `mooncake report`.

Not here: how a page is made (page.py), its tables (tables.py) and pictures (pictures/).
"""

from __future__ import annotations

from pathlib import Path

from loadtest.report import tables
from loadtest.report.page import NOTHING, ReportPage, ReportTile, Section, write_page
from loadtest.report.pictures import latency, lengths, over_time
from loadtest.results.lengths import by_length
from loadtest.results.metrics import Slo, Spread, Summary
from loadtest.results.numbers import rate_text, settings_of, shown, summary_of
from loadtest.results.phases import measured, spreads
from loadtest.results.recording import EMBEDDED_RUN, Recording, goodput_of, to_bytes
from loadtest.results.tables import duration, slo_text, warnings

FOOTER = (
    ("mooncake report THIS.html", "prints its numbers"),
    ("mooncake report A.html B.html", "compares two"),
    ("mooncake report *.html --out ALL.html", "draws the trade-off of many"),
)


def write_report(recording: Recording, path: Path) -> None:
    """Write a page without pictures first, in case drawing fails; OSError if unwritable."""
    embedded = to_bytes(recording).decode()
    write_page(bare_page(recording, embedded), path)
    write_page(page_of(recording, embedded), path)


def bare_page(recording: Recording, embedded: str) -> ReportPage:
    note = (
        "The pictures of this run were not drawn. To draw them: mooncake report THIS.html "
        "--out NEW.html."
    )
    return ReportPage(recording.title, notes=[note], embedded=[(EMBEDDED_RUN, embedded)])


def page_of(recording: Recording, embedded: str) -> ReportPage:
    summary = summary_of(recording)
    return ReportPage(
        title=recording.title,
        subtitle=subtitle(recording, summary),
        notes=[*notes(recording), *warnings(summary)],
        tiles=tiles(recording, summary),
        sections=sections(recording, summary),
        settings=settings_of(recording),
        footer=FOOTER,
        embedded=[(EMBEDDED_RUN, embedded)],
    )


def subtitle(recording: Recording, summary: Summary) -> str:
    started = f", started {recording.started_at}" if recording.started_at else ""
    return (
        f"{recording.name}{started}, {summary.requests:,} requests in "
        f"{duration(summary.duration_s)}"
    )


def notes(recording: Recording) -> list[str]:
    """Conditions that make the numbers of the page unreliable."""
    found = []
    if recording.settings.get("is_interrupted"):
        cancelled = recording.settings.get("cancelled") or 0
        found.append(
            f"This run was interrupted; {cancelled} requests without an answer were cancelled and "
            "do not count."
        )
    if not recording.requests:
        found.append("No request ended in this run.")
    return found


def tiles(recording: Recording, summary: Summary) -> list[ReportTile]:
    requests, nothing_answered = summary.requests, "not measured: no request was answered"
    return [
        ReportTile(
            "Answered",
            [(f"{summary.completed:,}", f"of {requests:,}")],
            f"{summary.completed / requests:.1%} of those sent" if requests else "",
        ),
        _refused_tile(summary),
        _goodput_tile(recording),
        _spread_tile("TTFT, median", summary.ttft_s, nothing_answered),
        _spread_tile("TBT, median", summary.tbt_s, "not measured: no answer of two tokens"),
        ReportTile(
            "Throughput",
            [(rate_text(summary.requests_per_s), "answers/s")],
            f"{rate_text(summary.input_tokens_per_s)} prompt and "
            f"{rate_text(summary.output_tokens_per_s)} generated tokens/s",
        ),
        _cached_tile(summary),
        _spread_tile("Whole request, median", summary.latency_s, nothing_answered),
    ]


def _refused_tile(summary: Summary) -> ReportTile:
    rejected = sum(summary.rejections_by_reason.values())
    failed = sum(summary.errors_by_kind.values())
    sub = ""
    if summary.requests:
        sub = f"{rejected / summary.requests:.1%} and {failed / summary.requests:.1%} of those sent"
    values = [(f"{rejected:,}", "rejected"), (f"{failed:,}", "failed")]
    return ReportTile("Rejected, failed", values, sub)


def _goodput_tile(recording: Recording) -> ReportTile:
    found = goodput_of(recording)
    if found is None:
        return ReportTile("Goodput", [(NOTHING, "")], "no service level was given")
    rate = f"{rate_text(found.requests_per_s)} requests/s"
    met = slo_text(recording.slo).replace("<=", "≤")
    return ReportTile("Goodput", [(f"{found.share:.1%}", rate)], f"{found.requests:,} met {met}")


def _spread_tile(name: str, spread: Spread | None, missing: str) -> ReportTile:
    if spread is None:
        return ReportTile(name, [(NOTHING, "")], missing)
    sub = f"p90 {duration(spread.p90)}, p99 {duration(spread.p99)}"
    return ReportTile(name, [(duration(spread.p50), "")], sub)


def _cached_tile(summary: Summary) -> ReportTile:
    name = "Prompt tokens cached"
    if summary.hit_rate is None:
        return ReportTile(name, [(NOTHING, "")], "not measured: no answer reported it")
    sub = "of an unlimited cache it was not computed"
    if summary.ideal_hit_rate is not None:
        sub = f"unlimited cache: {summary.ideal_hit_rate:.1%}"
        if summary.cached_over_ideal is not None:
            sub += f", reached {shown(summary.cached_over_ideal, 'share')} of it"
    return ReportTile(name, [(f"{summary.hit_rate:.1%}", "")], sub)


def sections(recording: Recording, summary: Summary) -> list[Section]:
    records, slo = recording.requests, recording.slo or Slo()
    found, buckets = measured(records), by_length(recording)
    parts = [
        Section("", tables=tables.times(summary)),
        Section("Workloads", tables=tables.workloads(recording)),
        Section(
            "Latency",
            [
                latency.distribution(
                    "TTFT",
                    "Time from sending a request to its first token.",
                    tables.by_workload(recording, "ttft_s"),
                    slo.ttft_s,
                ),
                latency.distribution(
                    "TBT",
                    "Of one request: the mean of the longest tenth of the intervals between "
                    "its tokens.",
                    tables.by_workload(recording, "tbt_s"),
                    slo.tbt_s,
                ),
            ],
        ),
        Section(
            "By prompt length",
            [lengths.goodput(buckets), lengths.outcomes(buckets)],
            tables.prompt_lengths(buckets),
        ),
        Section(
            "Load over time",
            [
                over_time.requests(recording),
                over_time.cache(recording),
                over_time.workers(recording, "prefill"),
                over_time.workers(recording, "decode"),
            ],
        ),
        Section(
            "Where the time went",
            [latency.first_token(found), latency.whole_request(found), latency.prediction(records)],
            tables.phases(spreads(found)),
        ),
        Section("Served or not", [lengths.by_reason(summary.rejections_by_reason, len(records))]),
        Section("Not served, and why", tables=tables.unserved(records)),
        Section("Slowest requests, by TTFT", tables=tables.slowest(records)),
    ]
    return [part for part in parts if part.pictures or part.tables]
