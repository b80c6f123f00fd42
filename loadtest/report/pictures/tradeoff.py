"""Many runs in one picture: goodput against load and cost, latency against throughput, outcomes.

Not here: choosing runs, lines and the Pareto front (sweep.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadtest.report.pictures.style import (
    DASHED,
    MANY,
    NAMED,
    STEPS,
    Picture,
    count_axis,
    drawn,
    label,
    legend,
    not_measured,
    percent_axis,
    seconds_scale,
)
from loadtest.report.sweep import RunLine, RunPoint, lines, pareto, value_of
from loadtest.results.digest import RunDigest
from loadtest.results.lengths import span_names
from loadtest.results.numbers import rate_text
from loadtest.results.tables import duration

NUMBERS_MAX = 40  # with more points, no numbers are drawn beside them
BARS_MAX = 40
OUTCOMES = {
    "within both": NAMED["green"],
    "too late or slow": NAMED["sky"],
    "answered": NAMED["sky"],
    "rejected": NAMED["orange"],
    "failed": NAMED["vermilion"],
}


@dataclass(frozen=True, slots=True)
class RunAxis:
    name: str  # name of the number, or of a setting
    label: str
    unit: str = "per_s"  # share | per_s | s | count
    less_is_better: bool | None = None  # None: neither direction is better

    def text(self, value: float) -> str:
        if self.unit == "share":
            return f"{value:.1%}"
        return duration(value) if self.unit == "s" else rate_text(value)

    def shape(self, axes: Axes, which: str, most: float) -> None:
        axis: Axis = getattr(axes, f"{which}axis")
        if self.unit == "share" and which == "y":
            percent_axis(axes)
        elif self.unit == "count":
            count_axis(axis)
        elif self.unit != "s":
            axis.set_major_locator(MaxNLocator(nbins=6, steps=STEPS))
            axis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value)))
        if self.unit not in ("s", "share"):
            getattr(axes, f"set_{which}lim")(0.0, 1.08 * max(most, 1e-9))
        getattr(axes, f"set_{which}label")(self.label)


@dataclass(frozen=True, slots=True)
class TradeOff:
    title: str
    x: RunAxis
    y: RunAxis
    caption: str
    is_ideal_drawn: bool = False  # draw y = x, the line of all requests sent
    # the service level of a run, on the y axis
    level: Callable[[RunDigest], float | None] = lambda run: None


def tradeoff(runs: Sequence[RunDigest], asked: TradeOff, marked: int | None) -> Picture:
    """`marked`: the number of the run to highlight."""
    found = lines(runs, asked.x.name, asked.y.name)
    points = [point for line in found for point in line.points]
    if not points:
        why = f"no run has both: {asked.x.label}, {asked.y.label}."
        return not_measured(asked.title, why)
    levels = {level for run in runs if (level := asked.level(run)) is not None}
    x_better, y_better = asked.x.less_is_better, asked.y.less_is_better
    unbeaten: list[RunPoint] = []
    if x_better is not None and y_better is not None:
        unbeaten = pareto(points, less_x=x_better, less_y=y_better)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _scales(axes, asked, points, levels)
        if asked.is_ideal_drawn:
            ends = [0, max(point.x for point in points)]
            look = {"color": NAMED["muted"], "linestyle": ":", "linewidth": 1.2}
            axes.plot(ends, ends, **look, label="all that were sent")
        for level in sorted(levels)[:3]:
            look = {"color": NAMED["vermilion"], "linestyle": DASHED, "linewidth": 1.2}
            axes.axhline(level, **look, label=f"level {asked.y.text(level)}")
        _draw_lines(axes, found, is_joined=not unbeaten)
        if len(unbeaten) > 1:
            axes.plot(
                [p.x for p in unbeaten],
                [p.y for p in unbeaten],
                "-",
                color=NAMED["slate"],
                linewidth=1.1,
                zorder=1.5,
                label="not beaten by another",
            )
        _mark(axes, points, marked)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)

    left_out = len(runs) - len(points)
    caption = asked.caption + " Numbers are those of the runs in the table."
    if unbeaten:
        caption += " The grey line joins the runs that no other beats in both (the Pareto front)."
    if left_out:
        caption += f" {left_out} of {len(runs)} runs do not have both numbers."
    words = "; ".join(
        f"run {point.number}: {asked.x.text(point.x)}, {asked.y.text(point.y)}"
        for point in sorted(points, key=lambda point: point.number)[:BARS_MAX]
    )
    alt = f"{asked.x.label}, {asked.y.label}: {words}."
    return drawn(asked.title, caption, alt, draw, 3.5 + 0.1 * len(found))


def _scales(axes: Axes, asked: TradeOff, points: Sequence[RunPoint], levels: set[float]) -> None:
    for which, axis in (("x", asked.x), ("y", asked.y)):
        values = [getattr(point, which) for point in points]
        if axis.unit == "s":
            known = [value for value in (*values, *(levels if which == "y" else ())) if value > 0]
            low_s, high_s = (min(known), max(known)) if known else (1e-3, 1.0)
            seconds_scale(axes, which, low_s / 1.5, high_s * 1.5)
        axis.shape(axes, which, max(values))


def _draw_lines(axes: Axes, found: Sequence[RunLine], is_joined: bool) -> None:
    for line, colour in zip(found, MANY, strict=False):
        best: dict[float, float] = {}
        for point in line.points:  # of equal x, the line goes through the highest point
            best[point.x] = max(best.get(point.x, point.y), point.y)
        if is_joined and len(best) > 1:
            axes.plot(list(best), list(best.values()), "-", color=colour, linewidth=1.2, alpha=0.7)
        axes.plot(
            [point.x for point in line.points],
            [point.y for point in line.points],
            "o",
            color=colour,
            markersize=6,
            markeredgewidth=0,
            clip_on=False,
            label=label(line.label, 48) if len(found) > 1 else "_",
        )


def _mark(axes: Axes, points: Sequence[RunPoint], marked: int | None) -> None:
    for point in points:
        if point.number == marked:
            axes.plot(
                [point.x],
                [point.y],
                "o",
                color="none",
                markersize=12,
                clip_on=False,
                markeredgecolor=NAMED["vermilion"],
                markeredgewidth=1.6,
                label="best",
            )
        if len(points) <= NUMBERS_MAX:
            text, beside = str(point.number), {"xytext": (6, 5), "textcoords": "offset points"}
            axes.annotate(text, (point.x, point.y), **beside, fontsize=7.5, color=NAMED["muted"])


def outcomes(runs: Sequence[RunDigest]) -> Picture:
    title = "Requests by outcome"
    shown = [(n, run) for n, run in enumerate(runs, 1) if value_of(run, "requests")][:BARS_MAX]
    if not shown:
        return not_measured(title, "no run has a request.")
    parts = [parts_of(run) for _, run in shown]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        below = [0.0] * len(shown)
        for name, colour in OUTCOMES.items():
            shares = [part.get(name, 0.0) for part in parts]
            if any(shares):
                axes.bar(range(len(shown)), shares, 0.78, below, color=colour, label=name)
                below = [low + share for low, share in zip(below, shares, strict=True)]
        axes.set_xticks(range(len(shown)), [str(number) for number, _ in shown])
        axes.tick_params(axis="x", length=0, labelsize=7 if len(shown) > 20 else 8.5)
        axes.grid(False, axis="x")
        axes.set_xlabel("run")
        percent_axis(axes)
        legend(axes, columns=4)

    left_out = sum(bool(value_of(run, "requests")) for run in runs) - len(shown)
    caption = "Shares of all requests that were sent."
    if left_out:
        caption += f" {left_out} more runs are in the table only."
    words = (
        f"run {number}: " + ", ".join(f"{name} {share:.1%}" for name, share in part.items())
        for (number, _), part in zip(shown, parts, strict=True)
    )
    return drawn(title, caption, f"{'; '.join(words)}.", draw)


def parts_of(run: RunDigest) -> dict[str, float]:
    """Shares of the requests, by the names in OUTCOMES; they add up to 1."""
    answered = value_of(run, "answered_share") or 0.0
    rest = {name: value_of(run, f"{name}_share") or 0.0 for name in ("rejected", "failed")}
    within = value_of(run, "goodput_share")
    if within is None:
        return {"answered": answered, **rest}
    return {"within both": within, "too late or slow": max(0.0, answered - within), **rest}


def lengths_of_runs(runs: Sequence[RunDigest]) -> Picture:
    """The share within both limits, as a cell for each run and each bucket of prompt lengths."""
    title = "Goodput by prompt length"
    shown = [
        (number, {b.span: share for b in run.lengths if (share := b.share(b.within)) is not None})
        for number, run in enumerate(runs, 1)
    ]
    shown = [(number, cells) for number, cells in shown if cells][:BARS_MAX]
    if not shown:
        return not_measured(title, "no run has a service level and requests.")
    names = span_names(
        b for number, _ in shown for b in runs[number - 1].lengths if b.share(b.within) is not None
    )
    columns = {span: at for at, span in enumerate(names)}
    is_wide = any(" to " in name for name in names.values())

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, (_, cells) in enumerate(shown):
            for span, share in cells.items():
                at = columns[span]
                look = {"color": NAMED["green"], "alpha": 0.08 + 0.72 * share, "linewidth": 0}
                axes.barh(row, 0.96, 0.92, at - 0.48, **look)
                axes.annotate(f"{share:.0%}", (at, row), ha="center", va="center", fontsize=7.5)
        axes.set_xticks(range(len(columns)), list(names.values()), rotation=90 if is_wide else 0)
        axes.set_yticks(range(len(shown)), [str(number) for number, _ in shown])
        axes.tick_params(length=0, labelsize=8)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("prompt tokens, from")
        axes.set_ylabel("run")

    left_out = sum(any(b.within is not None for b in run.lengths) for run in runs) - len(shown)
    caption = "Of all requests sent with prompts of this length, the share within both limits."
    if left_out:
        caption += f" {left_out} more runs are in the numbers only (--json)."
    words = (
        f"run {number}: "
        + ", ".join(f"from {names[span]} {share:.0%}" for span, share in cells.items())
        for number, cells in shown
    )
    return drawn(title, caption, f"{'; '.join(words)}.", draw, 1.2 + 0.24 * len(shown))
