"""What clients saw over a run, from its records: requests per second, in flight, hit rate. Pure.

Time is cut into bins of one round width, so that a picture has at most BINS_MAX of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord

Numbers = npt.NDArray[np.float64]

BINS_MAX = 45
ROUND_S = (
    0.001, 0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0,
    3_600.0,
)  # fmt: skip
IN_FLIGHT_POINTS_MAX = 300


@dataclass(frozen=True, slots=True)
class Bins:
    """From the run's begin to its end; all of one width, except the last, which may differ."""

    width_s: float
    edges_s: Numbers

    @property
    def count(self) -> int:
        return len(self.edges_s) - 1

    def counts(self, times_s: Sequence[float]) -> Numbers:
        """How many fall into each bin; what lies outside the run counts to its first or last."""
        return np.bincount(self._places(times_s), minlength=self.count).astype(float)

    def sums(self, times_s: Sequence[float], values: Sequence[float]) -> Numbers:
        return np.bincount(self._places(times_s), weights=values, minlength=self.count)

    def per_second(self, times_s: Sequence[float]) -> Numbers:
        return self.counts(times_s) / np.diff(self.edges_s)

    def _places(self, times_s: Sequence[float]) -> npt.NDArray[np.int64]:
        inner = self.edges_s[1:-1]
        return np.searchsorted(inner, np.asarray(times_s, dtype=float), side="right")


def end_s(records: Sequence[RequestRecord]) -> float:
    return max((record.finished_s for record in records), default=0.0)


def bins_of(records: Sequence[RequestRecord], bins_max: int = BINS_MAX) -> Bins:
    """From the run's begin to its last answer, in steps of a round width.

    What is left at the end is a bin of its own when it is at least half as wide as the others;
    less would be a rate over a moment, so it belongs to the bin before.
    """
    duration_s = max(end_s(records), ROUND_S[0])
    width_s = next((width_s for width_s in ROUND_S if duration_s / width_s <= bins_max), None)
    if width_s is None:  # weeks: whole hours
        width_s = 3_600.0 * math.ceil(duration_s / 3_600.0 / bins_max)
    full = int(duration_s / width_s)
    is_rest_wide = duration_s - full * width_s >= width_s / 2
    inner = np.arange(1, full + (1 if is_rest_wide else 0)) * width_s
    return Bins(float(width_s), np.array([0.0, *inner, duration_s]))


def per_second(records: Sequence[RequestRecord], bins: Bins) -> dict[str, Numbers]:
    """Requests sent, and requests that ended in each way, per second in each bin."""
    ended = {
        name: [record.finished_s for record in records if record.outcome == outcome]
        for name, outcome in (("answered", COMPLETED), ("rejected", REJECTED), ("failed", FAILED))
    }
    times_s = {"sent": [record.sent_s for record in records], **ended}
    return {name: bins.per_second(values) for name, values in times_s.items()}


def tokens_per_second(records: Sequence[RequestRecord], bins: Bins) -> Numbers:
    """Generated tokens that reached a client, also those of answers that broke off later."""
    return bins.per_second([s for record in records for s in record.token_times_s])


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
