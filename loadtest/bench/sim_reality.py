"""The simulator against the real server: the same requests, the same decisions, how far apart?

    python -m loadtest.bench.sim_reality [--trace conversation_trace.jsonl]

A server of our own with one prefill and one decode worker of one thread each. First it is profiled
(`mooncake profile`), alone. Then, for each run, the first requests of a trace at a scale are sent
to it at their times, with fresh tokens; and the simulator serves requests with the very same blocks
with that profile: the real Conductor, Directory and batching, steps as long as the profile says.

    TTFT   as the client sees it; the simulator's has the profile's `serving` on top, and so has
           its first interval
    TBT    mean interval between the tokens of a request, its first one (prefill to decode) included
    longest 10 %   the mean of the longest tenth of a request's intervals, as in the paper

Means over all requests, medians over the runs. The two workers share cores, as the profile says;
that client, Triton and frontend need them too, the simulator does not know.

Not here: the simulated cluster (simulator/cluster/).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conductor import ConductorConfig
from loadtest.bench.overload.load import send_planned
from loadtest.client.metrics_page import counter_sum, fetch_page
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
from loadtest.simulator.cluster.gpu import Table
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.site import ClusterSettings
from mooncake_store.block_keys import block_keys, chain_seed

WORKERS = ("prefill_0", "decode_1")
STORE_BYTES = 2**30
ERROR_GOAL = 0.25
START_OF_TRACE = PROJECT / "tests" / "data" / "conversation_start.jsonl"


@dataclass(frozen=True, slots=True)
class RequestMeans:
    """Over all requests, in seconds; `hit_share` of the prompt tokens."""

    ttft_s: float
    tbt_s: float
    longest_s: float
    first_s: float  # of the intervals: from prefill's token to the first of decode
    hit_share: float

    def row(self, run: int, where: str) -> dict[str, Cell]:
        return {
            "run": run,
            "where": where,
            "ttft_mean_ms": round(self.ttft_s * 1e3, 1),
            "tbt_mean_ms": round(self.tbt_s * 1e3, 2),
            "tbt_longest_tenth_ms": round(self.longest_s * 1e3, 2),
            "first_interval_ms": round(self.first_s * 1e3, 2),
            "hit_share": round(self.hit_share, 3),
        }


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


def of_jobs(jobs: Sequence[SimulatedJob], profile: Profile) -> RequestMeans:
    lost = Counter(
        job.reject.reason if job.reject else job.refused for job in jobs if job.finished_s is None
    )
    if lost:
        raise ValueError(f"the simulator did not answer {dict(lost)} of {len(jobs)} requests")
    serving_s = profile.serving
    several = [job for job in jobs if job.output_tokens > 1]
    return RequestMeans(
        statistics.fmean(
            (job.prefilled_s or 0.0) - job.arrived_s + serving_s.base_s for job in jobs
        ),
        statistics.fmean(
            ((job.finished_s or 0.0) - (job.prefilled_s or 0.0) + serving_s.handover_s)
            / (job.output_tokens - 1)
            for job in several
        ),
        statistics.fmean(
            job.tbt_s + serving_s.handover_s / math.ceil(0.1 * (job.output_tokens - 1))
            for job in several
        ),
        statistics.fmean(
            (job.joined_s or 0.0)
            - (job.prefilled_s or 0.0)
            + job.tbt_decode_s
            + serving_s.handover_s
            for job in several
        ),
        sum(job.cached_tokens for job in jobs) / sum(job.prompt_tokens for job in jobs),
    )


def simulate(
    planned: Sequence[PlannedRequest], profile: Profile, token_bytes: int, seed: int
) -> list[SimulatedJob]:
    """The same requests, sharing the very blocks that their prompts share."""
    block_tokens = int(profile.settings["block_tokens"])
    seed_key = chain_seed("simulated")
    offered = [
        Offered(
            one.index, one.due_s, len(one.prompt_ids), one.output_tokens,
            block_keys(one.prompt_ids, block_tokens, seed_key),
        )
        for one in planned
    ]  # fmt: skip
    block_bytes = block_tokens * token_bytes
    load_s = profile.serving.per_cached_token_s
    settings = ClusterSettings(
        prefills=1, decodes=1, seed=seed, block_tokens=block_tokens,
        node_blocks=STORE_BYTES // block_bytes, chunk_tokens=profile.chunk_tokens,
        waiting_max=512, decode_slots=int(profile.settings["slots"]), max_tokens=1,
        nic_bytes_per_s=1e9, host_to_gpu_bytes_per_s=token_bytes / load_s if load_s else 1e12,
        report_s=0.5, shared_prefill=profile.sharing.prefill,
        shared_decode=profile.sharing.decode,
    )  # fmt: skip
    gpu = Table(
        profile.prefill.estimate.coefficients, profile.decode.estimate.coefficients,
        token_bytes, int(profile.settings["kv_pages"]) * block_bytes,
    )  # fmt: skip
    return SimulatedFleet(ConductorConfig(admission="none"), settings, gpu).run(offered)


async def measure(
    addresses: Addresses, repository: Path, rows: Sequence[TraceRow], scale: float, runs: int,
    seed: int, rounds: int,
) -> tuple[list[tuple[RequestMeans, RequestMeans]], Profile]:  # fmt: skip
    """(real, simulated) of each run."""
    profile = await measure_profile(addresses, repository, WORKERS, rounds, seed, 2**31)
    async with TritonClient(addresses.grpc, "conductor", channels=1) as client:
        server = await describe_server(client, {})
    refuse_too_long(rows, scale, server)
    page = fetch_page(addresses.metrics_url)
    kv_bytes = counter_sum(page, "mooncake_kv_bytes_max", {"model": WORKERS[1]}) or 0.0
    pages = int(profile.settings["kv_pages"]) * server.block_tokens
    found = []
    for number in range(1, runs + 1):
        source = TokenSource(server.vocabulary_tokens, server.special_token_ids, seed + number)
        planned = plan(rows, source, scale, speed=1.0)
        with console.status(f"run {number} of {runs}: {planned[-1].due_s:.0f} s of trace ..."):
            records = await send_planned(addresses.grpc, planned)
        jobs = simulate(planned, profile, round(kv_bytes / pages), seed + number)
        found.append((of_records(records), of_jobs(jobs, profile)))
    return found, profile


def refuse_too_long(rows: Sequence[TraceRow], scale: float, server: ServerDescription) -> None:
    if (long := too_long(rows, scale, server.context_tokens_max)) is not None:
        raise ValueError(f"requests have up to {long.context_tokens:,} tokens, the server takes "
                         f"{server.context_tokens_max:,}: use --length-scale {long.length_scale}"
                         )  # fmt: skip


def targets(found: Sequence[tuple[RequestMeans, RequestMeans]]) -> list[Target]:
    """Medians over the runs, so that one disturbed run does not decide."""

    def error(name: str) -> float:
        apart = [getattr(sim, name) / getattr(real, name) - 1.0 for real, sim in found]
        return round(abs(float(statistics.median(apart))), 4)

    return [
        Target("ttft_mean_apart", error("ttft_s"), "<=", ERROR_GOAL),
        Target("tbt_mean_apart", error("tbt_s"), "<=", ERROR_GOAL),
    ]


def main(
    trace: Annotated[Path, typer.Option(help="A published trace.")] = START_OF_TRACE,
    requests: Annotated[int, typer.Option(min=10, help="Its first ones.")] = 300,
    length_scale: Annotated[float, typer.Option(help="Of prompts and answers.")] = 0.0625,
    runs: Annotated[int, typer.Option(min=1, help="Medians are over them.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Of the profile.")] = 3,
    seed: FreshSeed = None,
) -> None:
    """Serve the same requests really and simulated; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    models: dict[str, Parameters] = {
        "conductor": {"requests_max": 1024, "admission": "none"},
        WORKERS[1]: {"slots": 512, "kv_pages": 8192},
    }
    with benchmark("sim_reality") as run, own_repository(("prefill_1", "decode_0"), models) as copy:
        rows = read_trace(trace, requests)
        arguments = ["--model-repository", str(copy), "--store-bytes", "1G"]
        with served(None, arguments) as addresses:
            console.print(f"{len(rows)} requests, {runs} runs, --seed {seed}")
            found, profile = asyncio.run(
                measure(addresses, copy, rows, length_scale, runs, seed, rounds)
            )
        for number, (real, simulated) in enumerate(found, 1):
            run.rows += [real.row(number, "server"), simulated.row(number, "simulator")]
        run.rows.append({
            "where": f"profile: error {profile.prefill.error_mean:.1%} of prefills, "
            f"{profile.decode.error_mean:.1%} of decode steps; beside the other role they take "
            f"{profile.sharing.prefill:.2f} and {profile.sharing.decode:.2f} times as long"
        })  # fmt: skip
        run.targets = targets(found)


if __name__ == "__main__":
    typer.run(main)
