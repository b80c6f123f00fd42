"""Two runs on one page: settings that differ, every number, and curves drawn over each other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from loadtest.report import rows
from loadtest.report.compare import compare
from loadtest.report.contents import Section
from loadtest.report.page import rendered
from loadtest.report.phases import Phases, mean_of, measured
from loadtest.report.pictures import latency, where
from loadtest.report.pictures.style import Picture, not_measured
from loadtest.results.recording import Recording

NAMES = ("A", "B")
LEVELS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"))


def write_comparison(a: Recording, b: Recording, files: tuple[Path, Path], path: Path) -> None:
    """OSError when `path` cannot be written."""
    settings = (rows.settings_of(a), rows.settings_of(b))
    different = rows.differing(*settings)
    html = rendered(
        "comparison.html",
        runs=list(zip(NAMES, (file.name for file in files), (a, b), strict=True)),
        different=different,
        same=[name for name in settings[0] if name not in {name for name, _, _ in different}],
        rows=compare(a, b),
        sections=sections(a, b),
    )
    path.write_text(html, encoding="utf-8")


def sections(a: Recording, b: Recording) -> list[Section]:
    runs = dict(zip(NAMES, (a, b), strict=True))
    found = {name: measured(run.requests) for name, run in runs.items()}
    return [
        Section("Latency", [_distribution(title, field, runs) for title, field in LEVELS]),
        Section("Where the time went", [
            _until_first_token(found), _whole(found),
        ]),
    ]  # fmt: skip


def _distribution(title: str, field: str, runs: dict[str, Recording]) -> Picture:
    values = {name: rows.values_of(run.requests, field) for name, run in runs.items()}
    levels = {getattr(run.slo, field, None) for run in runs.values()}
    level_s = levels.pop() if len(levels) == 1 else None
    return latency.distribution(title, "Answered requests of both runs.", values, level_s)


def _until_first_token(found: dict[str, list[Phases]]) -> Picture:
    title = "Where the time to the first token went"
    return _bars(title, found, "ttft_s", "until_first_token", "TTFT")


def _whole(found: dict[str, list[Phases]]) -> Picture:
    return _bars("Where the whole time went", found, "latency_s", "all", "whole time")


def _bars(
    title: str, found: dict[str, list[Phases]], order_by: str, field: str, what: str
) -> Picture:
    """For the mean and two percentiles, the bar of A above the bar of B."""
    order = attrgetter(order_by)
    runs = {name: sorted(phases, key=order) for name, phases in found.items() if phases}
    if not runs:
        return not_measured(title, where.NO_DECISION)
    bars = {}
    for percent in (None, 50, 90):
        for name, ordered in runs.items():
            part: Sequence[Phases] = ordered if percent is None else where.around(ordered, percent)
            which = "mean" if percent is None else f"around p{percent}"
            bars[f"{name}, {which}"] = mean_of([getattr(phases, field) for phases in part])
    caption = (
        f"Mean over all requests whose decision says it, and over the requests around the median "
        f"and the 90th percentile of the {what} of each run (the nearest twentieth)."
    )
    for name in NAMES:
        if name not in runs:
            caption += f" {name} was not measured: {where.NO_DECISION}"
    return where.compared(title, bars, caption)
