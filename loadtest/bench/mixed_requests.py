"""Requests of every kind in random order: good, wrong in many ways, and left by their clients.

Over gRPC and HTTP, up to `in_flight_max` at once. Each ends as it should or is unexpected, with the
reason. Not here: what the server has left of them afterwards (leaks.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import requests

from loadtest.client.protocol import GenerateRequest, Rejected, ServerError
from loadtest.client.server import Addresses
from loadtest.client.triton_client import TritonClient

HTTP_S_MAX = 120.0
SHARES = {"good": 5, "good http": 1, "bad": 2, "left": 2, "left http": 1}
WAYS_TO_BE_WRONG = (
    {"input_ids": np.array([1, 2, 10**6], np.int32)},
    {"input_ids": np.array([5, -1], np.int32)},
    {"max_tokens": 0},
    {"max_tokens": 10**6},
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"parameters": {"no_such_parameter": 1}},
    {"parameters": {"prefill_worker": "prefill_99"}},
    {"input_ids": None, "text_input": ""},
)


@dataclass(slots=True)
class Mixed:
    """What came of them: counts by kind, and messages of those that ended as they should not."""

    ended: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sender:
    client: TritonClient
    addresses: Addresses
    chance: random.Random
    vocabulary_tokens: int

    def request(self, number: int) -> GenerateRequest:
        """Half of them begin like others, so that prefixes are shared and fetched."""
        chance = self.chance
        stem = random.Random(chance.randrange(8))
        ids = [stem.randrange(16, self.vocabulary_tokens) for _ in range(chance.choice((0, 256)))]
        ids += [chance.randrange(16, self.vocabulary_tokens) for _ in range(chance.randint(1, 200))]
        output_tokens = chance.randint(1, 24)
        return GenerateRequest(
            request_id=f"mixed-{number}", input_ids=np.array(ids, np.int32),
            max_tokens=output_tokens, end_id=-1, stream=chance.random() < 0.8,
        )  # fmt: skip

    async def good(self, number: int) -> str:
        async for event in self.client.generate(self.request(number)):
            if event.finish_reason:
                return "good"
        return "unexpected: no finish reason"

    async def bad(self, number: int) -> str:
        wrong = self.chance.choice(WAYS_TO_BE_WRONG)
        try:
            async for _ in self.client.generate(replace(self.request(number), **wrong)):
                pass
        except Rejected:
            raise
        except ServerError as error:
            return "bad" if error.kind == "invalid_request" else f"unexpected: {wrong}: {error}"
        return f"unexpected: {wrong} was answered"

    async def left(self, number: int) -> str:
        """Goes away before the first token or after some."""
        request = replace(self.request(number), max_tokens=200, stream=True)
        patience_s = self.chance.random() * 0.3

        async def read() -> None:
            async for _ in self.client.generate(request):
                pass

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), patience_s)
        return "left"

    async def good_http(self, number: int) -> str:
        body = self._body(self.request(number), is_stream=False)
        url = f"http://{self.addresses.http}/v2/models/conductor/generate"
        answer = await asyncio.to_thread(requests.post, url, json=body, timeout=HTTP_S_MAX)
        is_fine = answer.ok or "rejected kind=" in answer.text
        return "good http" if is_fine else f"unexpected: {answer.text}"

    async def left_http(self, number: int) -> str:
        body = self._body(self.request(number), is_stream=True) | {"max_tokens": 200}
        events = self.chance.randint(1, 8)
        await asyncio.to_thread(self._leave_http, body, events)
        return "left http"

    def _leave_http(self, body: dict[str, object], events: int) -> None:
        url = f"http://{self.addresses.http}/v2/models/conductor/generate_stream"
        with requests.post(url, json=body, stream=True, timeout=HTTP_S_MAX) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= events:
                    return

    def _body(self, request: GenerateRequest, is_stream: bool) -> dict[str, object]:
        assert request.input_ids is not None
        return {"input_ids": request.input_ids.tolist(), "max_tokens": request.max_tokens,
                "end_id": -1, "stream": is_stream}  # fmt: skip


async def send_mixed(
    addresses: Addresses,
    count: int,
    seed: int,
    vocabulary_tokens: int,
    in_flight_max: int,
) -> Mixed:
    """Send `count` requests; returns when the last has ended."""
    chance = random.Random(seed)
    mixed, places = Mixed(), asyncio.Semaphore(in_flight_max)
    kinds = chance.choices(list(SHARES), list(SHARES.values()), k=count)
    async with TritonClient(addresses.grpc) as client:
        sender = Sender(client, addresses, chance, vocabulary_tokens)

        async def send(number: int, kind: str) -> None:
            async with places:
                try:
                    ended = await getattr(sender, kind.replace(" ", "_"))(number)
                except Rejected:
                    ended = "rejected"
                except (ServerError, requests.RequestException) as error:
                    ended = f"unexpected: {kind}: {error}"
                mixed.ended[ended.partition(":")[0]] += 1
                if ended.startswith("unexpected"):
                    mixed.unexpected.append(ended)

        await asyncio.gather(*(send(number, kind) for number, kind in enumerate(kinds)))
    return mixed


def run_mixed(
    addresses: Addresses, count: int, seed: int, vocabulary_tokens: int, in_flight_max: int
) -> Mixed:
    """`send_mixed` for a process that does nothing else."""
    return asyncio.run(send_mixed(addresses, count, seed, vocabulary_tokens, in_flight_max))
