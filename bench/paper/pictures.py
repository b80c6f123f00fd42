"""Pictures of the experiments, beside the paper's numbers and Dynamo's.

They are drawn from the rows of a result, so they show the same numbers as the JSON. Each is a PNG,
SVG or PDF, by the name of the file. Not here: the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from loadtest.harness.result import Cell
from loadtest.report.pictures.style import MANY, NAMED
from loadtest.simulator.pictures import DOTS_PER_INCH, Row, finish_panel, number_of, panels_beside

BAR_SHARE = 0.8  # of the width of a group of bars
REJECTION_PANELS = (
    ("wasted_prefill_s", "wasted prefill, GPU s"), ("within_slo", "requests within both SLOs"),
    ("prefill_load_std", "swing of the prefill load"), ("rejected", "rejected, % of offered"),
)  # fmt: skip
DYNAMO_PANELS = (
    ("recorded", 1.0, "ttft_mean_ms", "mean TTFT at 1x, ms"),
    ("spread", 1.0, "ttft_mean_ms", "mean TTFT at 1x, ticks spread, ms"),
    ("recorded", 4.0, "good", "good requests at 4x"),
)


def save_scheduling(path: Path, rows: Sequence[Row]) -> None:
    """Mean TTFT of each policy, one panel a speed; a line where the paper has it."""
    columns = (("ttft_mean_s", "paper_ttft_s", "{}x as fast as recorded"),)
    figure, panels = bar_panels(rows, "speed", "policy", columns, 3.2)
    for panel in panels:
        panel.set_yscale("log")
    panels[0].set_ylabel("mean TTFT, s (lines: the paper)")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_rejection(path: Path, rows: Sequence[Row]) -> None:
    """Waste, goodput and rejections of each admission at the speed that was found; the paper's
    rejections as lines."""
    rows = [row for row in rows if row["speed"] == rows[-1]["speed"]]
    figure, panels = panels_beside(len(REJECTION_PANELS), 10.0)
    for panel, (column, title) in zip(panels, REJECTION_PANELS, strict=True):
        values = numbers(rows, column)
        paper: list[Cell] = [None for row in rows]
        if column == "rejected":
            shares = zip(values, rows, strict=True)
            values = [value * 100 / number_of(row, "offered") for value, row in shares]
            paper = [row["paper_rejected_percent"] for row in rows]
        draw_bars(panel, [str(row["admission"]) for row in rows], values, paper, ",.3g")
        finish_panel(panel, title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_dynamo_replay(path: Path, rows: Sequence[Row]) -> None:
    """Mean TTFT beside Dynamo's routers, and the requests served in overload."""
    figure, panels = panels_beside(len(DYNAMO_PANELS), 12.0, 4.6)
    for panel, (ticks, speed, column, title) in zip(panels, DYNAMO_PANELS, strict=True):
        of_load = [row for row in rows if row["ticks"] == ticks and row["speed"] == speed]
        names = list(dict.fromkeys(map(_scheduler, of_load)))
        sizes = sorted({number_of(row, "blocks") for row in of_load})
        height = BAR_SHARE / max(1, len(sizes))
        for row in of_load:  # a pair of bars for each scheduler: the small cache and the large one
            blocks, value = number_of(row, "blocks"), number_of(row, column)
            size = sizes.index(blocks)
            at = names.index(_scheduler(row)) + (size - (len(sizes) - 1) / 2) * height
            colour = NAMED["blue" if row["engine"] == "here" else "pale"]
            panel.barh(at, value, height * 0.92, color=colour, alpha=0.65 if size else 1.0)
            panel.text(value, at, f" {value:,.0f} ({blocks:,.0f} blocks)", va="center", fontsize=6)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_ssd(path: Path, rows: Sequence[Row]) -> None:
    """Hit rate and mean TTFT by the size of the DRAM, with and without an SSD behind it."""
    traces = values_of(rows, "trace")
    figure, panels = panels_beside(2 * len(traces), 6.4 * len(traces))
    columns = (("hit_percent", "prompt tokens cached, %"), ("ttft_mean_s", "mean TTFT, s"))
    for number, panel in enumerate(panels):
        trace, (column, title) = traces[number // 2], columns[number % 2]
        for label, has_ssd, colour in (("DRAM", False, MANY[0]), ("DRAM + SSD", True, MANY[1])):
            chosen = [
                row for row in rows if row["trace"] == trace and bool(row["ssd_blocks"]) == has_ssd
            ]
            draw_line(panel, chosen, "dram_blocks", column, colour, label)
            sizes = numbers(chosen, "dram_blocks")
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator(sizes))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        panel.set_ylim(0)
        panel.set_xlabel("blocks of DRAM a node")
        finish_panel(panel, f"{trace}: {title}", axis="both")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_scale(path: Path, rows: Sequence[Row]) -> None:
    """CPU milliseconds of a request by part, the time of a decision, and the requests' results."""
    figure, (cost, decision, served) = panels_beside(3, 11.0)
    workers = numbers(rows, "workers")
    names = [f"{count:,.0f}" for count in workers]
    parts = {
        column.removesuffix("_cpu_s"): [
            1e3 * number_of(row, column) / number_of(row, "requests") for row in rows
        ]
        for column in rows[0]
        if column.endswith("_cpu_s") and "per" not in column
    }
    draw_stacked(cost, names, parts)
    for column, colour in (("decision_mean_us", MANY[0]), ("decision_p99_us", MANY[1])):
        draw_line(decision, rows, "workers", column, colour, column.split("_")[1])
    for column, colour in (("within_slo_percent", MANY[0]), ("hit_percent", MANY[1])):
        draw_line(served, rows, "workers", column, colour, column.removesuffix("_percent"))
    decision.set_ylim(bottom=0)
    served.set_ylim(0, 102)
    for panel, title in (
        (cost, "CPU of a request, ms"),
        (decision, "one decision, µs"),
        (served, "requests within SLO, tokens found, %"),
    ):
        panel.set_xlabel("workers")
        panel.legend(frameon=False, fontsize=7)
        finish_panel(panel, title)
    for panel in (decision, served):
        panel.set_xscale("log")
        panel.set_xticks(workers, names)
        panel.xaxis.set_minor_locator(NullLocator())
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_roles(path: Path, rows: Sequence[Row]) -> None:
    """Share within both limits of every fixed split, beside the controller and the best oracle;
    and how many prefill workers the controller has over time."""
    figure, panels = panels_beside(2, 9.0)
    of = {
        name: [row for row in rows if row["system"] == name]
        for name in ("fixed", "controller", "oracle")
    }
    for column, label, colour in (
        ("within_percent", "fixed, both phases", MANY[0]),
        ("within_first_percent", "fixed, first phase", NAMED["muted"]),
        ("within_second_percent", "fixed, second phase", MANY[3]),
    ):
        draw_line(panels[0], of["fixed"], "prefills", column, colour, label)
    for name, colour in (("controller", MANY[1]), ("oracle", MANY[2])):
        best = max(numbers(of[name], "within_percent"))
        panels[0].axhline(best, color=colour, label=f"{name}: {best:.1f} %")
    panels[0].set_xlabel("prefill nodes of 16")
    panels[0].set_ylabel("requests within both limits, %")
    panels[0].legend(frameon=False, fontsize=7)
    finish_panel(panels[0], "two phases, TTFT <= 30 s, TBT <= 100 ms", axis="both")
    (ours,) = of["controller"]
    steps = [step.split(":") for step in str(ours["prefills_over_time"]).split()]
    panels[1].step(
        [float(at) for at, _ in steps],
        [int(count) for _, count in steps],
        where="post",
        color=MANY[1],
    )
    panels[1].set_xlabel("s since the first request")
    panels[1].set_ylim(0, 16)
    finish_panel(panels[1], "prefill workers under the controller", axis="both")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_cpp(path: Path, rows: Sequence[Row]) -> None:
    """Mean TTFT of long prompts and of all by mix, over that of nodes alone; lines: the goals."""
    columns = (
        ("long_of_baseline", "", "{}: over 64k tokens"),
        ("of_baseline", "", "{}: all prompts"),
    )
    figure, panels = bar_panels(rows, "policy", "mix", columns, 4.6)
    for number, panel in enumerate(panels):
        panel.axhline((0.6, 1.0)[number % 2], color=NAMED["ink"], linewidth=0.8, linestyle=":")
    panels[0].set_ylabel("mean TTFT / nodes alone (dotted: goal)")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def save_crowd(path: Path, rows: Sequence[Row]) -> None:
    """How the requests ended with each seed, and how late."""
    figure, (ends, late) = panels_beside(2, 8.0)
    names = [f"seed {row['seed']}" if number_of(row, "kills") else "nothing breaks" for row in rows]
    hung = [100 * number_of(row, "hung") / number_of(row, "requests") for row in rows]
    finished, typed = numbers(rows, "finished_percent"), numbers(rows, "typed_error_percent")
    draw_stacked(ends, names, {"finished": finished, "typed error": typed, "hung": hung})
    dynamo = [
        100 - 100 * number_of(row, "dynamo_hung") / number_of(row, "requests") for row in rows
    ]
    ends.plot(
        names, dynamo, "_", color=NAMED["ink"], markersize=24, label="ended in Dynamo's issue"
    )
    late.bar(names, numbers(rows, "late_most_s"), color=MANY[0])
    finish_panel(ends, "requests, %")
    finish_panel(late, "latest end after a client's timeout, s")
    for panel in (ends, late):
        panel.tick_params(axis="x", rotation=30, labelsize=8)
    ends.legend(frameon=False, fontsize=7, loc="lower right")
    figure.savefig(path, dpi=DOTS_PER_INCH)


SAVE = {
    "cpp": save_cpp,
    "crowd": save_crowd,
    "scale": save_scale,
    "roles": save_roles,
    "scheduling": save_scheduling,
    "rejection": save_rejection,
    "dynamo-replay": save_dynamo_replay,
    "ssd": save_ssd,
}


def _scheduler(row: Row) -> str:
    if row["engine"] == "here":
        return f"{row['policy']}, {row['passes']} passes"
    return f"Dynamo {row['policy']}"


def numbers(rows: Sequence[Row], column: str) -> list[float]:
    return [number_of(row, column) for row in rows]


def values_of(rows: Sequence[Row], column: str) -> list[str]:
    """The different values of a column as text, in order of appearance."""
    return list(dict.fromkeys(str(row[column]) for row in rows))


def bar_panels(
    rows: Sequence[Row],
    by: str,
    name: str,
    columns: Sequence[tuple[str, str, str]],
    width_in: float,
) -> tuple[Figure, Sequence[Axes]]:
    """A panel of bars for each value of `by` and each of `columns`: (column, the paper's column or
    "", title). `name`: column of the bars' names; `width_in`: of the panels of a value."""
    groups = list(dict.fromkeys(row[by] for row in rows))
    figure, panels = panels_beside(len(groups) * len(columns), width_in * len(groups))
    for number, panel in enumerate(panels):
        group, (column, paper, title) = (
            groups[number // len(columns)],
            columns[number % len(columns)],
        )
        chosen = [row for row in rows if row[by] == group and row[column] is not None]
        papers = [row[paper] if paper else None for row in chosen]
        draw_bars(panel, [str(row[name]) for row in chosen], numbers(chosen, column), papers, ".2f")
        finish_panel(panel, title.format(f"{group:g}" if isinstance(group, float) else group))
    return figure, panels


def draw_stacked(panel: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """A bar for each name, made of its value in each part."""
    below = [0.0] * len(names)
    for (label, values), colour in zip(parts.items(), MANY, strict=False):
        panel.bar(names, values, BAR_SHARE, below, color=colour, label=label)
        below = [one + value for one, value in zip(below, values, strict=True)]


def draw_line(
    panel: Axes,
    rows: Sequence[Row],
    across: str,
    column: str,
    colour: str,
    label: str,
    mark: str = "o-",
) -> None:
    xs, ys = numbers(rows, across), numbers(rows, column)
    panel.plot(xs, ys, mark, color=colour, markersize=4, label=label, markerfacecolor="none")


def draw_bars(
    panel: Axes, names: Sequence[str], values: Sequence[float], paper: Sequence[Cell], shown: str
) -> None:
    """A bar for each name with its value above it, and a line where the paper has one."""
    for number, value in enumerate(values):
        panel.bar(number, value, BAR_SHARE, color=MANY[number % len(MANY)])
        panel.text(number, value, f"{value:{shown}}", ha="center", va="bottom", fontsize=8)
        if (level := paper[number]) is not None:
            panel.hlines(float(level), number - 0.4, number + 0.4, color=NAMED["ink"])
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
