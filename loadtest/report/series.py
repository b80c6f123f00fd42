"""The server's load over a run, from its samples: gauges as they are, counters as rates. Pure.

A series is one metric of one worker (or of one path, node, ...), told by a label. A worker counts
as prefill when it says how many prompt tokens wait for it, and as decode when it says how many KV
tokens its running batch holds, whatever the models are called.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from loadtest.client.metrics_page import series_of
from loadtest.results.recording import Sample

WAITING = "mooncake_requests_waiting"
RUNNING = "mooncake_requests_running"
QUEUE_TOKENS = "mooncake_queue_tokens"
CONTEXT_TOKENS = "mooncake_context_tokens"
STEP_SECONDS = "mooncake_step_seconds_total"
PAGES_USED = "mooncake_pages_used"
PAGES_MAX = "mooncake_pages_max"
PROMPT_TOKENS = "mooncake_prompt_tokens_total"
OUTPUT_TOKENS = "mooncake_output_tokens_total"
STORE_USED = "mooncake_store_bytes_used"
STORE_MAX = "mooncake_store_bytes_max"


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity over time; the times ascend."""

    label: str
    times_s: tuple[float, ...]
    values: tuple[float, ...]


def gauge(samples: Sequence[Sample], name: str, by: str = "model") -> list[Line]:
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
        Line(label, tuple(line), tuple(line.values())) for label, line in sorted(points.items())
    ]


def rate(samples: Sequence[Sample], name: str, by: str = "model") -> list[Line]:
    """A counter's growth per second since the sample before; NaN at the first, where none was.

    A counter that fell was started anew with its worker. What it had counted by then is unknown,
    and so is the rate: NaN.
    """
    return [_rate(line) for line in gauge(samples, name, by) if len(line.times_s) > 1]


def _rate(line: Line) -> Line:
    times_s, totals = line.times_s, line.values
    rates = [
        (after - before) / (after_s - before_s)
        if after >= before and after_s > before_s
        else math.nan
        for (before_s, after_s), (before, after) in zip(
            pairwise(times_s), pairwise(totals), strict=True
        )
    ]
    return Line(line.label, times_s, (math.nan, *rates))


def share(used: Sequence[Line], limits: Sequence[Line]) -> list[Line]:
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
            found.append(Line(line.label, *map(tuple, zip(*points, strict=True))))
    return found


def prefill_workers(samples: Sequence[Sample]) -> set[str]:
    return {line.label for line in gauge(samples, QUEUE_TOKENS)}


def decode_workers(samples: Sequence[Sample]) -> set[str]:
    return {line.label for line in gauge(samples, CONTEXT_TOKENS)}


def only(lines: Iterable[Line], labels: set[str]) -> list[Line]:
    return [line for line in lines if line.label in labels]


@lru_cache(maxsize=65_536)
def parsed(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a sample's key; its own name and no labels when it is not of that form."""
    try:
        (series,) = series_of([f"{key} 0"])
    except ValueError:
        return key, {}
    return series.name, series.labels
