"""The cost of Triton, the frontend and the hand-over on top of the bare engine, at the client.

    python -m bench.overhead [--only ttft-tbt|throughput|interference]

One server has one prefill and one decode worker, and the bare engine runs in this process with as
many threads as a worker. Compared ways take turns in each round; medians over the rounds.
docs/reference/benchmarks.md describes the three parts.

TBT of a stream is its mean: (last token - first token of the full batch) / tokens between. A token
counts when its message arrives. A message may carry several tokens, so single intervals would show
the packing rather than the speed.

Not here: requests (served.py), the bare engine (bare_engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import numpy as np
import typer

from backends.text.tokenizer import Tokenizer
from bench.harness.processes import CpuTime, process_name, process_tree
from bench.overhead.bare_engine import CHECKPOINT, BareEngine
from bench.overhead.served import ModelWay, OpenAiWay, TokenArrivals, stream, together, tokens_per_s
from loadtest.client.server import describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import BenchmarkRun, FreshSeed, benchmark, console, together_tbt_s
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure, OwnServer, own_ports, own_repository, started
from loadtest.replay.prompts import TokenIds, TokenSource

STREAMS = 16
BESIDE_STREAMS = 4  # streams whose token intervals a long prompt disturbs
BESIDE_TOKENS_MAX = 5_000  # of each stream; the streams are cancelled when the long prompt is done
CANCELLED_S = 0.5
# in one loop, where many steps are without the long prompt for each with a chunk
BESIDE_PREFILLS = 4
TTFTS = 11  # in each round
CPU_MS_SHOWN = 0.05
P99 = 0.99
# All requests are the benchmark's own. By default the conductor keeps capacity for requests like
# those of the last minute, and may reject the long prompt beside the streams.
CONDUCTOR = {"expected_arrivals_share": "0"}
WORKER_CORES = {"prefill_0": 0, "decode_0": 1}


@dataclass(frozen=True, slots=True)
class OverheadShape:
    short_tokens: int
    prompt_tokens: int
    output_tokens: int
    answer_tokens: int
    long_tokens: int
    chunk_tokens: int
    rounds: int

    @property
    def long_steps(self) -> int:
        return -(-self.long_tokens // self.chunk_tokens)

    @property
    def kv_tokens(self) -> int:
        """KV tokens of the bare engine at once, with a block for each request's last tokens."""
        longest_tokens = max(self.output_tokens, self.answer_tokens)
        streams = STREAMS * (self.prompt_tokens + longest_tokens + 64)
        steps = BESIDE_PREFILLS * self.long_steps
        beside = BESIDE_STREAMS * (self.prompt_tokens + steps + 64) + self.long_tokens
        return self.short_tokens + 128 + max(streams, beside)


@dataclass(slots=True)
class Bench:
    server: OwnServer
    gateway: str  # HOST:PORT
    engine: BareEngine
    source: TokenSource
    shape: OverheadShape
    run: BenchmarkRun
    _prompts: int = 0

    def prompts(self, count: int, tokens: int) -> list[TokenIds]:
        first, self._prompts = self._prompts, self._prompts + count
        return [self.source.fresh(first + at, tokens) for at in range(count)]


async def ttft_and_tbt(bench: Bench) -> None:
    shape, run, cpu = bench.shape, bench.run, CpuTime(bench.server.addresses.grpc)
    rows: list[dict[str, Cell]] = []
    async with TritonClient(bench.server.addresses.grpc, channels=STREAMS) as client:
        [short] = bench.prompts(1, shape.short_tokens)
        await stream(client, "ttft", short, 2)  # from here on it is cached
        for index in range(1, shape.rounds + 1):
            with console.status(f"TTFT and TBT, round {index} of {shape.rounds} ..."):
                pairs = [
                    (bench.engine.ttft_s(short), (await stream(client, "ttft", short, 2)).ttft_s)
                    for _ in range(TTFTS)
                ]
                prompts = bench.prompts(STREAMS, shape.prompt_tokens)
                bare = together_tbt_s(bench.engine.streams_s(prompts, shape.output_tokens), 2)
                await together(client, prompts, 2)  # now all are cached, so all decode at once
                with cpu.measuring():
                    arrived = await together(client, prompts, shape.output_tokens)
                served = together_tbt_s([each.times_s for each in arrived], 2)
            if bare is None or served is None:
                raise CannotMeasure("the streams did not run together: ask for more tokens")
            tokens = STREAMS * shape.output_tokens
            rows.append(
                {
                    "round": index,
                    "engine_ttft_ms": round(
                        statistics.median(bare_s for bare_s, _ in pairs) * 1e3, 3
                    ),
                    "ttft_ms": round(statistics.median(its_s for _, its_s in pairs) * 1e3, 3),
                    "engine_tbt_ms": round(bare * 1e3, 3),
                    "tbt_ms": round(served * 1e3, 3),
                    "tokens_per_message": round(tokens / sum(each.messages for each in arrived), 2),
                }
            )
    run.rows += rows
    steps = shape.rounds * shape.output_tokens
    run.rows += [
        {"process": name, "cpu_ms_per_step": round(seconds * 1e3 / steps, 3)}
        for name, seconds in sorted(cpu.seconds.items(), key=lambda item: -item[1])
        if seconds * 1e3 / steps >= CPU_MS_SHOWN
    ]
    added_ms = statistics.median(
        float(row["ttft_ms"] or 0) - float(row["engine_ttft_ms"] or 0) for row in rows
    )
    ratio = statistics.median(
        float(row["tbt_ms"] or 0) / float(row["engine_tbt_ms"] or 1) for row in rows
    )
    run.targets += [
        Target("ttft_added_ms", round(added_ms, 3), "<=", 8.0),
        Target("tbt_over_engine", round(ratio, 4), "<=", 1.15, f"{STREAMS} streams"),
    ]


async def throughput(bench: Bench) -> None:
    shape, grpc = bench.shape, bench.server.addresses.grpc
    tokenizer = Tokenizer.load(CHECKPOINT)
    texts = [text_of(tokenizer, prompt) for prompt in bench.prompts(STREAMS, shape.prompt_tokens)]
    # The engine gets what the server makes of the texts, so that both attend to as many tokens.
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    rows: list[dict[str, Cell]] = []
    async with (
        TritonClient(grpc, channels=STREAMS) as conductor,
        TritonClient(grpc, "ensemble", channels=STREAMS) as ensemble,
    ):
        ways: dict[str, ModelWay | OpenAiWay] = {
            "conductor": ModelWay(conductor),
            "ensemble": ModelWay(ensemble),
            "gateway": OpenAiWay(bench.gateway),
        }
        for index in range(shape.rounds + 1):  # the first one caches the prompts
            with console.status(f"throughput, round {index} of {shape.rounds} ..."):
                streams_s = bench.engine.streams_s(prompts, shape.answer_tokens)
                begin_s = max(times_s[0] for times_s in streams_s)
                end_s = max(times_s[-1] for times_s in streams_s)
                row: dict[str, Cell] = {"round": index}
                decoded = sum(time_s > begin_s for times_s in streams_s for time_s in times_s)
                row["engine_tokens_per_s"] = round(decoded / (end_s - begin_s), 1)
                for name, way in ways.items():
                    for kind, is_streamed in (("streamed", True), ("whole", False)):
                        rate = await tokens_per_s(way, texts, shape.answer_tokens, is_streamed)
                        row[f"{name}_{kind}_tokens_per_s"] = round(rate, 1)
            if index:
                rows.append(row)
    bench.run.rows += rows
    for name in ways:
        for peer, goal in ((f"{name}_whole", 0.9), ("engine", 0.85)):
            ratio = statistics.median(
                float(row[f"{name}_streamed_tokens_per_s"] or 0)
                / float(row[f"{peer}_tokens_per_s"] or 1)
                for row in rows
            )
            over = peer.removeprefix(f"{name}_")
            bench.run.targets.append(
                Target(f"{name}_streamed_over_{over}", round(ratio, 3), ">=", goal)
            )


def text_of(tokenizer: Tokenizer, prompt: TokenIds) -> str:
    """About as many tokens when it is read again: random ones would be a sixth more."""
    read_again = tokenizer.encode(tokenizer.decode(prompt.tolist()))
    return tokenizer.decode(read_again[: len(prompt)])


async def interference(bench: Bench) -> None:
    shape, rows = bench.shape, []
    streams = bench.prompts(BESIDE_STREAMS, shape.prompt_tokens)
    with pinned(bench.server):
        async with TritonClient(bench.server.addresses.grpc, channels=STREAMS) as client:
            await together(client, streams, 2)
            for index in range(1, shape.rounds + 1):
                [long] = bench.prompts(1, shape.long_tokens)
                with console.status(f"interference, round {index} of {shape.rounds} ..."):
                    alone_s, beside_s = await served_intervals(client, streams, long)
                    row: dict[str, Cell] = {
                        "round": index,
                        "alone_p99_ms": p99_ms(alone_s),
                        "beside_p99_ms": p99_ms(beside_s),
                    }
                    for name, prompt in (("alone", None), ("beside", long)):
                        found_s = bench.engine.intervals_s(
                            streams, BESIDE_PREFILLS * shape.long_steps, prompt, shape.chunk_tokens
                        )
                        row[f"loop_{name}_p99_ms"] = p99_ms(found_s)
                rows.append(row)
    bench.run.rows += rows
    raised = [
        (
            float(row["loop_beside_p99_ms"] or 0) - float(row["loop_alone_p99_ms"] or 0),
            float(row["beside_p99_ms"] or 0) - float(row["alone_p99_ms"] or 0),
        )
        for row in rows
    ]
    loop_ms, served_ms = (statistics.median(each) for each in zip(*raised, strict=True))
    why = f"{loop_ms:.1f} ms in one loop, {served_ms:.1f} ms on another worker"
    # A raise too small to be measured counts as a tenth of a millisecond.
    ratio = round(loop_ms / max(served_ms, 0.1), 2)
    bench.run.targets.append(Target("loop_raise_over_worker_raise", ratio, ">=", 5.0, why))


async def served_intervals(
    client: TritonClient, streams: Sequence[TokenIds], long: TokenIds
) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of streams, alone and while a long prompt is computed."""
    arrived = [TokenArrivals() for _ in streams]
    running = asyncio.create_task(together(client, streams, BESIDE_TOKENS_MAX, arrived))
    await asyncio.sleep(1.0)  # poll: all of them decode, and nothing else happens for a while
    prefill = await stream(client, "long", long, 1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    if any(len(each.times_s) == BESIDE_TOKENS_MAX for each in arrived):
        raise CannotMeasure(
            f"{BESIDE_TOKENS_MAX} tokens came before the long prompt was done: is its worker there?"
        )
    if not all(each.times_s for each in arrived):
        raise CannotMeasure("a stream had no token before the long prompt was done")
    await asyncio.sleep(CANCELLED_S)  # poll: the server has cancelled it, and its cores are free
    begin_s = max(each.times_s[0] for each in arrived)
    alone = [s for each in arrived for s in each.intervals_s(begin_s, prefill.sent_s)]
    beside = [s for each in arrived for s in each.intervals_s(prefill.sent_s, prefill.times_s[0])]
    return alone, beside


def p99_ms(intervals_s: Sequence[float]) -> float:
    return round(float(np.quantile(intervals_s, P99)) * 1e3, 3)


@contextlib.contextmanager
def pinned(server: OwnServer) -> Iterator[None]:
    """Pin the workers to a core each, and this process with its engine to that of the decode
    worker."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise CannotMeasure("two cores are needed to keep the workers apart")
    for process in process_tree(server.pid):
        if (core := WORKER_CORES.get(process_name(process))) is not None:
            for thread in process.threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, {cores[core]})
    try:
        yield
    finally:
        for process in process_tree(server.pid):
            for thread in process.threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)


class OverheadPart(str, Enum):
    TTFT_TBT = "ttft-tbt"
    THROUGHPUT = "throughput"
    INTERFERENCE = "interference"


PARTS = {
    OverheadPart.TTFT_TBT: ttft_and_tbt,
    OverheadPart.THROUGHPUT: throughput,
    OverheadPart.INTERFERENCE: interference,
}


async def described(server: OwnServer, seed: int) -> tuple[TokenSource, int]:
    async with TritonClient(server.addresses.grpc) as client:
        found = await describe_server(client, {})
    source = TokenSource.of_server(found, seed)
    return source, found.block_tokens


def main(
    only: Annotated[
        list[OverheadPart] | None, typer.Option(help="Only this part; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of the medians.")] = 5,
    short_tokens: Annotated[int, typer.Option(min=65, help="Tokens of the cached prompt.")] = 350,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=3_000, help="Tokens of each stream's prompt.")
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of each stream, for TBT.")
    ] = 256,
    answer_tokens: Annotated[
        int,
        typer.Option(
            min=64,
            help="Tokens of each answer, for throughput; many, so that the TTFT hardly counts.",
        ),
    ] = 800,
    threads: Annotated[int, typer.Option(min=1, help="As in the workers' config.pbtxt.")] = 1,
    seed: FreshSeed = None,
) -> None:
    """Measure what serving adds to the bare engine; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    shape = OverheadShape(
        short_tokens, prompt_tokens, output_tokens, answer_tokens, 8_000, 512, rounds
    )
    [port] = own_ports(1)
    arguments = ["--prefill", "1", "--decode", "1", "--openai-port", str(port)]
    with benchmark("overhead") as run, contextlib.ExitStack() as stack:
        console.print(f"{rounds} rounds, --seed {seed}")
        with console.status("waiting for the server ..."):
            repository = stack.enter_context(own_repository((), {"conductor": CONDUCTOR}))
            arguments += ["--model-repository", str(repository)]
            server = stack.enter_context(started(arguments))
        source, block_tokens = asyncio.run(described(server, seed))
        engine = BareEngine(block_tokens, threads, shape.kv_tokens)
        bench = Bench(server, f"127.0.0.1:{port}", engine, source, shape, run)
        for part in only or list(OverheadPart):
            asyncio.run(PARTS[part](bench))


if __name__ == "__main__":
    typer.run(main)
