"""The gain from workers that change their roles with the load (`roles/controller.py`).

The synthetic trace runs in two phases. The first half of its requests comes at 2.5 times the
recorded speed with a third of the output, the second at 1.2 times with three times the output. So
prefill is the bottleneck first and decode after that. On 16 nodes, TTFT <= 30 s and TBT <= 100 ms,
nothing is rejected.

    fixed        every split of the 16 nodes, from 1P+15D to 15P+1D
    oracle       has both phases as input: begins in a split that is good for the first, and at the
                 half changes as many workers at once as the second needs; they drain first
    controller   begins with 8P+8D without any input

Targets: the controller serves at least 1.15 times as many requests within both limits as the best
fixed split. On the two published traces at recorded speed it flips no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.paper import constants
from bench.paper.experiments.scheduling import config_for
from bench.paper.figures.served import POLICY, ServedRun, served
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import Flip, SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE = "synthetic"
TTFT_SLO_S, TBT_SLO_S = 30.0, 0.1
SPEEDS = (2.5, 1.2)  # of the two phases
OUTPUTS = (1 / 3, 3.0)  # factor of the output tokens
SPLITS = tuple(range(1, constants.NODES))
ORACLES = ((11, 5), (11, 6), (12, 5), (12, 6))  # prefill nodes in each phase; near the best
STEADY = ("conversation", "synthetic")
GAIN_MIN = 1.15


@dataclass(frozen=True, slots=True)
class RolesPlan:
    name: str  # "fixed" | "oracle" | "controller" | "steady"
    config: ConductorConfig
    shape: ClusterSettings
    prefills_then: int = 0  # of the oracle, in the second phase
    has_phases: bool = True  # False: the trace as it was recorded


@dataclass(frozen=True, slots=True)
class RolesRun:
    plan: RolesPlan
    run: ServedRun
    flips: tuple[Flip, ...]

    @property
    def within(self) -> float:
        return self.run.within(TTFT_SLO_S, TBT_SLO_S)

    def within_half(self, second: bool) -> float:
        """Share of the requests of one phase."""
        half = len(self.run.ttfts_s) // 2
        part = slice(half, None) if second else slice(half)
        is_in = (self.run.ttfts_s[part] <= TTFT_SLO_S) & (self.run.tbts_s[part] <= TBT_SLO_S)
        return float(is_in.mean())

    def prefills_over_time(self) -> str:
        """As "0:8 24:9": prefill workers from each second on; a draining worker counts for its old
        role."""
        prefills = self.plan.shape.prefills
        found = [f"0:{prefills}"]
        for flip in self.flips:
            prefills += 1 if flip.role == "prefill" else -1
            found.append(f"{flip.ended_s:.0f}:{prefills}")
        return " ".join(found)


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """All splits, the oracles, the controller, and the controller on steady traces."""
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)
    fixed = options.changed(replace(config_for(POLICY), ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S))
    flips = replace(fixed, role_flips="on")
    at = {n: replace(options.settings(), prefills=n, decodes=constants.NODES - n) for n in SPLITS}
    even = at[constants.NODES // 2]
    plans = [
        *(RolesPlan("fixed", fixed, shape) for shape in at.values()),
        *(RolesPlan("oracle", fixed, at[first], then) for first, then in ORACLES),
        RolesPlan("controller", flips, even),
    ]
    planned = [
        PlannedRun(f"{p.name} {p.shape.prefills}P, then {p.prefills_then}P", source, run, (p,))
        for p in plans
    ]
    steady = RolesPlan("steady", flips, even, has_phases=False)
    planned += [
        PlannedRun(f"{name}, steady", options.source(name), run, (steady,)) for name in STEADY
    ]
    runs = run_all(planned, begin, options.jobs, options.kept)
    return rows_of(runs), targets_of(runs, why_not)


def run(
    offered: Sequence[Offered], plan: RolesPlan, on_over: Callable[[], None] = lambda: None
) -> RolesRun:
    fleet = SimulatedFleet(plan.config, plan.shape, Roofline())
    if plan.has_phases:
        offered, half_s = in_phases(offered)
        if plan.prefills_then:
            fleet.clock.at(half_s, _switch, fleet, plan)
    jobs = fleet.run(offered, constants.REPLAY_SPEED, on_over)
    return RolesRun(plan, served(plan.name, constants.REPLAY_SPEED, jobs), tuple(fleet.flips))


def _switch(fleet: SimulatedFleet, plan: RolesPlan) -> None:
    """Change to the split of the second phase, all at once."""
    for worker_id in list(fleet.prefills)[: plan.shape.prefills - plan.prefills_then]:
        fleet.flip(worker_id)


def in_phases(offered: Sequence[Offered]) -> tuple[list[Offered], float]:
    """The requests with the times and outputs of the two phases, and the start of the second."""
    half = len(offered) // 2
    began_s = offered[half].at_s
    half_s = began_s / SPEEDS[0]
    made = [
        replace(one, at_s=one.at_s / SPEEDS[0], output_tokens=_times(one.output_tokens, OUTPUTS[0]))
        for one in offered[:half]
    ]
    made += [
        replace(
            one,
            at_s=half_s + (one.at_s - began_s) / SPEEDS[1],
            output_tokens=_times(one.output_tokens, OUTPUTS[1]),
        )
        for one in offered[half:]
    ]
    return made, half_s


def _times(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def rows_of(runs: Sequence[RolesRun]) -> Rows:
    rows: Rows = []
    best = best_fixed(runs)
    for one, trace in zip(runs, _traces(runs), strict=True):
        rows.append(
            {
                "trace": trace,
                **one.run.columns(),
                "prefills": one.plan.shape.prefills,
                "prefills_then": one.plan.prefills_then or None,
                "within_percent": round(100 * one.within, 2),
                "within_first_percent": round(100 * one.within_half(False), 2),
                "within_second_percent": round(100 * one.within_half(True), 2),
                "of_best_fixed": round(one.within / best, 4) if one.plan.has_phases else None,
                "flips": len(one.flips),
                "drain_max_s": round(
                    max((f.ended_s - f.began_s for f in one.flips), default=0.0), 1
                ),
                "prefills_over_time": one.prefills_over_time(),
            }
        )
    return rows


def _traces(runs: Sequence[RolesRun]) -> list[str]:
    """The traces of each row: the phases, or the steady traces in their order."""
    steady = iter(STEADY)
    return ["phases" if one.plan.has_phases else next(steady) for one in runs]


def best_fixed(runs: Sequence[RolesRun]) -> float:
    """At least one request, so that no gain is infinite."""
    found = [one.within for one in runs if one.plan.name == "fixed"]
    return max(*found, 1 / len(runs[0].run.ttfts_s))


def targets_of(runs: Sequence[RolesRun], why_not: str = "") -> list[Target]:
    best = best_fixed(runs)
    named = {name: [one for one in runs if one.plan.name == name] for name in ("oracle", "steady")}
    (ours,) = [one for one in runs if one.plan.name == "controller"]
    oracle = max(one.within for one in named["oracle"]) / best
    gain = None if why_not else round(ours.within / best, 4)
    why = why_not or f"an oracle reaches {oracle:.2f}"
    targets = [
        Target(
            "requests within both limits, controller / best fixed split", gain, ">=", GAIN_MIN, why
        )
    ]
    for trace, one in zip(STEADY, named["steady"], strict=True):
        flips = None if why_not else len(one.flips)
        targets.append(Target(f"flips on {trace} as recorded", flips, "<=", 0, why_not))
    return targets
