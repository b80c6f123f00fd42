"""Coupled engines with the same trace on the same 16 nodes, swept over their parameters.

They are vLLM-like continuous batching, with chunked prefill, with a prefix cache. The size of a
chunk, the batch and the dispatch matter as much as the engine, so each is varied on its own from
the default. The first row is the project's own 8 + 8 nodes. No system rejects requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.paper.coupled import CoupledFleet, CoupledSettings
from bench.paper.experiments import scheduling
from loadtest.harness.result import Cell
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of, within
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.options import Answer, Begin, SimulationOptions
from loadtest.simulator.runs import PlannedRun, run_all

TRACE, POLICY, TTFT_SLO_S = "conversation", "kvcache_centric", 30.0
TBT_SLOS_S = (0.1, 0.2, 0.3)  # FAST'25, Figure 1
CHUNKED = CoupledSettings("chunked")
SWEPT = (
    CoupledSettings("vllm"),
    CoupledSettings("vllm", has_prefix_cache=True),
    CHUNKED,
    replace(CHUNKED, has_prefix_cache=True),
    replace(CHUNKED, chunk_tokens=512),
    replace(CHUNKED, chunk_tokens=8_192),
    replace(CHUNKED, sequences_max=32),
    replace(CHUNKED, dispatch="random"),
    replace(CHUNKED, dispatch="least_requests"),
)


def answer(options: SimulationOptions, begin: Begin) -> Answer:
    source, shape = options.source(options.one_trace(TRACE)), options.settings()
    planned: list[PlannedRun[dict[str, Cell]]] = []
    for speed in options.speeds or (1.0,):
        name = f"{shape.prefills}P+{shape.decodes}D {POLICY}"
        planned.append(
            PlannedRun(
                f"{name} {speed:g}x", source, run_own, (name, speed, shape, options.only_changes)
            )
        )
        for swept in SWEPT:
            settings = replace(swept, nodes=shape.prefills + shape.decodes, seed=options.seed)
            planned.append(
                PlannedRun(f"{settings.name} {speed:g}x", source, run_coupled, (settings, speed))
            )
    return run_all(planned, begin, options.jobs, options.kept), []


def run_own(
    offered: Sequence[Offered],
    name: str,
    speed: float,
    shape: ClusterSettings,
    options: SimulationOptions,
    on_over: Callable[[], None],
) -> dict[str, Cell]:
    fleet = SimulatedFleet(options.changed(scheduling.config_for(POLICY)), shape, Roofline())
    return _row(name, speed, None, fleet.run(offered, speed, on_over))


def run_coupled(
    offered: Sequence[Offered], settings: CoupledSettings, speed: float, on_over: Callable[[], None]
) -> dict[str, Cell]:
    jobs = CoupledFleet(settings, Roofline()).run(offered, speed, on_over)
    return _row(settings.engine, speed, settings, jobs)


def _row(
    name: str, speed: float, settings: CoupledSettings | None, jobs: Sequence[SimulatedJob]
) -> dict[str, Cell]:
    outcome = outcome_of(jobs)
    row: dict[str, Cell] = {
        "engine": name,
        "speed": speed,
        "has_prefix_cache": settings.has_prefix_cache if settings else None,
        "chunk_tokens": settings.chunk_tokens if settings else None,
        "sequences_max": settings.sequences_max if settings else None,
        "dispatch": settings.dispatch if settings else None,
        "finished": outcome.finished,
        "ttft_mean_s": round(outcome.ttft_s.mean, 3),
        "ttft_p90_s": round(outcome.ttft_s.p90, 3),
        "tbt_p50_s": round(outcome.tbt_s.p50, 4),
        "tbt_p90_s": round(outcome.tbt_s.p90, 4),
        "hit_percent": round(100 * outcome.hit_share, 2),
        "prefill_s_per_request": round(outcome.prefill_s / max(1, outcome.prefills), 3),
    }
    for tbt_slo_s in TBT_SLOS_S:
        kept = within(jobs, TTFT_SLO_S, tbt_slo_s)
        row[f"within_{1e3 * tbt_slo_s:.0f}_ms_percent"] = round(100 * kept / len(jobs), 1)
    return row
