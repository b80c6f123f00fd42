"""TTFT of a prompt that is new, cached in the worker's own node, and cached in the other node.

    python -m bench.reuse [--url 127.0.0.1:8001]

Each fresh prompt of random tokens is sent three times, alone, with its workers pinned:

    cold     prefill_0: computes everything, its blocks go to node s0
    cached   prefill_0 again: finds them in its own node
    fetched  prefill_1: its node s1 has nothing, so the blocks come from s0 over NIXL

The server's counter `mooncake_transfer_bytes_total{transport="nixl"}` must rise with each fetch;
otherwise the target has no value.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from loadtest.client.answer import ReceivedAnswer
from loadtest.client.metrics_page import counter_sum, fetch_page
from loadtest.client.protocol import GenerateRequest
from loadtest.client.server import Addresses, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, ServerUrl, benchmark, console, served, settled
from loadtest.harness.result import Cell, Target
from loadtest.replay.prompts import TokenIds, TokenSource

RATIO_GOAL = 0.35
OUTPUT_TOKENS = 4  # more than one, so that decode reads the blocks: then they are in the store
COUNTER = "mooncake_transfer_bytes_total"
COUNTER_S, COUNTER_S_MAX = 1.2, 10.0  # workers publish their counters every second


@dataclass(frozen=True, slots=True)
class Step:
    """One way to send a prompt: its workers, and its name in the rows."""

    name: str
    prefill_worker: str
    decode_worker: str


STEPS = (
    Step("cold", "prefill_0", "decode_0"),
    Step("cached", "prefill_0", "decode_0"),
    Step("fetched", "prefill_1", "decode_1"),
)


def settled_nixl_bytes(addresses: Addresses) -> float | None:
    """The counter once it has stopped changing; None when the server has no such counter."""

    def read() -> float | None:
        return counter_sum(fetch_page(addresses.metrics_url), COUNTER, {"transport": "nixl"})

    return settled(read, COUNTER_S, COUNTER_S_MAX)


async def send(client: TritonClient, step: Step, prompt: TokenIds) -> dict[str, Cell]:
    """Send one request, alone; returns its times and the server's counts."""
    answer = ReceivedAnswer()
    request = GenerateRequest(
        request_id=f"reuse-{step.name}",
        input_ids=prompt,
        max_tokens=OUTPUT_TOKENS,
        min_tokens=OUTPUT_TOKENS,
        end_id=-1,
        return_decision=True,
        parameters={"prefill_worker": step.prefill_worker, "decode_worker": step.decode_worker},
    )
    sent_s = time.perf_counter()
    async for event in client.generate(request):
        answer.add(event)
    fetched_bytes = answer.decision.get("fetched_bytes")
    return {
        "step": step.name,
        "prefill": str(answer.decision.get("prefill", "")),
        "ttft_ms": round((answer.token_times_s[0] - sent_s) * 1_000, 3),
        "cached_tokens": answer.cached_tokens,
        "fetched_bytes": fetched_bytes if isinstance(fetched_bytes, int) else None,
    }


async def measure(
    addresses: Addresses, model: str, prompts: int, prompt_tokens: int, seed: int
) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    async with TritonClient(addresses.grpc, model, channels=1) as client:
        server = await describe_server(client, {})
        source = TokenSource.of_server(server, seed)
        for step in STEPS:  # warm-up: first-time costs are not reuse
            await send(client, step, source.fresh(0, prompt_tokens))
        before = settled_nixl_bytes(addresses)
        for index in range(1, prompts + 1):
            prompt = source.fresh(index, prompt_tokens)
            for step in STEPS:
                with console.status(f"prompt {index} of {prompts}, {step.name} ..."):
                    row = await send(client, step, prompt)
                    after = settled_nixl_bytes(addresses)
                moved = None if after is None else after - (before or 0.0)
                rows.append({"prompt": index, "tokens": prompt_tokens, **row, "nixl_bytes": moved})
                before = after
    return rows


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    """Ratios of medians, each null with a reason when its step was not as expected."""
    cold_ms = median_ms(rows, "cold")
    found = []
    for step in ("cached", "fetched"):
        why = doubt(rows, step)
        value = None if why else median_ms(rows, step) / cold_ms
        found.append(Target(f"ttft_{step}_over_cold", value, "<=", RATIO_GOAL, why))
    return found


def doubt(rows: Sequence[dict[str, Cell]], step: str) -> str:
    """Why the rows of `step` are not as expected; empty when they are."""
    if any(row["cached_tokens"] for row in rows if row["step"] == "cold"):
        return "a cold prompt was cached already"
    of_step = [row for row in rows if row["step"] == step]
    if not all(row["cached_tokens"] for row in of_step):
        return f"not every {step} prompt was found in the cache"
    if step == "fetched" and not all(row["nixl_bytes"] for row in of_step):
        return f"{COUNTER} of nixl did not rise with every fetched prompt"
    return ""


def median_ms(rows: Sequence[dict[str, Cell]], step: str) -> float:
    times = [row["ttft_ms"] for row in rows if row["step"] == step]
    return float(statistics.median(value for value in times if isinstance(value, int | float)))


def main(
    url: ServerUrl = None,
    model: Annotated[str, typer.Option(help="Model to send to.")] = "conductor",
    prompts: Annotated[int, typer.Option(min=5, help="Fresh prompts; medians are over them.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of each prompt.")] = 4_096,
    seed: FreshSeed = None,
) -> None:
    """Measure what KV reuse saves of the time to the first token; the last line is JSON."""
    seed = secrets.randbits(62) if seed is None else seed
    with benchmark("reuse") as run, served(url) as addresses:
        console.print(f"{prompts} prompts of {prompt_tokens:,} tokens, --seed {seed}")
        run.rows = asyncio.run(measure(addresses, model, prompts, prompt_tokens, seed))
        run.targets = targets(run.rows)


if __name__ == "__main__":
    typer.run(main)
