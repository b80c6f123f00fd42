"""The cost of several frontends that decide apart and exchange notes on what they routed.

Each frontend has a real conductor of its own and gets every Nth request, so two turns of one
conversation mostly reach different ones. The others receive its notes after notes_latency_s and the
time until notes are sent together (backends/frontend/routing_notes.py). `none`: no notes; frontends
see each other's requests in worker reports only.

The published timestamps are on 3-second ticks, with about ten prompts at one instant. One frontend
decides on those one after the other, as if each decision took no time. Four decide on three each
before notes can arrive. Real prompts do not arrive at one instant, so the target is for the same
requests spread evenly until the next tick (`evenly`, loadtest/simulator/cluster/job.py); `recorded`
is the worst case.

Not here: the cluster (cluster/), the policies (scheduling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.paper.experiments.scheduling import POLICIES, config_for, ratio_target
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE, SPEED, POLICY = "conversation", 2.0, "adaptive"
FRONTENDS = (1, 4)
LATENCIES_S = (0.005, None)
ARRIVALS = ("evenly", "recorded")
TTFT_4_OVER_1 = 1.05
TARGET = "frontends_ttft_4_over_1"

Case = tuple[str, str, float, int, float | None]  # arrivals, policy, speed, frontends, latency


@dataclass(frozen=True, slots=True)
class FrontendsRun:
    case: Case
    outcome: SimulationOutcome
    note_batches: int  # note batches received by all frontends together
    missed: int


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every number of frontends with every latency, at both kinds of arrivals."""
    cases = [
        (arrivals, policy, speed, frontends, latency_s)
        for arrivals in ARRIVALS
        for policy in options.one_of(options.policies or (POLICY,), POLICIES, "policy")
        for speed in options.speeds or (SPEED,)
        for frontends in options.frontends or FRONTENDS
        for latency_s in (options.notes_latencies_s or LATENCIES_S if frontends > 1 else (None,))
    ]
    runs = runs_of(cases, options, begin)
    _, why_not = options.promised(TRACE)
    return rows_of(runs), [target_of(runs, why_not)]


def runs_of(cases: Sequence[Case], options: SimulationOptions, begin: Begin) -> list[FrontendsRun]:
    trace, settings = options.one_trace(TRACE), options.settings()
    source = {name: options.source(trace, is_spread=name == "evenly") for name in ARRIVALS}
    planned = [
        PlannedRun(
            f"{case[3]} frontends, notes {case[4]}, {case[0]}",
            source[case[0]],
            run,
            (case, settings, options.only_changes),
        )
        for case in cases
    ]
    return run_all(planned, begin, options.jobs, options.kept)


def run(
    offered: Sequence[Offered],
    case: Case,
    settings: ClusterSettings,
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> FrontendsRun:
    _, policy, speed, frontends, latency_s = case
    settings = replace(settings, frontends=frontends, notes_latency_s=latency_s)
    fleet = SimulatedFleet(options.changed(config_for(policy)), settings, settings.gpu())
    outcome = outcome_of(fleet.run(offered, speed, on_over))
    stats = [one.stats() for one in fleet.conductors]
    received = sum(one.note_batches_received for one in stats)
    return FrontendsRun(case, outcome, received, sum(one.note_batches_missed for one in stats))


def rows_of(runs: Sequence[FrontendsRun]) -> Rows:
    means = {run.case: run.outcome.ttft_s.mean for run in runs}
    rows: Rows = []
    for run in runs:
        arrivals, policy, speed, frontends, latency_s = run.case
        ttft, outcome = run.outcome.ttft_s, run.outcome
        alone_s = means.get((arrivals, policy, speed, 1, None))
        notes: str | float = "none" if latency_s is None else latency_s
        rows.append(
            {
                "arrivals": arrivals,
                "policy": policy,
                "speed": speed,
                "frontends": frontends,
                "notes_latency_s": notes if frontends > 1 else None,
                "finished": outcome.finished,
                "ttft_mean_s": round(ttft.mean, 3),
                "ttft_p50_s": round(ttft.p50, 3),
                "ttft_p99_s": round(ttft.p99, 3),
                "tbt_p50_s": round(outcome.tbt_s.p50, 4),
                "hit_percent": round(100 * outcome.hit_share, 2),
                "note_batches": run.note_batches,
                "of_one_frontend": round(ttft.mean / alone_s, 3) if alone_s else None,
            }
        )
    return rows


def target_of(runs: Sequence[FrontendsRun], why_not: str = "") -> Target:
    """The target, for the requests spread evenly; `why_not`: why that was not run."""
    found = {run.case: run.outcome.ttft_s.mean for run in runs if not why_not}
    one: Case = ("evenly", POLICY, SPEED, 1, None)
    four: Case = ("evenly", POLICY, SPEED, 4, LATENCIES_S[0])
    why_not = why_not or "these numbers of frontends were not run"
    return ratio_target(TARGET, found, four, one, float, TTFT_4_OVER_1, why_not)
