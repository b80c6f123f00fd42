"""The picture of hit rates by size: one panel a trace, one line a policy.

Not here: the numbers (hit_rate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from loadtest.report.pictures.style import MANY, NAMED
from loadtest.simulator.hit_rate import OPTIMUM, PAPER_BLOCKS, Run

WIDTH_IN, HEIGHT_IN, DOTS_PER_INCH = 9.0, 3.8, 150


def save(path: Path, runs: Sequence[Run]) -> None:
    """PNG, SVG or PDF, by the name of the file."""
    traces = list(dict.fromkeys(run.trace for run in runs))
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        of_trace = [run for run in runs if run.trace == trace]
        sizes = sorted({run.blocks for run in of_trace if run.blocks is not None})
        policies = dict.fromkeys(run.policy for run in of_trace)
        for policy, colour in zip([p for p in policies if p != OPTIMUM], MANY, strict=False):
            points = {r.blocks: r.result.percent for r in of_trace if r.policy == policy}
            panel.plot(sizes, [points[blocks] for blocks in sizes], "o-", color=colour,
                       markersize=4, label=policy)  # fmt: skip
        best = {r.blocks: r.result.percent for r in of_trace if r.policy == OPTIMUM}
        panel.plot(sizes, [best[blocks] for blocks in sizes], ":", color=NAMED["slate"],
                   label="the future known")  # fmt: skip
        unlimited = next(run.result.percent for run in of_trace if run.blocks is None)
        panel.axhline(unlimited, color=NAMED["muted"], linewidth=0.8)
        panel.text(sizes[0], unlimited, f"unlimited {unlimited:.1f} %", va="bottom", fontsize=8)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(
            FuncFormatter(lambda size, _: f"{size / 1000:.3g}k"))  # fmt: skip
        panel.set_ylim(0, unlimited * 1.12)
        panel.set_title(f"{trace} trace", fontsize=10)
        panel.set_xlabel(f"blocks of 512 tokens ({PAPER_BLOCKS:,} are 3 M tokens)")
        panel.grid(color=NAMED["grid"], linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("hits, % of block references")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=DOTS_PER_INCH)
