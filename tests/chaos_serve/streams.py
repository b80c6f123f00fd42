"""Steady streams of requests: what is asked, and how each request ended.

Each stream sends one request after another to one frontend, and to the next one when it cannot be
reached, as a client behind a load balancer would. One that is rejected is sent again when the
server said so. Every request has a deadline of its own (`timeout_ms`), which goes on meanwhile; the
client waits a little longer, and what is silent even then has hung.

A connection for each request: a client that keeps them waits longer and longer before it looks
whether a frontend is there again.

Not here: what the answers must be (answers.py), what goes wrong meanwhile (fault_injector.py).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.engine.sampling_params import SamplingParams
from loadtest.client.protocol import GenerateRequest, Rejected, ServerError
from loadtest.client.triton_client import TritonClient

STREAMS = 8
DEADLINE_S = 45.0  # of a request, which the server keeps
MARGIN_S = 15.0  # a frontend may stand still when it is about to say so
RETRY_S_MIN = 0.2
PAUSE_S = 0.25  # before another frontend is asked
FINISHED, REJECTED, HUNG = "finished", "rejected", "hung"
NO_ANSWER = ("unreachable", "incomplete", "server_error")  # of these a connection that broke is one
VOCABULARY = range(16, 2_048)
TOP_K = 20  # of those that are sampled: with all tokens, many edges lie close together
STEMS, STEM_TOKENS = 4, 256
PROMPTS_MIN, PROMPTS_MAX, PROMPT_S = 12, 40, 5.0  # one for so many seconds of faults
TAIL_TOKENS, ANSWER_TOKENS = (1, 70, 400, 1_100), (16, 64, 160, 320)


@dataclass(frozen=True, slots=True)
class ChaosPrompt:
    """All that the answer follows from."""

    number: int
    input_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def request(self, request_id: str, deadline_s: float) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            input_ids=np.array(self.input_ids, np.int32),
            max_tokens=self.max_tokens,
            end_id=-1,
            stream=True,
            temperature=self.temperature,
            top_k=TOP_K if self.temperature else None,
            seed=self.seed,
            return_decision=True,
            parameters={"timeout_ms": int(deadline_s * 1e3)},
        )

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            top_k=TOP_K if self.temperature else 0,
        )


def prompts(seed: int, count: int = PROMPTS_MAX) -> list[ChaosPrompt]:
    """Most begin like some others, so that prefixes are found, fetched and copied."""
    chance = random.Random(seed)
    stems = [[chance.choice(VOCABULARY) for _ in range(STEM_TOKENS)] for _ in range(STEMS)]
    made = []
    for number in range(count):
        tail = [chance.choice(VOCABULARY) for _ in range(chance.choice(TAIL_TOKENS))]
        stem = chance.choice(stems) if chance.random() < 0.8 else []
        made.append(
            ChaosPrompt(
                number,
                (*stem, *tail),
                chance.choice(ANSWER_TOKENS),
                chance.choice((0.0, 0.8)),
                chance.randrange(2**31),
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How one request ended."""

    request_id: str
    prompt: ChaosPrompt
    host: str  # of its frontend
    sent_s: float  # time.monotonic
    ended_s: float
    tokens: tuple[int, ...]
    outcome: str  # FINISHED, REJECTED, HUNG, or the kind of the error
    message: str = ""
    workers: str = ""  # of the last decision
    rejections: int = 0  # after which it was asked again


async def ask(prompt: ChaosPrompt, host: str, address: str, request_id: str) -> EndedRequest:
    """Once, and when it is rejected again and again as the server asked for, until its deadline."""
    sent_s, rejections = time.monotonic(), 0
    while True:
        left_s = DEADLINE_S - (time.monotonic() - sent_s)
        answer = await _ask_once(prompt, address, f"{request_id}-{rejections}", left_s)
        wait_s = max(answer.retry_after_s, RETRY_S_MIN)
        left_s = DEADLINE_S - (time.monotonic() - sent_s)
        if answer.outcome != REJECTED or wait_s >= left_s:
            break
        rejections += 1
        await asyncio.sleep(wait_s)
    return EndedRequest(
        request_id=request_id,
        prompt=prompt,
        host=host,
        sent_s=sent_s,
        ended_s=time.monotonic(),
        tokens=tuple(answer.tokens),
        outcome=answer.outcome,
        message=answer.message,
        workers=answer.workers,
        rejections=rejections,
    )


@dataclass(slots=True)
class _Answer:
    tokens: list[int] = field(default_factory=list)
    outcome: str = "incomplete"
    message: str = ""
    workers: str = ""
    retry_after_s: float = 0.0


async def _ask_once(
    prompt: ChaosPrompt, address: str, request_id: str, deadline_s: float
) -> _Answer:
    answer = _Answer()
    request = prompt.request(request_id, deadline_s)
    try:
        async with TritonClient(address, channels=1) as client:
            async for event in client.generate(request, deadline_s + MARGIN_S):
                answer.tokens += event.output_ids
                if event.decision:
                    answer.workers = _workers(event.decision)
                if event.finish_reason:
                    answer.outcome = FINISHED
    except Rejected as error:
        answer.outcome, answer.message = REJECTED, f"{error.kind}: {error.message}"
        answer.retry_after_s = error.retry_after_s
    except ServerError as error:
        answer.outcome = HUNG if error.kind == "timeout" else error.kind
        answer.message = error.message
    return answer


def _workers(decision: Mapping[str, Any]) -> str:
    """For people: who served it, in how many attempts, with how much from the store."""
    names = ("prefill", "decode", "attempts", "cached_tokens", "fetched_from")
    return ", ".join(f"{name} {decision[name]}" for name in names if name in decision)


class SteadyStreams:
    """In a thread of their own, from `start` to `stop`."""

    def __init__(
        self, asked: Sequence[ChaosPrompt], frontends: Mapping[str, str], seed: int
    ) -> None:
        self.ended: list[EndedRequest] = []  # grows; read it after `stop`
        self._asked, self._frontends, self._seed = asked, dict(frontends), seed
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="steady-streams", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No request is sent any more; returns when the last one has ended."""
        self._is_stopping = True
        self._thread.join(DEADLINE_S + 2 * MARGIN_S)
        assert not self._thread.is_alive(), "a stream did not end within the client's own deadline"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        async def all_streams() -> None:
            await asyncio.gather(*(self._stream(number) for number in range(STREAMS)))

        try:
            asyncio.run(all_streams())
        except BaseException as error:  # told to whoever stops it
            self._failure = error

    async def _stream(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        hosts = sorted(self._frontends)
        turn, count = number, 0
        while not self._is_stopping:
            host = hosts[turn % len(hosts)]
            prompt = chance.choice(self._asked)
            ended = await ask(prompt, host, self._frontends[host], f"chaos-{number}-{count}")
            self.ended.append(ended)
            count += 1
            if ended.outcome in NO_ANSWER:
                turn += 1
            if ended.outcome != FINISHED:
                await asyncio.sleep(PAUSE_S)
