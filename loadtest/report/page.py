"""The pages: one run as one HTML file, and two runs side by side.

The page of a run is also its file: the recording stands inside, for `mooncake report`. Nothing is
loaded from anywhere and no script runs; the page itself forbids it, because it shows messages and
names that came from a server.

Not here: how a picture is drawn (pictures/), how a page looks (templates/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadtest.report import tables
from loadtest.report.numbers import compare, differing, setting_text, settings_of, summary_of
from loadtest.report.phases import Phases, PhaseSpread, mean_of, measured, spreads
from loadtest.report.pictures import latency, over_time, refusals
from loadtest.report.pictures.style import Picture, not_measured
from loadtest.results.metrics import Slo
from loadtest.results.recording import Recording, goodput_of, to_bytes
from loadtest.results.tables import duration, lag_s, slo_text, warnings

# Control characters in a message: no browser shows them, and some make a page no HTML.
UNPRINTABLE = dict.fromkeys([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)])
NAMES = ("A", "B")  # of two runs
LEVELS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"))


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    pictures: list[Picture]
    phases: list[PhaseSpread] = field(default_factory=list)  # a table beside the pictures


def write_report(recording: Recording, path: Path) -> None:
    """The page of one run; OSError when `path` cannot be written.

    First without a picture: should drawing fail, a long run is not lost with it.
    """
    embedded = to_bytes(recording).decode()
    bare = rendered("bare.html", run=recording, embedded=embedded)
    path.write_text(bare, encoding="utf-8")
    path.write_text(page_of(recording, embedded), encoding="utf-8")


def page_of(recording: Recording, embedded: str) -> str:
    summary = summary_of(recording)
    return rendered(
        "report.html",
        run=recording,
        summary=summary,
        lag_s=lag_s(summary),
        rejected=sum(summary.rejections_by_reason.values()),
        failed=sum(summary.errors_by_kind.values()),
        goodput=goodput_of(recording),
        slo=slo_text(recording.slo),
        notes=[*notes(recording), *warnings(summary)],
        sections=sections(recording),
        settings=settings_of(recording),
        workloads=tables.workloads(recording),
        refusals=tables.unserved(recording.requests),
        slowest=tables.slowest(recording.requests),
        embedded=embedded,
    )


def rendered(template: str, **values: Any) -> str:
    """Everything but pictures is escaped."""
    environment = Environment(
        loader=PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": lambda seconds: "–" if seconds is None else duration(seconds),
        "count": lambda number: "–" if number is None else f"{number:,}",
        "share": lambda number: "–" if number is None else f"{number:.1%}",
        "rate": lambda number: f"{number:,.0f}" if number >= 1_000 else f"{number:.3g}",
        "setting": setting_text,
        "svg": Markup,
    }
    return environment.get_template(template).render(**values).translate(UNPRINTABLE)


def sections(recording: Recording) -> list[Section]:
    records, slo = recording.requests, recording.slo or Slo()
    found = measured(records)
    rejections = summary_of(recording).rejections_by_reason
    return [
        Section("Latency", [
            latency.distribution(
                "TTFT", "Time from sending a request to its first token.",
                tables.by_workload(recording, "ttft_s"), slo.ttft_s),
            latency.distribution(
                "TBT", "Of one request: the mean of the longest tenth of the intervals between "
                "its tokens.", tables.by_workload(recording, "tbt_s"), slo.tbt_s),
        ]),
        Section("Load over time", [
            over_time.requests(recording), over_time.cache(recording),
            over_time.workers(recording, "prefill"), over_time.workers(recording, "decode"),
        ]),
        Section("Where the time went", [
            latency.first_token(found), latency.whole_request(found), latency.prediction(records),
        ], spreads(found)),
        Section("Served or not", [
            refusals.by_prompt_length(records), refusals.by_reason(rejections, len(records)),
        ]),
    ]  # fmt: skip


def notes(recording: Recording) -> list[str]:
    """What a reader must know before believing the page."""
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


def write_comparison(a: Recording, b: Recording, files: tuple[Path, Path], path: Path) -> None:
    """OSError when `path` cannot be written."""
    settings = (settings_of(a), settings_of(b))
    different = differing(*settings)
    html = rendered(
        "comparison.html",
        runs=list(zip(NAMES, (file.name for file in files), (a, b), strict=True)),
        different=different,
        same=[name for name in settings[0] if name not in {name for name, _, _ in different}],
        rows=compare(a, b),
        sections=compared_sections(a, b),
    )
    path.write_text(html, encoding="utf-8")


def compared_sections(a: Recording, b: Recording) -> list[Section]:
    runs = dict(zip(NAMES, (a, b), strict=True))
    found = {name: measured(run.requests) for name, run in runs.items()}
    return [
        Section("Latency", [_distribution(title, field, runs) for title, field in LEVELS]),
        Section("Where the time went", [
            _bars("Where the time to the first token went", found, "ttft_s", "until_first_token",
                  "TTFT"),
            _bars("Where the whole time went", found, "latency_s", "all", "whole time"),
        ]),
    ]  # fmt: skip


def _distribution(title: str, field: str, runs: dict[str, Recording]) -> Picture:
    values = {name: tables.values_of(run.requests, field) for name, run in runs.items()}
    levels = {getattr(run.slo, field, None) for run in runs.values()}
    level_s = levels.pop() if len(levels) == 1 else None
    return latency.distribution(title, "Answered requests of both runs.", values, level_s)


def _bars(
    title: str, found: dict[str, list[Phases]], order_by: str, field: str, what: str
) -> Picture:
    """For the mean and two percentiles, the bar of A above the bar of B."""
    order = attrgetter(order_by)
    runs = {name: sorted(phases, key=order) for name, phases in found.items() if phases}
    if not runs:
        return not_measured(title, latency.NO_DECISION)
    bars = {}
    for percent in (None, 50, 90):
        for name, ordered in runs.items():
            part: Sequence[Phases] = ordered
            if percent is not None:
                part = latency.around(ordered, percent)
            which = "mean" if percent is None else f"around p{percent}"
            bars[f"{name}, {which}"] = mean_of([getattr(phases, field) for phases in part])
    caption = (
        f"Mean over all requests whose decision says it, and over the requests around the median "
        f"and the 90th percentile of the {what} of each run (the nearest twentieth)."
    )
    for name in NAMES:
        if name not in runs:
            caption += f" {name} was not measured: {latency.NO_DECISION}"
    return latency.compared(title, bars, caption)
