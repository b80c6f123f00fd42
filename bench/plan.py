"""Does a plan rank fleets as the real server does?

    python -m bench.plan [--trace conversation_trace.jsonl]

One prefill and one decode worker of one thread each are profiled (`mooncake profile`), alone and
beside a second one of their role. From that profile the fleets 1P+1D, 2P+1D and 1P+2D are planned,
and then served from the model repository that the plan writes. The first requests of a trace at a
scale are sent to each at their times, with fresh tokens. Goodput is counted on both sides: requests
within both limits per second.

The limits follow the paper: 10x of the TTFT and 5x of the TBT that requests have alone, as planned.
The plan chooses the speed of the trace before anything is served: the one at which the planned
goodputs differ most.

Each pair of fleets has a target: 1 if the plan ranks it as the server does. If the server's
goodputs differ by MARGIN or less, noise would decide, and there is no value.

Not here: planning (planner/), sending (overload/load.py).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from bench.overload.load import send_planned
from conductor import ConductorConfig
from loadtest.client.server import Addresses, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, benchmark, console, served
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT
from loadtest.planner.engine import MeasuredEngine
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels, run_fleet
from loadtest.planner.overlay import store_bytes, write_overlay
from loadtest.profile.command import measure as measure_profile
from loadtest.replay.prompts import TokenSource, plan
from loadtest.replay.trace import read_trace
from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered, offered_of

SHAPES = ((1, 1), (2, 1), (1, 2))
MARGIN = 1.15
STORE_BYTES = 2**28  # of each node
TTFT_TIMES, TBT_TIMES = 10.0, 5.0  # of the unloaded times: the paper's limits
ALONE_S, ALONE_REQUESTS = 60.0, 60  # seconds between requests that come alone, and their number
SPEEDS = tuple(round(0.5 * 1.3**step, 3) for step in range(12))
# share of requests within the limits at the best fleet; below it, nothing is planned
SHARE_MIN = 0.3
START_OF_TRACE = PROJECT / "tests" / "data" / "conversation_start.jsonl"


@dataclass(frozen=True, slots=True)
class FleetCount:
    """The outcomes of the requests, on one side."""

    offered: int
    within: int
    unanswered: int
    ttft_p90_s: float
    tbt_p90_s: float

    def row(self, fleet: str, where: str, arrivals_s: float) -> dict[str, Cell]:
        return {
            "fleet": fleet,
            "where": where,
            "within": self.within,
            "goodput_per_s": round(self.within / arrivals_s, 4),
            "unanswered": self.unanswered,
            "ttft_p90_ms": round(1e3 * self.ttft_p90_s, 1),
            "tbt_p90_ms": round(1e3 * self.tbt_p90_s, 2),
        }


def planned_count(run: FleetRun) -> FleetCount:
    return FleetCount(run.offered, run.within, run.unanswered, run.ttft_p90_s, run.tbt_p90_s)


def served_count(records: Sequence[RequestRecord], levels: ServiceLevels) -> FleetCount:
    done = [record for record in records if record.outcome == COMPLETED]
    lost = [one for one in records if one.outcome not in (COMPLETED, REJECTED)]
    if lost:
        raise ValueError(f"{len(lost)} of {len(records)} requests failed, one with {lost[0].kind}")
    ttfts_s = [record.ttft_s or 0.0 for record in done]
    tbts_s = [record.tbt_s or 0.0 for record in done]
    good = sum(
        ttft_s <= levels.ttft_s and tbt_s <= levels.tbt_s
        for ttft_s, tbt_s in zip(ttfts_s, tbts_s, strict=True)
    )
    return FleetCount(len(records), good, len(records) - len(done), *map(p90, (ttfts_s, tbts_s)))


def p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else 0.0


def unloaded_limits(offered: Sequence[Offered], engine: MeasuredEngine) -> ServiceLevels:
    """Multiples of the median request's times when each request comes alone."""
    apart = [replace(one, at_s=ALONE_S * number) for number, one in enumerate(offered)]
    settings = replace(engine.settings(), prefills=1, decodes=1)
    config = ConductorConfig(admission="none", advisory=True, ttft_slo_s=30.0, tbt_slo_s=1.0)
    jobs = SimulatedFleet(config, settings, engine.gpu()).run(apart[:ALONE_REQUESTS])
    ttft_s = statistics.median((job.prefilled_s or 0.0) - job.arrived_s for job in jobs)
    tbt_s = statistics.median(job.tbt_s for job in jobs if job.output_tokens > 1)
    return ServiceLevels(TTFT_TIMES * ttft_s, TBT_TIMES * tbt_s)


def planned_runs(
    offered: Sequence[Offered],
    engine: MeasuredEngine,
    levels: ServiceLevels,
    speed: float,
    seed: int,
) -> dict[tuple[int, int], FleetRun]:
    blocks = engine.node_blocks_max
    return {
        shape: run_fleet(offered, FleetPlan(*shape, blocks), engine, levels, speed, seed)
        for shape in SHAPES
    }


def spread_of(runs: Mapping[tuple[int, int], FleetRun]) -> float:
    """The best fleet's planned goodput over the worst's; 0 if even the best serves few requests."""
    if max(run.share for run in runs.values()) < SHARE_MIN:
        return 0.0
    counts = [max(1, run.within) for run in runs.values()]
    return max(counts) / min(counts)


def targets_of(
    real: Mapping[tuple[int, int], FleetCount], planned: Mapping[tuple[int, int], FleetCount]
) -> list[Target]:
    found = []
    for one, other in combinations(SHAPES, 2):
        name = f"{_name(one)} against {_name(other)}, ranked as the server does"
        on_server = _ratio(real[one], real[other])
        in_plan = _ratio(planned[one], planned[other])
        said = f"server {on_server:.3f}, plan {in_plan:.3f}"
        if max(on_server, 1 / on_server) <= MARGIN:
            found.append(Target(name, None, ">=", 1.0, f"the server's are too close: {said}"))
            continue
        agrees = (on_server > 1) == (in_plan > 1) and in_plan != 1
        found.append(Target(name, float(agrees), ">=", 1.0, said))
    return found


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}P+{shape[1]}D"


def _ratio(one: FleetCount, other: FleetCount) -> float:
    return max(0.5, one.within) / max(0.5, other.within)


async def profiled(addresses: Addresses, rounds: int, seed: int) -> MeasuredEngine:
    repository, workers = PROJECT / "model_repository", ("prefill_0", "decode_0")
    profile = await measure_profile(addresses, repository, workers, rounds, seed, 2_048)
    return MeasuredEngine.of(profile, STORE_BYTES)


async def send(
    addresses: Addresses, trace: Path, requests: int, scale: float, speed: float, seed: int
) -> list[RequestRecord]:
    async with TritonClient(addresses.grpc, "conductor", channels=1) as client:
        server = await describe_server(client, {})
    source = TokenSource.of_server(server, seed)
    rows = read_trace(trace, requests)
    return list(await send_planned(addresses.grpc, plan(rows, source, scale, speed)))


def main(
    trace: Annotated[Path, typer.Option(help="A published trace.")] = START_OF_TRACE,
    requests: Annotated[int, typer.Option(min=10, help="Its first ones.")] = 300,
    length_scale: Annotated[float, typer.Option(help="Factor of all lengths.")] = 0.0625,
    speed: Annotated[
        float | None,
        typer.Option(help="Factor of the trace's speed; default: where plans differ most."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the profile.")] = 2,
    seed: FreshSeed = None,
) -> None:
    """Plan and serve the same fleets; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    with benchmark("plan") as run:
        with served(None, ["--store-bytes", str(STORE_BYTES)]) as addresses:
            engine = asyncio.run(profiled(addresses, rounds, seed))
        settings = engine.settings()
        offered = offered_of(read_trace(trace, requests), settings.block_tokens, length_scale)
        levels = unloaded_limits(offered, engine)
        tried = {
            at: planned_runs(offered, engine, levels, at, seed % 2**31)
            for at in ([speed] if speed else SPEEDS)
        }
        at = max(tried, key=lambda one: spread_of(tried[one]))
        console.print(
            f"{len(offered)} requests at {at:g}x, TTFT <= {levels.ttft_s:.3g} s, "
            f"TBT <= {levels.tbt_s:.3g} s, --seed {seed}"
        )
        real, planned = {}, {shape: planned_count(one) for shape, one in tried[at].items()}
        for number, (shape, one) in enumerate(tried[at].items()):
            with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
                repository = write_overlay(Path(folder), one, engine, levels)
                nodes = ",".join(f"s{node}" for node in range(sum(shape)))
                size = store_bytes(one.plan, engine)
                with served(
                    None,
                    [
                        f"--model-repository={repository}",
                        f"--nodes={nodes}",
                        f"--store-bytes={size}",
                    ],
                ) as addresses:
                    records = asyncio.run(
                        send(addresses, trace, requests, length_scale, at, seed + 1 + number)
                    )
            real[shape] = served_count(records, levels)
            for where, count in (("server", real[shape]), ("plan", planned[shape])):
                run.rows.append(count.row(_name(shape), where, one.arrivals_s))
        run.constants = {
            "speed": at,
            "length_scale": length_scale,
            "ttft_slo_s": levels.ttft_s,
            "tbt_slo_s": levels.tbt_s,
            **engine.stated(),
        }
        run.targets = targets_of(real, planned)


if __name__ == "__main__":
    typer.run(main)
