"""Answers of a server: by interface, streamed or whole, with the arrival times of their tokens.

Not here: the comparisons (__main__.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from loadtest.client import sse_client
from loadtest.client.protocol import GenerateRequest
from loadtest.client.triton_client import TritonClient
from loadtest.harness.server import CannotMeasure
from loadtest.replay.prompts import TokenIds

COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class TokenArrivals:
    """Arrival times of the tokens of one stream, and their packing."""

    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # one per token
    messages: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    def intervals_s(self, from_s: float, to_s: float) -> list[float]:
        """Between tokens, in that time. Tokens of one message share the time since the message
        before, so that packing alone makes no tail."""
        found: list[float] = []
        moments = sorted(set(self.times_s))
        for before_s, after_s in pairwise(moments):
            if before_s >= from_s and after_s <= to_s:
                tokens = self.times_s.count(after_s)
                found += [(after_s - before_s) / tokens] * tokens
        return found


async def stream(
    client: TritonClient,
    name: str,
    prompt: TokenIds,
    output_tokens: int,
    arrivals: TokenArrivals | None = None,
) -> TokenArrivals:
    """`arrivals`: filled during the stream, for a caller that may end it early."""
    request = GenerateRequest(
        request_id=name,
        input_ids=prompt,
        max_tokens=output_tokens,
        min_tokens=output_tokens,
        end_id=-1,
    )
    arrivals = TokenArrivals() if arrivals is None else arrivals
    arrivals.sent_s = time.perf_counter()
    async for event in client.generate(request):
        arrivals.messages += 1
        arrivals.times_s += [event.time_s] * len(event.output_ids)
    came = len(arrivals.times_s)
    assert came == output_tokens, f"{came} tokens of {output_tokens}"
    return arrivals


async def together(
    client: TritonClient,
    prompts: Sequence[TokenIds],
    output_tokens: int,
    arrived: Sequence[TokenArrivals] | None = None,
) -> list[TokenArrivals]:
    """`arrived`: one for each prompt, as in `stream`."""
    arrived = [TokenArrivals() for _ in prompts] if arrived is None else arrived
    each = [
        stream(client, f"tbt-{i}", prompt, output_tokens, arrivals)
        for i, (prompt, arrivals) in enumerate(zip(prompts, arrived, strict=True))
    ]
    return await asyncio.gather(*each)


@dataclass(frozen=True, slots=True)
class ModelWay:
    client: TritonClient

    async def answer(self, text: str, tokens: int, is_streamed: bool) -> None:
        """Returns with the last token. CannotMeasure when the answer is incomplete."""
        request = GenerateRequest(
            request_id=f"{self.client.model}-{hash(text)}",
            text_input=text,
            max_tokens=tokens,
            min_tokens=tokens,
            end_id=-1,
            stream=is_streamed,
        )
        events = [event async for event in self.client.generate(request)]
        if not events or events[-1].finish_reason != "length":
            raise CannotMeasure(f"{self.client.model} ended before {tokens} tokens")


@dataclass(frozen=True, slots=True)
class OpenAiWay:
    address: str

    async def answer(self, text: str, tokens: int, is_streamed: bool) -> None:
        body = {
            "prompt": text,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": is_streamed,
            "temperature": 0,
        }
        answer = await sse_client.ask(self.address, COMPLETIONS, body)
        if answer.status != 200 or not (answer.is_done or answer.body):
            raise CannotMeasure(f"the gateway answered {answer.status}: {answer.body[:300]!r}")


async def tokens_per_s(
    way: ModelWay | OpenAiWay, texts: Sequence[str], tokens: int, is_streamed: bool
) -> float:
    """Tokens per second of concurrent answers, from the first request to the last token."""
    started_s = time.perf_counter()
    await asyncio.gather(*(way.answer(text, tokens, is_streamed) for text in texts))
    return len(texts) * tokens / (time.perf_counter() - started_s)
