"""Pictures of the experiments on simulated clusters, beside the paper's numbers.

They are drawn from the rows of a result, so they show what the JSON says. Not here: the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.bench.result import Cell
from loadtest.report.pictures.style import MANY, NAMED

HEIGHT_IN, DOTS_PER_INCH = 3.8, 150
BAR_SHARE = 0.8  # of the room that a group of bars has

Rows = Sequence[Mapping[str, Cell]]


def save_scheduling(path: Path, rows: Rows) -> None:
    """Mean TTFT of each policy, one panel a speed; a line where the paper has it."""
    speeds = list(dict.fromkeys(_number(row, "speed") for row in rows))
    figure = Figure(figsize=(3.2 * len(speeds), HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(speeds), squeeze=False)[0]
    for panel, speed in zip(panels, speeds, strict=True):
        chosen = [row for row in rows if row["speed"] == speed]
        for place, row in enumerate(chosen):
            mean_s = _number(row, "ttft_mean_s")
            panel.bar(place, mean_s, BAR_SHARE, color=MANY[place % len(MANY)])
            panel.text(place, mean_s, f"{mean_s:.2f}", ha="center", va="bottom", fontsize=8)
            if row["paper_ttft_s"] is not None:
                paper_s = _number(row, "paper_ttft_s")
                panel.hlines(paper_s, place - 0.4, place + 0.4, color=NAMED["ink"], linewidth=1.5)
        panel.set_xticks(range(len(chosen)), [str(row["policy"]) for row in chosen], rotation=30,
                         ha="right", fontsize=8)  # fmt: skip
        panel.set_yscale("log")
        panel.set_title(f"{speed:g}x as fast as recorded", fontsize=10)
        _plain(panel)
    panels[0].set_ylabel("mean TTFT, s (lines: the paper)")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_rejection(path: Path, rows: Rows) -> None:
    """What each admission wastes, keeps and rejects; the paper's rejections as lines."""
    figure = Figure(figsize=(10.0, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 4)
    columns = (
        ("wasted_prefill_s", "wasted prefill, GPU s"), ("within_slo", "requests within both SLOs"),
        ("prefill_load_std", "swing of the prefill load"), ("rejected", "rejected, % of offered"),
    )  # fmt: skip
    for panel, (column, title) in zip(panels, columns, strict=True):
        for place, row in enumerate(rows):
            value = _number(row, column)
            if column == "rejected":
                value *= 100 / _number(row, "offered")
                if row["paper_rejected_percent"] is not None:
                    paper = _number(row, "paper_rejected_percent")
                    panel.hlines(paper, place - 0.4, place + 0.4, color=NAMED["ink"])
            panel.bar(place, value, BAR_SHARE, color=MANY[place % len(MANY)])
            panel.text(place, value, f"{value:,.3g}", ha="center", va="bottom", fontsize=8)
        names = [str(row["admission"]) for row in rows]
        panel.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize=8)
        panel.set_title(title, fontsize=9)
        _plain(panel)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _plain(panel: Axes) -> None:
    panel.grid(axis="y", color=NAMED["grid"], linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _number(row: Mapping[str, Cell], column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float), f"{column} of {row} is no number"
    return float(value)
