"""A plan as one HTML page: the choice, what it was weighed against, and every run.

Not here: how pictures look (report/pictures/style.py), what is run (search.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from loadtest.harness.result import Result, shown
from loadtest.planner.fleet_run import FleetRun, ServiceLevels
from loadtest.planner.search import Search
from loadtest.report.page import PageTable, ReportPage, Section, write_page
from loadtest.report.pictures.style import (
    NAMED,
    Picture,
    count_axis,
    drawn,
    legend,
    not_measured,
    percent_axis,
)

NOT_REAL = (
    "The real conductor, directory and batching on a virtual clock; models for the seconds of GPUs "
    "and networks."
)
OUTCOMES = {
    "within both": ("within", NAMED["green"]),
    "first token late": ("late", NAMED["orange"]),
    "tokens slow": ("slow", NAMED["pink"]),
    "turned away": ("unanswered", NAMED["slate"]),
}


@dataclass(frozen=True, slots=True)
class PlanPage:
    """What is on it."""

    search: Search
    chosen: FleetRun
    levels: ServiceLevels
    result: Result
    why: str  # it was chosen
    command: str  # that serves it


def write_plan(plan: PlanPage, path: Path) -> None:
    """OSError when `path` cannot be written."""
    rows = plan.result.rows
    pictures = [
        sizes(plan.search, plan.chosen), splits(plan.search, plan.chosen),
        caches(plan.search, plan.chosen),
    ]  # fmt: skip
    chosen = [number for number, row in enumerate(rows) if row["is_chosen"]]
    cells = [[shown(cell) for cell in row.values()] for row in rows]
    table = PageTable(list(rows[0]), cells, marked=chosen, is_dense=True)
    write_page(
        ReportPage(
            "Plan", [Section("", pictures), Section("Every run", tables=[table])],
            lead=[plan.why, NOT_REAL], command=plan.command, settings=plan.result.constants,
            settings_heading="What was assumed",
        ),
        path,
    )  # fmt: skip


def sizes(search: Search, chosen: FleetRun) -> Picture:
    """Goodput of the best fleet of each size, of all of it and a node."""
    best = [search.best_of(nodes) for nodes in search.sizes()]
    offered = chosen.offered / chosen.arrivals_s

    def draw(figure: Figure) -> None:
        whole, a_node = figure.subplots(1, 2)
        for axes, values, title in (
            (whole, [run.goodput for run in best], "requests within both limits per second"),
            (a_node, [run.goodput_per_node for run in best], "per second and node"),
        ):
            axes.plot([run.plan.nodes for run in best], values, "o-", color=NAMED["blue"])
            count_axis(axes.xaxis)
            axes.set_ylim(0.0, 1.08 * max([*values, 1e-9]))
            axes.set_xlabel("nodes")
            axes.set_title(title, fontsize=9)
            axes.axvline(chosen.plan.nodes, color=NAMED["vermilion"], linewidth=1.0)
        whole.axhline(offered, color=NAMED["muted"], linestyle=":", label="offered")
        whole.set_ylim(0.0, 1.08 * offered)

    alt = ", ".join(f"{run.plan.nodes} nodes {run.goodput:.3g} per second" for run in best)
    return drawn(
        "Size of the fleet",
        "The best split of each size that was run; dotted: what is offered; red: the choice.",
        alt, draw,
    )  # fmt: skip


def splits(search: Search, chosen: FleetRun) -> Picture:
    """What became of the requests in each split of the chosen size."""
    title = f"Splits of {chosen.plan.nodes} nodes"
    found = {
        run.plan.prefills: run
        for stage in ("grid", "refine") for run in search.stages.get(stage, ())
        if run.plan.nodes == chosen.plan.nodes
    }  # fmt: skip
    runs = {run.plan.name: run for _, run in sorted(found.items())}
    return _outcomes(title, runs, "Requests by what became of them.")


def caches(search: Search, chosen: FleetRun) -> Picture:
    """The same for each size of the cache, and the hit rate."""
    title = "Cache of a node"
    best = search.best()
    found = {
        run.plan.node_blocks: run for run in search.runs()
        if (run.plan.prefills, run.plan.decodes) == (best.plan.prefills, best.plan.decodes)
        and (run.plan.policy, run.plan.admission) == (best.plan.policy, best.plan.admission)
    }  # fmt: skip
    runs = {
        f"{blocks:,} blocks\n{run.hit_share:.0%} cached": run
        for blocks, run in sorted(found.items())
    }
    return _outcomes(title, runs, "The chosen fleet with less DRAM; cached: of prompt tokens.")


def _outcomes(title: str, runs: Mapping[str, FleetRun], caption: str) -> Picture:
    if not runs:
        return not_measured(title, "no such fleet was run.")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        below = [0.0] * len(runs)
        for name, (field, colour) in OUTCOMES.items():
            shares = [getattr(run, field) / run.offered for run in runs.values()]
            axes.bar(range(len(runs)), shares, 0.7, bottom=below, color=colour, label=name)
            below = [low + share for low, share in zip(below, shares, strict=True)]
        axes.set_xticks(range(len(runs)), list(runs), fontsize=8)
        percent_axis(axes)
        legend(axes, columns=len(OUTCOMES))

    alt = ", ".join(f"{name}: {run.share:.1%} within" for name, run in runs.items())
    return drawn(title, caption, alt.replace("\n", " "), draw)


def rows_of(search: Search, chosen: FleetRun) -> Sequence[dict[str, str | int | float | bool]]:
    """Every run, in the order of the stages."""
    rows: list[dict[str, str | int | float | bool]] = []
    for stage, runs in search.stages.items():
        for run in runs:
            plan = run.plan
            rows.append({
                "stage": stage,
                "nodes": plan.nodes,
                "prefills": plan.prefills,
                "decodes": plan.decodes,
                "node_blocks": plan.node_blocks,
                "policy": plan.policy,
                "admission": plan.admission,
                "within_percent": round(100 * run.share, 2),
                "goodput_per_s": round(run.goodput, 4),
                "goodput_per_s_and_node": round(run.goodput_per_node, 4),
                "late": run.late,
                "slow": run.slow,
                "unanswered": run.unanswered,
                "ttft_p90_s": round(run.ttft_p90_s, 4),
                "tbt_p90_s": round(run.tbt_p90_s, 5),
                "hit_percent": round(100 * run.hit_share, 2),
                "prefill_busy_percent": round(100 * run.prefill_busy, 1),
                "decode_busy_percent": round(100 * run.decode_busy, 1),
                "is_chosen": run is chosen,
            })  # fmt: skip
    return rows
