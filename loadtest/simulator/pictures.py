"""The picture of `hit-rate`, drawn from the rows of its result; and how panels look.

Each picture is a PNG, SVG or PDF, by the suffix of the file. Not here: the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from loadtest.harness.result import Cell
from loadtest.report.pictures.style import MANY, NAMED

HEIGHT_IN, DOTS_PER_INCH = 3.8, 150

Row = Mapping[str, Cell]


def save_hit_rate(path: Path, rows: Sequence[Row]) -> None:
    """Hit rates by size: one panel a trace, one line a policy, dots for a known future."""
    traces = list(dict.fromkeys(str(row["trace"]) for row in rows))
    figure, panels = panels_beside(len(traces), 9.0)
    for panel, trace in zip(panels, traces, strict=True):
        of_trace = [row for row in rows if row["trace"] == trace]
        sized = [row for row in of_trace if row["blocks"] is not None]
        sizes = sorted({int(number_of(row, "blocks")) for row in sized})
        lines: dict[str, dict[int, float]] = {}
        for row in sized:
            line = lines.setdefault(str(row["policy"]), {})
            line[int(number_of(row, "blocks"))] = number_of(row, "hit_percent")
        best = lines.pop("optimum")
        for (policy, points), colour in zip(lines.items(), MANY, strict=False):
            percents = [points[blocks] for blocks in sizes]
            panel.plot(sizes, percents, "o-", color=colour, markersize=4, label=policy)
        percents = [best[blocks] for blocks in sizes]
        panel.plot(sizes, percents, ":", color=NAMED["slate"], label="the future known")
        unlimited = next(number_of(row, "hit_percent") for row in of_trace if row not in sized)
        panel.axhline(unlimited, color=NAMED["muted"], linewidth=0.8)
        panel.text(sizes[0], unlimited, f"unlimited {unlimited:.1f} %", va="bottom", fontsize=8)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / 1000:.3g}k"))
        panel.set_ylim(0, unlimited * 1.12)
        panel.set_xlabel("blocks of 512 tokens (5,859 are 3 M tokens)")
        finish_panel(panel, f"{trace} trace", axis="both")
    panels[0].set_ylabel("hits, % of block references")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def panels_beside(
    count: int, width_in: float, height_in: float = HEIGHT_IN
) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def finish_panel(panel: Axes, title: str, axis: str = "y") -> None:
    panel.set_title(title, fontsize=10)
    panel.grid(axis=axis, color=NAMED["grid"], linewidth=0.6)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def number_of(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float), f"{column} of {row} is no number"
    return float(value)
