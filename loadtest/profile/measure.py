"""Timing one prefill worker and one decode worker of a running server, as a client.

Prefill: a prompt of `new` fresh tokens after a prefix that is cached on the worker's node; the
worker reports its compute time (`decision.prefill_s`) and its cached tokens. Decode: `sequences`
streams at once, each over a cached context; a step is the time between tokens while all run. A
sample is the median of its rounds, so one outlier does not bend the fit.

Not here: the fit and the file (profile.py).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from conductor.estimates.estimates import DecodeSample, PrefillSample
from loadtest.client.answer import ReceivedAnswer
from loadtest.client.protocol import GenerateRequest, ServerError
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import together_tbt_s
from loadtest.profile.profile import BurstMeans, Serving, Sharing
from loadtest.replay.prompts import TokenIds, TokenSource

# (new tokens, prefix tokens); a prefix consists of whole blocks of up to 256 tokens
PREFILL_POINTS = (
    (32, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (2048, 0), (4096, 0), (64, 1024),
    (256, 1024), (512, 2048), (1024, 2048), (256, 4096), (1024, 4096), (64, 6144),
)  # fmt: skip
# (sequences, context tokens of each)
DECODE_POINTS = (
    (1, 64), (1, 1024), (1, 4096), (2, 512), (4, 256), (4, 1024), (8, 256), (8, 1024), (16, 512),
    (24, 256),
)  # fmt: skip
NO_PINS: Mapping[str, str] = {}
STEPS = 32  # tokens of each stream of a decode point
# Both at once: prompts one after the other, beside streams that decode all the time.
TOGETHER_STREAMS, TOGETHER_CONTEXT, TOGETHER_PROMPT = 4, 256, 1024
TOGETHER_PROMPTS = 4  # per round
TOGETHER_TOKENS = 512  # of each stream, or as many as fit
SECOND_TOKENS = 128  # of each stream, on two decode workers
# Tokens of prompts that are sent at once.
BURST_PROMPTS = (256, 1024, 64, 512, 768, 128, 1536, 384)
BURST_TOKENS = 16  # of each answer
BURSTS = 5  # per round
BURST_PAUSE_S = 1.5  # between bursts: published traces have a tick of 3 s, and caches get cold
SSD_PROMPTS = 8  # prompts that are repeated after others have evicted them from DRAM
SSD_PROMPT = 2048  # tokens of each
SSD_FILLED_MAX = 256 * 2**20  # most bytes of DRAM that are filled for it; more would take too long


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of the two workers."""

    context_tokens_max: int  # tokens; lower when longer points are left out
    block_tokens: int
    slots: int
    kv_pages: int

    def takes_prefill(self, new_tokens: int, prefix_tokens: int) -> bool:
        return new_tokens + prefix_tokens + 1 <= self.context_tokens_max

    def takes_decode(self, sequences: int, context_tokens: int) -> bool:
        """Whether the streams fit with a margin; otherwise they would not run together."""
        tokens = context_tokens + STEPS
        pages = sequences * (tokens // self.block_tokens + 1)
        is_short = tokens <= self.context_tokens_max and sequences <= self.slots
        return is_short and pages <= self.kv_pages * 3 // 4


@dataclass(frozen=True, slots=True)
class Prefill:
    new_tokens: int
    prefix_tokens: int
    prefill_s: float
    ttft_s: float
    second_s: float  # from the first token to the second


@dataclass(frozen=True, slots=True)
class SecondWorkers:
    """Second workers of the same server; "" where there is none."""

    prefill: str = ""
    decode: str = ""


@dataclass(frozen=True, slots=True)
class Together:
    prefill_alone_s: Sequence[float]
    prefill_beside_s: Sequence[float]
    step_alone_s: Sequence[float]  # between tokens of a stream
    step_beside_s: Sequence[float]
    prefill_second_s: Sequence[float] = ()  # beside a second prefill worker
    step_second_s: Sequence[float] = ()  # beside a second decode worker


class Measure:
    """Sends all requests to one pair of workers; the server must have no other load."""

    def __init__(self, client: TritonClient, workers: tuple[str, str], source: TokenSource) -> None:
        self._client = client
        self._pins = {"prefill_worker": workers[0], "decode_worker": workers[1]}
        self._source = source
        self._prompts = 0

    def _fresh(self, tokens: int) -> TokenIds:
        self._prompts += 1
        return self._source.fresh(self._prompts, tokens)

    async def prefill(
        self, points: Sequence[tuple[int, int]], rounds: int, done: Callable[[], None]
    ) -> list[Prefill]:
        """Every prompt of every round except the first round, which warms the worker up."""
        prefixes = {tokens: self._fresh(tokens) for tokens in {prefix for _, prefix in points}}
        for tokens, prefix in prefixes.items():
            if tokens:
                await self._ask(prefix, 2)
        found = []
        for number in range(rounds + 1):
            for new_tokens, prefix_tokens in points:
                fresh = self._fresh(new_tokens)
                answer, sent_s = await self._ask(
                    np.concatenate([prefixes[prefix_tokens], fresh]), 2
                )
                cached_tokens = answer.cached_tokens or 0
                prompt_tokens = new_tokens + prefix_tokens
                first_s, second_s = answer.token_times_s
                if number:
                    found.append(
                        Prefill(
                            prompt_tokens - cached_tokens,
                            cached_tokens,
                            float(str(answer.decision["prefill_s"])),
                            first_s - sent_s,
                            second_s - first_s,
                        )
                    )
                done()
        return found

    async def decode(
        self, points: Sequence[tuple[int, int]], rounds: int, done: Callable[[], None]
    ) -> list[DecodeSample]:
        found: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        for _ in range(rounds):
            for sequences, context_tokens in points:
                prompts = [self._fresh(context_tokens) for _ in range(sequences)]
                await asyncio.gather(*(self._ask(prompt, 2) for prompt in prompts))
                streams = await asyncio.gather(*(self._ask(prompt, STEPS) for prompt in prompts))
                times = [answer.token_times_s for answer, _ in streams]
                if (step_s := together_tbt_s(times, STEPS // 3)) is not None:
                    found[sequences, context_tokens].append(step_s)
                done()
        return [
            DecodeSample(sequences, sequences * (context + STEPS // 2), statistics.median(seconds))
            for (sequences, context), seconds in found.items()
            if seconds
        ]

    async def together(
        self, room: Room, second: SecondWorkers, rounds: int, done: Callable[[], None]
    ) -> list[Together]:
        """Prompts alone and beside decoding streams, then both beside a second worker of their
        role. No rounds when no stream of more than one token fits."""
        tokens = min(TOGETHER_PROMPT, room.context_tokens_max // 2)
        length = min(TOGETHER_TOKENS, room.context_tokens_max - TOGETHER_CONTEXT - 1)
        found = []
        for _ in range(rounds if length > 1 else 0):
            alone = await self._timed(tokens)
            contexts = [self._fresh(TOGETHER_CONTEXT) for _ in range(TOGETHER_STREAMS)]
            begun = asyncio.Event()
            streams = [
                asyncio.create_task(self._ask(context, length, begun)) for context in contexts
            ]
            await begun.wait()
            beside = await self._timed(tokens)
            answers = await asyncio.gather(*streams)
            windows = [(first_s - computed_s, first_s) for computed_s, first_s in beside]
            times = [answer.token_times_s for answer, _ in answers]
            found.append(
                Together(
                    [s for s, _ in alone],
                    [s for s, _ in beside],
                    *split(times, windows),
                    await self._beside_prefill(second.prefill, tokens),
                    await self._beside_decode(second.decode, min(length, SECOND_TOKENS)),
                )
            )
            done()
        return found

    async def _beside_prefill(self, other: str, tokens: int) -> list[float]:
        if not other:
            return []
        own, _ = await asyncio.gather(self._timed(tokens), self._timed(tokens, other))
        return [seconds for seconds, _ in own]

    async def _beside_decode(self, other: str, length: int) -> list[float]:
        if not other:
            return []
        streams = [
            self._ask(self._fresh(TOGETHER_CONTEXT), length, pins=pins)
            for pins in ({}, {"decode_worker": other})
            for _ in range(TOGETHER_STREAMS)
        ]
        times = [answer.token_times_s for answer, _ in await asyncio.gather(*streams)]
        own, others = times[:TOGETHER_STREAMS], times[TOGETHER_STREAMS:]
        both = (min(one[1] for one in others), max(one[-1] for one in others))
        return split(own, [both])[1]

    async def burst(self, room: Room, rounds: int, done: Callable[[], None]) -> BurstMeans:
        """Prompts at once: one is handed over while the next is computed, and others wait."""
        lengths = [n for n in BURST_PROMPTS if n + BURST_TOKENS < room.context_tokens_max]
        found: list[tuple[ReceivedAnswer, float]] = []
        for _ in range(rounds):
            for _ in range(BURSTS if lengths else 0):
                await asyncio.sleep(BURST_PAUSE_S)
                prompts = map(self._fresh, lengths)
                found += await asyncio.gather(*(self._ask(one, BURST_TOKENS) for one in prompts))
            done()
        return burst_means(lengths, [(sent_s, one.token_times_s) for one, sent_s in found])

    async def from_ssd(self, filled_bytes: int, token_bytes: int, room: Room) -> float:
        """Bytes per second of prefixes that only the own node's SSD holds; 0: none was restored.
        `filled_bytes`: bytes to store so that they are evicted from DRAM."""
        tokens = min(SSD_PROMPT, room.context_tokens_max // 2)
        early = [self._fresh(tokens) for _ in range(SSD_PROMPTS)]
        others = [self._fresh(tokens) for _ in range(filled_bytes // (tokens * token_bytes) + 1)]
        for prompt in (*early, *others):
            await self._ask(prompt, 2)
        moved_bytes = load_s = 0.0
        for prompt in early:
            answer, _ = await self._ask(np.concatenate([prompt, self._fresh(8)]), 2)
            blocks = float(str(answer.decision["restore_blocks"]))
            if blocks and (answer.cached_tokens or 0) >= blocks * room.block_tokens:
                moved_bytes += blocks * room.block_tokens * token_bytes
                load_s += float(str(answer.decision["load_s"]))
        return moved_bytes / load_s if load_s else 0.0

    async def from_node(self, other: str, token_bytes: int, room: Room, rounds: int) -> float:
        """Bytes per second of prefixes that another node holds; 0: none was fetched."""
        tokens = min(SSD_PROMPT, room.context_tokens_max // 2)
        moved_bytes = load_s = 0.0
        for _ in range(rounds):
            prompt = self._fresh(tokens)
            await self._ask(prompt, 2, pins={"prefill_worker": other})
            answer, _ = await self._ask(np.concatenate([prompt, self._fresh(8)]), 2)
            if blocks := float(str(answer.decision["fetched_blocks"])):
                moved_bytes += blocks * room.block_tokens * token_bytes
                load_s += float(str(answer.decision["load_s"]))
        return moved_bytes / load_s if load_s else 0.0

    async def _timed(self, tokens: int, prefill: str = "") -> list[tuple[float, float]]:
        """(seconds of prefill, time of the first token) of fresh prompts, one after the other."""
        pins, found = {"prefill_worker": prefill} if prefill else {}, []
        for _ in range(TOGETHER_PROMPTS):
            answer, _ = await self._ask(self._fresh(tokens), 2, pins=pins)
            found.append((float(str(answer.decision["prefill_s"])), answer.token_times_s[0]))
        return found

    async def _ask(
        self,
        prompt: TokenIds,
        output_tokens: int,
        begun: asyncio.Event | None = None,
        pins: Mapping[str, str] = NO_PINS,
    ) -> tuple[ReceivedAnswer, float]:
        """`begun`: set with its second token or its end. `pins`: workers that replace the pair."""
        self._prompts += 1
        request = GenerateRequest(
            f"profile-{self._prompts}",
            input_ids=prompt,
            max_tokens=output_tokens,
            min_tokens=output_tokens,
            end_id=-1,
            return_decision=True,
            parameters={**self._pins, **pins},
        )
        answer, sent_s = ReceivedAnswer(), time.perf_counter()
        try:
            async for event in self._client.generate(request):
                answer.add(event)
                if begun is not None and len(answer.token_times_s) > 1:
                    begun.set()
        finally:
            if begun is not None:
                begun.set()
        if len(answer.token_times_s) != output_tokens:
            raise ServerError(
                "incomplete", f"{len(answer.token_times_s)} of {output_tokens} tokens came"
            )
        return answer, sent_s


def split(
    streams: Sequence[Sequence[float]], windows: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Intervals between tokens: those wholly outside the windows, and those wholly inside one."""
    alone, beside = [], []
    for times in streams:
        for before_s, after_s in pairwise(times[1:]):
            if any(from_s <= before_s and after_s <= until_s for from_s, until_s in windows):
                beside.append(after_s - before_s)
            elif all(after_s <= from_s or until_s <= before_s for from_s, until_s in windows):
                alone.append(after_s - before_s)
    return alone, beside


def sharing_of(rounds: Sequence[Together]) -> Sharing:
    """Ratios of means, medians over the rounds; 1 where nothing ran beside or nothing was lost."""

    def factor(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        found = [
            statistics.fmean(beside) / statistics.fmean(alone)
            for alone, beside in pairs
            if alone and beside
        ]
        return max(1.0, statistics.median(found)) if found else 1.0

    return Sharing(
        factor([(each.prefill_alone_s, each.prefill_beside_s) for each in rounds]),
        factor([(each.step_alone_s, each.step_beside_s) for each in rounds]),
        factor([(each.prefill_alone_s, each.prefill_second_s) for each in rounds]),
        factor([(each.step_alone_s, each.step_second_s) for each in rounds]),
    )


def burst_means(
    lengths: Sequence[int], answers: Sequence[tuple[float, Sequence[float]]]
) -> BurstMeans:
    if not answers:
        return BurstMeans()
    return BurstMeans(
        tuple(lengths),
        len(answers[0][1]),
        statistics.fmean(times[0] - sent_s for sent_s, times in answers),
        statistics.fmean(times[1] - times[0] for _, times in answers),
        statistics.fmean((times[-1] - times[1]) / (len(times) - 2) for _, times in answers),
    )


def samples_of(prefills: Sequence[Prefill]) -> list[PrefillSample]:
    """One sample for each point: the median of its rounds."""
    by_point: dict[tuple[int, int], list[float]] = {}
    for one in prefills:
        by_point.setdefault((one.new_tokens, one.prefix_tokens), []).append(one.prefill_s)
    return [PrefillSample(*point, statistics.median(s)) for point, s in by_point.items()]


def serving_of(prefills: Sequence[Prefill], step_s: float) -> Serving:
    """Serving time on top of the prefill, fitted as a non-decreasing line over the cached tokens,
    and the second token's time on top of `step_s`, a decode step of one sequence."""
    rest_s = [max(0.0, one.ttft_s - one.prefill_s) for one in prefills]
    paired = list(zip(rest_s, prefills, strict=True))
    uncached_s = [s for s, one in paired if not one.prefix_tokens]
    base_s = statistics.median(uncached_s or rest_s)
    slopes = [(s - base_s) / one.prefix_tokens for s, one in paired if one.prefix_tokens]
    handover_s = statistics.median(one.second_s for one in prefills) - step_s
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    return Serving(base_s, slope, max(0.0, handover_s))
