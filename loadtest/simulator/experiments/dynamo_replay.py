"""The conductor in NVIDIA Dynamo's replay engine, beside Dynamo's own router in its own replay.

The conversation trace on two prefill and two decode workers, each with its own cache and nothing
else. First the gate: under round robin this engine must agree with Dynamo's. Then the conductor
under the paper's policy and under ours, at recorded speed, with each tick spread out, and at four
times the speed, where more is offered than fits. One set of limits for every row.

`passes` tells what fills a prefill pass. `filled`: all the tokens there are, as Dynamo's engine has
it. `shared`: prompts share a pass only where that pays (conductor/step_sharing.py). Dynamo reaches
the same by holding prompts in its router until a worker is free (queue threshold 0).

Not here: the engine (../dynamo), its peer (../dynamo/peer.py), the picture (../dynamo/plot.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conductor import ConductorConfig
from conductor.step_sharing import ALWAYS, overhead_tokens
from loadtest.bench.result import Cell, Result
from loadtest.simulator.asked import Asked, SimulationRefused, progress_bar
from loadtest.simulator.dynamo import plot
from loadtest.simulator.dynamo.arrivals import jobs_of, spread_ticks
from loadtest.simulator.dynamo.conductor_scheduler import ConductorScheduler, profile_prefill
from loadtest.simulator.dynamo.outcome import Outcome, outcome_of
from loadtest.simulator.dynamo.peer import (
    BLOCKS,
    ROUTERS,
    RUNS,
    SPEEDS,
    PeerFailed,
    PeerResult,
    PeerRun,
    digest,
    read_recorded,
    run_live,
)
from loadtest.simulator.dynamo.replay import Replay, Scheduler
from loadtest.simulator.dynamo.round_robin import RoundRobin
from loadtest.simulator.dynamo.targets import Case, Run, targets_of
from loadtest.trace import TraceRow

TRACE = "conversation"
OVERLOAD = 4.0
TTFT_LIMIT_S, TBT_LIMIT_S = 10.0, 0.1  # what the conductor is told to keep


@dataclass(frozen=True, slots=True)
class Peer:
    """What Dynamo's own replay found, or why that is not known."""

    results: dict[PeerRun, PeerResult]
    why_not: str = ""


def answer(asked: Asked) -> Result:
    """Every case, beside Dynamo's numbers; the picture when one was asked for."""
    started_s = time.monotonic()
    trace = asked.one_trace(TRACE)
    rows = asked.rows(trace)
    cases = [
        case
        for case in all_cases()
        if (not asked.blocks or case.blocks in asked.blocks)
        and (not asked.speeds or case.speed in asked.speeds)
        and (not asked.policies or case.policy in (*asked.policies, "round_robin"))
    ]
    if not cases:
        raise SimulationRefused(f"there are --blocks {BLOCKS} and --speed {SPEEDS}")
    why_not = "" if trace == TRACE else f"it was promised of the {TRACE} trace"
    if asked.requests is not None or asked.changes:
        why_not = asked.is_shortened
    with progress_bar() as begin:
        peer = _peer(rows, cases, asked.peer_python, begin)
        spread = spread_ticks(rows)
        runs = []
        for case in cases:
            arrived = begin(case.name, len(rows))
            runs.append(run(case, spread if case.is_spread else rows, arrived, asked.changed))
    shown = _rows(runs, peer.results)
    targets = targets_of(runs, peer.results, why_not, peer.why_not)
    if asked.picture is not None:
        plot.save(asked.picture, shown)
    return Result("dynamo-replay", time.monotonic() - started_s, shown, targets)


def all_cases() -> list[Case]:
    """The gate, then each policy at recorded speed, spread out, and in overload."""
    cases = [
        Case("round_robin", "fifo", "filled", blocks, speed)
        for speed in SPEEDS
        for blocks in BLOCKS
    ]
    for blocks in BLOCKS:
        for passes in ("filled", "shared"):
            cases.append(Case("kvcache_centric", "fifo", passes, blocks, 1.0))
            cases.append(Case("adaptive", "shortest_first", passes, blocks, 1.0))
        cases.append(Case("adaptive", "shortest_first", "shared", blocks, 1.0, is_spread=True))
        cases.append(Case("adaptive", "shortest_first", "shared", blocks, OVERLOAD))
    return cases


def config_for(policy: str, queue_order: str) -> ConductorConfig:
    """What the conductor is told: the same limits at every speed and cache size."""
    return ConductorConfig(
        policy=policy, queue_order=queue_order, admission="predictive",
        ttft_slo_s=TTFT_LIMIT_S, tbt_slo_s=TBT_LIMIT_S,
        replicate=False,  # there is nothing to copy blocks with
    )  # fmt: skip


def run(
    case: Case, rows: Sequence[TraceRow], arrived: Callable[[], None] = lambda: None,
    changed: Callable[[ConductorConfig], ConductorConfig] = lambda config: config,
) -> Run:  # fmt: skip
    """Replay one case to its end."""
    started_s = time.monotonic()
    scheduler: Scheduler = RoundRobin()
    if case.policy != "round_robin":
        scheduler = ConductorScheduler(changed(config_for(case.policy, case.queue_order)))
    shares = overhead_tokens(profile_prefill().estimate) if case.passes == "shared" else ALWAYS
    replay = Replay(scheduler, case.blocks, overhead_tokens=shares)
    jobs = jobs_of(rows, case.speed)
    replay.run(jobs, arrived)
    replay.check()
    rejected: dict[str, int] = {}
    if isinstance(scheduler, ConductorScheduler):
        scheduler.conductor.check()
        rejected = scheduler.rejected
    return Run(case, outcome_of(jobs), rejected, time.monotonic() - started_s)


def _peer(
    rows: Sequence[TraceRow], cases: Sequence[Case], python: str | None,
    begin: Callable[[str, int], Callable[[], None]],
) -> Peer:  # fmt: skip
    """Live when its Python was given, else as recorded if that was on the same trace."""
    places = {(case.blocks, case.speed, case.is_spread) for case in cases}
    wanted = [run for run in RUNS if (run.blocks, run.speed, run.is_spread) in places]
    if python is not None:
        try:
            return Peer(run_live(rows, wanted, python, begin("Dynamo's own replay", len(wanted))))
        except (PeerFailed, OSError) as problem:
            raise SimulationRefused(f"--peer-python: {problem}") from None
    recorded_of, results = read_recorded()
    if recorded_of != digest(rows):
        return Peer({}, "Dynamo's replay is recorded of another trace; run it: --peer-python")
    return Peer({run: results[run] for run in wanted})


def _rows(runs: Sequence[Run], peer: dict[PeerRun, PeerResult]) -> list[dict[str, Cell]]:
    """Ours and Dynamo's of the same load one after the other."""
    loads = dict.fromkeys((r.case.speed, r.case.is_spread, r.case.blocks) for r in runs)
    shown = []
    for load in sorted(loads):
        shown += [
            _peer_row(run, result)
            for run, result in peer.items()
            if (run.speed, run.is_spread, run.blocks) == load
        ]
        shown += [
            _row(found)
            for found in runs
            if (found.case.speed, found.case.is_spread, found.case.blocks) == load
        ]
    return shown


def _row(run: Run) -> dict[str, Cell]:
    case, outcome = run.case, run.outcome
    return {
        "engine": "here",
        "policy": case.policy,
        "queue": case.queue_order,
        "passes": case.passes,
        "speed": case.speed,
        "ticks": "spread" if case.is_spread else "recorded",
        "blocks": case.blocks,
        "requests": outcome.requests,
        "admitted": outcome.admitted,
        "ttft_mean_ms": round(1e3 * outcome.ttft_mean_s, 1),
        "ttft_p50_ms": round(1e3 * outcome.ttft_p50_s, 1),
        "ttft_p90_ms": round(1e3 * outcome.ttft_p90_s, 1),
        "ttft_p99_ms": round(1e3 * outcome.ttft_p99_s, 1),
        "ttft_max_ms": round(1e3 * outcome.ttft_max_s, 1),
        "wait_max_s": round(outcome.wait_max_s, 3),
        "itl_mean_ms": round(1e3 * outcome.itl_mean_s, 2),
        "reuse_percent": round(100 * outcome.reuse, 2),
        "good": outcome.good,
        "good_tokens_per_s": round(outcome.good_tokens_per_s, 1),
        "good_percent_by_length": _by_length(outcome, lambda c: f"{100 * c.good_share:.0f}"),
        "ttft_p99_s_by_length": _by_length(outcome, lambda c: f"{c.ttft_p99_s:.1f}"),
        "rejected": ", ".join(f"{count} {kind}" for kind, count in sorted(run.rejected.items())),
        "seconds": round(run.seconds, 2),
    }


def _by_length(outcome: Outcome, shown: Callable[..., str]) -> str:
    return " / ".join(shown(found) for found in outcome.classes)


def _peer_row(run: PeerRun, result: PeerResult) -> dict[str, Cell]:
    policy = ROUTERS[run.router].get("router_queue_policy", "fifo")
    return {
        "engine": f"dynamo {result.version}",
        "policy": run.router,
        "queue": str(policy),
        "passes": "filled",
        "speed": run.speed,
        "ticks": "spread" if run.is_spread else "recorded",
        "blocks": run.blocks,
        "requests": result.requests,
        "admitted": result.requests,
        "ttft_mean_ms": round(result.ttft_mean_ms, 1),
        "ttft_p50_ms": round(result.ttft_p50_ms, 1),
        "ttft_p90_ms": round(result.ttft_p90_ms, 1),
        "ttft_p99_ms": round(result.ttft_p99_ms, 1),
        "ttft_max_ms": round(result.ttft_max_ms, 1),
        "itl_mean_ms": round(result.itl_mean_ms, 2),
        "reuse_percent": round(100 * result.reuse, 2),
        "good": result.good,
        "good_tokens_per_s": round(result.good_tokens_per_s, 1),
    }
