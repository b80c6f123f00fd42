"""Which prefill policy gives the least time to the first token? The paper's Figure 5, and ours.

The conversation trace runs with its recorded timestamps (and faster) on 8 prefill and 8 decode
nodes of 8x A800 with LLaMA3-70B, nothing rejected. The paper's four policies serve each prefill
queue in order of arrival, as the paper does. `adaptive` serves short work first, with ageing,
because its formula assumes that queue. Rows differ in nothing else.

Not here: the policies (conductor/routing/policies.py), the cluster (cluster/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

POLICIES = ("random", "load_balance", "cache_aware", "kvcache_centric", "adaptive")
SPEEDS = (1.0, 1.5, 2.0)
PAPER_TTFT_S = {  # FAST'25, Figure 5: speed 1
    "random": 19.65,
    "load_balance": 5.27,
    "cache_aware": 3.58,
    "kvcache_centric": 3.07,
}
CENTRIC_OF_AWARE = {1.0: 0.91, 1.5: 0.86}
ADAPTIVE_OF_CENTRIC = {1.0: 0.96, 1.5: 0.92, 2.0: 0.6}
P99_RATIO_MAX = 1.1
STRICTLY_LESS = 0.999
TRACE = "conversation"

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SchedulingRun:
    policy: str
    speed: float
    queue_order: str
    outcome: SimulationOutcome
    prefill_busy: float  # share of the time, mean of the workers
    ttft_error: float  # |predicted - actual| / actual, mean of the last requests


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    policies = options.one_of(options.policies, POLICIES, "policy")
    settings = options.settings()
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)
    planned = [
        PlannedRun(
            f"{policy} {speed:g}x", source, run, (policy, speed, settings, options.only_changes)
        )
        for speed in options.speeds or SPEEDS
        for policy in policies
    ]
    runs = run_all(planned, begin, options.jobs, options.kept)
    return rows_of(runs), targets_of(runs, why_not)


def config_for(policy: str) -> ConductorConfig:
    """The conductor's settings; the same for every row except the policy and its queue order."""
    return ConductorConfig(
        policy=policy,
        queue_order="shortest_first" if policy == "adaptive" else "fifo",
        admission="none",
        advisory=True,  # nothing is rejected, not even for a full decode pool: the queue shows it
        ttft_slo_s=30.0,
        tbt_slo_s=1.0,
        decode_s_expected=30.0,  # a first guess; measured from then on
    )


def run(
    offered: Sequence[Offered],
    policy: str,
    speed: float,
    settings: ClusterSettings,
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> SchedulingRun:
    config = options.changed(config_for(policy))
    fleet = SimulatedFleet(config, settings, settings.gpu())
    outcome = outcome_of(fleet.run(offered, speed, on_over))
    busy = [node.busy_s / fleet.clock.now_s for node in fleet.prefills.values()]
    error = fleet.conductor.stats().ttft_error
    return SchedulingRun(policy, speed, config.queue_order, outcome, sum(busy) / len(busy), error)


def rows_of(runs: Sequence[SchedulingRun]) -> Rows:
    means = {(run.policy, run.speed): run.outcome.ttft_s.mean for run in runs}
    rows: Rows = []
    for run in runs:
        ttft, outcome = run.outcome.ttft_s, run.outcome
        centric_s = means.get(("kvcache_centric", run.speed))
        paper_s = PAPER_TTFT_S.get(run.policy) if run.speed == 1.0 else None
        rows.append(
            {
                "policy": run.policy,
                "queue": run.queue_order,
                "speed": run.speed,
                "finished": outcome.finished,
                "ttft_mean_s": round(ttft.mean, 3),
                "ttft_p50_s": round(ttft.p50, 3),
                "ttft_p90_s": round(ttft.p90, 3),
                "ttft_p99_s": round(ttft.p99, 3),
                "ttft_max_s": round(ttft.most, 3),
                "ttft_prefill_mean_s": round(outcome.ttft_prefill_s.mean, 3),
                "tbt_p50_s": round(outcome.tbt_s.p50, 4),
                "tbt_decode_p50_s": round(outcome.tbt_decode_s.p50, 4),
                "hit_percent": round(100 * outcome.hit_share, 2),
                "fetched_blocks": outcome.fetched_blocks,
                "prefill_busy_percent": round(100 * run.prefill_busy, 1),
                "ttft_error_percent": round(100 * run.ttft_error, 1),
                "of_kvcache_centric": round(ttft.mean / centric_s, 3) if centric_s else None,
                "paper_ttft_s": paper_s,
                "paper_of_kvcache_centric": round(paper_s / PAPER_TTFT_S["kvcache_centric"], 3)
                if paper_s
                else None,
            }
        )
    return rows


def targets_of(runs: Sequence[SchedulingRun], why_not: str = "") -> list[Target]:
    """The targets of the whole trace, with the values found; `why_not`: why there are none."""
    found = {(run.policy, run.speed): run.outcome.ttft_s for run in runs if not why_not}
    why_not = why_not or "this policy or speed was not run"
    mean, p99 = attrgetter("mean"), attrgetter("p99")
    targets = []
    for speed in SPEEDS:
        for worse, better in pairwise(POLICIES[:4]):
            name = f"{better} / {worse}, mean TTFT at {speed:g}x (strictly less)"
            pair = (better, speed), (worse, speed)
            targets.append(ratio_target(name, found, *pair, mean, STRICTLY_LESS, why_not))
    for speed, goal in CENTRIC_OF_AWARE.items():
        name = f"kvcache_centric / cache_aware, mean TTFT at {speed:g}x"
        pair = ("kvcache_centric", speed), ("cache_aware", speed)
        targets.append(ratio_target(name, found, *pair, mean, goal, why_not))
    for speed, goal in ADAPTIVE_OF_CENTRIC.items():
        pair = ("adaptive", speed), ("kvcache_centric", speed)
        name = f"adaptive / kvcache_centric, mean TTFT at {speed:g}x"
        targets.append(ratio_target(name, found, *pair, mean, goal, why_not))
        name = f"adaptive / kvcache_centric, p99 TTFT at {speed:g}x"
        targets.append(ratio_target(name, found, *pair, p99, P99_RATIO_MAX, why_not))
    return targets


def ratio_target(
    name: str,
    found: Mapping[Key, Value],
    above: Key,
    below: Key,
    number: Callable[[Value], float],
    goal: float,
    why_not: str,
) -> Target:
    """A number of one run over that of another; without a value when one of them is missing."""
    if above not in found or below not in found:
        return Target(name, None, "<=", goal, why_not)
    over, under = number(found[above]), number(found[below])
    if not under:
        return Target(name, None, "<=", goal, f"{below} has {under:g}")
    return Target(name, round(over / under, 4), "<=", goal)
