"""The load of the prefill and of the decode workers over time, from the samples of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.recording import Recording, Sample
from loadtest.report import series
from loadtest.report.pictures.style import (
    MANY,
    NAMED,
    Picture,
    count_axis,
    drawn,
    label,
    legend,
    not_measured,
    panels,
    percent_axis,
    time_axis,
)
from loadtest.report.series import Line
from loadtest.report.timeline import end_s

THREE_PANELS_IN = 5.0
LINES_MAX = 4  # more workers than that are shown as a band
DOTS_MAX = 120  # of more samples the dots would be a line of their own
STYLES = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


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
    panels_ = [
        Panel("requests", of(samples, series.QUEUE_REQUESTS, workers)),
        Panel("tokens to compute", of(samples, series.QUEUE_TOKENS, workers)),
        Panel("pages in use", pages(samples, workers), is_share=True),
    ]
    caption = (
        "Requests waiting at or being computed by each prefill worker; tokens of their prompts "
        "that are not computed yet; pages of its engine's KVCache memory in use."
    )
    return pool("Prefill workers", workers, panels_, caption, recording)


def decode(recording: Recording) -> Picture:
    samples = recording.samples
    workers = series.decode_workers(samples)
    generated = series.only(series.rate(samples, series.OUTPUT_TOKENS), workers)
    panels_ = [
        Panel("running requests", of(samples, series.SLOTS_USED, workers)),
        Panel("tokens per second", generated, is_rate=True),
        Panel("pages in use", pages(samples, workers), is_share=True),
    ]
    caption = (
        "Requests in the running batch of each decode worker; tokens that it generated per "
        "second, between two samples; pages of its engine's KVCache memory in use."
    )
    return pool("Decode workers", workers, panels_, caption, recording)


def pool(
    title: str, workers: set[str], rows: Sequence[Panel], caption: str, recording: Recording
) -> Picture:
    if not workers:
        why = "its metrics page names no such worker" if recording.samples else "no samples"
        return not_measured(title, f"{why} of the server.")
    until_s = max(end_s(recording.requests), recording.samples[-1].time_s)

    def draw(figure: Figure) -> None:
        axes = panels(figure, len(rows))
        for place, row in zip(axes, rows, strict=True):
            _draw(place, row)
            place.set_ylabel(row.name)
            place.margins(y=0.1)
            place.set_ylim(bottom=0.0)
            if row.is_share:
                percent_axis(place)
            else:
                count_axis(place.yaxis)
        if axes[0].get_legend_handles_labels()[1]:
            legend(axes[0], columns=LINES_MAX)
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
    return drawn(title, caption, f"{title}: largest values: {peaks}.", draw, THREE_PANELS_IN)


def peak_of(lines: Sequence[Line]) -> float | None:
    known = [value for line in lines for value in line.values if not math.isnan(value)]
    return max(known) if known else None


def of(samples: Sequence[Sample], name: str, workers: set[str]) -> list[Line]:
    return series.only(series.gauge(samples, name), workers)


def pages(samples: Sequence[Sample], workers: set[str]) -> list[Line]:
    used, most = of(samples, series.PAGES_USED, workers), of(samples, series.PAGES_MAX, workers)
    return series.share(used, most)


def _draw(axes: Axes, row: Panel) -> None:
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
