"""The result of one run for each of its requests, of our cluster and of coupled engines.

The times of all requests are kept, so a share within any two limits can be counted from one run. A
request without an answer is within none.

Not here: the runs and targets of an experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.paper import constants
from bench.paper.coupled import CoupledFleet, CoupledSettings
from bench.paper.experiments.scheduling import config_for
from conductor import ConductorConfig
from loadtest.harness.result import Cell
from loadtest.simulator.cluster.fleet import SimulatedCluster, SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.cluster.steps import Seconds
from loadtest.simulator.options import NO_OPTIONS, SimulationOptions
from loadtest.simulator.runs import Begin, PlannedRun, run_all

TRACES = ("conversation", "synthetic")
POLICY = "kvcache_centric"  # Algorithm 1 of the paper

Quiet = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Times are infinite without an answer."""

    system: str
    speed: float
    ttfts_handover_s: Seconds  # including the part of the hand-over that prefill did not hide
    tbts_all_s: Seconds  # including the first interval
    ttfts_prefill_s: Seconds  # until the prompt was computed
    tbts_decode_s: Seconds  # without the first interval
    outcome: SimulationOutcome

    @property
    def ttfts_s(self) -> Seconds:
        """The TTFTs as constants.py defines them."""
        return self.ttfts_handover_s if constants.HANDOVER_IN_TTFT else self.ttfts_prefill_s

    @property
    def tbts_s(self) -> Seconds:
        """The TBTs as constants.py defines them."""
        return self.tbts_all_s if constants.FIRST_INTERVAL_IN_TBT else self.tbts_decode_s

    @property
    def prefill_s(self) -> float:
        """GPU seconds of prefill, a request."""
        return self.outcome.prefill_s / max(1, self.outcome.prefills)

    def within(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Share of all requests."""
        return float(np.mean((self.ttfts_s <= ttft_slo_s) & (self.tbts_s <= tbt_slo_s)))

    def within_at_best(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """The same without the hand-over and the first interval."""
        is_early = self.ttfts_prefill_s <= ttft_slo_s
        return float(np.mean(is_early & (self.tbts_decode_s <= tbt_slo_s)))

    def columns(self) -> dict[str, Cell]:
        """The columns that every row has of a run."""
        outcome = self.outcome
        return {
            "system": self.system,
            "speed": self.speed,
            "requests": outcome.offered,
            "finished": outcome.finished,
            "ttft_mean_s": round(outcome.ttft_s.mean, 3),
            "ttft_p90_s": round(outcome.ttft_s.p90, 3),
            "tbt_p50_s": round(outcome.tbt_s.p50, 4),
            "tbt_p90_s": round(outcome.tbt_s.p90, 4),
            "hit_percent": round(100 * outcome.hit_share, 2),
            "prefill_s_per_request": round(self.prefill_s, 4),
        }


@dataclass(frozen=True, slots=True)
class ServePlan:
    trace: str
    system: ClusterSettings | CoupledSettings  # ours, or coupled engines
    speed: float = constants.REPLAY_SPEED
    policy: str = ""  # of ours; with the conductor's other settings
    config: ConductorConfig | None = None
    output_tokens: int | None = None  # of every request, instead of the trace's

    @property
    def name(self) -> str:
        if isinstance(self.system, CoupledSettings):
            return self.system.name
        return f"{self.system.prefills}P+{self.system.decodes}D {self.policy}"


def ours(
    trace: str,
    shape: ClusterSettings,
    speed: float = constants.REPLAY_SPEED,
    options: SimulationOptions = NO_OPTIONS,
    policy: str = POLICY,
    **changes: object,
) -> ServePlan:
    """A run of our cluster; `changes`: of the conductor's settings."""
    config: ConductorConfig = replace(config_for(policy), **changes)  # type: ignore[arg-type]
    return ServePlan(trace, shape, speed, policy, options.changed(config))


def serve(offered: Sequence[Offered], plan: ServePlan, on_over: Quiet = lambda: None) -> ServedRun:
    if plan.output_tokens is not None:
        offered = [replace(one, output_tokens=plan.output_tokens) for one in offered]
    if isinstance(plan.system, CoupledSettings):
        fleet: SimulatedCluster = CoupledFleet(plan.system, Roofline())
    else:
        assert plan.config is not None, plan
        fleet = SimulatedFleet(plan.config, plan.system, plan.system.gpu())
    return served(plan.name, plan.speed, fleet.run(offered, plan.speed, on_over))


def serve_all(
    plans: Sequence[ServePlan], options: SimulationOptions, begin: Begin
) -> list[ServedRun]:
    plans = [replace(plan, system=replace(plan.system, seed=options.seed)) for plan in plans]
    planned = [
        PlannedRun(
            f"{plan.trace}, {plan.name} {plan.speed:g}x", options.source(plan.trace), serve, (plan,)
        )
        for plan in plans
    ]
    return run_all(planned, begin, options.jobs, options.kept)


def served(system: str, speed: float, jobs: Sequence[SimulatedJob]) -> ServedRun:
    times = np.full((4, len(jobs)), np.inf)
    for number, job in enumerate(jobs):
        if job.finished_s is not None and job.prefilled_s is not None:
            ttft_prefill_s = job.prefilled_s - job.arrived_s
            times[:, number] = job.ttft_s, job.tbt_s, ttft_prefill_s, job.tbt_decode_s
    return ServedRun(system, speed, *times, outcome_of(jobs))


def speeds(first: float, last: float, step: float) -> list[float]:
    """A grid of replay speeds, both ends included."""
    return [round(first + step * number, 4) for number in range(round((last - first) / step) + 1)]


def traces_of(options: SimulationOptions, known: Sequence[str]) -> tuple[str, ...]:
    """The selected traces, or all traces of the experiment."""
    return options.one_of(options.traces, tuple(known), "trace")
