"""What clients saw over a run, from its records: requests per second, in flight, hit rate. Pure.

Time is cut into bins of one round width, so that a picture has at most BINS_MAX of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.metrics import COMPLETED, FAILED, REJECTED, RequestRecord

Numbers = npt.NDArray[np.float64]

BINS_MAX = 45
ROUND_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600)
IN_FLIGHT_POINTS_MAX = 300


@dataclass(frozen=True, slots=True)
class Bins:
    width_s: float
    count: int

    @property
    def edges_s(self) -> Numbers:
        return np.arange(self.count + 1) * self.width_s

    def counts(self, times_s: Sequence[float]) -> Numbers:
        """How many fall into each bin; a time before the run's begin counts to the first."""
        places = np.clip(np.asarray(times_s, dtype=float) // self.width_s, 0, self.count - 1)
        return np.bincount(places.astype(int), minlength=self.count).astype(float)

    def sums(self, times_s: Sequence[float], values: Sequence[float]) -> Numbers:
        places = np.clip(np.asarray(times_s, dtype=float) // self.width_s, 0, self.count - 1)
        return np.bincount(places.astype(int), weights=values, minlength=self.count)


def end_s(records: Sequence[RequestRecord]) -> float:
    return max((record.finished_s for record in records), default=0.0)


def bins_of(records: Sequence[RequestRecord], bins_max: int = BINS_MAX) -> Bins:
    """From the run's begin to its last answer."""
    duration_s = end_s(records)
    widths = (0.001, 0.01, 0.1, 0.2, 0.5, *ROUND_S)
    width_s = next((w for w in widths if duration_s / w <= bins_max), None)
    if width_s is None:  # days: whole hours
        width_s = 3_600.0 * int(np.ceil(duration_s / 3_600.0 / bins_max))
    return Bins(float(width_s), max(1, int(np.ceil(duration_s / width_s))))


def per_second(records: Sequence[RequestRecord], bins: Bins) -> dict[str, Numbers]:
    """Requests sent, and requests that ended in each way, per second in each bin."""
    ended = {
        name: bins.counts([record.finished_s for record in records if record.outcome == outcome])
        for name, outcome in (("answered", COMPLETED), ("rejected", REJECTED), ("failed", FAILED))
    }
    sent = bins.counts([record.sent_s for record in records])
    return {name: counts / bins.width_s for name, counts in {"sent": sent, **ended}.items()}


def tokens_per_second(records: Sequence[RequestRecord], bins: Bins) -> Numbers:
    """Generated tokens that reached a client, also those of answers that broke off later."""
    return bins.counts([s for record in records for s in record.token_times_s]) / bins.width_s


def in_flight(records: Sequence[RequestRecord]) -> tuple[Numbers, Numbers]:
    """(times, requests sent and not ended); of a long run the largest in each short interval."""
    moments = np.array(
        [(r.sent_s, 1) for r in records] + [(r.finished_s, -1) for r in records], dtype=float
    ).reshape(-1, 2)
    # An end before a start at the same moment: a request that follows another is not beside it.
    moments = moments[np.lexsort((moments[:, 1], moments[:, 0]))]
    times_s, counts = moments[:, 0], np.cumsum(moments[:, 1])
    if len(times_s) <= IN_FLIGHT_POINTS_MAX:
        return times_s, counts
    parts = np.array_split(np.arange(len(times_s)), IN_FLIGHT_POINTS_MAX)
    return (
        np.array([times_s[part[0]] for part in parts]),
        np.array([counts[part].max() for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class HitRate:
    """Of the prompts sent in each bin, the share that was cached; NaN where none was sent."""

    rate: Numbers
    ideal: Numbers | None  # an unlimited cache's
    requests: int


def hit_rate(
    records: Sequence[RequestRecord], bins: Bins, ideal: Mapping[int, int] | None
) -> HitRate | None:
    """None when no completed request says what was cached."""
    told = [r for r in records if r.outcome == COMPLETED and r.cached_tokens is not None]
    if not told:
        return None
    sent_s = [record.sent_s for record in told]
    prompt = bins.sums(sent_s, [record.prompt_tokens for record in told])
    prompt[prompt == 0] = np.nan
    cached = bins.sums(sent_s, [record.cached_tokens or 0 for record in told])
    best = None
    if ideal is not None and all(record.index in ideal for record in told):
        best = bins.sums(sent_s, [ideal[record.index] for record in told]) / prompt
    return HitRate(cached / prompt, best, len(told))
