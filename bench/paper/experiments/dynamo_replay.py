"""The conductor in NVIDIA Dynamo's replay engine, beside Dynamo's own router in its own replay.

The conversation trace runs on two prefill and two decode workers, each with its own cache and
nothing else. First comes the gate: under round robin this engine must agree with Dynamo's. Then the
conductor runs under the paper's policy and under ours: at recorded speed, with each tick spread
out, and in an overload at four times the speed. The overload also runs with a lower minimum for
each length of prompt. All rows have the same limits.

Options select other cases: speeds, sizes of cache, numbers of workers, another trace. Then every
scheduler runs on it, and so does Dynamo itself with a Python that has its wheel.

`passes` is the rule for filling a prefill pass. `filled`: up to all the tokens, as in Dynamo's
engine. `shared`: prompts share a pass only where that pays (conductor/queue_order.py). Dynamo gets
the same by holding prompts in its router until a worker is free (queue threshold 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.dynamo.decode_worker import OutOfBlocks
from bench.dynamo.fleet import DynamoFleet, RoundRobinFleet, profile_prefill
from bench.dynamo.peer import (
    BLOCKS,
    ROUTERS,
    SPEEDS,
    PeerResult,
    PeerRun,
    ReplayTimes,
    digest,
    read_recorded,
    run_live,
)
from bench.dynamo.targets import (
    LENGTH_SHARE_MIN,
    LOW_SHARE,
    OVERLOAD,
    SPREAD,
    DynamoCase,
    DynamoRun,
    round_robin,
    targets_of,
)
from bench.dynamo.timing import alone_s
from conductor import ConductorConfig
from conductor.queue_order import ALWAYS
from loadtest.harness.result import Cell
from loadtest.replay.trace import TraceRow
from loadtest.simulator.cluster.job import Offered, offered_of, spread_ticks
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.options import (
    NO_OPTIONS,
    Answer,
    Begin,
    Rows,
    SimulationOptions,
    SimulationRefused,
)

TRACE = "conversation"
WORKERS = 2  # default for each kind
TTFT_LIMIT_S, TBT_LIMIT_S = 10.0, 0.1  # the conductor's limits


@dataclass(frozen=True, slots=True)
class DynamoResults:
    """The results of Dynamo's own replay, or why there are none."""

    results: dict[PeerRun, PeerResult]
    why_not: str = ""


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    trace = options.one_trace(TRACE)
    rows = options.rows(trace)
    cases = [
        case
        for case in cases_of(options)
        if not options.policies or case.policy in (*options.policies, "round_robin")
    ]
    why_not = "" if trace == TRACE else f"it was promised of the {TRACE} trace"
    if options.requests is not None or options.changes:
        why_not = options.is_shortened
    peer = _peer(rows, cases, options.peer_python, begin)
    offered, spread = offered_of(rows), offered_of(spread_ticks(rows))
    runs = []
    for case in cases:
        on_over = begin(case.name, len(rows))
        runs.append(run(case, spread if case.is_spread else offered, options, on_over))
    targets = targets_of(runs, peer.results, why_not, peer.why_not)
    return _rows(runs, peer.results), targets


def cases_of(options: SimulationOptions) -> list[DynamoCase]:
    """The published cases; or every scheduler on the selected load."""
    prefills, decodes = options.prefills or WORKERS, options.decodes or WORKERS
    is_usual = (prefills, decodes) == (WORKERS, WORKERS) and set(options.blocks) <= set(BLOCKS)
    if is_usual and not options.speeds:
        return [case for case in all_cases() if not options.blocks or case.blocks in options.blocks]
    cases = []
    for speed in options.speeds or (1.0,):
        for blocks in options.blocks or BLOCKS:
            cases.append(round_robin(blocks, speed))
            cases += conducted(blocks, speed)
    return [replace(case, prefills=prefills, decodes=decodes) for case in cases]


def conducted(blocks: int, speed: float) -> list[DynamoCase]:
    """The conductor under the paper's policy and under ours."""
    return [
        DynamoCase(policy, order, passes, blocks, speed)
        for passes in ("filled", "shared")
        for policy, order in (("kvcache_centric", "fifo"), ("adaptive", "shortest_first"))
    ]


def all_cases() -> list[DynamoCase]:
    """The gate, then each policy at recorded speed, spread out, and in overload."""
    cases = [round_robin(blocks, speed) for speed in SPEEDS for blocks in BLOCKS]
    for blocks in BLOCKS:
        cases += conducted(blocks, 1.0)
        cases += [replace(case, blocks=blocks) for case in (SPREAD, OVERLOAD, LOW_SHARE)]
    return cases


def config_for(
    policy: str, queue_order: str, length_share_min: float = LENGTH_SHARE_MIN
) -> ConductorConfig:
    """The conductor's settings: the same limits at every speed and cache size."""
    return ConductorConfig(
        policy=policy,
        queue_order=queue_order,
        admission="predictive",
        length_share_min=length_share_min,
        ttft_slo_s=TTFT_LIMIT_S,
        tbt_slo_s=TBT_LIMIT_S,
        replicate=False,  # there is no transfer to copy blocks with
    )


def run(
    case: DynamoCase,
    offered: Sequence[Offered],
    options: SimulationOptions = NO_OPTIONS,
    on_over: Callable[[], None] = lambda: None,
) -> DynamoRun:
    started_s = time.monotonic()
    shares = profile_prefill().estimate.overhead_tokens if case.passes == "shared" else ALWAYS
    sizes = case.blocks, case.prefills, case.decodes, shares
    if case.policy == "round_robin":
        fleet: DynamoFleet = RoundRobinFleet(*sizes)
    else:
        config = config_for(case.policy, case.queue_order, case.length_share_min)
        fleet = DynamoFleet(options.changed(config), *sizes)
    try:
        jobs = fleet.run(offered, case.speed, on_over)
    except OutOfBlocks as problem:
        raise SimulationRefused(f"{case.name}: {problem}") from None
    outcome, times = outcome_of(jobs, alone_s), ReplayTimes.of(jobs)
    return DynamoRun(case, outcome, times, time.monotonic() - started_s)


def _peer(
    rows: Sequence[TraceRow], cases: Sequence[DynamoCase], python: str | None, begin: Begin
) -> DynamoResults:
    """Live when its Python was given, else the recording if that is of the same trace."""
    wanted = list(dict.fromkeys(case.of_peer(router) for case in cases for router in ROUTERS))
    if python is not None:
        try:
            done = begin("Dynamo's own replay", len(wanted))
            return DynamoResults(run_live(rows, wanted, python, done))
        except (RuntimeError, OSError) as problem:
            raise SimulationRefused(f"--peer-python: {problem}") from None
    recorded_of, results = read_recorded()
    if recorded_of != digest(rows):
        return DynamoResults(
            {}, "Dynamo's replay is recorded of another trace; run it: --peer-python"
        )
    why_not = ""
    if missing := [run for run in wanted if run not in results]:
        why_not = f"{len(missing)} cases of Dynamo's replay are not recorded: --peer-python"
    return DynamoResults({run: results[run] for run in wanted if run in results}, why_not)


def _rows(runs: Sequence[DynamoRun], peer: dict[PeerRun, PeerResult]) -> Rows:
    """Ours and Dynamo's of the same load one after the other."""
    loads = {run.case.of_peer("") for run in runs}
    shown = []
    for load in sorted(loads, key=lambda load: (load.speed, load.is_spread, load.blocks)):
        shown += [
            _peer_row(run, result)
            for run, result in peer.items()
            if replace(run, router="") == load
        ]
        shown += [_row(found) for found in runs if found.case.of_peer("") == load]
    return shown


def _row(run: DynamoRun) -> dict[str, Cell]:
    case = run.case
    load = case.of_peer("")
    who: dict[str, Cell] = {
        "engine": "here",
        "policy": case.policy,
        "queue": case.queue_order,
        "passes": case.passes,
    }
    if case.length_share_min != LENGTH_SHARE_MIN:
        who["policy"] = f"{case.policy}, length_share_min {case.length_share_min:g}"
    refused = ", ".join(f"{count} {kind}" for kind, count in sorted(run.outcome.rejected.items()))
    return (
        who | _figures(load, run.outcome) | {"rejected": refused, "seconds": round(run.seconds, 2)}
    )


def _peer_row(run: PeerRun, result: PeerResult) -> dict[str, Cell]:
    policy = ROUTERS[run.router].get("router_queue_policy", "fifo")
    who: dict[str, Cell] = {
        "engine": f"dynamo {result.version}",
        "policy": run.router,
        "queue": str(policy),
        "passes": "filled",
    }
    return who | _figures(run, result.outcome)


def _figures(load: PeerRun, outcome: SimulationOutcome) -> dict[str, Cell]:
    """The same figures of ours and of Dynamo's, counted by the same code."""
    return {
        "speed": load.speed,
        "ticks": "spread" if load.is_spread else "recorded",
        "blocks": load.blocks,
        "workers": f"{load.prefills}P{load.decodes}D",
        "requests": outcome.offered,
        "admitted": outcome.finished,
        "ttft_mean_ms": round(1e3 * outcome.ttft_s.mean, 1),
        "ttft_p50_ms": round(1e3 * outcome.ttft_s.p50, 1),
        "ttft_p90_ms": round(1e3 * outcome.ttft_s.p90, 1),
        "ttft_p99_ms": round(1e3 * outcome.ttft_s.p99, 1),
        "ttft_max_ms": round(1e3 * outcome.ttft_s.most, 1),
        "wait_max_s": round(outcome.wait_max_s, 3),
        "itl_mean_ms": round(1e3 * outcome.itl_mean_s, 2),
        "reuse_percent": round(100 * outcome.hit_share, 2),
        "good": outcome.good,
        "good_ttft_p99_ms": round(1e3 * outcome.good_ttft_p99_s, 1),
        "good_tokens_per_s": round(outcome.good_tokens_per_s, 1),
        "good_percent_by_length": _by_length(outcome, lambda c: f"{100 * c.good_share:.0f}"),
        "ttft_p99_s_by_length": _by_length(outcome, lambda c: f"{c.ttft_p99_s:.1f}"),
    }


def _by_length(outcome: SimulationOutcome, shown: Callable[..., str]) -> str:
    return " / ".join(shown(found) for found in outcome.classes)
