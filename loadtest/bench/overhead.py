"""What Triton, the frontend and the hand-over add to the bare engine, for a user at the client.

    python -m loadtest.bench.overhead [--url 127.0.0.1:8001]

Two comparisons, each in turns on the same cores within one run, medians over rounds:

    ttft   a short prompt whose KV is cached: the client's time to the first token, against the
           bare engine computing the same tokens over KV that is in its pages already
    tbt    8 streams at once on one decode worker, against the bare engine with a batch of the
           same 8 prompts in this process, with as many threads as the worker has

TBT of a stream here is its mean: (last token - first token of the full batch) / tokens between.
A token counts when its message arrives; a message may carry several, so single intervals would say
more about the packing than about the speed. How many a message carries is in the rows, and so is
the CPU time that each process spends for one step of the 8 streams.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from backends.engine.generate import generate_tokens
from backends.engine.interface import Work
from backends.engine.sampling import sample
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from loadtest.client.protocol import GenerateRequest
from loadtest.client.server import describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import (
    FreshSeed,
    ServerUrl,
    benchmark,
    console,
    served,
    together_tbt_s,
)
from loadtest.harness.processes import CpuTime
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT
from loadtest.replay.prompts import TokenIds, TokenSource

TTFT_ADDED_S_GOAL = 0.010
TBT_RATIO_GOAL = 1.2
STREAMS = 8
TTFTS = 11  # in each round
CPU_MS_SHOWN = 0.05
CHECKPOINT = PROJECT / "backends" / "demo_checkpoint"
PINNED = {"prefill_worker": "prefill_0", "decode_worker": "decode_0"}


@dataclass(frozen=True, slots=True)
class OverheadShape:
    """How large what is measured is, in tokens."""

    short_tokens: int
    prompt_tokens: int
    output_tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class TokenArrivals:
    """When the tokens of one stream came, and how they were packed."""

    times_s: list[float]  # one per token
    messages: int


def tbt_s(streams: Sequence[TokenArrivals]) -> float:
    """Median over the streams of the mean interval while all of them ran."""
    found_s = together_tbt_s([stream.times_s for stream in streams], tokens_min=2)
    assert found_s is not None, "the streams did not run together; ask for more tokens"
    return found_s


class BareEngine:
    """The engine of the workers in this process, and nothing else."""

    def __init__(self, block_tokens: int, threads: int, shape: OverheadShape) -> None:
        tokens = STREAMS * (shape.prompt_tokens + shape.output_tokens) + shape.short_tokens
        pages = tokens // block_tokens + 2 * STREAMS + 2
        self._engine = TorchEngine.load(CHECKPOINT, pages, block_tokens, threads=threads)
        self._block_tokens = block_tokens
        self._short_pages: list[int] = []

    def ttft_s(self, prompt: TokenIds) -> float:
        """Of a prompt whose full blocks are in pages; at least one token is computed."""
        cached = min(len(prompt) // self._block_tokens * self._block_tokens, len(prompt) - 1)
        if not self._short_pages:
            self._short_pages = self._engine.pages.take(len(prompt) // self._block_tokens + 1)
            self._engine.forward([Work(prompt[:cached].tolist(), 0, self._short_pages)])
        started_s = time.perf_counter()
        work = Work(prompt[cached:].tolist(), cached, self._short_pages)
        sample(self._engine.forward([work])[0], SamplingParams(max_tokens=1), 0, [], [])
        return time.perf_counter() - started_s

    def tbt_s(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        params = SamplingParams(max_tokens=output_tokens, min_tokens=output_tokens)
        streams = [TokenArrivals([], 0) for _ in prompts]
        ids = [prompt.tolist() for prompt in prompts]
        for index, _ in generate_tokens(self._engine, ids, params, slots_max=len(prompts)):
            streams[index].times_s.append(time.perf_counter())
        return tbt_s(streams)


async def stream(
    client: TritonClient, name: str, prompt: TokenIds, output_tokens: int
) -> tuple[float, TokenArrivals]:
    """One request, pinned; (when it was sent, what arrived)."""
    request = GenerateRequest(
        request_id=name, input_ids=prompt, max_tokens=output_tokens, min_tokens=output_tokens,
        end_id=-1, parameters=PINNED,
    )  # fmt: skip
    times_s: list[float] = []
    messages = 0
    sent_s = time.perf_counter()
    async for event in client.generate(request):
        messages += 1
        times_s += [event.time_s] * len(event.output_ids)
    assert len(times_s) == output_tokens, f"{len(times_s)} tokens of {output_tokens}"
    return sent_s, TokenArrivals(times_s, messages)


async def ttfts_s(engine: BareEngine, client: TritonClient, short: TokenIds) -> tuple[float, float]:
    """Medians of (bare engine, client), in turns: both find caches that the other has used."""
    bare_s, served_s = [], []
    for _ in range(TTFTS):
        bare_s.append(engine.ttft_s(short))
        served_s.append(await client_ttft_s(client, short))
    return statistics.median(bare_s), statistics.median(served_s)


async def client_ttft_s(client: TritonClient, prompt: TokenIds) -> float:
    sent_s, arrivals = await stream(client, "ttft", prompt, 2)
    return arrivals.times_s[0] - sent_s


async def together(
    client: TritonClient, prompts: Sequence[TokenIds], output_tokens: int
) -> list[TokenArrivals]:
    each = [stream(client, f"tbt-{i}", p, output_tokens) for i, p in enumerate(prompts)]
    return [arrivals for _, arrivals in await asyncio.gather(*each)]


async def client_tbt(
    client: TritonClient, prompts: Sequence[TokenIds], output_tokens: int, cpu: CpuTime
) -> tuple[float, float]:
    """(TBT, tokens per message) of streams that run together.

    Sent twice: the first time brings the prompts into the cache, so that all decode at once then.
    """
    await together(client, prompts, 2)
    with cpu.measuring():
        arrived = await together(client, prompts, output_tokens)
    messages = sum(arrivals.messages for arrivals in arrived)
    return tbt_s(arrived), len(prompts) * output_tokens / messages


async def measure(
    grpc: str, shape: OverheadShape, threads: int, seed: int
) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    cpu = CpuTime(grpc)
    async with TritonClient(grpc, "conductor", channels=STREAMS) as client:
        server = await describe_server(client, {})
        source = TokenSource(server.vocabulary_tokens, server.special_token_ids, seed)
        engine = BareEngine(server.block_tokens, threads, shape)
        short = source.fresh(0, shape.short_tokens)
        await client_ttft_s(client, short)  # from here on it is cached
        for index in range(1, shape.rounds + 1):
            prompts = [
                source.fresh(index * STREAMS + i, shape.prompt_tokens) for i in range(STREAMS)
            ]
            with console.status(f"round {index} of {shape.rounds} ..."):
                bare_ttft_s, ttft_s = await ttfts_s(engine, client, short)
                bare_tbt_s = engine.tbt_s(prompts, shape.output_tokens)
                served_tbt_s, packed = await client_tbt(client, prompts, shape.output_tokens, cpu)
            rows.append({
                "round": index,
                "engine_ttft_ms": round(bare_ttft_s * 1e3, 3),
                "ttft_ms": round(ttft_s * 1e3, 3),
                "engine_tbt_ms": round(bare_tbt_s * 1e3, 3),
                "tbt_ms": round(served_tbt_s * 1e3, 3),
                "tokens_per_message": round(packed, 2),
            })  # fmt: skip
    steps = shape.rounds * shape.output_tokens
    rows += [
        {"process": name, "cpu_ms_per_step": round(seconds * 1e3 / steps, 3)}
        for name, seconds in sorted(cpu.seconds.items(), key=lambda item: -item[1])
        if seconds * 1e3 / steps >= CPU_MS_SHOWN
    ]
    return rows


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    def median(name: str) -> float:
        return float(np.median([row[name] for row in rows if name in row]))

    added_s = (median("ttft_ms") - median("engine_ttft_ms")) / 1e3
    ratio = median("tbt_ms") / median("engine_tbt_ms")
    return [
        Target("ttft_added_s", round(added_s, 6), "<=", TTFT_ADDED_S_GOAL),
        Target("tbt_over_engine", round(ratio, 4), "<=", TBT_RATIO_GOAL),
    ]


def main(
    url: ServerUrl = None,
    rounds: Annotated[int, typer.Option(min=3, help="Medians are over them.")] = 7,
    short_tokens: Annotated[int, typer.Option(min=65, help="Of the cached prompt.")] = 350,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each of the 8 prompts.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=64, help="Of each of the 8 answers.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="As in the workers' config.pbtxt.")] = 1,
    seed: FreshSeed = None,
) -> None:
    """Measure what serving adds to the bare engine; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    shape = OverheadShape(short_tokens, prompt_tokens, output_tokens, rounds)
    with benchmark("overhead") as run, served(url) as addresses:
        console.print(f"{rounds} rounds, --seed {seed}")
        run.rows = asyncio.run(measure(addresses.grpc, shape, threads, seed))
        run.targets = targets(run.rows)


if __name__ == "__main__":
    typer.run(main)
