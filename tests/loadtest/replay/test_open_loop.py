"""Requests start at their own times, whatever the server does; time here is virtual."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from loadtest.replay.open_loop import run_open_loop


class VirtualClock:
    """Time that jumps to the next sleeper when everything else waits."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time_s + duration_s, id(woken), woken))
        await woken

    async def run(self, main: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(main)
        while not task.done():
            for _ in range(20):  # enough turns for everything that can run to have run
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self.time_s, _, woken = heapq.heappop(self._sleepers)
                if not woken.cancelled():
                    woken.set_result(None)
        await task


def run(
    due_s: list[float],
    serve: Callable[[VirtualClock, int], Awaitable[None]],
    in_flight_max: int = 1_000,
) -> list[float]:
    """When each request was started."""
    clock, started_s = VirtualClock(), [-1.0] * len(due_s)

    async def send(index: int) -> None:
        started_s[index] = clock.now_s()
        await serve(clock, index)

    asyncio.run(clock.run(run_open_loop(due_s, send, clock, in_flight_max)))
    return started_s


async def serve_in_100_s(clock: VirtualClock, _: int) -> None:
    await clock.sleep(100.0)


def test_a_slow_server_does_not_delay_the_next_request() -> None:
    due_s = [0.0, 0.0, 0.5, 3.0, 3.0]
    assert run(due_s, serve_in_100_s) == due_s


def test_a_full_sender_waits_for_an_answer_and_is_then_late() -> None:
    assert run([0.0, 1.0, 2.0, 250.0], serve_in_100_s, 2) == [0.0, 1.0, 100.0, 250.0]


def test_the_loop_returns_when_the_last_answer_is_there() -> None:
    ended: list[int] = []

    async def serve(clock: VirtualClock, index: int) -> None:
        await clock.sleep(10.0 - index)
        ended.append(index)

    run([0.0, 0.0, 0.0], serve)
    assert ended == [2, 1, 0]


def test_an_error_that_escapes_a_request_is_raised_at_the_end() -> None:
    async def serve(clock: VirtualClock, index: int) -> None:
        await clock.sleep(1.0)
        if index == 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run([0.0, 5.0], serve)


def test_cancelling_the_loop_cancels_what_is_in_flight_and_starts_nothing_more() -> None:
    clock, seen = VirtualClock(), []

    async def send(index: int) -> None:
        try:
            await clock.sleep(100.0)
        except asyncio.CancelledError:
            seen.append(index)
            raise

    async def main() -> None:
        loop = asyncio.ensure_future(run_open_loop([0.0, 1.0, 9.0], send, clock, 10))
        await clock.sleep(5.0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    asyncio.run(clock.run(main()))
    assert seen == [0, 1]
