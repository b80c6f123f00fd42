"""vLLM behind our conductor and store, beside plain vLLM, on the same threads.

    python -m bench.engine_vllm

Plain vLLM is one process with all threads. Ours is a prefill and a decode worker with vLLM as the
engine, half of the threads each, behind the gateway. Both start anew in each round, in turns. The
client is `vllm bench serve`. In every round:

    streams  STREAMS short prompts at once: output tokens per second
    cold     COLD prompts of PROMPT_TOKENS, one after the other: TTFT
    warm     prompts that begin with SHARED of the first of these. Plain vLLM has them in its own
             cache. Ours has lost them there, because its engine's memory holds fewer tokens than
             the cold prompts; so they come from the store

Not here: goodput under load (headline/), copies alone (connector.py).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.headline.client import send
from bench.headline.environment import VLLM, vllm_environment
from bench.headline.goodput import RequestDetail
from bench.headline.servers import running
from bench.headline.systems import KV_BYTES, Machine, mooncake_repository, plan_of
from bench.headline.traces import TraceRequest, at_rate, probes
from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT, CannotMeasure, own_ports

SYSTEMS = ("vllm", "mooncake-vllm")
STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 8, 128, 128
COLD, WARM, PROMPT_TOKENS, SHARED = 8, 3, 4096, 0.9
CELLS = 4  # of a round
LIMITS = "600,10"  # TTFT and TBT in seconds: engines are compared, so ours rejects nothing
THROUGHPUT_GOAL, OWN_CACHE_GOAL, COLD_GOAL = 0.9, 1.5, 0.35
CHECKPOINT = PROJECT / ".mooncake" / "checkpoints" / "smollm2-135m"


def fresh(count: int, tokens: int, output_tokens: int, cell: int) -> list[TraceRequest]:
    """Prompts that share nothing, also with those of other cells; they arrive together."""
    return at_rate(probes((tokens,), count, output_tokens), 1.0, cell)


def begins_as(cold: Sequence[TraceRequest], count: int, cell: int) -> list[TraceRequest]:
    """Prompts that begin with SHARED of each of the first `count`, and then are fresh."""
    new = fresh(count, PROMPT_TOKENS, 1, cell)
    kept = round(len(cold[0].block_ids) * SHARED)
    return [
        replace(after, block_ids=known.block_ids[:kept] + after.block_ids[kept:])
        for known, after in zip(cold[:count], new, strict=True)
    ]


def measure(machine: Machine, system: str, number: int) -> dict[str, Cell]:
    cell = number * CELLS
    plan, logs = plan_of(system, machine, own_ports(6)), machine.state / "logs" / system

    def sent(requests: Sequence[TraceRequest], at_once_max: int) -> list[RequestDetail]:
        found = send(
            machine.vllm_bin, machine.checkpoint, base_url, requests, logs / "client", at_once_max
        )
        if failed := next((detail for detail in found if not detail.is_answered), None):
            raise CannotMeasure(f"{system} did not answer: {failed.error or 'too short'}")
        return found

    with running(plan, logs, progress) as start_s:
        base_url = plan.base_url
        sent(fresh(STREAMS, STREAM_PROMPT_TOKENS, 8, cell), STREAMS)  # warm up
        streams = sent(fresh(STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS, cell + 1), STREAMS)
        asked = fresh(COLD, PROMPT_TOKENS, 1, cell + 2)
        cold = sent(asked, 1)
        warm = sent(begins_as(asked, WARM, cell + 3), 1)
    tokens = sum(detail.output_tokens for detail in streams)
    row: dict[str, Cell] = {
        "round": number,
        "system": system,
        "start_s": round(start_s, 1),
        "output_tokens_per_s": round(tokens / max(detail.latency_s for detail in streams), 1),
        "cold_ttft_s": round(statistics.median(detail.ttft_s for detail in cold), 3),
        "warm_ttft_s": round(statistics.median(detail.ttft_s for detail in warm), 3),
    }
    progress(str(row))
    return row


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    plain, ours = (
        {
            name: statistics.median(float(row[name]) for row in rows if row["system"] == system)
            for name in ("output_tokens_per_s", "cold_ttft_s", "warm_ttft_s")
        }
        for system in SYSTEMS
    )
    throughput = ours["output_tokens_per_s"] / plain["output_tokens_per_s"]
    return [
        Target("throughput_over_plain", round(throughput, 3), ">=", THROUGHPUT_GOAL),
        Target(
            "stored_prefix_over_own_cache",
            round(ours["warm_ttft_s"] / plain["warm_ttft_s"], 3),
            "<=",
            OWN_CACHE_GOAL,
            "TTFT, 90 % of 4k tokens",
        ),
        Target(
            "stored_prefix_over_cold",
            round(ours["warm_ttft_s"] / ours["cold_ttft_s"], 3),
            "<=",
            COLD_GOAL,
        ),
    ]


def main(
    checkpoint: Annotated[
        Path, typer.Option(help="Hugging Face folder that both serve.")
    ] = CHECKPOINT,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the medians.")] = 3,
    state: Annotated[
        Path, typer.Option(help="Folder for logs, compiled code and the server's state.")
    ] = Path(".mooncake/engine-vllm"),
) -> None:
    """Measure vLLM behind our conductor beside plain vLLM; the last line is JSON."""
    with benchmark("engine_vllm") as run:
        if not (checkpoint / "config.json").exists():
            raise CannotMeasure(f"{checkpoint} has no config.json; name a model with --checkpoint")
        vllm_bin = vllm_environment()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        machine = Machine(checkpoint.resolve(), vllm_bin, None, cores, state.resolve())
        mooncake_repository(machine, "mooncake-vllm", LIMITS)
        run.constants |= {"vllm": VLLM, "cores": len(cores), "kv_bytes": KV_BYTES}
        for number in range(rounds):
            turn = number % len(SYSTEMS)
            for system in (*SYSTEMS[turn:], *SYSTEMS[:turn]):
                run.rows.append(measure(machine, system, number + 1))
        run.targets = targets(run.rows)


def progress(line: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
