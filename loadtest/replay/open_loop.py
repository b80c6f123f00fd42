"""An open-loop run against a server: planned requests in, a record of each out.

A request starts at its due time, even if no earlier one has been answered. A closed loop (next
request after the last answer) slows down with the server and so hides its overload. The one bound
is `in_flight_max`, which protects this machine. At the bound the loop waits for an answer, and the
wait is recorded as sender lag.

The clock is an argument, so that tests run hours of trace in no time.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.client.answer import ReceivedAnswer, record_of
from loadtest.client.http_interfaces import OpenAiInterface, TritonInterface
from loadtest.client.openai_server import http_address
from loadtest.client.protocol import ServerError
from loadtest.client.sse_client import SseClient
from loadtest.client.triton_client import TritonClient
from loadtest.replay.prompts import PlannedRequest
from loadtest.results.metrics import RequestRecord

IN_FLIGHT_MAX = 4_096
LoadClient = TritonClient | SseClient


class LoopClock(Protocol):
    """Seconds since the run began."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class WallClock:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


async def run_open_loop(
    due_s: Sequence[float],
    send: Callable[[int], Awaitable[None]],
    clock: LoopClock,
    in_flight_max: int,
) -> None:
    """Await `send(i)` for each i, started at `due_s[i]` (ascending), until all have returned.
    `send` handles its own errors; one that escapes is raised when the last request has ended. When
    this is cancelled, the requests in flight are cancelled and have ended before it returns."""
    assert in_flight_max > 0
    permits = asyncio.Semaphore(in_flight_max)

    async def send_and_release(index: int) -> None:
        try:
            await send(index)
        finally:
            permits.release()

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, due in enumerate(due_s):
            if (wait_s := due - clock.now_s()) > 0:
                await clock.sleep(wait_s)
            await permits.acquire()
            tasks.append(asyncio.create_task(send_and_release(index)))
            await asyncio.sleep(0)  # the request starts now, even if the next one is already due
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class SendOptions:
    url: str  # of gRPC, or of HTTP
    model: str
    ignore_eos: bool
    timeout_s: float
    channels: int
    return_decision: bool
    via: str = "grpc"
    key: str = field(default="", repr=False)  # API key for OpenAI's interface

    def client(self, now_s: Callable[[], float] = time.perf_counter) -> LoadClient:
        if self.via == "grpc":
            return TritonClient(self.url, self.model, self.channels, now_s)
        if self.via == "http":
            return SseClient(http_address(self.url), TritonInterface(self.model), now_s)
        interface = OpenAiInterface(model=self.model, key=self.key)
        return SseClient(http_address(self.url), interface, now_s)


@dataclass(slots=True)
class ReplayRun:
    """The results so far, filled during the run so that Ctrl-C loses nothing."""

    planned: Sequence[PlannedRequest]
    records: list[RequestRecord] = field(default_factory=list)
    started: int = 0
    is_interrupted: bool = False


async def send_one(
    client: LoadClient, request: PlannedRequest, options: SendOptions, clock: LoopClock
) -> RequestRecord:
    """Send one request to its end; every end is a record, except cancellation, which raises."""
    sent_s = clock.now_s()
    answer, error = ReceivedAnswer(), None
    asked = request.to_send(
        f"replay-{request.index}",
        ignore_eos=options.ignore_eos,
        return_decision=options.return_decision,
    )
    try:
        async for event in client.generate(asked, options.timeout_s):
            answer.add(event)
    except ServerError as server_error:
        error = server_error
    return record_of(
        answer,
        error,
        asked,
        due_s=request.due_s,
        sent_s=sent_s,
        finished_s=clock.now_s(),
        prompt_tokens=len(request.prompt_ids),
        index=request.index,
        output_ids=tuple(answer.output_ids),
    )


async def send_all(
    run: ReplayRun, options: SendOptions, clock: LoopClock, on_change: Callable[[ReplayRun], None]
) -> None:
    """Send everything and fill `run`; SIGINT ends it early. The run begins at the clock's zero."""
    async with options.client(clock.now_s) as client:

        async def send(index: int) -> None:
            run.started += 1
            run.records.append(await send_one(client, run.planned[index], options, clock))
            on_change(run)

        due_s = [request.due_s for request in run.planned]
        sending = asyncio.ensure_future(run_open_loop(due_s, send, clock, IN_FLIGHT_MAX))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, sending.cancel)
        try:
            await sending
        except asyncio.CancelledError:
            run.is_interrupted = True
        finally:
            loop.remove_signal_handler(signal.SIGINT)
