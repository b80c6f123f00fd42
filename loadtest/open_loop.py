"""Starts requests at their own times, whatever the server does: an open loop.

A closed loop (next request after the last answer) slows down with the server and so hides its
overload. Here a request is started when it is due even if none before it has been answered. The one
bound is `in_flight_max`, which protects this machine: when it is reached the loop waits for an
answer, and that wait shows up as sender lag.

The clock is an argument, so that tests run hours of trace in no time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class Clock(Protocol):
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
    clock: Clock,
    in_flight_max: int,
) -> None:
    """Await `send(i)` for each i, started at `due_s[i]` (ascending), until all have returned.

    `send` handles its own errors; one that escapes is raised when the last request has ended. When
    this is cancelled, the requests in flight are cancelled and have ended before it returns.
    """
    assert in_flight_max > 0
    places = asyncio.Semaphore(in_flight_max)

    async def send_and_leave(index: int) -> None:
        try:
            await send(index)
        finally:
            places.release()

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, due in enumerate(due_s):
            if (wait_s := due - clock.now_s()) > 0:
                await clock.sleep(wait_s)
            await places.acquire()
            tasks.append(asyncio.create_task(send_and_leave(index)))
            await asyncio.sleep(0)  # let it start now, even when the next one is due already
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
