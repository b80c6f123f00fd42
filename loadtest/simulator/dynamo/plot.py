"""The picture of `dynamo-replay`: mean TTFT beside Dynamo's routers, and who is served in overload.

Not here: the numbers (experiments/dynamo_replay.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.bench.result import Cell
from loadtest.report.pictures.style import NAMED

WIDTH_IN, HEIGHT_IN, DOTS_PER_INCH = 12.0, 4.6, 150
PANELS = (
    ("recorded", 1.0, "ttft_mean_ms", "mean TTFT at 1x, ms"),
    ("spread", 1.0, "ttft_mean_ms", "mean TTFT at 1x, ticks spread, ms"),
    ("recorded", 4.0, "good", "good requests at 4x"),
)

Rows = Sequence[Mapping[str, Cell]]


def save(path: Path, rows: Rows) -> None:
    """PNG, SVG or PDF, by the name of the file."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for panel, (ticks, speed, column, title) in zip(panels, PANELS, strict=True):
        of_load = [row for row in rows if row["ticks"] == ticks and row["speed"] == speed]
        _bars(panel, of_load, column)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _bars(panel: Axes, rows: Rows, column: str) -> None:
    """A pair of bars for each scheduler: the small cache and the large one."""
    names = list(dict.fromkeys(map(_name, rows)))
    sizes = sorted({int(str(row["blocks"])) for row in rows})
    height = 0.8 / max(1, len(sizes))
    for place, blocks in enumerate(sizes):
        offset = (place - (len(sizes) - 1) / 2) * height
        for row in rows:
            if row["blocks"] != blocks:
                continue
            at, value = names.index(_name(row)), float(str(row[column]))
            colour = NAMED["blue" if row["engine"] == "here" else "pale"]
            panel.barh(at + offset, value, height * 0.92, color=colour,
                       alpha=0.65 if place else 1.0)  # fmt: skip
            panel.text(value, at + offset, f" {value:,.0f} ({blocks:,} blocks)",
                       va="center", fontsize=6)  # fmt: skip
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.invert_yaxis()
    panel.margins(x=0.25)


def _name(row: Mapping[str, Cell]) -> str:
    if row["engine"] == "here":
        return f"{row['policy']}, {row['passes']} passes"
    return f"Dynamo {row['policy']}"
