"""Samples of an engine's speed for the machine profile.

The engine batches by itself, so a sample is made of requests. One kind is a prompt of random tokens
with one output token, the other a batch of streams and the time between tokens. A sample with a
prefix computes the prefix first, so that the engine's own prefix cache has it. No prompt is staged,
so nothing is loaded or saved. Points are measured in order until the budget is spent, the first
ones always.

Not here: the formula that is fitted to the samples (conductor/estimates/estimates.py).
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence

from backends.engine.connected.generation import ConnectedEngine, Order, Outcome
from backends.engine.sampling_params import SamplingParams
from backends.token_logprobs import TokenLogprobs

# (new tokens, tokens before them)
PREFILL_POINTS = (
    (64, 0), (512, 0), (2048, 0), (512, 2048), (8192, 0), (2048, 8192), (256, 0), (32768, 0),
)  # fmt: skip
DECODE_POINTS = ((1, 64), (1, 1024), (4, 512), (8, 256), (16, 256))  # (batch, context of each)
POINTS_MIN = 3  # measured even beyond the budget; the fit needs samples
GAPS = 12
ANSWER_S_MAX = 120.0


class Stopwatch:
    """A sink that records the times of tokens."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.error: Exception | None = None
        self._is_over = threading.Event()

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self.token_s += [time.perf_counter()] * len(token_ids)

    def ended(self, outcome: Outcome) -> None:
        self.error = outcome.error
        self._is_over.set()

    def wait(self) -> None:
        if not self._is_over.wait(ANSWER_S_MAX):
            raise TimeoutError(f"a measured request took more than {ANSWER_S_MAX:.0f} s")
        if self.error is not None:
            raise self.error


def measured_prefill(engine: ConnectedEngine, budget_s: float) -> list[tuple[int, int, float]]:
    """(new tokens, tokens before them, seconds)"""
    rng = random.Random(1)
    samples: list[tuple[int, int, float]] = []
    until_s = time.perf_counter() + budget_s
    _seconds(engine, _tokens(engine, rng, 32))  # the first request compiles kernels
    for new, before in PREFILL_POINTS:
        if new + before >= engine.max_seq_len:
            continue
        prefix = _tokens(engine, rng, before)
        if before:
            _seconds(engine, prefix)
        taken = [_seconds(engine, prefix + _tokens(engine, rng, new)) for _ in range(2)]
        samples.append((new, before, min(taken)))
        if len(samples) >= POINTS_MIN and time.perf_counter() > until_s:
            break
    return samples


def measured_decode(engine: ConnectedEngine, budget_s: float) -> list[tuple[int, int, float]]:
    """(batch, context tokens of all, seconds of a step)"""
    rng = random.Random(2)
    samples: list[tuple[int, int, float]] = []
    until_s = time.perf_counter() + budget_s
    for batch, context in DECODE_POINTS:
        if batch > engine.slots or context + GAPS >= engine.max_seq_len:
            continue
        prompts = [_tokens(engine, rng, context) for _ in range(batch)]
        watches = _run(engine, prompts, GAPS + 1)
        starts_s = max(watch.token_s[0] for watch in watches)  # all of them decode from here on
        ends_s = min(watch.token_s[-1] for watch in watches)
        within = [each for each in watches[0].token_s if starts_s <= each <= ends_s]
        gaps = [after - before for before, after in itertools.pairwise(within)]
        if gaps := [gap for gap in gaps if gap > 0]:
            samples.append((batch, batch * context, statistics.median(gaps)))
        if len(samples) >= POINTS_MIN and time.perf_counter() > until_s:
            break
    return samples


def _tokens(engine: ConnectedEngine, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(engine.vocabulary_tokens) for _ in range(count)]


def _seconds(engine: ConnectedEngine, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    _run(engine, [prompt], 1)
    return time.perf_counter() - started_s


def _run(engine: ConnectedEngine, prompts: Sequence[list[int]], tokens: int) -> list[Stopwatch]:
    sampling = engine.sampling(SamplingParams(max_tokens=tokens), 0, tokens)
    watches = [Stopwatch() for _ in prompts]
    for prompt, watch in zip(prompts, watches, strict=True):
        engine.generate(Order(prompt, sampling), watch)
    for watch in watches:
        watch.wait()
    return watches
