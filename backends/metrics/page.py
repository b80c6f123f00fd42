"""The metrics of one model: values are observed, checked and published.

**Observing.** Publishing a value takes a round trip to Triton (docs/decisions/0010), and no request
waits for that. Any thread appends a value to `Observations` in a microsecond, without a lock. The
metrics thread removes and publishes the values.

**Publishing.** Only the metrics thread uses `MetricPage`. The page checks each value against the
table and sends only values that changed. Gauges are also sent once a second: while a model reloads,
its old process sets them to 0 when it exits.

Pure: how a series is made in Triton is an argument. Not here: when to publish
(triton/metrics_loop.py), which numbers (frontend/metrics.py, workers/metrics.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from backends.metrics.table import METRICS, Kind, Metric

VALUES_MAX = 100_000  # queued values: the busiest frontend makes as many in some minutes


class Observation(NamedTuple):
    """One value of a histogram, or an amount to add to a counter."""

    name: str
    value: float
    labels: dict[str, str]


class Observations:
    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._waiting: deque[Observation] = deque(maxlen=values_max)

    def observe(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Any thread (deque.append is atomic). A full queue drops its oldest value."""
        self._waiting.append(Observation(name, value, labels))

    @property
    def is_full(self) -> bool:
        """True if values may have been dropped."""
        return len(self._waiting) == self._waiting.maxlen

    def drain(self) -> Iterator[Observation]:
        """Remove the values that are queued now. Later values stay for the next call."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()


REFRESH_S = 1.0  # a gauge is sent again after this time, even if it did not change
Labels = tuple[tuple[str, str], ...]


class Series(Protocol):
    """One name with one set of labels, in Triton."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Undeclared(Exception):
    """The table lacks this name, kind, label or value, or does not allow it for this backend."""


@dataclass(slots=True)
class Published:
    """A series in Triton, and what this process published to it."""

    series: Series
    value: float  # of a gauge: NaN before the first; of a counter: the last total (`counter_to`)
    sent_s: float = 0.0  # of a gauge: time at which the value was sent, in s
    round: int = 0  # of a gauge: number of the round in which it was last set


class MetricPage:
    def __init__(self, publisher: str, make: Callable[[Metric, dict[str, str]], Series]) -> None:
        """`publisher`: the backend: conductor, prefill or decode.

        Counters and histograms with known label values are published as 0 from the start, so that
        a query need not distinguish "none" from "not yet".
        """
        self._publisher = publisher
        self._make = make
        self._published: dict[tuple[Kind, str, Labels], Published] = {}
        self._round = 0
        self.has_lost_values = False  # values may have been dropped; the metrics loop resets this
        for metric in METRICS.values():
            if publisher in metric.publishers and metric.kind != "gauge":
                for labels in metric.series_labels():
                    self._get(metric.kind, metric.name, labels)

    def go_on_from(self, before: MetricPage, names: Collection[str]) -> None:
        """Take over the last totals of the counters `names`: their owner outlives `before`."""
        for key, counter in before._published.items():
            if key[0] == "counter" and key[1] in names:
                self._published[key] = replace(counter)

    def gauge(self, name: str, value: float, now_s: float, **labels: str) -> None:
        """Set a gauge. A gauge that one round does not set becomes 0 (`end_round`)."""
        value = _finite(name, value)
        gauge = self._get("gauge", name, labels)
        gauge.round = self._round
        if value != gauge.value or now_s - gauge.sent_s >= REFRESH_S:
            gauge.series.set(value)
            gauge.value, gauge.sent_s = value, now_s

    def counter_to(self, name: str, total: float, **labels: str) -> None:
        """Add what the counter's owner counted since the last call. A lower `total` adds nothing.

        Triton keeps a counter when a model is reloaded, while the new process counts from 0.
        """
        counter = self._get("counter", name, labels)
        missing = _finite(name, total) - counter.value
        if missing > 0:
            counter.series.increment(missing)
            counter.value = total

    def take(self, observations: Observations) -> None:
        """Publish each value of a histogram, and the sum of the amounts of each counter. Raises
        for an invalid value, after publishing the values before it; later values stay queued."""
        self.has_lost_values = self.has_lost_values or observations.is_full
        amounts: dict[tuple[str, Labels], float] = {}
        try:
            for name, value, labels in observations.drain():
                if _metric(name).kind == "histogram":
                    self._get("histogram", name, labels).series.observe(_finite(name, value))
                else:
                    key = (name, _sorted(labels))
                    self._get("counter", name, labels)  # raises if it is not declared
                    amounts[key] = amounts.get(key, 0.0) + _finite(name, value)
        finally:
            for (name, labels_of), amount in amounts.items():
                if amount > 0:
                    self._get("counter", name, dict(labels_of)).series.increment(amount)

    def end_round(self) -> None:
        """End a round: gauges that it did not set (a storage node that is gone) become 0."""
        for gauge in self._gauges():
            if gauge.round != self._round and gauge.value != 0.0:
                gauge.series.set(0.0)
                gauge.value = 0.0
        self._round += 1

    def clear(self) -> None:
        """Set all gauges to 0. Otherwise Triton shows the last gauges of an unloaded model."""
        for gauge in self._gauges():
            gauge.series.set(0.0)
            gauge.value = 0.0

    def _gauges(self) -> list[Published]:
        return [each for (kind, _, _), each in self._published.items() if kind == "gauge"]

    def _get(self, kind: Kind, name: str, labels: dict[str, str]) -> Published:
        """The series, made on first use. A new gauge is NaN, so that any value is sent."""
        key = (kind, name, _sorted(labels))
        if key not in self._published:
            first = math.nan if kind == "gauge" else 0.0
            self._published[key] = Published(self._declared(kind, name, labels), first)
        return self._published[key]

    def _declared(self, kind: Kind, name: str, labels: dict[str, str]) -> Series:
        metric = _metric(name)
        if metric.kind != kind or self._publisher not in metric.publishers:
            raise Undeclared(
                f"{name} is a {metric.kind} of {metric.publishers}, no {kind} of {self._publisher}"
            )
        if labels.keys() != {label.name for label in metric.labels}:
            raise Undeclared(
                f"{name} has the labels {[label.name for label in metric.labels]}, "
                f"not {sorted(labels)}"
            )
        for label in metric.labels:
            if label.values and labels[label.name] not in label.values:
                raise Undeclared(
                    f"{name}: {label.name} is one of {label.values}, not {labels[label.name]!r}"
                )
        return self._make(metric, labels)


def _metric(name: str) -> Metric:
    if name not in METRICS:
        raise Undeclared(f"{name} is not in backends/metrics/table.py")
    return METRICS[name]


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return float(value)


def _sorted(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))
