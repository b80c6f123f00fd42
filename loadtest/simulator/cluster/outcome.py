"""The result of a simulated run, as the numbers that the papers and Dynamo's replay compare.

TTFT includes the part of the hand-over that prefill did not hide; `ttft_prefill_s` ends with the
prefill. TBT of a request is the mean of the longest 10 % of its token intervals, including the one
from prefill to decode. `tbt_decode_s` excludes that one: they differ by several points.

A prefill is *wasted* when its request is refused after or during it. Tokens computed for a
cancelled prompt and tokens lost with a worker that died are wasted too.

A request is *good* when it was answered with a TTFT of at most 30 s and a mean token interval of at
most 100 ms. These are the bounds of the Mooncake paper, counted as in Dynamo's replay. Good output
tokens are divided by the time in which requests arrive, which is equal for all schedulers. Dividing
by the length of the run would favour a scheduler that rejects over one that queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from conductor.estimates.lengths import CLASSES, class_name, length_class
from loadtest.simulator.cluster.job import SimulatedJob

TTFT_SLO_S, ITL_SLO_S = 30.0, 0.1


@dataclass(frozen=True, slots=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


NOTHING = Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LengthClass:
    name: str
    requests: int
    admitted: int
    good: int
    ttft_p99_s: float  # of the admitted requests; 0 without any

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    offered: int
    finished: int
    ttft_s: Quantiles
    hit_share: float  # share of the prompt tokens of all prefilled requests
    # mean over requests of their mean token interval; answers of one token left out
    itl_mean_s: float
    wait_max_s: float  # from arrival to the end of prefill, less the prefill time on an idle worker
    good: int
    good_ttft_p99_s: float  # of the good requests only
    good_tokens_per_s: float
    classes: tuple[LengthClass, ...]
    # Dynamo's own runs do not report the fields below.
    # rejected by the conductor before prefill, by kind
    rejected: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # refused by a worker, by kind
    ttft_prefill_s: Quantiles = NOTHING
    tbt_s: Quantiles = NOTHING
    tbt_decode_s: Quantiles = NOTHING
    decode_s: float = 0.0  # mean time from first token to last
    fetched_blocks: int = 0
    restored_blocks: int = 0
    prefills: int = 0  # requests with at least one computed chunk
    prefill_s: float = 0.0  # GPU seconds of all prefills
    wasted_prefills: int = 0
    wasted_prefill_s: float = 0.0

    @property
    def rejected_in_all(self) -> int:
        return sum(self.rejected.values()) + sum(self.refused.values())

    @property
    def wasted_share(self) -> float:
        return self.wasted_prefills / self.prefills if self.prefills else 0.0

    @property
    def good_share(self) -> float:
        return self.good / self.offered

    @property
    def least_class_share(self) -> float:
        """Good share of the worst served length class, relative to that of all requests."""
        shares = [found.good_share for found in self.classes if found.requests]
        return min(shares) / self.good_share if self.good else 0.0

    @property
    def worst_class_p99_s(self) -> float:
        return max(found.ttft_p99_s for found in self.classes)


def outcome_of(
    jobs: Sequence[SimulatedJob], alone_s: Callable[[int], float] = lambda tokens: 0.0
) -> SimulationOutcome:
    """The outcome of a finished run. `alone_s(tokens)`: prefill time on an idle worker."""
    done = [job for job in jobs if job.finished_s is not None]
    good = [job for job in done if is_good(job)]
    several = [job for job in done if job.output_tokens > 1]
    prefilled = [job for job in jobs if job.prefilled_s is not None]
    computed = [job for job in jobs if job.own_compute_s > 0.0]
    wasted = [job for job in computed if job.refused]
    prompt_tokens = sum(job.prompt_tokens for job in prefilled)
    arrivals_s = [job.arrived_s for job in jobs]
    window_s = max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0)
    waits_s = (
        (job.prefilled_s or 0.0) - job.arrived_s - alone_s(job.prompt_tokens - job.cached_tokens)
        for job in done
    )
    return SimulationOutcome(
        offered=len(jobs),
        finished=len(done),
        ttft_s=quantiles([job.ttft_s for job in done]),
        hit_share=sum(job.cached_tokens for job in prefilled) / max(1, prompt_tokens),
        itl_mean_s=quantiles([job.itl_s for job in several]).mean,
        wait_max_s=max(waits_s, default=0.0),
        good=len(good),
        good_ttft_p99_s=quantiles([job.ttft_s for job in good]).p99,
        good_tokens_per_s=sum(job.output_tokens for job in good) / max(window_s, 1e-9),
        classes=_classes(jobs),
        rejected=dict(Counter(job.reject.kind for job in jobs if job.reject is not None)),
        refused=dict(Counter(job.refused for job in jobs if job.refused)),
        ttft_prefill_s=quantiles([(job.prefilled_s or 0.0) - job.arrived_s for job in done]),
        tbt_s=quantiles([job.tbt_s for job in several]),
        tbt_decode_s=quantiles([job.tbt_decode_s for job in several]),
        decode_s=_mean([(job.finished_s or 0.0) - (job.prefilled_s or 0.0) for job in several]),
        fetched_blocks=sum(job.fetched_blocks for job in jobs),
        restored_blocks=sum(job.restored_blocks for job in jobs),
        prefills=len(computed),
        prefill_s=sum(job.own_compute_s for job in computed),
        wasted_prefills=len(wasted),
        wasted_prefill_s=sum(
            job.own_compute_s if job.refused else job.lost_compute_s for job in computed
        ),
    )


def is_good(job: SimulatedJob) -> bool:
    return job.finished_s is not None and job.ttft_s <= TTFT_SLO_S and job.itl_s <= ITL_SLO_S


def within(jobs: Sequence[SimulatedJob], ttft_slo_s: float, tbt_slo_s: float) -> int:
    return sum(
        job.finished_s is not None and job.ttft_s <= ttft_slo_s and job.tbt_s <= tbt_slo_s
        for job in jobs
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return NOTHING
    found = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return Quantiles(float(found.mean()), float(p50), float(p90), float(p99), float(found.max()))


def _classes(jobs: Sequence[SimulatedJob]) -> tuple[LengthClass, ...]:
    of_class: list[list[SimulatedJob]] = [[] for _ in range(CLASSES)]
    for job in jobs:
        of_class[length_class(job.prompt_tokens)].append(job)
    found = []
    for number, members in enumerate(of_class):
        ttfts_s = [job.ttft_s for job in members if job.finished_s is not None]
        good = sum(map(is_good, members))
        p99_s = quantiles(ttfts_s).p99
        found.append(LengthClass(class_name(number), len(members), len(ttfts_s), good, p99_s))
    return tuple(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
