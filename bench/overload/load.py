"""Fresh prompts for one server, sent as each phase of an overload needs, and their results.

The computed tokens are read from the prefill workers' own counter
`mooncake_prompt_tokens_total{path="computed"}`, from the end of one phase to the end of the next,
so no token is counted twice or left out.

Not here: the phases (__main__.py, decode_bound.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.client.metrics_page import counter_sum, fetch_page
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError
from loadtest.client.server import Addresses, describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.result import Cell
from loadtest.harness.server import Parameters, set_parameters
from loadtest.replay.open_loop import ReplayRun, SendOptions, WallClock, send_all
from loadtest.replay.prompts import PlannedRequest, TokenSource
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, spread

COUNTER = "mooncake_prompt_tokens_total"
ABORTED = "mooncake_aborted_prefill_tokens_total"  # tokens computed for prefills that were aborted
COUNTER_S_MAX = 20.0
COUNTER_POLL_S = 1.2  # workers publish once a second
RELOAD_S_MAX = 30.0
AROUND_CHANGE_S = 1.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class OverloadShape:
    prompt_tokens: int
    output_tokens: int  # of each answer; the least, if output_tokens_max is greater
    seconds: float  # of each overload
    at_once: int  # requests in flight when capacity is measured
    output_tokens_max: int = 0  # uniform between both; 0: all answers have output_tokens


@dataclass(frozen=True, slots=True)
class OverloadPhase:
    """One run, and the tokens that the prefill workers computed in it."""

    name: str
    records: Sequence[RequestRecord]
    computed_tokens: float

    def of(self, outcome: str) -> list[RequestRecord]:
        return [record for record in self.records if record.outcome == outcome]

    @property
    def wasted_tokens(self) -> float:
        """Tokens computed for requests without an answer: refused by their decode worker,
        cancelled, or failed; of partly computed prompts the computed part."""
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


class OverloadClient:
    """Sends fresh prompts to one server and reads its counter around them."""

    def __init__(
        self, addresses: Addresses, source: TokenSource, shape: OverloadShape, seed: int
    ) -> None:
        self._addresses = addresses
        self._source = source
        self._shape = shape
        self._lengths = np.random.default_rng(seed)  # of answers outside the overloads
        self._prompts = 0
        self._counted: float | None = None  # the counter at the end of the last phase

    @classmethod
    async def of(cls, addresses: Addresses, shape: OverloadShape, seed: int) -> OverloadClient:
        """A client with the vocabulary of the server."""
        async with TritonClient(addresses.grpc, "conductor", channels=1) as client:
            server = await describe_server(client, {})
        source = TokenSource.of_server(server, seed)
        return cls(addresses, source, shape, seed)

    async def unloaded(self, requests: int) -> OverloadPhase:
        """One request after the other."""
        await self._begin()
        records: list[RequestRecord] = []
        for _ in range(requests):
            records += await self._send_one()
        return await self._end("unloaded", records)

    async def full(self, seconds: float) -> tuple[OverloadPhase, float]:
        """`at_once` requests in flight; and completed requests per second."""
        await self._begin()
        started_s = time.perf_counter()
        records: list[RequestRecord] = []
        ended_s = [0.0]

        async def keep_on() -> None:
            while time.perf_counter() < started_s + seconds:
                records.extend(await self._send_one())
                ended_s.append(time.perf_counter())

        await asyncio.gather(*(keep_on() for _ in range(self._shape.at_once)))
        phase = await self._end("full", records)
        return phase, len(phase.of(COMPLETED)) / (max(ended_s) - started_s)

    async def during(self, change: Callable[[], Awaitable[float]]) -> tuple[OverloadPhase, float]:
        """Two requests at a time with the shortest answers, before, during and after the change;
        and its result."""
        await self._begin()
        records: list[RequestRecord] = []
        is_over = asyncio.Event()

        async def keep_on() -> None:
            while not is_over.is_set():
                records.extend(await self._send(self._planned([0.0], None)))

        senders = [asyncio.ensure_future(keep_on()) for _ in range(2)]
        try:
            await asyncio.sleep(AROUND_CHANGE_S)
            took_s = await change()
            await asyncio.sleep(AROUND_CHANGE_S)
        finally:
            is_over.set()
            await asyncio.gather(*senders)
        return await self._end("policy change", records), took_s

    async def overload(self, name: str, rate_per_s: float, seed: int) -> OverloadPhase:
        """Poisson arrivals; a seed fixes them and the lengths of answers."""
        await self._begin()
        rng = np.random.default_rng(seed)
        count = int(rate_per_s * self._shape.seconds)
        due_s = np.cumsum(rng.exponential(1.0 / rate_per_s, count))
        return await self._end(name, await self._send(self._planned(due_s.tolist(), rng)))

    async def _send_one(self) -> list[RequestRecord]:
        return await self._send(self._planned([0.0], self._lengths))

    def _planned(
        self, due_s: Sequence[float], rng: np.random.Generator | None
    ) -> list[PlannedRequest]:
        """`rng`: for the lengths of answers; None: the shortest."""
        shape, planned = self._shape, []
        longest = max(shape.output_tokens, shape.output_tokens_max)
        for index, due in enumerate(due_s):
            self._prompts += 1
            prompt = self._source.fresh(self._prompts, shape.prompt_tokens)
            tokens = shape.output_tokens
            if rng is not None:
                tokens = int(rng.integers(tokens, longest, endpoint=True))
            planned.append(PlannedRequest(index, index, due, prompt, tokens))
        return planned

    async def _send(self, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return await send_planned(self._addresses.grpc, planned)

    async def _begin(self) -> None:
        if self._counted is None:
            self._counted = await self._settled(0.0)

    async def _end(self, name: str, records: Sequence[RequestRecord]) -> OverloadPhase:
        assert self._counted is not None, "a phase begins before it ends"
        answered = [record for record in records if record.outcome == COMPLETED]
        due = self._counted + sum(record.prompt_tokens for record in answered)
        before, self._counted = self._counted, await self._settled(due)
        return OverloadPhase(name, records, self._counted - before)

    async def _settled(self, due: float) -> float:
        """The counter; workers publish a moment later, so wait until it has reached `due`."""
        give_up_s = time.perf_counter() + COUNTER_S_MAX
        last = -1.0
        while time.perf_counter() < give_up_s:
            page = await asyncio.to_thread(fetch_page, self._addresses.metrics_url)
            found = counter_sum(page, COUNTER, {"path": "computed"}) or 0.0
            found += counter_sum(page, ABORTED, {}) or 0.0
            if found >= due and found == last:
                return found
            last = found
            await asyncio.sleep(COUNTER_POLL_S)
        return last


async def send_planned(url: str, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
    """Requests at their times, each with an answer of exactly the planned length."""
    run = ReplayRun(planned)
    options = SendOptions(url, "conductor", True, TIMEOUT_S, 4, False)
    await send_all(run, options, WallClock(), lambda _: None)
    if run.is_interrupted:  # the run handled the Ctrl-C
        raise KeyboardInterrupt
    return sorted(run.records, key=lambda record: record.index)


async def reload(url: str, repository: Path, values: Parameters, admission: str) -> float:
    """Edit the conductor's config.pbtxt; seconds until a decision shows the new admission."""
    started_s = time.perf_counter()
    set_parameters(repository, "conductor", {"admission": admission, **values})
    async with TritonClient(url, "conductor", channels=1) as client:
        while time.perf_counter() - started_s < RELOAD_S_MAX:
            request = GenerateRequest(
                "reload", text_input="It is", max_tokens=2, end_id=-1, return_decision=True
            )
            with contextlib.suppress(Rejected):  # possible after an overload: retry
                async for event in client.generate(request):
                    if event.decision and event.decision.get("admission") == admission:
                        return time.perf_counter() - started_s
            await asyncio.sleep(0.1)  # poll
    raise ServerError("server_error", f"admission did not become {admission}")
