"""The load of the prefill and of the decode workers over time, from the samples of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report import series
from loadtest.report.pictures.style import (
    MANY,
    NAMED,
    Picture,
    count_axis,
    drawn,
    label,
    not_measured,
    panels,
    percent_axis,
    time_axis,
)
from loadtest.report.series import Line
from loadtest.report.timeline import end_s
from loadtest.results.recording import Recording, Sample

PANEL_IN, AROUND_IN = 1.15, 0.75
LINES_MAX = 4  # more workers than that are shown as a band
DOTS_MAX = 120  # of more samples the dots would be a line of their own
STYLES = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

USE = (
    "the share of time that its engine computed (a step counts when it ends, so a long one may "
    "show as over 100 %), and the share of its engine's KVCache memory (in pages) that is taken."
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity of every worker of a pool."""

    name: str
    lines: Sequence[Line]
    is_share: bool = False
    is_rate: bool = False  # holds since the sample before


def prefill(recording: Recording) -> Picture:
    samples = recording.samples
    workers = series.prefill_workers(samples)
    rows = [
        *requests(samples, workers),
        Panel("tokens left", of(samples, series.QUEUE_TOKENS, workers)),
        *use(samples, workers),
    ]
    caption = (
        "Of each prefill worker: requests waiting for pages, requests that have them, tokens of "
        f"the prompts of both that are not computed yet, {USE}"
    )
    return pool("Prefill workers", workers, rows, caption, recording)


def decode(recording: Recording) -> Picture:
    samples = recording.samples
    workers = series.decode_workers(samples)
    rows = [
        *requests(samples, workers),
        Panel("tokens/s", rate_of(samples, series.OUTPUT_TOKENS, workers), is_rate=True),
        *use(samples, workers),
    ]
    caption = (
        "Of each decode worker: requests waiting to be in the running batch, requests in it, "
        f"tokens generated per second, {USE}"
    )
    return pool("Decode workers", workers, rows, caption, recording)


def requests(samples: Sequence[Sample], workers: set[str]) -> list[Panel]:
    return [
        Panel("waiting", of(samples, series.WAITING, workers)),
        Panel("running", of(samples, series.RUNNING, workers)),
    ]


def use(samples: Sequence[Sample], workers: set[str]) -> list[Panel]:
    used, most = of(samples, series.PAGES_USED, workers), of(samples, series.PAGES_MAX, workers)
    busy = rate_of(samples, series.STEP_SECONDS, workers)
    return [
        Panel("busy", busy, is_share=True, is_rate=True),
        Panel("pages", series.share(used, most), is_share=True),
    ]


def pool(
    title: str, workers: set[str], rows: Sequence[Panel], caption: str, recording: Recording
) -> Picture:
    if not workers:
        why = "the samples name none." if recording.samples else "no samples of the server."
        return not_measured(title, why)
    until_s = max(end_s(recording.requests), recording.samples[-1].time_s)

    def draw(figure: Figure) -> None:
        axes = panels(figure, len(rows))
        for place, row in zip(axes, rows, strict=True):
            plot(place, row)
            place.set_ylabel(row.name)
            place.margins(y=0.1)
            place.set_ylim(bottom=0.0)
            if row.is_share:
                percent_axis(place, peak_of(row.lines) or 0.0)
            else:
                count_axis(place.yaxis)
        handles, names = max((place.get_legend_handles_labels() for place in axes), key=len_of)
        figure.legend(handles, names, loc="outside upper left", ncols=LINES_MAX)
        time_axis(axes[-1], until_s)
        figure.align_ylabels(axes)

    peaks = ", ".join(
        f"{row.name} {peak:.0%}" if row.is_share else f"{row.name} {peak:,.0f}"
        for row in rows
        if (peak := peak_of(row.lines)) is not None
    )
    if len(workers) > LINES_MAX:
        caption += f" The line is the mean of {len(workers)} workers, the band goes from the "
        caption += "least to the most loaded."
    caption += f" {len(recording.samples)} samples of the server's metrics page; what happened "
    caption += "between two of them is not seen, except in rates."
    return drawn(
        title, caption, f"{title}: largest values: {peaks}.", draw, AROUND_IN + PANEL_IN * len(rows)
    )


def len_of(handles_and_names: tuple[list[Any], list[str]]) -> int:
    return len(handles_and_names[1])


def peak_of(lines: Sequence[Line]) -> float | None:
    known = [value for line in lines for value in line.values if not math.isnan(value)]
    return max(known) if known else None


def of(samples: Sequence[Sample], name: str, workers: set[str]) -> list[Line]:
    return series.only(series.gauge(samples, name), workers)


def rate_of(samples: Sequence[Sample], name: str, workers: set[str]) -> list[Line]:
    return series.only(series.rate(samples, name), workers)


def plot(axes: Axes, row: Panel) -> None:
    """A line for each worker, or the band in which all are."""
    if peak_of(row.lines) is None:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center",
                  color=NAMED["muted"])  # fmt: skip
    elif len(row.lines) <= LINES_MAX:
        is_sparse = max(len(line.times_s) for line in row.lines) <= DOTS_MAX
        for line, colour, style in zip(row.lines, MANY, STYLES, strict=False):
            axes.plot(
                line.times_s, line.values, color=colour, linestyle=style, label=label(line.label),
                marker="o" if is_sparse and not row.is_rate else "", markersize=2.6,
                linewidth=1.2, drawstyle="steps-pre" if row.is_rate else "default",
            )  # fmt: skip
    else:
        times_s, low, mean, high = band(row.lines)
        axes.fill_between(times_s, low, high, color=NAMED["sky"], alpha=0.4, lw=0, label="range")
        axes.plot(times_s, mean, color=NAMED["blue"], label="mean")


def band(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Times, and at each the least, mean and largest value over the lines that have one."""
    values: dict[float, list[float]] = {}
    for line in lines:
        for time_s, value in zip(line.times_s, line.values, strict=True):
            if math.isnan(value):
                continue
            values.setdefault(time_s, []).append(value)
    times_s = sorted(values)
    columns = [[pick(values[s]) for s in times_s] for pick in (min, np.mean, max)]
    return np.array(times_s), *map(np.array, columns)
