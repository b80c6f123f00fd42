"""Thousands of workers: the cost of a run, and the real Conductor's results with them.

The conversation trace runs on 8 + 8, 64 + 64 and 500 + 500 workers. On 1,000 + 1,000 run ten copies
of it, one after the other and each with block ids of its own: 120,000 requests. The replay speed
grows with the number of workers, so each worker has its load at recorded speed. Turns of a
conversation come closer together by the same factor. On 1,000 + 1,000 many of them come before the
turn before them is computed, so fewer of their blocks are cached.

Seconds are of the CPU, so other work on the machine does not count. They are counted by the part
that takes them, without the time in other parts that it calls. A kept run has the seconds of its
own execution.

Target: the 120,000 requests in ten minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from bench.paper.experiments.scheduling import POLICIES, config_for
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.outcome import (
    ITL_SLO_S,
    TTFT_SLO_S,
    SimulationOutcome,
    outcome_of,
    within,
)
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import NODES, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE, POLICY = "conversation", "adaptive"
CPU_S_MAX = 600.0
COPY_BYTES = 2  # of a block key: number of the trace's copy

DECISIONS, CONDUCTOR, DIRECTORY, NETWORK, CHECKS, REST = (
    "decisions",
    "conductor_hears",
    "directory",
    "network",
    "checks",
    "workers_and_clock",
)
PARTS = (DECISIONS, CONDUCTOR, DIRECTORY, NETWORK, CHECKS, REST)


@dataclass(frozen=True, slots=True)
class ScaleCase:
    workers: int  # of each role
    copies: int = 1  # of the trace, one after the other

    @property
    def speed(self) -> float:
        return self.workers / NODES


CASES = (ScaleCase(8), ScaleCase(64), ScaleCase(500), ScaleCase(1_000, 10))
PROMISED = CASES[-1]


class CpuMeter:
    """CPU seconds of the parts of a run. A call from one part to another counts for the called
    part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.decisions_s: list[float] = []
        self._part, self._since_s = REST, time.process_time()

    def measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted as this part."""

        @wraps(function)
        def counted(*given: Any, **named: Any) -> Any:
            before = self._enter(part)
            began_s = self._since_s
            try:
                return function(*given, **named)
            finally:
                self._enter(before)
                if part == DECISIONS:
                    self.decisions_s.append(self._since_s - began_s)

        return counted

    def _enter(self, part: str) -> str:
        now_s, before = time.process_time(), self._part
        self.seconds[before] += now_s - self._since_s
        self._part, self._since_s = part, now_s
        return before

    def ended(self) -> None:
        self._enter(REST)


class MeteredFleet(SimulatedFleet):
    METERED = (
        (CONDUCTOR, "conductor", ("on_events", "on_prefill_finished", "on_finished", "on_tick")),
        (DECISIONS, "conductor", ("on_request",)),
        (DIRECTORY, "store", ("find", "put", "put_tail", "release", "report")),
        (NETWORK, "network", ("send", "_ended", "_paced_done")),
    )

    def __init__(self, config: ConductorConfig, settings: ClusterSettings, meter: CpuMeter) -> None:
        super().__init__(config, settings, Roofline())
        owners = {
            "conductor": self.conductor,
            "store": self.site.store,
            "network": self.site.network,
        }
        for part, owner, names in self.METERED:
            for name in names:
                setattr(owners[owner], name, meter.measured(part, getattr(owners[owner], name)))
        self._proved = meter.measured(CHECKS, super().check)

    def check(self) -> None:
        self._proved()


@dataclass(frozen=True, slots=True)
class ScaleRun:
    case: ScaleCase
    outcome: SimulationOutcome
    within_slo: int
    cpu_s: dict[str, float]  # by part
    decision_s: tuple[float, float, float]  # mean, p50, p99

    @property
    def all_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    """Every size, or with --prefills that one alone."""
    policies = options.one_of(options.policies or (POLICY,), POLICIES, "policy")
    trace, why_not = options.promised(TRACE)
    source = options.source(trace)
    cases = (ScaleCase(options.prefills),) if options.prefills else CASES
    planned = [
        PlannedRun(
            f"{case.workers} + {case.workers} workers, {policy}",
            source,
            run,
            (case, options.changed(config_for(policy)), options.seed),
        )
        for policy in policies
        for case in cases
    ]
    runs = run_all(planned, begin, options.jobs, options.kept)
    return rows_of(runs), [target_of(runs, why_not)]


def run(
    offered: Sequence[Offered],
    case: ScaleCase,
    config: ConductorConfig,
    seed: int = 0,
    on_over: Callable[[], None] = lambda: None,
) -> ScaleRun:
    settings = ClusterSettings(prefills=case.workers, decodes=case.workers, seed=seed)
    over = _every(case.copies, on_over)
    meter = CpuMeter()
    fleet = MeteredFleet(config, settings, meter)
    jobs = fleet.run(copied(offered, case.copies), case.speed, lambda: next(over))
    meter.ended()
    decisions_s = np.array(meter.decisions_s)
    p50, p99 = np.percentile(decisions_s, (50, 99))
    return ScaleRun(
        case,
        outcome_of(jobs),
        within(jobs, TTFT_SLO_S, ITL_SLO_S),
        meter.seconds,
        (float(decisions_s.mean()), float(p50), float(p99)),
    )


def _every(count: int, call: Callable[[], None]) -> Iterator[None]:
    """Calls `call` at every count-th step."""
    while True:
        for _ in range(count - 1):
            yield
        call()
        yield


def copied(offered: Sequence[Offered], copies: int) -> list[Offered]:
    """The requests `copies` times, one copy after the other, each with block keys of its own."""
    apart_s = offered[-1].at_s - offered[0].at_s
    apart_s += apart_s / max(1, len(offered) - 1)
    found = list(offered)
    for copy in range(1, copies):
        keys: dict[bytes, bytes] = {}
        mark = copy.to_bytes(COPY_BYTES, "little")
        for one in offered:
            own = [keys.setdefault(key, key[:-COPY_BYTES] + mark) for key in one.keys]
            number = copy * len(offered) + one.number
            found.append(replace(one, number=number, at_s=one.at_s + copy * apart_s, keys=own))
    return found


def rows_of(runs: Sequence[ScaleRun]) -> Rows:
    rows: Rows = []
    for run in runs:
        outcome, (mean_s, p50_s, p99_s) = run.outcome, run.decision_s
        rows.append(
            {
                "workers": 2 * run.case.workers,
                "copies": run.case.copies,
                "speed": run.case.speed,
                "requests": outcome.offered,
                "finished": outcome.finished,
                "cpu_s": round(run.all_cpu_s, 1),
                "requests_per_cpu_s": round(outcome.offered / run.all_cpu_s, 1),
                **{f"{part}_cpu_s": round(run.cpu_s[part], 2) for part in PARTS},
                "decision_mean_us": round(1e6 * mean_s, 1),
                "decision_p50_us": round(1e6 * p50_s, 1),
                "decision_p99_us": round(1e6 * p99_s, 1),
                "hit_percent": round(100 * outcome.hit_share, 2),
                "ttft_mean_s": round(outcome.ttft_s.mean, 3),
                "ttft_p90_s": round(outcome.ttft_s.p90, 3),
                "tbt_p90_s": round(outcome.tbt_s.p90, 4),
                "within_slo_percent": round(100 * run.within_slo / max(1, outcome.offered), 2),
            }
        )
    return rows


def target_of(runs: Sequence[ScaleRun], why_not: str = "") -> Target:
    name = f"CPU seconds of {PROMISED.copies} copies on {PROMISED.workers:,} + {PROMISED.workers:,}"
    found = [] if why_not else [run.all_cpu_s for run in runs if run.case == PROMISED]
    value = round(max(found), 1) if found else None
    why = "" if found else why_not or "this size was not run"
    return Target(name, value, "<=", CPU_S_MAX, why)
