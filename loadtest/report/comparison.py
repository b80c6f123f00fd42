"""Two runs side by side: their settings, every number, both curves in one picture.

Not here: how a page is made (page.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from loadtest.report import tables
from loadtest.report.page import NOTHING, PageTable, ReportPage, ReportTile, Section
from loadtest.report.pictures import latency, lengths
from loadtest.report.pictures.style import Picture, not_measured
from loadtest.results.lengths import by_length
from loadtest.results.numbers import compare, differing, setting_text, settings_of
from loadtest.results.phases import Phases, mean_of, measured
from loadtest.results.recording import Recording

NAMES = ("A", "B")  # names of the two runs
LEVELS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"))


def comparison_page(a: Recording, b: Recording, files: tuple[Path, Path]) -> ReportPage:
    runs = list(zip(NAMES, (file.name for file in files), (a, b), strict=True))
    return ReportPage(
        title="Two runs compared",
        tiles=[
            ReportTile(f"{name}: {file}", [(run.title, "")], _about(run), is_title=True)
            for name, file, run in runs
        ],
        sections=[_settings(a, b), *_pictures(a, b), _numbers(a, b)],
    )


def _about(run: Recording) -> str:
    started = f", started {run.started_at}" if run.started_at else ""
    return f"{run.name}{started}, {len(run.requests):,} requests"


def _settings(a: Recording, b: Recording) -> Section:
    settings = (settings_of(a), settings_of(b))
    different = differing(*settings)
    names = {name for name, _, _ in different}
    same = [name for name in settings[0] if name not in names]
    found = [
        PageTable(
            ("setting", *NAMES),
            [(name, setting_text(of_a), setting_text(of_b)) for name, of_a, of_b in different],
            left=(0, 1, 2),
        )
    ]
    text = [] if different else ["None."]
    if same:
        text.append(f"The same in both: {', '.join(same)}.")
    return Section("Settings that differ", tables=found if different else (), text=text)


def _numbers(a: Recording, b: Recording) -> Section:
    table = PageTable(
        ("number", "A", "B", "B − A", "B / A", "better is"),
        [(row.label, *row.texts, row.better or NOTHING) for row in compare(a, b)],
        caption="One run each: only more runs can show whether a difference is more than noise.",
        left=(0, 5),
    )
    return Section("Numbers", tables=[table])


def _pictures(a: Recording, b: Recording) -> list[Section]:
    runs = dict(zip(NAMES, (a, b), strict=True))
    found = {name: measured(run.requests) for name, run in runs.items()}
    return [
        Section("Latency", [_distribution(title, field, runs) for title, field in LEVELS]),
        Section(
            "By prompt length",
            [lengths.goodput_of_runs({name: by_length(run) for name, run in runs.items()})],
        ),
        Section(
            "Where the time went",
            [
                _bars(
                    "Where the time to the first token went",
                    found,
                    "ttft_s",
                    "until_first_token",
                    "TTFT",
                ),
                _bars("Where the whole time went", found, "latency_s", "all", "whole time"),
            ],
        ),
    ]


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
        f"Mean over all requests whose decision has these times, and over the requests around the "
        f"median and the 90th percentile of the {what} of each run (the nearest twentieth)."
    )
    for name in NAMES:
        if name not in runs:
            caption += f" {name} was not measured: {latency.NO_DECISION}"
    return latency.compared(title, bars, caption)
