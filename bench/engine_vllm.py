"""vLLM behind our conductor and store, beside plain vLLM, on the same threads.

    python -m bench.engine_vllm

    vllm           plain vLLM: one process with a thread for each core
    mooncake-vllm  a prefill and a decode worker with vLLM as the engine, behind the gateway, on the
                   same cores: prefill with as many threads, decode with one
    vllm-shared    plain vLLM that shares prefixes through `mooncake store serve`

All start anew in each round, in turns. The client is `vllm bench serve`. In every round:

    streams  STREAMS short prompts at once: output tokens per second, the median of REPEATS
    cold     COLD prompts of PROMPT_TOKENS, one after the other: TTFT
    warm     prompts that begin with SHARED of the first of these. Plain vLLM has them in its own
             cache. The others have lost them there, because the engine's memory holds fewer tokens
             than the cold prompts; so they come from the store

`vllm-shared` and `vllm` compute cold prompts alike, but the former also saves them.

Not here: goodput under load (headline/), copies alone (connector.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from backends.engine.plain_vllm.prefixes import TRANSFER_CONFIG
from bench.headline.client import send
from bench.headline.environment import VLLM, vllm_environment
from bench.headline.goodput import RequestDetail
from bench.headline.servers import running
from bench.headline.systems import (
    KV_BYTES,
    Machine,
    ServerCommand,
    SystemPlan,
    mooncake_repository,
    plan_of,
    url,
    vllm,
)
from bench.headline.traces import TraceRequest, at_rate, probes
from loadtest.harness.benchmark import benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import PROJECT, CannotMeasure, own_ports

SYSTEMS = ("vllm", "mooncake-vllm", "vllm-shared")
STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS, REPEATS = 8, 128, 128, 3
COLD, WARM, PROMPT_TOKENS, SHARED = 8, 3, 4096, 0.9
SHARED_KV_PROMPTS = 5  # in the KV memory of vllm-shared, so that the first cold prompts leave it
VLLM_BLOCK_TOKENS = 128  # its default on a CPU
CELLS = 3 + REPEATS  # of a round
LIMITS = "600,10"  # TTFT and TBT in seconds: engines are compared, so ours rejects nothing
THROUGHPUT_GOAL, OWN_CACHE_GOAL, COLD_GOAL, SAVING_GOAL = 0.9, 1.5, 0.35, 1.05
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


def shared_plan(machine: Machine, ports: Sequence[int], folder: Path) -> SystemPlan:
    """`folder`: of the store's sockets."""
    words = [sys.executable, "-m", "backends.cli", "store", "serve", "--folder", str(folder)]
    words += ["--store-bytes", str(KV_BYTES // 2)]
    store = ServerCommand("store", tuple(words), "")
    extra = ("--kv-transfer-config", json.dumps(TRANSFER_CONFIG))
    blocks = SHARED_KV_PROMPTS * PROMPT_TOKENS // VLLM_BLOCK_TOKENS  # the variable takes whole GiB
    extra += ("--num-gpu-blocks-override", str(blocks))
    variables = {"MOONCAKE_DIRECTORY": f"ipc://{folder}/directory"}
    engine = vllm(machine, "vllm-shared", ports[0], machine.cores, KV_BYTES // 2, extra, variables)
    return SystemPlan(((store,), (engine,)), url(ports[0]))


def measure(machine: Machine, system: str, number: int) -> dict[str, Cell]:
    with contextlib.ExitStack() as steps:
        if system == "vllm-shared":
            folder = Path(steps.enter_context(tempfile.TemporaryDirectory()))
            plan = shared_plan(machine, own_ports(6), folder / "s")
        else:
            plan = plan_of(system, machine, own_ports(6))
        return _measured(machine, system, number, plan)


def _measured(machine: Machine, system: str, number: int, plan: SystemPlan) -> dict[str, Cell]:
    cell, logs = number * CELLS, machine.state / "logs" / system

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
        speeds = []
        for number_of_cell in range(cell + 3, cell + CELLS):
            prompts = fresh(STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS, number_of_cell)
            streams = sent(prompts, STREAMS)
            tokens = sum(detail.output_tokens for detail in streams)
            speeds.append(tokens / max(detail.latency_s for detail in streams))
        asked = fresh(COLD, PROMPT_TOKENS, 1, cell + 1)
        cold = sent(asked, 1)
        warm = sent(begins_as(asked, WARM, cell + 2), 1)
    row: dict[str, Cell] = {
        "round": number,
        "system": system,
        "start_s": round(start_s, 1),
        "output_tokens_per_s": round(statistics.median(speeds), 1),
        "cold_ttft_s": round(statistics.median(detail.ttft_s for detail in cold), 3),
        "warm_ttft_s": round(statistics.median(detail.ttft_s for detail in warm), 3),
    }
    progress(str(row))
    return row


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    plain, ours, shared = (
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
        Target(
            "shared_prefix_over_cold",
            round(shared["warm_ttft_s"] / shared["cold_ttft_s"], 3),
            "<=",
            COLD_GOAL,
            "plain vLLM with the store",
        ),
        Target(
            "saving_over_plain",
            round(shared["cold_ttft_s"] / plain["cold_ttft_s"], 3),
            "<=",
            SAVING_GOAL,
            "time to compute 4k tokens, and save them",
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or servers would stay
    with benchmark("engine_vllm") as run:
        if not (checkpoint / "config.json").exists():
            raise CannotMeasure(f"{checkpoint} has no config.json; name a model with --checkpoint")
        vllm_bin = vllm_environment()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        machine = Machine(checkpoint.resolve(), vllm_bin, None, cores, state.resolve())
        mooncake_repository(machine, "mooncake-vllm", LIMITS, len(cores))
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
