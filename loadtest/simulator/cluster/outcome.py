"""What came of a simulated run, as the numbers that the papers compare.

TTFT counts queue, fetch, prefill and what of the hand-over was not hidden behind prefill;
`ttft_prefill_*` ends with the prefill. TBT of a request is the mean of the longest 10 % of its
token intervals, the one from prefill to decode included, in which it may have waited for a place in
the batch; `tbt_decode_*` is without that one. Both are shown: results move by several points.

A prefill is *wasted* when its request is refused, afterwards or on the way: what was computed of a
prompt that was given up counts, and so does what a worker that died took with it.

Not here: running (fleet.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.simulator.cluster.job import Job

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


NOTHING = Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    offered: int
    finished: int
    rejected: dict[str, int]  # by kind, before anything was computed
    refused: dict[str, int]  # by kind, on their way
    ttft_s: Quantiles
    ttft_prefill_s: Quantiles
    tbt_s: Quantiles
    tbt_decode_s: Quantiles
    decode_s: float  # mean time from first token to last
    hit_share: float  # of the prompt tokens that were prefilled
    fetched_blocks: int
    prefills: int  # requests of which something was computed
    prefill_s: float  # GPU seconds of all of them
    wasted_prefills: int
    wasted_prefill_s: float

    @property
    def rejected_in_all(self) -> int:
        return sum(self.rejected.values()) + sum(self.refused.values())

    @property
    def wasted_share(self) -> float:
        return self.wasted_prefills / self.prefills if self.prefills else 0.0


def outcome_of(jobs: Sequence[Job]) -> Outcome:
    done = [job for job in jobs if job.finished_s is not None]
    several = [job for job in done if job.output_tokens > 1]
    prefilled = [job for job in jobs if job.prefilled_s is not None]
    computed = [job for job in jobs if job.own_compute_s > 0.0]
    wasted = [job for job in computed if job.refused]
    prompt_tokens = sum(job.prompt_tokens for job in prefilled)
    return Outcome(
        offered=len(jobs),
        finished=len(done),
        rejected=dict(Counter(job.reject.kind for job in jobs if job.reject is not None)),
        refused=dict(Counter(job.refused for job in jobs if job.refused)),
        ttft_s=quantiles([ttft_s(job) for job in done]),
        ttft_prefill_s=quantiles([(job.prefilled_s or 0.0) - job.arrived_s for job in done]),
        tbt_s=quantiles([job.tbt_s for job in several]),
        tbt_decode_s=quantiles([job.tbt_decode_s for job in several]),
        decode_s=_mean([(job.finished_s or 0.0) - (job.prefilled_s or 0.0) for job in several]),
        hit_share=sum(job.cached_tokens for job in prefilled) / max(1, prompt_tokens),
        fetched_blocks=sum(job.fetched_blocks for job in jobs),
        prefills=len(computed),
        prefill_s=sum(job.own_compute_s for job in computed),
        wasted_prefills=len(wasted),
        wasted_prefill_s=sum(
            job.own_compute_s if job.refused else job.lost_compute_s for job in computed
        ),
    )


def ttft_s(job: Job) -> float:
    """Of a finished request."""
    assert job.prefilled_s is not None, f"{job.request_id} has no first token"
    return job.prefilled_s + job.handover_s - job.arrived_s


def within(jobs: Sequence[Job], ttft_slo_s: float, tbt_slo_s: float) -> int:
    """Requests that were answered and kept both service levels."""
    return sum(
        job.finished_s is not None and ttft_s(job) <= ttft_slo_s and job.tbt_s <= tbt_slo_s
        for job in jobs
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return NOTHING
    found: Numbers = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return Quantiles(float(found.mean()), float(p50), float(p90), float(p99), float(found.max()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
