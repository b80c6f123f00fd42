"""A run over time: requests as clients saw them, and the server's load from samples. Pure.

From the records: requests per second, in flight, hit rate. Time is cut into bins of one round
width, at most BINS_MAX of them.

From the samples: gauges as they are, counters as rates. A series is one metric of one worker (or of
one path, node, ...), named by a label. Names of models do not matter: a worker with waiting prompt
tokens counts as prefill, one with KV tokens of a running batch as decode.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loadtest.client.metrics_page import series_of
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.results.recording import Sample

Numbers = npt.NDArray[np.float64]

BINS_MAX = 45
ROUND_S = (
    0.001, 0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0,
    3_600.0,
)  # fmt: skip
IN_FLIGHT_POINTS_MAX = 300
SPREAD_POINTS_MAX = 32  # token times of a compact record

QUEUE_TOKENS = "mooncake_queue_tokens"
CONTEXT_TOKENS = "mooncake_context_tokens"
PAGES_USED = "mooncake_pages_used"
PROMPT_TOKENS = "mooncake_prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Bins:
    """From the run's start to its end; all of one width, except the last, which may differ."""

    width_s: float
    edges_s: Numbers

    @property
    def count(self) -> int:
        return len(self.edges_s) - 1

    def counts(self, times_s: Sequence[float]) -> Numbers:
        """How many times fall into each bin; times outside count in the first or last bin."""
        return np.bincount(self._positions(times_s), minlength=self.count).astype(float)

    def sums(
        self, times_s: Sequence[float] | Numbers, values: Sequence[float] | Numbers
    ) -> Numbers:
        return np.bincount(self._positions(times_s), weights=values, minlength=self.count)

    def per_second(self, times_s: Sequence[float]) -> Numbers:
        return self.counts(times_s) / np.diff(self.edges_s)

    def _positions(self, times_s: Sequence[float] | Numbers) -> npt.NDArray[np.int64]:
        inner = self.edges_s[1:-1]
        return np.searchsorted(inner, np.asarray(times_s, dtype=float), side="right")


def end_s(records: Sequence[RequestRecord]) -> float:
    return max((record.finished_s for record in records), default=0.0)


def bins_of(records: Sequence[RequestRecord], bins_max: int = BINS_MAX) -> Bins:
    """From the run's start to its last answer, in steps of a round width. The remainder at the end
    is a bin of its own when it is at least half as wide as the others. A smaller one would give a
    rate over a moment, so it is added to the bin before."""
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
    """Generated tokens that reached a client; those of a compact record are spread evenly."""
    whole = [r for r in records if r.generated_tokens is None]
    times_s = [np.asarray([s for record in whole for s in record.token_times_s])]
    weights = [np.ones(len(times_s[0]))]
    for record in records:
        if record.generated_tokens and record.token_times_s:
            points = min(record.generated_tokens, SPREAD_POINTS_MAX)
            ends_s = record.token_times_s[0], record.token_times_s[-1]
            times_s.append(np.linspace(*ends_s, points))
            weights.append(np.full(points, record.generated_tokens / points))
    sums = bins.sums(np.concatenate(times_s), np.concatenate(weights))
    return sums / np.diff(bins.edges_s)


def in_flight(records: Sequence[RequestRecord]) -> tuple[Numbers, Numbers]:
    """(times, requests sent and not ended); of a long run the largest in each short interval."""
    moments = np.array(
        [(r.sent_s, 1) for r in records] + [(r.finished_s, -1) for r in records], dtype=float
    ).reshape(-1, 2)
    # Ends sort before starts at the same moment, because a request that follows another is not
    # beside it.
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
    rate: Numbers
    ideal: Numbers | None  # of an unlimited cache


def hit_rate(
    records: Sequence[RequestRecord], bins: Bins, ideal: Mapping[int, int] | None
) -> HitRate | None:
    """None when no completed request reports cached tokens."""
    known = [r for r in records if r.outcome == COMPLETED and r.cached_tokens is not None]
    if not known:
        return None
    sent_s = [record.sent_s for record in known]
    prompt = bins.sums(sent_s, [record.prompt_tokens for record in known])
    prompt[prompt == 0] = np.nan
    cached = bins.sums(sent_s, [record.cached_tokens or 0 for record in known])
    best = None
    if ideal is not None and all(record.index in ideal for record in known):
        best = bins.sums(sent_s, [ideal[record.index] for record in known]) / prompt
    return HitRate(cached / prompt, best)


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """One quantity over time; the times ascend."""

    label: str
    times_s: tuple[float, ...]
    values: tuple[float, ...]


def gauge(samples: Sequence[Sample], name: str, by: str = "model") -> list[TimeSeries]:
    """A line for each value of the label `by`; series that agree in it are added up."""
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for sample in samples:
        for key, value in sample.values.items():
            if not key.startswith(name):
                continue
            found, labels = parsed(key)
            if found == name:
                line = points[labels.get(by, "")]
                line[sample.time_s] = line.get(sample.time_s, 0.0) + value
    return [
        TimeSeries(label, tuple(line), tuple(line.values()))
        for label, line in sorted(points.items())
    ]


def rate(samples: Sequence[Sample], name: str, by: str = "model") -> list[TimeSeries]:
    """A counter's growth per second since the sample before; NaN at the first and at a restart."""
    return [_rate(line) for line in gauge(samples, name, by) if len(line.times_s) > 1]


def _rate(line: TimeSeries) -> TimeSeries:
    times_s, totals = line.times_s, line.values
    rates = [
        (after - before) / (after_s - before_s)
        if after >= before and after_s > before_s
        else math.nan
        for (before_s, after_s), (before, after) in zip(
            pairwise(times_s), pairwise(totals), strict=True
        )
    ]
    return TimeSeries(line.label, times_s, (math.nan, *rates))


def share(used: Sequence[TimeSeries], limits: Sequence[TimeSeries]) -> list[TimeSeries]:
    """Each line divided by the limit of the same label at the same time."""
    limit_at = {
        (line.label, time_s): value
        for line in limits
        for time_s, value in zip(line.times_s, line.values, strict=True)
    }
    found = []
    for line in used:
        points = [
            (time_s, value / limit)
            for time_s, value in zip(line.times_s, line.values, strict=True)
            if (limit := limit_at.get((line.label, time_s)))
        ]
        if points:
            found.append(TimeSeries(line.label, *map(tuple, zip(*points, strict=True))))
    return found


def prefill_workers(samples: Sequence[Sample]) -> set[str]:
    return {line.label for line in gauge(samples, QUEUE_TOKENS)}


def decode_workers(samples: Sequence[Sample]) -> set[str]:
    return {line.label for line in gauge(samples, CONTEXT_TOKENS)}


@lru_cache(maxsize=65_536)
def parsed(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a sample's key; the key itself without labels when it has another form."""
    try:
        (series,) = series_of([f"{key} 0"])
    except ValueError:
        return key, {}
    return series.name, series.labels
