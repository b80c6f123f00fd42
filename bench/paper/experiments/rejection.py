"""Admission policies when more is offered than fits: Table 3 of the arXiv report.

The conversation trace runs at rising speeds on 8 + 8 nodes of 8x A800 with LLaMA3-70B. TTFT <= 30 s
and TBT <= 100 ms are the service levels of the paper's runs on real traces. A decode worker checks
each request again on arrival; the prefill of a refused request is wasted. The first search finds
the lowest speed at which the baseline wastes WASTED_SHARE_MIN of its prefills. Then every admission
runs at that speed. All rows have the same routing, FIFO queues and limits, and no shedding but by
limit, as in the paper.

Not here: the policies (conductor/admission/admission.py), the cluster (cluster/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from bench.paper.experiments.scheduling import ratio_target
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of, within
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NO_OPTIONS, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE = "conversation"
ADMISSIONS = ("baseline", "early", "predictive", "predictive_lengths")
TTFT_SLO_S, TBT_SLO_S = 30.0, 0.1
# Limit for the predicted step. A request's TBT is the mean of its longest intervals, which include
# the one from prefill to decode: a batch held at the service level would miss it.
STEP_S_MAX = 0.9 * TBT_SLO_S
WASTED_SHARE_MIN = 0.15
SPEEDS = tuple(1.0 + 0.25 * step for step in range(13))
PAPER_OFFERED = 23_000
PAPER_REJECTED = {"baseline": 4_183, "early": 3_771, "predictive": 3_589}
WASTED_OF_BASELINE = {"early": 0.8, "predictive": 0.7}
STRICTLY_LESS = 0.9999  # one request in ten thousand: counts must rise, however little


@dataclass(frozen=True, slots=True)
class RejectionRun:
    admission: str
    speed: float
    outcome: SimulationOutcome
    within_slo: int
    prefill_load_std: float
    prefill_load_mean: float
    decode_load_std: float
    tbt_error: float


class LoadWatch:
    """The load of both pools, each second: predicted latency against its service level.

    Prefill: predicted seconds of queue / TTFT SLO; decode: the current step of the batch / TBT SLO;
    each is the mean of the pool (arXiv, section 7). Only the time of arrivals counts, because the
    empty fleet at the end is no swing.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self.prefill: list[float] = []
        self.decode: list[float] = []

    def look(self, fleet: SimulatedFleet) -> None:
        now_s = fleet.clock.now_s
        if now_s > self._until_s:
            return
        queues = [w.queue_s for w in fleet.conductor.status(now_s) if w.role == "prefill"]
        self.prefill.append(sum(queues) / len(queues) / TTFT_SLO_S)
        steps = [node.step_s for node in fleet.decodes.values()]
        self.decode.append(sum(steps) / len(steps) / TBT_SLO_S)


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    admissions = options.one_of(options.admissions, ADMISSIONS, "admission")
    settings = options.settings()
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)

    def made(cases: Sequence[tuple[str, float]]) -> list[RejectionRun]:
        planned = [
            PlannedRun(
                f"{case[0]} {case[1]:g}x", source, run, (*case, settings, options.only_changes)
            )
            for case in cases
        ]
        return run_all(planned, begin, options.jobs, options.kept)

    runs: list[RejectionRun] = []
    speeds, at_once = options.speeds or SPEEDS, options.jobs
    for first in range(0, len(speeds), at_once):
        runs += made([("baseline", speed) for speed in speeds[first : first + at_once]])
        wasting = [n for n, r in enumerate(runs) if r.outcome.wasted_share >= WASTED_SHARE_MIN]
        if wasting:
            del runs[wasting[0] + 1 :]  # runs above the speed, made in parallel
            break
    speed = runs[-1].speed
    runs += made([(admission, speed) for admission in admissions if admission != "baseline"])
    return rows_of(runs), targets_of(runs, why_not)


def config_for(admission: str) -> ConductorConfig:
    """The conductor's settings; the same for every row except the admission."""
    return ConductorConfig(
        admission=admission,
        policy="kvcache_centric",
        queue_order="fifo",
        shedding="limit",
        ttft_slo_s=TTFT_SLO_S,
        tbt_slo_s=STEP_S_MAX,
        decode_s_expected=30.0,  # a first guess; measured from then on
    )


def run(
    offered: Sequence[Offered],
    admission: str,
    speed: float,
    settings: ClusterSettings,
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> RejectionRun:
    config = options.changed(config_for(admission))
    fleet = SimulatedFleet(config, settings, settings.gpu())
    watch = LoadWatch(offered[-1].at_s / speed)
    fleet.reported = watch.look
    jobs = fleet.run(offered, speed, on_over)
    errors = [
        abs(job.route.predicted.tbt_s - job.tbt_decode_s) / job.tbt_decode_s
        for job in jobs
        if job.route is not None and job.finished_s is not None and job.tbt_decode_s > 0
    ]
    return RejectionRun(
        admission,
        speed,
        outcome_of(jobs),
        within(jobs, TTFT_SLO_S, TBT_SLO_S),
        float(np.std(watch.prefill)),
        float(np.mean(watch.prefill)),
        float(np.std(watch.decode)),
        sum(errors) / max(1, len(errors)),
    )


def rows_of(runs: Sequence[RejectionRun]) -> Rows:
    rows: Rows = []
    for run in runs:
        outcome, paper = run.outcome, PAPER_REJECTED.get(run.admission)
        rows.append(
            {
                "admission": run.admission,
                "speed": run.speed,
                "offered": outcome.offered,
                "finished": outcome.finished,
                "within_slo": run.within_slo,
                "rejected": outcome.rejected_in_all,
                "rejected_before": sum(outcome.rejected.values()),
                "refused_at_decode": outcome.wasted_prefills,
                "wasted_prefill_percent": round(100 * outcome.wasted_share, 2),
                "wasted_prefill_s": round(outcome.wasted_prefill_s, 1),
                "prefill_s": round(outcome.prefill_s, 1),
                "prefill_load_mean": round(run.prefill_load_mean, 4),
                "prefill_load_std": round(run.prefill_load_std, 4),
                "decode_load_std": round(run.decode_load_std, 4),
                "ttft_mean_s": round(outcome.ttft_s.mean, 3),
                "ttft_p90_s": round(outcome.ttft_s.p90, 3),
                "tbt_p50_s": round(outcome.tbt_s.p50, 4),
                "tbt_p90_s": round(outcome.tbt_s.p90, 4),
                "tbt_decode_p90_s": round(outcome.tbt_decode_s.p90, 4),
                "decode_mean_s": round(outcome.decode_s, 2),
                "tbt_error_percent": round(100 * run.tbt_error, 1),
                "rejected_percent": round(100 * outcome.rejected_in_all / outcome.offered, 2),
                "paper_rejected": paper,
                "paper_rejected_percent": round(100 * paper / PAPER_OFFERED, 2) if paper else None,
            }
        )
    return rows


def targets_of(runs: Sequence[RejectionRun], why_not: str = "") -> list[Target]:
    """The targets at the last speed, with the values found; `why_not`: why there are none."""
    speed = runs[-1].speed
    found = {run.admission: run for run in runs if run.speed == speed and not why_not}
    baseline = found.get("baseline")
    if baseline is not None and baseline.outcome.wasted_share < WASTED_SHARE_MIN:
        why_not, found = f"the baseline never wasted {WASTED_SHARE_MIN:.0%} of its prefills", {}
    why_not = why_not or "this admission was not run"
    wasted, served = attrgetter("outcome.wasted_prefill_s"), attrgetter("within_slo")
    swing = attrgetter("prefill_load_std")
    cases = [
        (f"wasted prefill seconds, {name} / baseline", name, "baseline", wasted, goal)
        for name, goal in WASTED_OF_BASELINE.items()
    ]
    name = "wasted prefill seconds, predictive_lengths / predictive"
    cases.append((name, "predictive_lengths", "predictive", wasted, STRICTLY_LESS))
    for worse, better in pairwise(ADMISSIONS):
        name = f"requests within both SLOs, {worse} / {better}"
        cases.append((name, worse, better, served, STRICTLY_LESS))
    name = "swing of the prefill load, {} / {}"
    for pair, goal in (
        (("predictive", "early"), STRICTLY_LESS),
        (("predictive_lengths", "predictive"), 1.0),
    ):
        cases.append((name.format(*pair), *pair, swing, goal))
    return [
        ratio_target(name, found, above, below, number, goal, why_not)
        for name, above, below, number, goal in cases
    ]
