"""Service levels of `auto` beside fixed ones: requests within their service levels at three loads.

The conversation trace runs on 8 + 8 nodes of 8x A800 with LLaMA3-70B, with the settings of
model_repository/conductor/config.pbtxt. Goodput has two definitions. The service levels in the
paper's "Overload" section are 10x the TTFT and 5x the TBT of the request alone on an idle node. The
paper's runs on real traces have TTFT <= 30 s and TBT <= 100 ms. The capacity is the highest speed
at which the conductor that rejects late keeps 90 % of the offered requests within 10x and 5x. Then
each setting runs at the loads 0.5, 1.0 and 1.6 of it, as in `bench.headline`.

Not here: the limits (conductor/admission/limits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.paper.experiments.rejection import STEP_S_MAX, TBT_SLO_S, TRACE, TTFT_SLO_S
from bench.paper.experiments.scheduling import ratio_target
from conductor import ConductorConfig
from conductor.admission.limits import TBT_FACTOR, TTFT_FACTOR
from conductor.config import AUTO, SecondsOrAuto
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import GpuModel, prompt_s
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of, within
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

LATE = "30 s, 1 s"  # the shipped values before `auto`
SETTINGS: dict[str, tuple[SecondsOrAuto, SecondsOrAuto]] = {
    "auto": (AUTO, AUTO),
    LATE: (30.0, 1.0),
    "30 s, 90 ms": (TTFT_SLO_S, STEP_S_MAX),
    "10 s, 90 ms": (10.0, STEP_S_MAX),
}
LOADS = (0.5, 1.0, 1.6)  # of the capacity
SPEEDS = tuple(1.0 + 0.25 * step for step in range(17))
SUSTAINED_SHARE = 0.9
OF_BEST = 0.9  # goodput of `auto` / that of the best fixed setting, at least


@dataclass(frozen=True, slots=True)
class LimitsRun:
    setting: str
    speed: float
    outcome: SimulationOutcome
    within_multiples: int  # requests within 10x and 5x
    within_fixed: int  # requests within 30 s and 100 ms


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    settings = options.settings()
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)

    def made(cases: Sequence[tuple[str, float]]) -> list[LimitsRun]:
        planned = [
            PlannedRun(
                f"{case[0]} {case[1]:g}x", source, run, (*case, settings, options.only_changes)
            )
            for case in cases
        ]
        return run_all(planned, begin, options.jobs, options.kept)

    capacity = SPEEDS[0]
    for speed in () if options.speeds else SPEEDS:
        [late] = made([(LATE, speed)])
        if late.within_multiples < SUSTAINED_SHARE * late.outcome.offered:
            break
        capacity = speed
    speeds = options.speeds or tuple(round(load * capacity, 3) for load in LOADS)
    runs = made([(setting, speed) for speed in speeds for setting in SETTINGS])
    return rows_of(runs, capacity), targets_of(runs, why_not)


def config_for(setting: str) -> ConductorConfig:
    """The shipped settings, with these service levels."""
    ttft_slo_s, tbt_slo_s = SETTINGS[setting]
    return ConductorConfig(
        policy="adaptive",
        admission="predictive_lengths",
        ttft_slo_s=ttft_slo_s,
        tbt_slo_s=tbt_slo_s,
        decode_s_expected=30.0,  # a first guess; measured from then on
    )


def run(
    offered: Sequence[Offered],
    setting: str,
    speed: float,
    settings: ClusterSettings,
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> LimitsRun:
    gpu = settings.gpu()
    fleet = SimulatedFleet(options.changed(config_for(setting)), settings, gpu)
    jobs = fleet.run(offered, speed, on_over)
    return LimitsRun(
        setting,
        speed,
        outcome_of(jobs),
        sum(is_within_multiples(job, gpu, settings.chunk_tokens) for job in jobs),
        within(jobs, TTFT_SLO_S, TBT_SLO_S),
    )


def is_within_multiples(job: SimulatedJob, gpu: GpuModel, chunk_tokens: int) -> bool:
    """Whether the request kept 10x its TTFT and 5x its TBT alone on an idle node."""
    if job.finished_s is None:
        return False
    alone_s = prompt_s(gpu, 0, job.prompt_tokens, chunk_tokens)
    step_s = float(gpu.decode_s(1, job.prompt_tokens))
    return job.ttft_s <= TTFT_FACTOR * alone_s and job.tbt_s <= TBT_FACTOR * step_s


def rows_of(runs: Sequence[LimitsRun], capacity: float) -> Rows:
    return [
        {
            "limits": run.setting,
            "speed": run.speed,
            "load": round(run.speed / capacity, 3),
            "offered": run.outcome.offered,
            "within_10x_5x": run.within_multiples,
            "within_30s_100ms": run.within_fixed,
            "finished": run.outcome.finished,
            "rejected": run.outcome.rejected_in_all,
            "refused_at_decode": run.outcome.wasted_prefills,
            "wasted_prefill_percent": round(100 * run.outcome.wasted_share, 2),
            "ttft_mean_s": round(run.outcome.ttft_s.mean, 3),
            "ttft_p90_s": round(run.outcome.ttft_s.p90, 3),
            "tbt_p90_s": round(run.outcome.tbt_s.p90, 4),
        }
        for run in runs
    ]


def targets_of(runs: Sequence[LimitsRun], why_not: str = "") -> list[Target]:
    """`auto` beside each fixed setting at each speed; and how many it rejects at the lowest."""
    found = {} if why_not else {f"{run.setting} {run.speed:g}x": run for run in runs}
    targets = []
    for speed in sorted({run.speed for run in runs}):
        for fixed in list(SETTINGS)[1:]:
            name = f"requests within 10x and 5x at {speed:g}x, {fixed} / auto"
            pair = (f"{fixed} {speed:g}x", f"auto {speed:g}x")
            targets.append(
                ratio_target(name, found, *pair, _within_multiples, 1 / OF_BEST, why_not)
            )
    return targets


def _within_multiples(run: LimitsRun) -> float:
    return float(run.within_multiples)
