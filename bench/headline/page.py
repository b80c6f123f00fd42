"""The result as a picture for the README and as one HTML page.

The picture shows goodput against offered load, a line for each system, by both definitions. A point
is the median of the rounds and a bar their range. The page loads nothing and runs no script, like
every report of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.headline.goodput import FIXED, PAPER
from bench.headline.measure import CONVERSATION, HEAVY
from bench.headline.summary import OURS, Row
from bench.headline.systems import SYSTEMS
from bench.headline.traces import ANSWERS_DIVISOR, LENGTHS_DIVISOR
from loadtest.harness.result import Result, Target, shown
from loadtest.report.page import NOTHING, PageTable, ReportPage, ReportTile, Section, write_page
from loadtest.report.pictures.style import DASHED, MANY, NAMED, SETTINGS
from loadtest.simulator.experiment_page import Chapter, chapter_section, svg_of

LABELS = {
    "vllm": "vLLM",
    "vllm-tuned": "vLLM, tuned batch",
    "vllm-two": "two vLLM, router",
    "vllm-pd": "vLLM P/D over NIXL",
    "mooncake": "this project",
    "mooncake-vllm": "this project, vLLM engine",
}
COLOURS = dict(zip(SYSTEMS.values(), (*MANY[1:5], MANY[0], MANY[5]), strict=True))
PANELS = {
    FIXED: "TTFT within 2 s, 100 ms per token",
    PAPER: "TTFT within 10x, token within 5x of idle",
}
DOTS_PER_INCH = 160
CAPTION = (
    "Points and cells: medians of the rounds; bars: their range; dashed: all offered. The last "
    "table has the start and the load average beside each system's round."
)
LEAD = (
    "One machine, one model, one client. The client is vLLM's own `vllm bench serve`. It replays "
    f"Mooncake's published traces: whole conversations, prompts / {LENGTHS_DIVISOR}, "
    f"answers / {ANSWERS_DIVISOR}.",
    "A request is good when it was answered completely within both limits. Rejected and failed "
    "requests are not good. Goodput is the share of good requests times the offered rate.",
    "Each system has the same memory for KV, all cores, and empty caches in each round. The "
    "client runs on the same cores.",
    "vLLM has no admission control. This project rejects by its default limits, 10 and 5 times the "
    "unloaded times of a request. Times in the tables are of answered requests only. The trace is "
    "compressed: an hour of conversations takes minutes.",
)


def save_picture(path: Path, rows: Sequence[Row], background: str = "white") -> None:
    """PNG or SVG by the name of the file; no file without a measured row."""
    rows = [row for row in rows if row.get("trace") == CONVERSATION and row.get("rounds")]
    if not rows:
        return
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9.0, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for panel, (kind, title) in zip(panels, PANELS.items(), strict=True):
            draw(panel, rows, kind)
            panel.set_title(title, fontsize=9.5)
        panels[0].set_ylabel("goodput, requests/s")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.savefig(path, dpi=DOTS_PER_INCH, facecolor=background)


def draw(panel: Axes, rows: Sequence[Row], kind: str) -> None:
    column = f"goodput_{kind}_per_s"
    highest = max(_number(row, "offered_per_s") for row in rows)
    ends = [0.0, 1.05 * highest]
    panel.plot(ends, ends, color=NAMED["muted"], linestyle=DASHED, linewidth=0.8, label="offered")
    for system in SYSTEMS.values():
        own = [row for row in rows if row["system"] == system and row.get(column) is not None]
        if not own:
            continue
        middle = [_number(row, column) for row in own]
        below = [_number(row, column) - _number(row, f"{column}_min") for row in own]
        above = [_number(row, f"{column}_max") - _number(row, column) for row in own]
        panel.errorbar(
            [_number(row, "offered_per_s") for row in own],
            middle,
            yerr=[below, above],
            color=COLOURS[system],
            linewidth=2.4 if system == OURS else 1.4,
            marker="o",
            markersize=5 if system == OURS else 4,
            capsize=3,
            label=LABELS[system],
            zorder=3 if system == OURS else 2,
        )
    panel.set_xlabel("offered, requests/s")
    panel.set_xlim(0, ends[1])
    panel.set_ylim(0, ends[1])


def write_headline(path: Path, result: Result) -> None:
    """The page; OSError when `path` cannot be written."""
    rows = [row for row in result.rows if "trace" in row]
    svg = svg_of(
        lambda file: save_picture(file, rows, "none"),
        "Goodput against offered load by two definitions, a line for each system",
    )
    chapter = chapter_section(Chapter(result, svg, why=CAPTION))
    sections = [chapter, Section("Targets", tables=[targets_table(result)])]
    page = ReportPage(
        "Beside vLLM: goodput of the same machine",
        sections,
        subtitle=f"{result.constants.get('rounds', NOTHING)} rounds",
        lead=LEAD,
        command="python -m bench.headline",
        tiles=tiles(result.targets),
        settings=dict(result.constants),
        settings_heading="How it was measured",
    )
    write_page(page, path)


def tiles(targets: Sequence[Target]) -> list[ReportTile]:
    """The four ratios at the heavy load of the conversation trace."""
    found = []
    for target in targets:
        if f"{CONVERSATION}_{HEAVY:g}" in target.name:
            kind = target.name.partition("_")[0]
            value = NOTHING if target.value is None else f"{target.value:.2f}x"
            name = f"Goodput at {HEAVY:g} of vLLM's capacity, {kind} limits"
            found.append(ReportTile(name, [(value, target.why)], f"goal: {target.goal:g}x"))
    return found


def targets_table(result: Result) -> PageTable:
    met = {True: "yes", False: "no", None: "not measured"}
    rows = [
        (
            target.name,
            shown(target.value),
            f"{target.op} {target.goal:g}",
            met[target.is_met],
            target.why,
        )
        for target in result.targets
    ]
    columns = ("target", "measured", "goal", "met", "of what")
    return PageTable(columns, rows, left=(0, 3, 4), caption="Ratios of medians over the rounds.")


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float), f"{column} is {value!r}"
    return float(value)
