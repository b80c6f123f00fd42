"""Four times what fits, on the real server: with admission `predictive` and without any.

    python -m loadtest.bench.overload

A server of our own, fresh prompts of one length, in one run:

    unloaded   one request after the other: the TTFT and TBT that the service levels are taken from
    capacity   so many at once that the server is never idle: requests per second that it completes
    none       an open loop at 4x that rate, nothing is rejected
    predictive the same requests, with ttft_slo_s = 10x and tbt_slo_s = 5x the unloaded medians

The policy is changed in config.pbtxt while the server runs and two requests at a time are in
flight: `policy_change_s` is the time until a decision shows it, `policy_change_lost` counts those
requests. TBT of a request is the mean of its longest 10 % of intervals (metrics.py); a level is
kept when the P90 over the admitted is below it. That no prefill token of a rejected request was
computed is read off the workers' own counter `mooncake_prompt_tokens_total{path="computed"}`:
prompts are fresh, so it must rise by just the tokens of those that were admitted.

Not here: starting the server (server.py), the shape of the answer (result.py).
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from loadtest.addresses import Addresses
from loadtest.bench.repository import copy_repository, set_parameters
from loadtest.bench.result import Cell, Result, Target
from loadtest.bench.server import measuring, serving
from loadtest.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, spread
from loadtest.metrics_page import counter_sum, fetch_page
from loadtest.open_loop import WallClock
from loadtest.protocol import GenerateRequest, ServerError
from loadtest.run import Run, SendOptions, send_all
from loadtest.server_info import describe_server
from loadtest.triton_client import TritonClient
from loadtest.workloads import PlannedRequest, TokenSource

OVERLOAD = 4.0
TTFT_SLO, TBT_SLO = 10.0, 5.0  # times unloaded
COUNTER = "mooncake_prompt_tokens_total"
COUNTER_S_MAX = 20.0
RELOAD_S_MAX = 30.0
AROUND_CHANGE_S = 1.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent."""

    prompt_tokens: int
    output_tokens: int
    seconds: float  # of each overload
    at_once: int  # requests in flight when capacity is measured


@dataclass(frozen=True, slots=True)
class Phase:
    """One run, and what the prefill workers computed meanwhile."""

    name: str
    records: Sequence[RequestRecord]
    computed_tokens: float

    def of(self, outcome: str) -> list[RequestRecord]:
        return [record for record in self.records if record.outcome == outcome]

    @property
    def wasted_tokens(self) -> float:
        """Computed for requests that got no answer."""
        return self.computed_tokens - sum(r.prompt_tokens for r in self.of(COMPLETED))

    @property
    def rejected_without_retry(self) -> int:
        return sum((record.retry_after_s or 0.0) <= 0.0 for record in self.of(REJECTED))

    def p90_s(self, name: str) -> float | None:
        found = spread([getattr(record, name) for record in self.of(COMPLETED)])
        return None if found is None else found.p90

    def p50_s(self, name: str) -> float:
        found = spread([getattr(record, name) for record in self.of(COMPLETED)])
        assert found is not None, f"no request of {self.name} was answered"
        return found.p50

    def row(self) -> dict[str, Cell]:
        ttft_s, tbt_s = self.p90_s("ttft_s"), self.p90_s("tbt_s")
        return {
            "phase": self.name,
            "sent": len(self.records),
            "completed": len(self.of(COMPLETED)),
            "rejected": len(self.of(REJECTED)),
            "failed": len(self.of(FAILED)),
            "computed_tokens": round(self.computed_tokens),
            "wasted_tokens": round(self.wasted_tokens),
            "ttft_p90_ms": None if ttft_s is None else round(ttft_s * 1e3, 1),
            "tbt_p90_ms": None if tbt_s is None else round(tbt_s * 1e3, 1),
        }


class Load:
    """Sends fresh prompts to one server and reads its counter around them."""

    def __init__(self, addresses: Addresses, source: TokenSource, shape: Shape) -> None:
        self._addresses = addresses
        self._source = source
        self._shape = shape
        self._prompts = 0

    def _planned(self, due_s: Sequence[float]) -> list[PlannedRequest]:
        planned = []
        for index, due in enumerate(due_s):
            self._prompts += 1
            prompt = self._source.fresh(self._prompts, self._shape.prompt_tokens)
            planned.append(PlannedRequest(index, index, due, prompt, self._shape.output_tokens))
        return planned

    async def unloaded(self, requests: int) -> Phase:
        records: list[RequestRecord] = []
        before = await self._computed(0.0)
        for _ in range(requests):
            records += await self._send(self._planned([0.0]))
        return Phase("unloaded", records, await self._computed(before, records) - before)

    async def capacity_per_s(self, seconds: float) -> float:
        """Completed requests per second while `at_once` are in flight."""
        end_s = time.perf_counter() + seconds
        ended_s: list[float] = []

        async def keep_on() -> None:
            while time.perf_counter() < end_s:
                await self._send(self._planned([0.0]))
                ended_s.append(time.perf_counter())

        started_s = time.perf_counter()
        await asyncio.gather(*(keep_on() for _ in range(self._shape.at_once)))
        return len(ended_s) / (max(ended_s) - started_s)

    async def during(self, change: Callable[[], Awaitable[float]]) -> tuple[Phase, float]:
        """A few requests at a time, before, during and after the change; and what it returned."""
        records: list[RequestRecord] = []
        is_over = asyncio.Event()

        async def keep_on() -> None:
            while not is_over.is_set():
                records.extend(await self._send(self._planned([0.0])))

        before = await self._computed(0.0)
        senders = [asyncio.ensure_future(keep_on()) for _ in range(2)]
        try:
            await asyncio.sleep(AROUND_CHANGE_S)
            took_s = await change()
            await asyncio.sleep(AROUND_CHANGE_S)
        finally:
            is_over.set()
            await asyncio.gather(*senders)
        phase = Phase("policy change", records, await self._computed(before, records) - before)
        return phase, took_s

    async def overload(self, name: str, rate_per_s: float, seed: int) -> Phase:
        """Poisson arrivals, the same for the same seed."""
        chance = np.random.default_rng(seed)
        count = int(rate_per_s * self._shape.seconds)
        due_s = np.cumsum(chance.exponential(1.0 / rate_per_s, count))
        before = await self._computed(0.0)
        records = await self._send(self._planned(due_s.tolist()))
        return Phase(name, records, await self._computed(before, records) - before)

    async def _send(self, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
        run = Run(planned)
        options = SendOptions(self._addresses.grpc, "conductor", True, TIMEOUT_S, 4, False)
        await send_all(run, options, WallClock(), lambda _: None)
        return sorted(run.records, key=lambda record: record.index)

    async def _computed(self, before: float, records: Sequence[RequestRecord] = ()) -> float:
        """The counter; workers publish a moment later, so wait for what must come."""
        answered = [record for record in records if record.outcome == COMPLETED]
        due = before + sum(record.prompt_tokens for record in answered)
        give_up_s = time.perf_counter() + COUNTER_S_MAX
        last = -1.0
        while time.perf_counter() < give_up_s:
            page = await asyncio.to_thread(fetch_page, self._addresses.metrics_url)
            found = counter_sum(page, COUNTER, {"path": "computed"}) or 0.0
            if found >= due and found == last:
                return found
            last = found
            await asyncio.sleep(1.2)  # poll: they publish once a second
        return last


async def reload(
    url: str, repository: Path, values: dict[str, str | int | float], admission: str
) -> float:
    """Edit the conductor's config.pbtxt; seconds until a decision shows the new admission."""
    started_s = time.perf_counter()
    set_parameters(repository, "conductor", {"admission": admission, **values})
    async with TritonClient(url, "conductor", channels=1) as client:
        while time.perf_counter() - started_s < RELOAD_S_MAX:
            request = GenerateRequest(
                "reload", text_input="It is", max_tokens=2, end_id=-1, return_decision=True
            )
            async for event in client.generate(request):
                if event.decision and event.decision.get("admission") == admission:
                    return time.perf_counter() - started_s
            await asyncio.sleep(0.1)  # poll
    raise ServerError("server_error", f"admission did not become {admission}")


async def measure(
    addresses: Addresses, repository: Path, shape: Shape, seed: int, console: Console
) -> tuple[list[Phase], dict[str, float]]:
    """(unloaded, none, policy change, predictive) and the numbers between them."""
    async with TritonClient(addresses.grpc, "conductor", channels=1) as client:
        server = await describe_server(client, {})
    load = Load(
        addresses, TokenSource(server.vocabulary_tokens, server.special_token_ids, seed), shape
    )
    with console.status("unloaded ..."):
        await load.unloaded(3)  # warms up
        unloaded = await load.unloaded(15)
    with console.status("capacity ..."):
        capacity_per_s = await load.capacity_per_s(shape.seconds)
    rate_per_s = OVERLOAD * capacity_per_s
    with console.status(f"{rate_per_s:.1f} requests/s, no admission ..."):
        none = await load.overload("none", rate_per_s, seed)
    levels = {
        "ttft_slo_s": round(TTFT_SLO * unloaded.p50_s("ttft_s"), 4),
        "tbt_slo_s": round(TBT_SLO * unloaded.p50_s("tbt_s"), 4),
    }
    with console.status("switching to predictive ..."):
        change, reload_s = await load.during(
            lambda: reload(addresses.grpc, repository, dict(levels), "predictive")
        )
    with console.status(f"{rate_per_s:.1f} requests/s, predictive ..."):
        predictive = await load.overload("predictive", rate_per_s, seed)
    numbers = {"capacity_per_s": capacity_per_s, "reload_s": reload_s, **levels}
    return [unloaded, none, change, predictive], numbers


def targets(phases: Sequence[Phase], numbers: dict[str, float]) -> list[Target]:
    _, none, change, predictive = phases

    def level(phase: Phase, name: str, op: str) -> Target:
        p90_s, what = phase.p90_s(f"{name}_s"), f"{phase.name}_{name}_p90_over_slo"
        if p90_s is None:
            return Target(what, None, op, 1.0, "nobody was admitted")
        return Target(what, round(p90_s / numbers[f"{name}_slo_s"], 3), op, 1.0)

    rejected = len(predictive.of(REJECTED))
    return [
        Target("predictive_rejected", rejected, ">=", 1),
        Target("predictive_wasted_prefill_tokens", predictive.wasted_tokens, "<=", 0),
        Target("rejections_without_retry_after", predictive.rejected_without_retry, "<=", 0),
        Target("predictive_failed", len(predictive.of(FAILED)), "<=", 0),
        level(predictive, "ttft", "<="),
        level(predictive, "tbt", "<="),
        level(none, "ttft", ">="),
        Target("policy_change_s", round(numbers["reload_s"], 2), "<=", 5.0),
        Target("policy_change_lost", len(change.records) - len(change.of(COMPLETED)), "<=", 0),
    ]


def main(
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Of each prompt.")] = 1_024,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 24,
    seconds: Annotated[float, typer.Option(min=2.0, help="Of each overload.")] = 10.0,
    at_once: Annotated[int, typer.Option(min=2, help="In flight while measuring capacity.")] = 8,
    seed: Annotated[
        int | None, typer.Option(help="Prompts and arrivals; random by default, so always fresh.")
    ] = None,
) -> None:
    """Offer 4x what fits, with and without admission; the last line is JSON."""
    console = Console(stderr=True, highlight=False)
    seed = secrets.randbits(62) if seed is None else seed
    shape = Shape(prompt_tokens, output_tokens, seconds, at_once)
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mooncake-overload-") as folder:
        repository = copy_repository(Path(folder) / "model_repository", ("prefill_1", "decode_0"))
        set_parameters(repository, "conductor", {"admission": "none", "requests_max": 2048})
        with (
            measuring(console),
            serving(None, ["--model-repository", str(repository)]) as addresses,
        ):
            console.print(f"--seed {seed}")
            phases, numbers = asyncio.run(measure(addresses, repository, shape, seed, console))
    rows = [phase.row() for phase in phases]
    rows.append({name: round(value, 4) for name, value in numbers.items()})
    result = Result("overload", time.perf_counter() - started_s, rows, targets(phases, numbers))
    result.print()


if __name__ == "__main__":
    typer.run(main)
