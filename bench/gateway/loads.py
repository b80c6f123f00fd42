"""The loads of a gateway, or of Triton directly: pairs, streams at once, users that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from loadtest.client import sse_client
from loadtest.client.protocol import GenerateRequest
from loadtest.client.triton_client import TritonClient
from loadtest.harness.server import CannotMeasure

PATH = "/v1/completions"
FIRST_TOKEN_ID, LAST_TOKEN_ID = 20, 2000  # of the demo's vocabulary, none of them special
PAIR_TOKENS = 2
LEAVING_SHARE = 0.1
USER_TOKENS = 20
RSS_EVERY_S = 1.0
REJECTED = 429


@dataclass(frozen=True, slots=True)
class DirectWay:
    grpc: str

    async def times_s(self, prompt: list[int], tokens: int) -> tuple[float, list[float]]:
        """Times of the sending, and of each message's arrival."""
        async with TritonClient(self.grpc, channels=1) as client:
            # connects: the other way connects outside the measured time too
            await client.model_parameters()
            request = GenerateRequest(
                "pair", np.array(prompt, np.int32), max_tokens=tokens, end_id=-1, temperature=0.0
            )
            sent_s = time.perf_counter()
            return sent_s, [event.time_s async for event in client.generate(request)]


@dataclass(frozen=True, slots=True)
class GatewayWay:
    address: str
    key: str

    async def times_s(self, prompt: list[int], tokens: int) -> tuple[float, list[float]]:
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        answer = await sse_client.ask(self.address, PATH, body, self.key)
        if answer.status != 200 or not answer.is_done:
            raise CannotMeasure(f"the gateway answered {answer.status}: {answer.body[:300]!r}")
        return answer.sent_s, answer.times_s


Ways = Mapping[str, DirectWay | GatewayWay]  # direct, gateway


@dataclass(frozen=True, slots=True)
class StreamLoad:
    tokens: int
    messages: int
    seconds: float


@dataclass(slots=True)
class SoakRun:
    answered: int = 0
    left: int = 0
    refused: int = 0  # rejected with 429, and retried
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)  # (since its start, value)

    def between(self, from_s: float, to_s: float) -> float:
        return float(np.median([value for at_s, value in self.rss_bytes if from_s <= at_s <= to_s]))


def fresh(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]


async def pairs(
    ways: Ways, count: int, prompt_tokens: int, rng: random.Random
) -> list[tuple[float, float]]:
    """Seconds to the first token, direct and through the gateway; the first of a pair
    alternates."""
    found = []
    for number in range(count):
        ttfts_s: dict[str, float] = {}
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            sent_s, times_s = await ways[name].times_s(fresh(rng, prompt_tokens), PAIR_TOKENS)
            ttfts_s[name] = times_s[0] - sent_s
        found.append((ttfts_s["direct"], ttfts_s["gateway"]))
    return found


async def streams(
    route: DirectWay | GatewayWay, count: int, prompt_tokens: int, tokens: int, rng: random.Random
) -> StreamLoad:
    """`count` streams at once; the clock runs from the first request to the last token."""
    asked = [route.times_s(fresh(rng, prompt_tokens), tokens) for _ in range(count)]
    found = await asyncio.gather(*asked)
    begin_s = min(sent_s for sent_s, _ in found)
    end_s = max(times_s[-1] for _, times_s in found)
    return StreamLoad(count * tokens, sum(len(times_s) for _, times_s in found), end_s - begin_s)


async def soak(
    route: GatewayWay, users: int, seconds: float, rss_bytes: Callable[[], int], rng: random.Random
) -> SoakRun:
    """Users send one request after the other; some leave in the middle of their answer."""
    found, begin_s = SoakRun(), time.monotonic()

    async def user() -> None:
        while time.monotonic() - begin_s < seconds:
            body = {"prompt": "hi", "max_tokens": rng.randint(2, 2 * USER_TOKENS), "stream": True}
            if rng.random() < LEAVING_SHARE:
                answer = await sse_client.ask(
                    route.address,
                    PATH,
                    body | {"max_tokens": 1000},
                    route.key,
                    events_max=rng.randint(1, USER_TOKENS),
                )
                if answer.status == REJECTED:
                    await turned_away()
                    continue
                if answer.status != 200:
                    raise CannotMeasure(f"nobody could leave: {answer.status}")
                found.left += 1
            else:
                answer = await sse_client.ask(route.address, PATH, body, route.key)
                if answer.status == REJECTED:
                    await turned_away()
                    continue
                if not answer.is_done:
                    raise CannotMeasure(f"an answer ended early: {answer.status}")
                found.answered += 1

    async def turned_away() -> None:
        found.refused += 1
        await asyncio.sleep(1.0)  # the least Retry-After

    async def look() -> None:
        while True:
            found.rss_bytes.append((time.monotonic() - begin_s, rss_bytes()))
            await asyncio.sleep(RSS_EVERY_S)

    looking = asyncio.ensure_future(look())
    await asyncio.gather(*(user() for _ in range(users)))
    looking.cancel()
    return found
