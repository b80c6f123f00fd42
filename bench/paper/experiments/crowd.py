"""Does every request of a crowd end, whatever fails? NVIDIA Dynamo's issue 13088.

In that issue 36 of 1,536 requests never ended on 50 prefill and 2,500 decode workers: no error, no
retry, no timeout. This experiment has as many requests and workers. The requests are the start of
the conversation trace, at the speed that gives 50 prefill workers the load of 8 at recorded speed.
While requests arrive, 5 % of the workers of each role are killed, frozen or reloaded at random
times, a third each. Freezes last from one second, which no process notices, to a minute. The
Conductor and the frontend's state machine are the real ones (crowd/followed_fleet.py), and every
client has a timeout.

A request is *within its deadline* when it ended before its client's timeout plus the time in which
the loss of a worker is detected (STOP_S). A stopped request ends when its worker's call ends, or
when the directory misses the worker. It ended *finished*, or with an error of a type that clients
know (backends/errors.py). A request without an end ten minutes later is *hung*.

Targets: all requests within their deadlines and none hung, with every seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from bench.crowd.followed_fleet import Breakage, FollowedFleet, Kind
from conductor import ConductorConfig
from loadtest.harness.result import Target
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered
from loadtest.simulator.cluster.outcome import quantiles
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.cluster.store import WORKER_TTL_S
from loadtest.simulator.options import NODES, Answer, Begin, Rows, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE, REQUESTS = "conversation", 1_536
PREFILLS, DECODES = 50, 2_500
BROKEN_SHARE = 0.05
SEEDS = 5
TIMEOUT_S = 120.0
REPORT_S = 1.0
STOP_S = WORKER_TTL_S + 2 * REPORT_S
HUNG_S = 600.0  # after the last arrival
FREEZE_S = (1.0, 60.0)
KINDS: tuple[Kind, ...] = get_args(Kind)
UNTYPED = "untyped"


@dataclass(frozen=True, slots=True)
class CrowdCase:
    prefills: int
    decodes: int
    share: float  # share of the workers of each role that fail
    seed: int

    @property
    def speed(self) -> float:
        return self.prefills / NODES


@dataclass(frozen=True, slots=True)
class CrowdRun:
    case: CrowdCase
    broken: dict[str, int]  # by kind
    requests: int
    ends: dict[str, int]  # by kind: finished, or the error
    hung: int
    within_deadline: int
    late_most_s: float  # most seconds after a client's timeout, of all requests that ended
    losses: dict[str, int]  # of attempts, by kind
    attempts_most: int
    ttfts_s: tuple[float, float]  # p50 and p99 of the finished requests

    @property
    def finished(self) -> int:
        return self.ends.get("finished", 0)

    @property
    def typed(self) -> int:
        return sum(self.ends.values()) - self.finished - self.ends.get(UNTYPED, 0)


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    prefills, decodes = options.prefills or PREFILLS, options.decodes or DECODES
    first = options.seed
    cases = [CrowdCase(prefills, decodes, 0.0, first)]
    cases += [CrowdCase(prefills, decodes, BROKEN_SHARE, first + n) for n in range(SEEDS)]
    source = options.source(options.one_trace(TRACE))
    config = options.changed(config_of_crowd())
    planned = [
        PlannedRun(f"seed {case.seed}, {case.share:.0%} break", source, run, (case, config))
        for case in cases
    ]
    runs = run_all(planned, begin, options.jobs, options.kept)
    return rows_of(runs), targets_of(runs, _why_not(options))


def _why_not(options: SimulationOptions) -> str:
    """Why the targets do not apply; or ""."""
    if options.requests is not None and options.requests < REQUESTS:
        return f"only the first {options.requests} requests were sent"
    asked = options.prefills or PREFILLS, options.decodes or DECODES
    if asked != (PREFILLS, DECODES):
        return f"{asked[0]} + {asked[1]} workers, it was promised of {PREFILLS} + {DECODES}"
    return f"it was promised without --set {', '.join(options.changes)}" if options.changes else ""


def config_of_crowd() -> ConductorConfig:
    """The settings of model_repository/conductor/config.pbtxt, with the papers' service levels."""
    return ConductorConfig(
        policy="adaptive",
        admission="predictive_lengths",
        ttft_slo_s=30.0,
        tbt_slo_s=0.1,
        decode_s_expected=30.0,
    )


def run(
    offered: Sequence[Offered],
    case: CrowdCase,
    config: ConductorConfig,
    on_over: Callable[[], None] = lambda: None,
) -> CrowdRun:
    offered = offered[:REQUESTS]
    last_s = offered[-1].at_s / case.speed
    breakages = breakages_of(case, last_s)
    settings = ClusterSettings(
        prefills=case.prefills, decodes=case.decodes, seed=case.seed, report_s=REPORT_S
    )
    fleet = FollowedFleet(
        config, settings, Roofline(), breakages, TIMEOUT_S, give_up_s=last_s + HUNG_S
    )
    fleet.run(offered, case.speed, on_over)
    return came_of(fleet, case, Counter(breakage.kind for breakage in breakages))


def breakages_of(case: CrowdCase, last_s: float) -> list[Breakage]:
    """A share of each role fails, each kind equally often, while requests arrive."""
    rng = random.Random(case.seed)
    found: list[Breakage] = []
    for role, count in (("p", case.prefills), ("d", case.decodes)):
        broken = round(case.share * count + 0.499) if case.share else 0
        for number, worker in enumerate(rng.sample(range(count), broken)):
            found.append(
                Breakage(
                    at_s=rng.uniform(0.0, last_s),
                    worker_id=f"{role}{worker}",
                    kind=KINDS[number % len(KINDS)],
                    seconds=rng.uniform(*FREEZE_S),
                )
            )
    return found


def came_of(fleet: FollowedFleet, case: CrowdCase, broken: Counter[str]) -> CrowdRun:
    requests = list(fleet.requests.values())
    over = [request for request in requests if request.is_over]
    late_s = [(r.ended_s or 0.0) - r.arrived_s - TIMEOUT_S for r in over]
    losses: Counter[str] = Counter()
    for request in requests:
        losses.update(request.losses)
    ttft = quantiles([(r.first_token_s or 0.0) - r.arrived_s for r in over if r.error is None])
    return CrowdRun(
        case=case,
        broken=dict(broken),
        requests=len(requests),
        ends=dict(Counter(request.kind for request in over)),
        hung=len(fleet.hung),
        within_deadline=sum(seconds <= STOP_S for seconds in late_s),
        late_most_s=max(0.0, *late_s),
        losses=dict(losses),
        attempts_most=max(len(request.attempts) for request in requests),
        ttfts_s=(ttft.p50, ttft.p99),
    )


def rows_of(runs: Sequence[CrowdRun]) -> Rows:
    return [
        {
            "seed": run.case.seed,
            "prefills": run.case.prefills,
            "decodes": run.case.decodes,
            **{f"{kind}s": run.broken.get(kind, 0) for kind in KINDS},
            "requests": run.requests,
            "within_deadline_percent": round(100 * run.within_deadline / run.requests, 3),
            "hung": run.hung,
            "finished_percent": round(100 * run.finished / run.requests, 2),
            "typed_error_percent": round(100 * run.typed / run.requests, 2),
            "errors": _listed({k: n for k, n in run.ends.items() if k != "finished"}),
            "attempts_lost": _listed(run.losses),
            "attempts_most": run.attempts_most,
            "late_most_s": round(run.late_most_s, 3),
            "ttft_p50_s": round(run.ttfts_s[0], 3),
            "ttft_p99_s": round(run.ttfts_s[1], 3),
            "dynamo_hung": 36,
        }
        for run in runs
    ]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def targets_of(runs: Sequence[CrowdRun], why_not: str = "") -> list[Target]:
    broken = [run for run in runs if run.case.share and not why_not]
    shares = [run.within_deadline / run.requests for run in broken]
    known = [(run.finished + run.typed) / run.requests for run in broken]
    found = (
        ("ended within their deadline, least of the seeds", min(shares, default=None), ">=", 1.0),
        (
            "finished, or with a typed error, least of the seeds",
            min(known, default=None),
            ">=",
            1.0,
        ),
        ("hung, most of the seeds", max((run.hung for run in broken), default=None), "<=", 0.0),
    )
    return [
        Target(f"requests: {name}", value, op, goal, "" if value is not None else why_not)
        for name, value, op, goal in found
    ]
