"""One open-loop run against a server: planned requests in, a record of each out.

Not here: the command and its summary (replay.py), when to start (open_loop.py), gRPC
(triton_client.py), what the records mean (metrics.py).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.answer import Answer, ending
from loadtest.metrics import RequestRecord
from loadtest.open_loop import Clock, run_open_loop
from loadtest.protocol import GenerateRequest, ServerError
from loadtest.triton_client import TritonClient
from loadtest.workloads import PlannedRequest

IN_FLIGHT_MAX = 4_096


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How each request is sent."""

    url: str
    model: str
    ignore_eos: bool
    timeout_s: float
    channels: int
    return_decision: bool


@dataclass(slots=True)
class Run:
    """Everything that happened, filled while it happens so that Ctrl-C loses nothing."""

    planned: Sequence[PlannedRequest]
    records: list[RequestRecord] = field(default_factory=list)
    started: int = 0
    is_interrupted: bool = False


def to_send(request: PlannedRequest, options: SendOptions) -> GenerateRequest:
    """The request for the server; with `ignore_eos` its answer has exactly the trace's length."""
    return GenerateRequest(
        request_id=f"replay-{request.index}",
        input_ids=request.prompt_ids,
        max_tokens=request.output_tokens,
        min_tokens=request.output_tokens if options.ignore_eos else None,
        end_id=-1 if options.ignore_eos else None,
        return_decision=True if options.return_decision else None,
    )


async def send_one(
    client: TritonClient, request: PlannedRequest, options: SendOptions, clock: Clock
) -> RequestRecord:
    """Send one request to its end; every way of ending is a record, except being cancelled."""
    sent_s = clock.now_s()
    answer, error = Answer(), None
    try:
        async for event in client.generate(to_send(request, options), options.timeout_s):
            answer.add(event)
    except ServerError as server_error:
        error = server_error
    end = ending(error)
    return RequestRecord(
        index=request.index,
        request_id=f"replay-{request.index}",
        due_s=request.due_s,
        sent_s=sent_s,
        finished_s=clock.now_s(),
        prompt_tokens=len(request.prompt_ids),
        output_tokens_asked=request.output_tokens,
        outcome=end.outcome,
        kind=end.kind,
        message=end.message,
        retry_after_s=end.retry_after_s,
        token_times_s=tuple(answer.token_times_s),
        output_ids=tuple(answer.output_ids),
        cached_tokens=answer.cached_tokens,
        finish_reason=answer.finish_reason,
        decision=answer.decision or None,
    )


async def send_all(
    run: Run, options: SendOptions, clock: Clock, on_change: Callable[[Run], None]
) -> None:
    """Send everything; SIGINT ends it early. Fills `run`. The run begins at the clock's zero."""
    async with TritonClient(options.url, options.model, options.channels, clock.now_s) as client:

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
