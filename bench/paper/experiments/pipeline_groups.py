"""Are long prompts served sooner by prefill nodes that share the layers? FAST'25, 3.3: CPP.

The conversation trace runs at recorded speed on 8 + 8 nodes, the same GPUs in every row. All eight
prefill nodes are alone (the baseline), or some of them are in groups of 2, 4 or 8. In a group,
different chunks of a prompt are on different nodes at a time. The Conductor chooses between a group
and a node alone by the predicted time to the first token, as between any two workers. The paper has
no figure of it.

A group's cache is the DRAM of its first node, because the others hold no whole blocks. So with more
groups less of a prompt is cached, which is included. Rows "DRAM of all" give the first node the
DRAM of the whole group; they have no target.

The target is for the mix of nodes alone and groups of 2 that is best for prompts of more than 64k
tokens without raising the mean of all. The mean TTFT of those prompts is at most 0.6 of the
baseline's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.paper import constants
from bench.paper.experiments.scheduling import config_for
from bench.paper.figures.served import POLICY
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE = "conversation"
LONG_TOKENS = 64 * 1_024
OURS = "adaptive"
# (groups, nodes in each); the other nodes are alone. The first is the baseline.
ALONE = (0, 2)
PAIRS = ((1, 2), (2, 2), (3, 2), (4, 2))
MIXES = {POLICY: (ALONE, *PAIRS, (1, 4), (2, 4), (1, 8)), OURS: (ALONE, (2, 2), (4, 2))}
POOLED = {POLICY: ((3, 2), (4, 2)), OURS: ()}  # the cache of a group is the DRAM of all its nodes
LONG_MAX, ALL_MAX = 0.6, 1.0  # mean TTFT over that of the baseline


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    policy: str
    config: ConductorConfig
    shape: ClusterSettings

    @property
    def mix(self) -> tuple[int, int]:
        return self.shape.pipeline_groups, self.shape.pipeline_stages

    @property
    def is_pooled(self) -> bool:
        return bool(self.shape.pipeline_home_blocks)

    @property
    def name(self) -> str:
        groups, stages = self.mix
        alone = self.shape.prefills - groups * stages
        parts = [f"{groups} x {stages}"] * bool(groups) + [f"{alone} alone"] * bool(alone)
        return " + ".join(parts) + ", DRAM of all" * self.is_pooled


@dataclass(frozen=True, slots=True)
class PipelineRun:
    plan: PipelinePlan
    ttft_mean_s: float
    ttft_p90_s: float
    ttft_long_mean_s: float
    ttft_others_mean_s: float
    long_prompts: int
    hit_share: float
    hit_share_long: float
    in_groups: float  # share of all prompts
    long_in_groups: float  # share of the long ones
    prefill_busy: float  # of all prefill nodes
    ttft_error: float  # |predicted - actual| / actual, mean of the last requests


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every mix, the baseline first."""
    trace, why_not = options.promised(TRACE)
    policies = options.one_of(options.policies, tuple(MIXES), "policy")
    planned = []
    for policy in policies:
        config = options.changed(config_for(policy))
        mixes = [(mix, False) for mix in MIXES[policy]] + [(mix, True) for mix in POOLED[policy]]
        for (groups, stages), is_pooled in mixes:
            shape = options.settings()
            if groups * stages > shape.prefills:
                continue
            shape = replace(
                shape,
                pipeline_groups=groups,
                pipeline_stages=stages,
                pipeline_home_blocks=stages * shape.node_blocks if is_pooled else 0,
            )
            plan = PipelinePlan(policy, config, shape)
            name = f"{policy}, {plan.name}"
            planned.append(PlannedRun(name, options.source(trace), run, (plan,)))
    runs = run_all(planned, begin, options.jobs, options.kept)
    return rows_of(runs), targets_of(runs, why_not)


def run(
    offered: Sequence[Offered], plan: PipelinePlan, on_over: Callable[[], None] = lambda: None
) -> PipelineRun:
    fleet = SimulatedFleet(plan.config, plan.shape, Roofline())
    jobs = fleet.run(offered, constants.REPLAY_SPEED, on_over)
    ttfts_s = np.array([job.ttft_s for job in jobs])
    tokens = np.array([job.prompt_tokens for job in jobs])
    cached = np.array([job.cached_tokens for job in jobs])
    called = {stage.home for stage in fleet.stages.values()}
    in_group = np.array(
        [job.route is not None and job.route.prefill.node_id in called for job in jobs]
    )
    is_long = tokens > LONG_TOKENS
    nodes = [*fleet.prefills.values(), *fleet.stages.values()]
    return PipelineRun(
        plan=plan,
        ttft_mean_s=_mean(ttfts_s),
        ttft_p90_s=float(np.percentile(ttfts_s, 90)),
        ttft_long_mean_s=_mean(ttfts_s[is_long]),
        ttft_others_mean_s=_mean(ttfts_s[~is_long]),
        long_prompts=int(is_long.sum()),
        hit_share=float(cached.sum() / tokens.sum()),
        hit_share_long=float(cached[is_long].sum() / max(1, tokens[is_long].sum())),
        in_groups=_mean(in_group),
        long_in_groups=_mean(in_group[is_long]),
        prefill_busy=sum(node.busy_s for node in nodes) / len(nodes) / fleet.clock.now_s,
        ttft_error=fleet.conductor.stats().ttft_error,
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def baseline_of(runs: Sequence[PipelineRun], policy: str) -> PipelineRun:
    return next(r for r in runs if (r.plan.policy, r.plan.mix) == (policy, ALONE))


def best_of(runs: Sequence[PipelineRun]) -> PipelineRun | None:
    """The best mix with groups of 2 for long prompts, among those that do not raise the mean of all
    prompts if there are any."""
    pairs = [
        one
        for one in runs
        if one.plan.policy == POLICY and one.plan.mix in PAIRS and not one.plan.is_pooled
    ]
    whole_s = baseline_of(runs, POLICY).ttft_mean_s if pairs else 0.0
    fair = [r for r in pairs if r.ttft_mean_s <= ALL_MAX * whole_s]
    return min(fair or pairs, key=lambda r: r.ttft_long_mean_s, default=None)


def rows_of(runs: Sequence[PipelineRun]) -> Rows:
    best = best_of(runs)
    rows: Rows = []
    for one in runs:
        base = baseline_of(runs, one.plan.policy)
        groups, stages = one.plan.mix
        rows.append(
            {
                "policy": one.plan.policy,
                "mix": one.plan.name,
                "groups": groups,
                "stages": stages if groups else 1,
                "is_best_of_pairs": one is best,
                "ttft_mean_s": round(one.ttft_mean_s, 3),
                "ttft_p90_s": round(one.ttft_p90_s, 3),
                "of_baseline": _ratio(one.ttft_mean_s, base.ttft_mean_s),
                "long_prompts": one.long_prompts,
                "ttft_long_mean_s": round(one.ttft_long_mean_s, 3),
                "long_of_baseline": _ratio(one.ttft_long_mean_s, base.ttft_long_mean_s),
                "others_of_baseline": _ratio(one.ttft_others_mean_s, base.ttft_others_mean_s),
                "in_groups_percent": round(100 * one.in_groups, 1),
                "long_in_groups_percent": round(100 * one.long_in_groups, 1),
                "hit_percent": round(100 * one.hit_share, 2),
                "hit_long_percent": round(100 * one.hit_share_long, 2),
                "prefill_busy_percent": round(100 * one.prefill_busy, 1),
                "ttft_error_percent": round(100 * one.ttft_error, 1),
            }
        )
    return rows


def _ratio(value_s: float, base_s: float) -> float | None:
    return round(value_s / base_s, 4) if base_s else None


def targets_of(runs: Sequence[PipelineRun], why_not: str = "") -> list[Target]:
    best = None if why_not else best_of(runs)
    base = baseline_of(runs, POLICY) if best is not None else None
    targets = []
    for what, goal, number in (
        ("prompts over 64k tokens", LONG_MAX, lambda r: r.ttft_long_mean_s),
        ("all prompts", ALL_MAX, lambda r: r.ttft_mean_s),
    ):
        value = _ratio(number(best), number(base)) if best and base else None
        which = f"{best.plan.name} / 8 alone" if best else "groups of 2 / 8 alone"
        name = f"{POLICY}, {which}: mean TTFT of {what}"
        missing = "" if best else why_not or "this policy was not run"
        targets.append(Target(name, value, "<=", goal, missing))
    return targets
