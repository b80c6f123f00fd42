"""The cost of a client that leaves, by interface, and the time until its resources are free.

    python -m bench.gateway.lost_clients [--times 50] [--lost 8]

It starts a server. First one client of the gateway leaves, `--times` times for each row: while its
answer streams, in its prefill, and while most of eight long prompts still wait in the queue; over a
reused connection; by closing only its sending side; with a second request already sent. The time
runs from the close until the metrics show no request, page, slot or lease, nor a request in the
gateway. The metrics are updated five times a second, which adds up to a fifth of a second.

Then `--lost` clients at once leave after a moment of an answer of 1,500 tokens. Measured are the
tokens computed for no client, how long pages and slots are held, and the TTFT of another client in
that time. `ensemble` has no cancellation: Triton does not report to its models that a client has
left.

Not here: growth over minutes (leaks.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from bench.gateway.__main__ import keyed
from bench.gateway.loads import fresh
from bench.leaks import in_use
from loadtest.client.metrics_page import counter_sum, fetch_page, series_of
from loadtest.client.protocol import GenerateRequest
from loadtest.client.server import Addresses
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, benchmark, console
from loadtest.harness.result import Cell, Target
from loadtest.harness.server import CannotMeasure, own_ports, started, wait_for_gateway

COMPLETIONS = "/v1/completions"
ENSEMBLE, CONDUCTOR = "/v2/models/ensemble/generate", "/v2/models/conductor/generate_stream"
LONG_TOKENS, SHORT_TOKENS = 3_000, 64
QUEUED = 8
ANSWER_TOKENS = 1_500
MOMENT_S = 0.5  # seconds that a client stays: all answers have begun
LOOK_S = 0.05
FREE_S_MAX = 60.0
FREE_S_GOAL = 1.0
WATCHED_S = 4.0  # seconds in which another client sends one request after the other
OTHERS_TOKENS = 16
TOKENS, PAGES, RUNNING = (
    "mooncake_output_tokens_total",
    "mooncake_pages_used",
    "mooncake_requests_running",
)


class LeavingClient:
    """One HTTP connection. It closes like that of a killed process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def of(cls, address: str) -> LeavingClient:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def ask(self, path: str, body: Mapping[str, Any], key: str = "") -> None:
        content = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: bench",
            f"Content-Length: {len(content)}",
            "Content-Type: application/json",
        ]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    async def events(self, count: int) -> None:
        for _ in range(count):
            await self._reader.readuntil(b"data: ")

    async def whole(self) -> None:
        head = await self._reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
        await self._reader.readexactly(int(length.split()[1]))

    def leave(self) -> None:
        self.writer.transport.abort()


@dataclass(slots=True)
class UseIntegral:
    """Held resources, integrated over time since a moment."""

    page_s: float = 0.0
    slot_s: float = 0.0
    free_s: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class OthersTimes:
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LostBench:
    addresses: Addresses
    gateway: str
    key: str
    rng: random.Random

    def page(self) -> str:
        return fetch_page(self.addresses.metrics_url)

    async def until_free(self) -> UseIntegral:
        """Poll until nothing is in use; CannotMeasure after FREE_S_MAX."""
        found, begin_s = UseIntegral(), time.monotonic()
        tokens, last_s = counter_sum(await asyncio.to_thread(self.page), TOKENS) or 0.0, begin_s
        while True:
            page = await asyncio.to_thread(self.page)
            now_s = time.monotonic()
            held: dict[str, float] = {}
            for series in series_of(
                line for line in page.splitlines() if line.startswith((PAGES, RUNNING))
            ):
                held[series.name] = held.get(series.name, 0.0) + series.value
            found.page_s += held.get(PAGES, 0.0) * (now_s - last_s)
            found.slot_s += held.get(RUNNING, 0.0) * (now_s - last_s)
            last_s, found.free_s = now_s, now_s - begin_s
            if not in_use(page):
                found.tokens = (counter_sum(page, TOKENS) or 0.0) - tokens
                return found
            if found.free_s > FREE_S_MAX:
                raise CannotMeasure(f"in use after {FREE_S_MAX:.0f} s: {in_use(page)}")
            await asyncio.sleep(LOOK_S)

    async def until_used(self) -> None:
        give_up_s = time.monotonic() + FREE_S_MAX
        while PAGES not in "".join(in_use(await asyncio.to_thread(self.page))):
            if time.monotonic() > give_up_s:
                raise CannotMeasure("no page came into use")

    def body(self, tokens: int, is_stream: bool = True) -> dict[str, Any]:
        return {
            "prompt": fresh(self.rng, tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
        }

    async def free_s(self, what: str) -> float:
        """Seconds until all is free after one client, or `QUEUED` of them, left."""
        clients = [
            await LeavingClient.of(self.gateway) for _ in range(QUEUED if what == "queued" else 1)
        ]
        client = clients[0]
        if what == "keep-alive":
            client.ask(COMPLETIONS, {"prompt": "hi", "max_tokens": 2}, self.key)
            await client.whole()
        is_long = what in ("queued", "prefill")
        for each in clients:
            body = self.body(LONG_TOKENS if is_long else SHORT_TOKENS, what != "prefill")
            each.ask(COMPLETIONS, body, self.key)
        if not is_long:
            await client.events(3)
        await self.until_used()  # use that the metrics do not show yet would count as free
        if what == "a second request sent":
            client.writer.write(b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n")
        for each in clients:
            each.writer.write_eof() if what == "half closed" else each.leave()
        return (await self.until_free()).free_s

    @contextlib.asynccontextmanager
    async def asking(self, route: str) -> AsyncIterator[None]:
        """One client in the middle of its answer; it leaves when the block ends."""
        if route == "conductor, gRPC":
            async with TritonClient(self.addresses.grpc, channels=1) as triton:
                asked = asyncio.ensure_future(self._stream(triton))
                yield
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
            return
        address = self.gateway if route == "gateway" else self.addresses.http
        client = await LeavingClient.of(address)
        if route == "gateway":
            client.ask(COMPLETIONS, self.body(SHORT_TOKENS), self.key)
        else:
            words = "".join(self.rng.choices("abcdefgh ", k=SHORT_TOKENS))
            body = {"text_input": words, "max_tokens": ANSWER_TOKENS, "end_id": -1}
            is_ensemble = route == "ensemble, HTTP"
            path = ENSEMBLE if is_ensemble else CONDUCTOR
            client.ask(path, body | ({} if is_ensemble else {"stream": True}))
        yield
        client.leave()

    async def _stream(self, triton: TritonClient) -> None:
        prompt = np.array(fresh(self.rng, SHORT_TOKENS), np.int32)
        request = GenerateRequest("lost", prompt, max_tokens=ANSWER_TOKENS, end_id=-1)
        async for _ in triton.generate(request):
            pass

    async def lose(self, route: str, count: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(self.asking(route))
            await asyncio.sleep(MOMENT_S)

    async def lost(self, route: str, count: int) -> tuple[UseIntegral, OthersTimes]:
        """Once without another client, and once with another client's requests from then on."""
        await self.lose(route, count)
        use, others = await self.until_free(), OthersTimes()
        await self.lose(route, count)
        await self.ask_on(others)
        await self.until_free()
        return use, others

    async def ask_on(self, found: OthersTimes) -> None:
        give_up_s = time.monotonic() + WATCHED_S
        async with TritonClient(self.addresses.grpc, channels=1) as triton:
            while time.monotonic() < give_up_s:
                prompt = np.array(fresh(self.rng, SHORT_TOKENS), np.int32)
                request = GenerateRequest("other", prompt, max_tokens=OTHERS_TOKENS, end_id=-1)
                sent_s = time.perf_counter()
                times_s = [event.time_s async for event in triton.generate(request)]
                found.ttft_s.append(times_s[0] - sent_s)
                found.tbt_s.append((times_s[-1] - times_s[0]) / (OTHERS_TOKENS - 1))


LEAVING = ("decode", "prefill", "queued", "keep-alive", "half closed", "a second request sent")
ROUTES = ("nobody", "gateway", "conductor, gRPC", "conductor, HTTP", "ensemble, HTTP")


def left_row(what: str, seconds: Sequence[float]) -> dict[str, Cell]:
    return {
        "left": what,
        "times": len(seconds),
        "free_s_median": round(statistics.median(seconds), 3),
        "free_s_p90": round(float(np.percentile(seconds, 90)), 3),
        "free_s_max": round(max(seconds), 3),
    }


def lost_row(route: str, lost: int, use: UseIntegral, others: OthersTimes) -> dict[str, Cell]:
    return {
        "lost": f"{lost} of {route}",
        "free_s": round(use.free_s, 2),
        "tokens": round(use.tokens),
        "slot_s": round(use.slot_s, 2),
        "page_s": round(use.page_s, 1),
        "others_ttft_ms": round(statistics.median(others.ttft_s) * 1e3, 1),
        "others_tbt_ms": round(statistics.median(others.tbt_s) * 1e3, 2),
    }


def main(
    times: Annotated[
        int, typer.Option(min=1, help="Single clients that leave, of each kind.")
    ] = 50,
    lost: Annotated[int, typer.Option(min=1, help="Clients that leave at once.")] = 8,
    seed: FreshSeed = None,
) -> None:
    """Measure; the last line is JSON."""
    used_seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    [port] = own_ports(1)
    with benchmark("lost_clients") as run, keyed() as keys:
        arguments = ["--openai-port", str(port), "--api-keys", str(keys.path)]
        with console.status("waiting for the server ..."), started(arguments) as server:
            gateway = f"127.0.0.1:{port}"
            wait_for_gateway(gateway)
            bench = LostBench(server.addresses, gateway, keys.key, random.Random(used_seed))

            async def measure() -> None:
                slowest_s = 0.0
                for what in LEAVING:
                    await bench.until_free()
                    seconds = [await bench.free_s(what) for _ in range(times)]
                    slowest_s = max(slowest_s, *seconds)
                    run.rows.append(left_row(what, seconds))
                for route in ROUTES:
                    count = 0 if route == "nobody" else lost
                    run.rows.append(lost_row(route, count, *await bench.lost(route, count)))
                why = f"the slowest of {times * len(LEAVING)}"
                run.targets.append(Target("free_s", slowest_s, "<=", FREE_S_GOAL, why))

            asyncio.run(measure())
        run.constants |= {"seed": used_seed, "lost": lost, "answer_tokens": ANSWER_TOKENS}


if __name__ == "__main__":
    typer.run(main)
