"""Which fleets are worth a run: a grid first, then its best part, then cache and conductor.

    bounds     the least prefill and decode workers: the work of prompts after an unlimited cache;
               the largest batch within the TBT limit
    grid       fleets of growing size, each in the splits next to the ratio of the bounds, until one
               serves the required share (with a number of nodes: every other split of it)
    refine     sizes between the last that did not and the first that did; splits next to the best
    cache      the best fleet with half the DRAM, a quarter, ... until goodput falls
    conductor  the same with other policies and admissions

Without a number of nodes the smallest fleet that serves the share within both limits is chosen. If
none does, or if the number of nodes is given, the most goodput is chosen. Each stage runs a batch,
so that `--jobs` can run it in parallel. Nothing is run twice (simulator/runs.py).

Not here: a run (fleet_run.py), writing the choice (overlay.py, command.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loadtest.planner.engine import PlannedEngine, PlanRefused
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels, arrivals_s_of
from loadtest.simulator.cluster.gpu import GpuModel, prompt_s
from loadtest.simulator.cluster.job import Offered

NODES_MAX = 64  # largest fleet of the grid
GROWTH = 1.4  # from one size of the grid to the next
SPLITS_OF_NODES = 9  # of a given number of nodes, in the grid
NEARLY = 0.99  # of the best goodput: a cache that serves this share of it is good enough
BETTER = 1.01  # factor by which another conductor must exceed the shipped settings
CACHE_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
CONDUCTORS = (
    ("adaptive", "none"),
    ("kvcache_centric", "predictive_lengths"),
    ("kvcache_centric", "none"),
)

Run = Callable[[Sequence[FleetPlan]], Sequence[FleetRun]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Workers that the traffic keeps busy in any case, and the time of a request alone."""

    prefills: float
    decodes: float
    ttft_p50_s: float
    ttft_share_s: float  # the required share of prompts takes at most this on an idle worker
    tbt_s: float


@dataclass(slots=True)
class Search:
    """All runs so far, by stage; `best` is the choice among them."""

    share: float  # required share of requests within both limits
    has_nodes: bool  # the number of nodes is given: goodput alone decides
    stages: dict[str, list[FleetRun]] = field(default_factory=dict)

    def runs(self) -> list[FleetRun]:
        return [run for runs in self.stages.values() for run in runs]

    def plans(self) -> set[FleetPlan]:
        return {run.plan for run in self.runs()}

    def best(self) -> FleetRun:
        enough = [run for run in self.runs() if run.share >= self.share]
        if enough and not self.has_nodes:
            fewest = min(run.plan.nodes for run in enough)
            return max((run for run in enough if run.plan.nodes == fewest), key=_goodput)
        return max(self.runs(), key=_goodput)

    def best_of(self, nodes: int) -> FleetRun:
        return max((run for run in self.runs() if run.plan.nodes == nodes), key=_goodput)

    def sizes(self) -> list[int]:
        return sorted({run.plan.nodes for run in self.runs()})

    def add(self, stage: str, plans: Iterable[FleetPlan], run: Run) -> None:
        known = self.plans()
        new = [plan for plan in dict.fromkeys(plans) if plan not in known]
        if new:
            self.stages.setdefault(stage, []).extend(run(new))


def bounds_of(
    offered: Sequence[Offered],
    engine: PlannedEngine,
    levels: ServiceLevels,
    speed: float,
    share: float,
) -> Bounds:
    """PlanRefused if requests cannot be within the limits even alone."""
    gpu, settings = engine.gpu(), engine.settings()
    prompts_s = prompts_alone_s(offered, gpu, settings.block_tokens, settings.chunk_tokens)
    alone_s = np.array(prompts_s) + settings.serving_s
    contexts = np.array([one.prompt_tokens + one.output_tokens for one in offered], np.float64)
    context = float(contexts.mean())
    tbt_s = gpu.decode_s(1, context)
    arrivals_s = arrivals_s_of(offered, speed)
    p50_s, share_s = (float(s) for s in np.quantile(alone_s, (0.5, share)))
    if share_s > levels.ttft_s:
        raise PlanRefused(
            f"--slo-ttft {levels.ttft_s:g} is below the unloaded time: alone on {engine.name}, "
            f"{share:.0%} of the prompts take up to {share_s:.3g} s (half of them {p50_s:.3g} s, "
            f"the longest {alone_s.max():.3g} s), what earlier prompts left in the cache taken off"
        )
    if tbt_s > levels.tbt_s:
        raise PlanRefused(
            f"--slo-tbt {levels.tbt_s:g} is below the unloaded time: a decode step of one sequence "
            f"with {context:,.0f} tokens takes {tbt_s:.3g} s on {engine.name}"
        )
    tokens_max = gpu.pages_bytes // gpu.token_bytes
    if contexts.max() > tokens_max:
        raise PlanRefused(
            f"the longest request has {contexts.max():,.0f} tokens, and beside its weights "
            f"{engine.name} has room for {tokens_max:,} tokens of KV"
        )
    batch = largest_batch(gpu, context, levels.tbt_s, settings.decode_slots)
    tokens_per_s = sum(one.output_tokens - 1 for one in offered) / arrivals_s
    return Bounds(
        sum(prompts_s) / arrivals_s, tokens_per_s * levels.tbt_s / batch, p50_s, share_s, tbt_s
    )


def prompts_alone_s(
    offered: Sequence[Offered], gpu: GpuModel, block_tokens: int, chunk_tokens: int
) -> list[float]:
    """Seconds of each prompt on an idle worker, after the hits of an unlimited cache."""
    seen: set[bytes] = set()
    found = []
    for one in offered:
        hits = next((n for n, key in enumerate(one.keys) if key not in seen), len(one.keys))
        seen.update(one.keys)
        cached = min(hits * block_tokens, one.prompt_tokens - 1)
        found.append(prompt_s(gpu, cached, one.prompt_tokens, chunk_tokens))
    return found


def largest_batch(gpu: GpuModel, context: float, tbt_slo_s: float, slots: int) -> int:
    """The largest batch whose step is within the limit and that fits in memory; at least 1."""
    room = int(gpu.pages_bytes / gpu.token_bytes / context)
    most = max(1, min(slots, room))
    while most > 1 and gpu.decode_s(most, most * context) > tbt_slo_s:
        most -= 1
    return most


def explore(
    engine: PlannedEngine, bounds: Bounds, share: float, nodes: int | None, run: Run
) -> Search:
    search = Search(share, nodes is not None)
    blocks = engine.node_blocks_max
    if nodes is None:
        _grow(search, bounds, blocks, run)
        _bisect(search, bounds, blocks, run)
    else:
        step = max(1, round((nodes - 1) / SPLITS_OF_NODES))
        splits = {*range(1, nodes, step), nodes - 1}
        search.add("grid", (FleetPlan(p, nodes - p, blocks) for p in sorted(splits)), run)
    _refine_split(search, run)
    best = search.best()
    for cache_share in CACHE_SHARES[1:]:
        smaller = replace(best.plan, node_blocks=max(1, int(blocks * cache_share)))
        search.add("cache", [smaller], run)
        if _run_of(search, smaller).goodput < NEARLY * best.goodput:
            break
    return search


def choose(search: Search, run: Run) -> FleetRun:
    """The best fleet, with the smallest cache that is as good, and the best conductor for it."""
    best = search.best()
    cached = [
        each
        for each in search.stages.get("cache", ())
        if each.goodput >= NEARLY * best.goodput
        and (each.share >= search.share) == (best.share >= search.share)
    ]
    chosen = min(cached, key=lambda each: each.plan.node_blocks, default=best)
    others = [replace(chosen.plan, policy=p, admission=a) for p, a in CONDUCTORS]
    search.add("conductor", others, run)
    other = max((_run_of(search, plan) for plan in others), key=_goodput)
    return other if other.goodput > BETTER * chosen.goodput else chosen


def splits_of(nodes: int, bounds: Bounds) -> list[int]:
    """Numbers of prefill workers: the split in the ratio of the bounds, and its neighbours."""
    middle = round(nodes * bounds.prefills / max(1e-9, bounds.prefills + bounds.decodes))
    middle = min(max(middle, 1), nodes - 1)
    return [p for p in (middle - 1, middle, middle + 1) if 1 <= p < nodes]


def _grow(search: Search, bounds: Bounds, blocks: int, run: Run) -> None:
    """Fleets of growing size, from the least that the work needs, until one serves the share."""
    nodes = max(2, math.ceil(search.share * (bounds.prefills + bounds.decodes)))
    if nodes > NODES_MAX:
        raise PlanRefused(
            f"at least {nodes} nodes have to be busy all the time ({bounds.prefills:.1f} with "
            f"prefill, {bounds.decodes:.1f} with decode), and plans end at {NODES_MAX}: replay it "
            "more slowly (--speed), or a part of it (--requests)"
        )
    while True:
        plans = [FleetPlan(p, nodes - p, blocks) for p in splits_of(nodes, bounds)]
        search.add("grid", plans, run)
        if search.best_of(nodes).share >= search.share or nodes == NODES_MAX:
            return
        nodes = min(NODES_MAX, max(nodes + 1, round(nodes * GROWTH)))


def _bisect(search: Search, bounds: Bounds, blocks: int, run: Run) -> None:
    """Bisect between the largest insufficient and the smallest sufficient size."""
    while True:
        enough = [n for n in search.sizes() if search.best_of(n).share >= search.share]
        if not enough:
            return
        below = max((n for n in search.sizes() if n < enough[0]), default=1)
        nodes = (below + enough[0]) // 2
        if nodes in (below, enough[0]):
            return
        near = search.best_of(enough[0]).plan
        middle = round(nodes * near.prefills / near.nodes)
        around = {*splits_of(nodes, bounds), *range(middle - 1, middle + 2)}
        plans = [FleetPlan(p, nodes - p, blocks) for p in sorted(around) if 1 <= p < nodes]
        search.add("refine", plans, run)


def _refine_split(search: Search, run: Run) -> None:
    """Try neighbours of the best split until none is better."""
    while True:
        best = search.best()
        plan, before = best.plan, len(search.runs())
        beside = [
            replace(plan, prefills=p, decodes=plan.nodes - p)
            for p in (plan.prefills - 1, plan.prefills + 1)
            if 1 <= p < plan.nodes
        ]
        search.add("refine", beside, run)
        if search.best() is best or len(search.runs()) == before:
            return


def _run_of(search: Search, plan: FleetPlan) -> FleetRun:
    return next(run for run in search.runs() if run.plan == plan)


def _goodput(run: FleetRun) -> float:
    return run.goodput


def rows_of(search: Search, chosen: FleetRun) -> Sequence[dict[str, str | int | float | bool]]:
    rows: list[dict[str, str | int | float | bool]] = []
    for stage, runs in search.stages.items():
        for run in runs:
            plan = run.plan
            rows.append(
                {
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
                }
            )
    return rows
