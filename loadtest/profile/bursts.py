"""What a burst of prompts shows that prompts one by one do not.

While one prompt is handed over to decode the next is computed, others wait, blocks and tokens are
on their way, and engines, frontend, client and storage nodes want the same cores. What that costs
is told apart by where it shows: between the first token and the second, in decode steps, and in how
long the prompts take one behind the other. Means and not medians: a few tokens are late by very
much, and they count.

Not here: sending bursts, and two workers that compute beside each other all the time (measure.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from conductor.estimates.estimates import DecodeEstimate


@dataclass(frozen=True, slots=True)
class BurstAnswer:
    """One of several prompts that came at once."""

    prompt_tokens: int
    sent_s: float
    token_times_s: Sequence[float]  # at least two

    @property
    def first_s(self) -> float:
        return self.token_times_s[0]

    @property
    def second_s(self) -> float:
        return self.token_times_s[1]


Burst = Sequence[BurstAnswer]


def handover_beside_s(bursts: Sequence[Burst], step_s: float) -> float:
    """What the second token took on top of a step, for all but the last prompt of a burst: behind
    that one nothing is computed any more."""
    found = [
        answer.second_s - answer.first_s
        for burst in bursts
        for answer in sorted(burst, key=lambda one: one.first_s)[:-1]
    ]
    return max(0.0, statistics.fmean(found) - step_s) if found else 0.0


def decode_beside(bursts: Sequence[Burst], estimate: DecodeEstimate) -> float:
    """How many times as long decode steps took while prompts of the same burst were computed, over
    all of them; at least 1. Tokens that come late and together cancel out."""
    measured_s = expected_s = 0.0
    for burst in bursts:
        computed_s = max(answer.first_s for answer in burst)
        for answer in burst:
            for number, (from_s, until_s) in enumerate(pairwise(answer.token_times_s[1:]), 2):
                if from_s >= computed_s:
                    continue
                running = [one for one in burst if one.second_s <= from_s < one.token_times_s[-1]]
                context = sum(one.prompt_tokens + number for one in running)
                measured_s += until_s - from_s
                expected_s += estimate.step_s(max(1, len(running)), context)
    return max(1.0, measured_s / expected_s) if expected_s else 1.0


def queued_prompt_s(
    bursts: Sequence[Burst], prompt_s: Callable[[int], float], base_s: float, prefill_beside: float
) -> float:
    """What each prompt of a burst took on top of its steps, of which those beside decoding take
    `prefill_beside` times as long; at least 0."""
    found = []
    for burst in bursts:
        begin_s, end_s = min(one.sent_s for one in burst), max(one.first_s for one in burst)
        decoding_s = _covered_s([(one.second_s, one.token_times_s[-1]) for one in burst], end_s)
        factor = 1.0 + (prefill_beside - 1.0) * decoding_s / (end_s - begin_s)
        computing_s = factor * sum(prompt_s(one.prompt_tokens) for one in burst)
        found.append((end_s - begin_s - base_s - computing_s) / len(burst))
    return max(0.0, statistics.fmean(found)) if found else 0.0


def _covered_s(spans: Sequence[tuple[float, float]], end_s: float) -> float:
    """How much time they cover together, until `end_s`."""
    covered_s, reached_s = 0.0, float("-inf")
    for from_s, until_s in sorted(spans):
        until_s = min(until_s, end_s)
        covered_s += max(0.0, until_s - max(from_s, reached_s))
        reached_s = max(reached_s, until_s)
    return covered_s
