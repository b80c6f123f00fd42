"""What a replay comes to: TTFT, reuse, goodput, and the same for each class of prompt length.

A request is *good* when it was admitted, its TTFT is at most 30 s and the mean time between its
tokens at most 100 ms: the bounds of the Mooncake paper, counted as Dynamo's replay counts them.
Good output tokens per second are over the time in which requests arrive, which is the same for
everybody: over the whole run, a scheduler that lets work pile up would be divided by more seconds
than one that turns it away. The same function counts our runs and Dynamo's own.

Not here: the replay itself (replay.py), targets (targets.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conductor.estimates.length_class import CLASSES, class_name, length_class
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.timing import alone_s

TTFT_SLO_S, ITL_SLO_S = 30.0, 0.1


def is_good(job: Job) -> bool:
    return not job.is_rejected and job.ttft_s <= TTFT_SLO_S and job.itl_s <= ITL_SLO_S


@dataclass(frozen=True, slots=True)
class LengthClass:
    """The requests of one class of prompt length."""

    name: str
    requests: int
    admitted: int
    good: int
    ttft_p99_s: float  # of the admitted; 0 without any

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. TTFT and reuse are those of the admitted requests."""

    requests: int
    admitted: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    wait_max_s: float  # from arrival to the end of prefill, less what prefill takes alone
    itl_mean_s: float  # of the requests' means, one token answers apart
    reuse: float  # prompt tokens found cached / prompt tokens
    good: int
    good_ttft_p99_s: float  # of the good requests only
    good_tokens_per_s: float
    classes: tuple[LengthClass, ...]

    @property
    def good_share(self) -> float:
        return self.good / self.requests

    @property
    def least_class_share(self) -> float:
        """Good share of the worst served class, relative to that of all requests."""
        shares = [found.good_share for found in self.classes if found.requests]
        return min(shares) / self.good_share if self.good else 0.0

    @property
    def worst_class_p99_s(self) -> float:
        return max(found.ttft_p99_s for found in self.classes)


def outcome_of(jobs: Sequence[Job]) -> Outcome:
    """Of a replay that has ended; at least one request was admitted."""
    admitted = [job for job in jobs if not job.is_rejected]
    good = [job for job in admitted if is_good(job)]
    ttfts = np.array([job.ttft_s for job in admitted])
    p50, p90, p99 = (float(value) for value in np.percentile(ttfts, (50, 90, 99)))
    itls = [job.itl_s for job in admitted if job.output_tokens > 1]
    waits = (
        job.prefilled_s - job.arrived_s - alone_s(job.prompt_tokens - job.cached_tokens)
        for job in admitted
    )
    good_p99_s = float(np.percentile([job.ttft_s for job in good], 99)) if good else 0.0
    window_s = max(job.arrived_s for job in jobs) - min(job.arrived_s for job in jobs)
    return Outcome(
        requests=len(jobs),
        admitted=len(admitted),
        ttft_mean_s=float(ttfts.mean()),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        ttft_max_s=float(ttfts.max()),
        wait_max_s=max(waits),
        itl_mean_s=float(np.mean(itls)) if itls else 0.0,
        reuse=sum(job.cached_tokens for job in admitted) / sum(j.prompt_tokens for j in admitted),
        good=len(good),
        good_ttft_p99_s=good_p99_s,
        good_tokens_per_s=sum(job.output_tokens for job in good) / max(window_s, 1e-9),
        classes=tuple(_class(jobs, number) for number in range(CLASSES)),
    )


def _class(jobs: Sequence[Job], number: int) -> LengthClass:
    of_class = [job for job in jobs if length_class(job.prompt_tokens) == number]
    ttfts = [job.ttft_s for job in of_class if not job.is_rejected]
    p99_s = float(np.percentile(ttfts, 99)) if ttfts else 0.0
    good = sum(map(is_good, of_class))
    return LengthClass(class_name(number), len(of_class), len(ttfts), good, p99_s)
