"""Many runs: their differing settings, the best run, and the Pareto front.

Runs of any kind in any mix. This module decides what is drawn; pictures/tradeoff.py draws it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.results.digest import RunDigest
from loadtest.results.numbers import setting_text
from loadtest.results.recording import Setting

LOAD = "offered_per_s"
# settings that give the size of a fleet, the most informative first
COSTS = ("gpus", "nodes", "workers")
GOODPUT, SHARE = "goodput_per_s", "goodput_share"
# Settings that follow from the load or the fleet's size, which have an axis of their own.
OF_LOAD = frozenset({"speed", "users", "spawn_rate", "requests_max", "planned", "cancelled"})
OF_COST = frozenset({*COSTS, "prefills", "decodes"})
OF_NOBODY = frozenset({"seed", "url", "metrics_url", "is_interrupted", "cancelled"})
LINES_MAX = 7
# share of requests within the limits; a run with less is overloaded, however much goodput it has
SHARE_LEAST = 0.9
SAME = 1.01  # loads within this ratio are one load


@dataclass(frozen=True, slots=True)
class RunPoint:
    number: int  # number of the run, from 1
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class RunLine:
    """Runs that differ only in the value of the axis, ascending."""

    label: str
    points: tuple[RunPoint, ...]


def different(runs: Sequence[RunDigest]) -> dict[str, list[Setting]]:
    """Each setting that differs between runs, with its value in each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    columns = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in columns.items()
        if any(_is_other(value, values[0]) for value in values)
    }


def _is_other(a: Setting, b: Setting) -> bool:
    """2 and 2.0 are one value, True and 1 are two."""
    return a != b or isinstance(a, bool) != isinstance(b, bool)


def same(runs: Sequence[RunDigest]) -> dict[str, Setting]:
    varied = different(runs)
    return {name: value for name, value in runs[0].settings.items() if name not in varied}


def value_of(run: RunDigest, name: str) -> float | None:
    """A number of the run, or a numeric setting; None where it has neither."""
    value = run.numbers[name] if name in run.numbers else run.settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def cost_of(runs: Sequence[RunDigest]) -> str | None:
    """The setting of a run's cost; None when it varies nowhere or a run with goodput lacks it."""
    return next((name for name, silent in _varied_costs(runs).items() if not silent), None)


def _varied_costs(runs: Sequence[RunDigest]) -> dict[str, int]:
    """Costs that differ between the runs with a service level (all runs, if none has one), the most
    informative first, and the number of runs that lack each."""
    judged = [run for run in runs if value_of(run, SHARE) is not None] or runs
    found = {}
    for name in COSTS:
        known = [cost for run in judged if (cost := value_of(run, name))]
        if len(set(known)) > 1:
            found[name] = len(judged) - len(known)
    return found


def has_several_loads(runs: Sequence[RunDigest]) -> bool:
    loads = [load for run in runs if (load := value_of(run, LOAD)) is not None]
    return bool(loads) and max(loads) > SAME * min(loads)


def lines(runs: Sequence[RunDigest], x: str, y: str) -> list[RunLine]:
    """Runs as points, in lines whose runs differ only in `x`. A run without one of the two numbers
    is left out. With too many lines, all points are in one without a name."""
    groups: dict[tuple[str, ...], list[RunPoint]] = {}
    names = _lines_by(runs, x)
    for number, run in enumerate(runs, 1):
        across, up = value_of(run, x), value_of(run, y)
        if across is not None and up is not None:
            key = tuple(f"{name} {setting_text(run.settings.get(name))}" for name in names)
            groups.setdefault(key, []).append(RunPoint(number, across, up))
    if len(groups) > LINES_MAX:
        groups = {(): [point for points in groups.values() for point in points]}
    return [
        RunLine(", ".join(key), tuple(sorted(points, key=lambda point: (point.x, point.number))))
        for key, points in groups.items()
    ]


def _lines_by(runs: Sequence[RunDigest], x: str) -> list[str]:
    """Settings that distinguish lines: those that differ, without those of the axis."""
    left_out = OF_NOBODY | {x}
    if x == LOAD:
        left_out |= OF_LOAD
    if x in COSTS:
        left_out |= OF_COST
    if value_of(runs[0], x) is not None and x in runs[0].numbers and x != LOAD:
        left_out |= OF_LOAD  # the load determines this number
    found = [name for name in different(runs) if name not in left_out]
    return [
        n for n in found if len({setting_text(run.settings.get(n)) for run in runs}) < len(runs)
    ]


def pareto(points: Sequence[RunPoint], less_x: bool, less_y: bool) -> list[RunPoint]:
    """The Pareto front: points with no other point that is as good in both numbers and better in
    one. Ascending in x. `less_x`, `less_y`: smaller is better. Equal points all stay."""
    sign_x, sign_y = (1 if less_x else -1), (1 if less_y else -1)
    ordered = sorted(points, key=lambda point: (sign_x * point.x, sign_y * point.y, point.number))
    kept: list[RunPoint] = []
    for point in ordered:
        last = kept[-1] if kept else None
        if (
            last is None
            or sign_y * point.y < sign_y * last.y
            or (point.x, point.y) == (last.x, last.y)
        ):
            kept.append(point)
    return sorted(kept, key=lambda point: (point.x, point.number))


def best_of(runs: Sequence[RunDigest], share: float = SHARE_LEAST) -> int | None:
    """The number of the run with the most goodput, divided by its cost if that is known, among the
    runs that serve this share within their limits (all, if none does); None without goodput."""
    cost = cost_of(runs)
    found: list[tuple[bool, float, float, int]] = []
    for number, run in enumerate(runs, 1):
        good = value_of(run, GOODPUT)
        size = value_of(run, cost) if cost else 1.0
        if good and size:
            ttft_s = value_of(run, "ttft_p90_s")
            is_enough = (value_of(run, SHARE) or 0.0) >= share
            lateness_s = ttft_s if ttft_s is not None else math.inf
            found.append((is_enough, good / size, -lateness_s, -number))
    return -max(found)[3] if found else None


def best_text(runs: Sequence[RunDigest], share: float = SHARE_LEAST) -> str:
    best = best_of(runs, share)
    if best is None:
        return "best: none, because no run has goodput"
    run, cost = runs[best - 1], cost_of(runs)
    what = (
        f"most goodput a second and {cost.removesuffix('s')}" if cost else "most goodput a second"
    )
    if (value_of(run, SHARE) or 0.0) >= share:
        among = f"of the runs that serve {share:.0%} within their limits"
    else:
        among = f"of all, as none serves {share:.0%} within its limits"
    return f"best: run {best} ({run.label}), the {what} {among}"


def pareto_runs(runs: Sequence[RunDigest]) -> set[int]:
    """Runs on the Pareto front of goodput and cost; without a cost, of answers and TTFT."""
    cost = cost_of(runs)
    x, y = (cost, GOODPUT) if cost else ("requests_per_s", "ttft_p90_s")
    points = [point for line in lines(runs, x, y) for point in line.points]
    is_cost = cost is not None
    return {point.number for point in pareto(points, less_x=is_cost, less_y=not is_cost)}


def warnings_of(runs: Sequence[RunDigest]) -> list[str]:
    """Reasons why the runs may not be comparable."""
    found = []
    unjudged = sum(value_of(run, SHARE) is None for run in runs)
    if unjudged == len(runs):
        found.append(
            "No run has a service level, so no goodput: give --slo-ttft-s and --slo-tbt-s to judge "
            "them all by the same."
        )
    elif unjudged:
        found.append(f"{unjudged} of {len(runs)} runs have no service level, hence no goodput.")
    costs = _varied_costs(runs)
    if costs and all(costs.values()):
        name, silent = next(iter(costs.items()))
        found.append(
            f"{silent} of {len(runs)} runs do not report their {name}, so all are compared without "
            "their cost."
        )
    levels = {(run.slo, run.is_mixed) for run in runs if value_of(run, SHARE) is not None}
    if len({(slo.ttft_s, slo.tbt_s) if slo else None for slo, _ in levels}) > 1:
        found.append(
            "The runs are judged by different service levels: --slo-ttft-s and --slo-tbt-s judge "
            "them all by the same."
        )
    if empty := sum(run.numbers.get("requests") == 0 for run in runs):
        found.append(f"{empty} of {len(runs)} runs have no request and are in no picture.")
    unanswered = sum(
        run.numbers.get("answered") == 0 and bool(run.numbers.get("requests")) for run in runs
    )
    if unanswered:
        found.append(
            f"{unanswered} of {len(runs)} runs have no answer: they have no TTFT, and appear only "
            "where goodput is shown."
        )
    traces = {str(run.settings["trace"]) for run in runs if run.settings.get("trace")}
    if len(traces) > 1:
        found.append(f"Not the same requests were sent: {', '.join(sorted(traces)[:5])}.")
    return found
