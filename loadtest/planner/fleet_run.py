"""One fleet on one trace: its simulation and its result.

The fleet is that of `mooncake simulate` with the real conductor and directory. The conductor is
configured with the plan's service levels, so the simulated configuration is the written one.

A request is *within* when it was answered within both limits: its TTFT, and the mean of the longest
tenth of its token intervals, the first one included. TTFT ends when the first token is computed, as
for a client. The part of the hand-over to decode that prefill did not hide is in the first
interval. Goodput is requests within per second of the arrivals, which is the same time for every
fleet.

Not here: which fleets are worth a run (search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conductor import ConductorConfig
from loadtest.planner.engine import PlannedEngine
from loadtest.results.digest import RunDigest, digest_of
from loadtest.results.metrics import Slo
from loadtest.results.recording import Recording, Setting, to_bytes
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.outcome import quantiles
from loadtest.simulator.recorded_run import FleetSampler, recording_of


@dataclass(frozen=True, slots=True)
class ServiceLevels:
    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    prefills: int
    decodes: int
    node_blocks: int  # blocks of KV in each node's DRAM
    policy: str = "adaptive"
    admission: str = "predictive_lengths"

    @property
    def nodes(self) -> int:
        return self.prefills + self.decodes

    @property
    def name(self) -> str:
        return f"{self.prefills}P+{self.decodes}D"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.node_blocks:,} blocks, {self.policy}, {self.admission}"

    def config(self, levels: ServiceLevels) -> ConductorConfig:
        return ConductorConfig(
            ttft_slo_s=levels.ttft_s,
            tbt_slo_s=levels.tbt_s,
            policy=self.policy,
            admission=self.admission,
            advisory=self.admission == "none",
        )


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The result of one plan; counts are of requests."""

    plan: FleetPlan
    offered: int
    within: int
    late: int  # answered, TTFT above its limit
    slow: int  # answered with TTFT in time, TBT above its limit
    unanswered: int  # rejected or refused
    arrivals_s: float
    ttft_p90_s: float
    tbt_p90_s: float
    hit_share: float
    prefill_busy: float  # share of the time, mean of the workers
    decode_busy: float
    in_flight_max: int
    digest: RunDigest | None = None  # the run as a page of many runs shows it

    @property
    def share(self) -> float:
        return self.within / self.offered

    @property
    def goodput(self) -> float:
        return self.within / self.arrivals_s

    @property
    def goodput_per_node(self) -> float:
        return self.goodput / self.plan.nodes


def run_fleet(
    offered: Sequence[Offered],
    plan: FleetPlan,
    engine: PlannedEngine,
    levels: ServiceLevels,
    speed: float,
    seed: int,
    on_over: Callable[[], None] = lambda: None,
) -> FleetRun:
    fleet, jobs, run = _simulated(offered, plan, engine, levels, speed, seed, on_over)
    done = [job for job in jobs if job.finished_s is not None]
    ttfts_s = [(job.prefilled_s or 0.0) - job.arrived_s for job in done]
    late = sum(ttft_s > levels.ttft_s for ttft_s in ttfts_s)
    good = sum(
        ttft_s <= levels.ttft_s and job.tbt_s <= levels.tbt_s
        for ttft_s, job in zip(ttfts_s, done, strict=True)
    )
    prompt_tokens = sum(job.prompt_tokens for job in done)
    busy = [
        sum(node.busy_s for node in nodes) / len(nodes) / max(fleet.clock.now_s, 1e-9)
        for nodes in (fleet.prefills.values(), fleet.decodes.values())
    ]
    return FleetRun(
        plan,
        len(jobs),
        good,
        late,
        len(done) - late - good,
        len(jobs) - len(done),
        arrivals_s_of(offered, speed),
        quantiles(ttfts_s).p90,
        quantiles([job.tbt_s for job in done if job.output_tokens > 1]).p90,
        sum(job.cached_tokens for job in done) / max(1, prompt_tokens),
        *busy,
        in_flight_max(jobs),
        digest_of(run, plan.label),
    )


def record_fleet(
    offered: Sequence[Offered],
    plan: FleetPlan,
    engine: PlannedEngine,
    levels: ServiceLevels,
    speed: float,
    seed: int,
    on_over: Callable[[], None] = lambda: None,
) -> bytes:
    """The same run, request by request, as the bytes that a page embeds."""
    return to_bytes(_simulated(offered, plan, engine, levels, speed, seed, on_over)[2])


def _simulated(
    offered: Sequence[Offered],
    plan: FleetPlan,
    engine: PlannedEngine,
    levels: ServiceLevels,
    speed: float,
    seed: int,
    on_over: Callable[[], None],
) -> tuple[SimulatedFleet, list[SimulatedJob], Recording]:
    settings = replace(
        engine.settings(),
        prefills=plan.prefills,
        decodes=plan.decodes,
        node_blocks=plan.node_blocks,
        seed=seed,
    )
    fleet = SimulatedFleet(plan.config(levels), settings, engine.gpu())
    sampler = FleetSampler(arrivals_s_of(offered, speed))
    fleet.reported = sampler.look
    jobs = fleet.run(offered, speed, on_over)
    described: dict[str, Setting] = {
        "engine": engine.name,
        "nodes": plan.nodes,
        "prefills": plan.prefills,
        "decodes": plan.decodes,
        "node_blocks": plan.node_blocks,
        "policy": plan.policy,
        "admission": plan.admission,
        "speed": speed,
        "requests_max": len(jobs),
    }
    slo = Slo(levels.ttft_s, levels.tbt_s)
    title = f"Planned: {plan.label} on {engine.name}"
    return fleet, jobs, recording_of(jobs, "plan", title, described, slo, sampler.samples)


def arrivals_s_of(offered: Sequence[Offered], speed: float) -> float:
    """Seconds in which requests arrive; at least one second, if all arrive at once."""
    at_s = [one.at_s for one in offered]
    return max(1.0, (max(at_s) - min(at_s)) / speed)


def in_flight_max(jobs: Sequence[SimulatedJob]) -> int:
    changes = [(job.arrived_s, 1) for job in jobs if job.finished_s is not None]
    changes += [(job.finished_s, -1) for job in jobs if job.finished_s is not None]
    most = there = 0
    for _, change in sorted(changes):
        there += change
        most = max(most, there)
    return most
