"""The simulator against the real server: the same requests and decisions, and the difference.

    python -m bench.sim_reality [--trace conversation_trace.jsonl] [--case ssd]

The server has one prefill and one decode worker of one thread each. In every turn it is profiled
alone (`mooncake profile`). Then the first requests of a trace at a scale are sent to it at their
times, with fresh tokens. The simulator serves requests with the same blocks with that profile
(simulator/profiled.py): the real Conductor, Directory and batching, with the profile's step times
and gaps. There are three cases, with medians over the turns of each:

    recorded   the trace at its own speed
    doubled    twice as fast
    ssd        on a server with little memory and an SSD: all prompts, then all of them again after
               they were evicted to the SSD

    TTFT   as the client sees it
    TBT    mean interval between the tokens of a request, its first one (prefill to decode) included
    longest 10 %   the mean of the longest tenth of a request's intervals, as in the paper

Not here: the simulated cluster (simulator/cluster/).
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.overload.load import send_planned
from conductor import ConductorConfig
from loadtest.client.protocol import ServerError
from loadtest.client.server import Addresses, ServerDescription, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, benchmark, console, served
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT, Parameters, own_repository
from loadtest.profile.command import measure as measure_profile
from loadtest.profile.profile import Profile
from loadtest.replay.prompts import PlannedRequest, TokenSource, plan, too_long
from loadtest.replay.trace import TraceRow, read_trace
from loadtest.results.metrics import COMPLETED, RequestRecord
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.profiled import settings_of, token_bytes
from mooncake_store.block_keys import block_keys, chain_seed

WORKERS = ("prefill_0", "decode_1")
ERROR_GOAL = 0.25
START_OF_TRACE = PROJECT / "tests" / "data" / "conversation_start.jsonl"
AGAIN_MS = 3_000.0  # from the last prompt to the first repeated one


@dataclass(frozen=True, slots=True)
class RealityCase:
    """The requests of a case, and the server's memory."""

    name: str
    speed: float
    store_bytes: int = 2**30
    ssd_bytes: int = 0
    is_asked_twice: bool = False

    def rows(self, rows: Sequence[TraceRow]) -> list[TraceRow]:
        if not self.is_asked_twice:
            return list(rows)
        later_ms = rows[-1].timestamp_ms - rows[0].timestamp_ms + AGAIN_MS
        return [*rows, *(replace(row, timestamp_ms=row.timestamp_ms + later_ms) for row in rows)]


CASES = {
    case.name: case
    for case in (
        RealityCase("recorded", 1.0),
        RealityCase("doubled", 2.0),
        RealityCase("ssd", 2.0, store_bytes=64 * 2**20, ssd_bytes=2**30, is_asked_twice=True),
    )
}


@dataclass(frozen=True, slots=True)
class RealityOptions:
    scale: float
    turns: int
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class RequestMeans:
    """Means over all requests, in seconds; `hit_share` of the prompt tokens."""

    ttft_s: float
    tbt_s: float
    longest_s: float
    first_s: float  # first interval: from prefill's token to the first of decode
    hit_share: float

    def row(self, case: str, turn: int, where: str) -> dict[str, Cell]:
        return {
            "case": case,
            "turn": turn,
            "where": where,
            "ttft_mean_ms": round(self.ttft_s * 1e3, 1),
            "tbt_mean_ms": round(self.tbt_s * 1e3, 2),
            "tbt_longest_tenth_ms": round(self.longest_s * 1e3, 2),
            "first_interval_ms": round(self.first_s * 1e3, 2),
            "hit_share": round(self.hit_share, 3),
        }


@dataclass(frozen=True, slots=True)
class CaseMeans:
    case: str
    turn: int
    real: RequestMeans
    simulated: RequestMeans
    profile: Profile


def of_records(records: Sequence[RequestRecord]) -> RequestMeans:
    done = [record for record in records if record.outcome == COMPLETED]
    if len(done) < len(records):
        lost = Counter(record.kind for record in records if record.outcome != COMPLETED)
        raise ServerError("server_error", f"not answered: {dict(lost)} of {len(records)}")
    streams = [record.token_times_s for record in done if len(record.token_times_s) > 1]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    return RequestMeans(
        statistics.fmean(record.ttft_s or 0.0 for record in done),
        statistics.fmean((times[-1] - times[0]) / (len(times) - 1) for times in streams),
        statistics.fmean(record.tbt_s or 0.0 for record in done if record.tbt_s is not None),
        statistics.fmean(times[1] - times[0] for times in streams),
        sum(record.cached_tokens or 0 for record in done) / prompt_tokens,
    )


def of_jobs(jobs: Sequence[SimulatedJob]) -> RequestMeans:
    lost = Counter(
        job.reject.reason if job.reject else job.refused for job in jobs if job.finished_s is None
    )
    if lost:
        raise ValueError(f"the simulator did not answer {dict(lost)} of {len(jobs)} requests")
    several = [job for job in jobs if job.output_tokens > 1]
    return RequestMeans(
        statistics.fmean((job.prefilled_s or 0.0) - job.arrived_s for job in jobs),
        statistics.fmean(
            ((job.finished_s or 0.0) - (job.prefilled_s or 0.0)) / (job.output_tokens - 1)
            for job in several
        ),
        statistics.fmean(job.tbt_s for job in several),
        statistics.fmean(
            (job.joined_s or 0.0) - (job.prefilled_s or 0.0) + job.tbt_decode_s for job in several
        ),
        sum(job.cached_tokens for job in jobs) / sum(job.prompt_tokens for job in jobs),
    )


def simulate(
    planned: Sequence[PlannedRequest], profile: Profile, case: RealityCase, seed: int
) -> list[SimulatedJob]:
    """The same requests, sharing the same blocks as their prompts."""
    block_tokens = int(profile.settings["block_tokens"])
    seed_key = chain_seed("simulated")
    offered = [
        Offered(
            one.index,
            one.due_s,
            len(one.prompt_ids),
            one.output_tokens,
            block_keys(one.prompt_ids, block_tokens, seed_key),
        )
        for one in planned
    ]
    block_bytes = block_tokens * token_bytes(profile)
    shape = ClusterSettings(
        prefills=1,
        decodes=1,
        seed=seed,
        node_blocks=case.store_bytes // block_bytes,
        ssd_blocks=case.ssd_bytes // block_bytes,
        waiting_max=512,
        max_tokens=1,
        report_s=0.5,
    )
    settings = settings_of(profile, shape)
    config = ConductorConfig(admission="none", ttft_slo_s=30.0, tbt_slo_s=1.0)
    return SimulatedFleet(config, settings, settings.gpu()).run(offered)


async def take_turns(
    addresses: Addresses,
    repository: Path,
    rows: Sequence[TraceRow],
    cases: Sequence[RealityCase],
    asked: RealityOptions,
) -> list[CaseMeans]:
    """Every case in every turn, after a profile of that turn."""
    async with TritonClient(addresses.grpc, "conductor", channels=1) as client:
        server = await describe_server(client, {})
    refuse_too_long(rows, asked.scale, server)
    found = []
    for turn in range(1, asked.turns + 1):
        profile = await measure_profile(
            addresses, repository, WORKERS, asked.rounds, asked.seed + turn, 2**31
        )
        for case in cases:
            seed = asked.seed + 1_000 * turn + len(found)
            source = TokenSource.of_server(server, seed)
            planned = plan(case.rows(rows), source, asked.scale, case.speed)
            with console.status(f"turn {turn}, {case.name}: {planned[-1].due_s:.0f} s ..."):
                records = await send_planned(addresses.grpc, planned)
            jobs = simulate(planned, profile, case, seed)
            found.append(CaseMeans(case.name, turn, of_records(records), of_jobs(jobs), profile))
    return found


def refuse_too_long(rows: Sequence[TraceRow], scale: float, server: ServerDescription) -> None:
    if (long := too_long(rows, scale, server.context_tokens_max)) is not None:
        raise ValueError(
            f"requests have up to {long.context_tokens:,} tokens, the server takes "
            f"{server.context_tokens_max:,}: use --length-scale {long.length_scale}"
        )


def targets(found: Sequence[CaseMeans]) -> list[Target]:
    """Medians over the turns, so that one disturbed run does not decide."""
    made = []
    for case in dict.fromkeys(each.case for each in found):
        for name in ("ttft_s", "tbt_s"):
            apart = [
                getattr(each.simulated, name) / getattr(each.real, name) - 1.0
                for each in found
                if each.case == case
            ]
            value = round(abs(float(statistics.median(apart))), 4)
            made.append(Target(f"{case}_{name[:-2]}_mean_apart", value, "<=", ERROR_GOAL))
    return made


def row_of(found: CaseMeans) -> dict[str, Cell]:
    """The turn's profile of the quantities that are hardest to predict."""
    burst, sharing = found.profile.burst, found.profile.sharing
    return {
        "case": found.case,
        "turn": found.turn,
        "where": "profile",
        "profile_error_percent": round(100 * found.profile.prefill.error_mean, 1),
        "handover_ms": round(found.profile.serving.handover_s * 1e3, 1),
        "burst_ttft_ms": round(burst.ttft_s * 1e3, 1),
        "burst_first_interval_ms": round(burst.first_interval_s * 1e3, 1),
        "burst_step_ms": round(burst.step_s * 1e3, 2),
        "beside_decode": round(sharing.prefill, 2),
        "beside_prefill": round(sharing.decode, 2),
        "ssd_mb_per_s": round(found.profile.sources.ssd_bytes_per_s / 1e6),
    }


def main(
    trace: Annotated[Path, typer.Option(help="A published trace.")] = START_OF_TRACE,
    requests: Annotated[int, typer.Option(min=10, help="Its first ones.")] = 100,
    length_scale: Annotated[float, typer.Option(help="Factor of all lengths.")] = 0.0625,
    runs: Annotated[int, typer.Option(min=1, help="Turns; medians are over them.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each profile.")] = 2,
    case: Annotated[
        list[str] | None, typer.Option(help=f"Only this: {', '.join(CASES)}; repeatable.")
    ] = None,
    seed: FreshSeed = None,
) -> None:
    """Serve the same requests really and simulated; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    asked = RealityOptions(length_scale, runs, rounds, seed)
    models: dict[str, Parameters] = {
        "conductor": {"requests_max": 1024, "admission": "none"},
        WORKERS[1]: {"slots": 512, "kv_pages": 8192},
    }
    with benchmark("sim_reality") as run, own_repository(("prefill_1", "decode_0"), models) as copy:
        if unknown := set(case or ()) - set(CASES):
            raise ValueError(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
        rows = read_trace(trace, requests)
        chosen = [CASES[name] for name in case or CASES]
        found: list[CaseMeans] = []
        for has_ssd in (False, True):
            cases = [one for one in chosen if bool(one.ssd_bytes) == has_ssd]
            if cases:
                found += turns_on_a_server(copy, rows, cases, asked)
        for each in found:
            run.rows.append(each.real.row(each.case, each.turn, "server"))
            run.rows.append(each.simulated.row(each.case, each.turn, "simulator"))
            run.rows.append(row_of(each))
        run.targets = targets(found)


def turns_on_a_server(
    repository: Path, rows: Sequence[TraceRow], cases: Sequence[RealityCase], asked: RealityOptions
) -> list[CaseMeans]:
    """All cases need one size of memory and SSD."""
    size = cases[0]
    arguments = ["--model-repository", str(repository), "--store-bytes", str(size.store_bytes)]
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-ssd-") as folder:
        if size.ssd_bytes:
            arguments += ["--ssd-bytes", str(size.ssd_bytes), "--ssd-path", folder]
        with served(None, arguments) as addresses:
            console.print(f"{len(rows)} requests, {asked.turns} turns, seed {asked.seed}")
            return asyncio.run(take_turns(addresses, repository, rows, cases, asked))


if __name__ == "__main__":
    typer.run(main)
