"""The metrics of one model: what happened is observed, checked and published.

**Observing.** Publishing a value takes a round trip to Triton (docs/decisions/0010), which no
request waits for. So whoever knows a value leaves it in `Observations`, from any thread, which
costs a microsecond and no lock, and the metrics thread fetches it.

**Publishing.** `MetricPage`, for that one thread, holds each value against the table and changes as
little as possible: a value that did not change is not sent again, but for the gauges' sake once a
second, because while a model reloads, its old process sets them to 0 when it ends.

Pure: how a series is made in Triton is an argument. Not here: when to publish
(triton/metrics_loop.py), which numbers (frontend/metrics.py, workers/metrics.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from backends.metrics.table import METRICS, Kind, Metric

VALUES_MAX = 100_000  # some minutes of the busiest frontend, should the metrics thread hang


class Observation(NamedTuple):
    """One value of a histogram, or an amount to add to a counter."""

    name: str
    value: float
    labels: dict[str, str]


class Observations:
    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._waiting: deque[Observation] = deque(maxlen=values_max)

    def observe(self, name: str, value: float = 1.0, **labels: str) -> None:
        """From any thread (deque.append is atomic); the oldest give way when too many wait."""
        self._waiting.append(Observation(name, value, labels))

    @property
    def is_full(self) -> bool:
        """Values may have been lost."""
        return len(self._waiting) == self._waiting.maxlen

    def drain(self) -> Iterator[Observation]:
        """Those that waited when it began; what comes meanwhile is for the next time."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()


REFRESH_S = 1.0
Labels = tuple[tuple[str, str], ...]


class Series(Protocol):
    """One name with one set of labels, as Triton has it."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Undeclared(Exception):
    """The table does not know this name, kind, label or value, or not from this backend."""


@dataclass(slots=True)
class Gauge:
    series: Series
    value: float
    sent_s: float
    round: int  # in which it was last published


@dataclass(slots=True)
class Counter:
    series: Series
    total: float  # of what this process counted, how much Triton has


class MetricPage:
    def __init__(self, publisher: str, make: Callable[[Metric, dict[str, str]], Series]) -> None:
        """`publisher`: whose metrics these are: conductor | prefill | decode.

        Counters and histograms whose labels are known stand on the page from the start, at 0, so
        that a query does not have to tell "none" from "not yet".
        """
        self._publisher = publisher
        self._make = make
        self._gauges: dict[tuple[str, Labels], Gauge] = {}
        self._counters: dict[tuple[str, Labels], Counter] = {}
        self._histograms: dict[tuple[str, Labels], Series] = {}
        self._round = 0
        self.has_lost_values = False  # so many waited that some gave way; the loop says so
        for metric in METRICS.values():
            if publisher in metric.publishers and metric.kind != "gauge":
                for labels in metric.series_labels():
                    self._series(metric.kind, metric.name, labels)

    def go_on_from(self, before: MetricPage, names: Collection[str]) -> None:
        """What these count lasts; the page before has published so much of it already."""
        for key, counter in before._counters.items():
            if key[0] in names:
                self._counters[key] = Counter(counter.series, counter.total)

    def gauge(self, name: str, value: float, now_s: float, **labels: str) -> None:
        """A gauge that is published in one round and not in the next goes to 0 (`end_round`)."""
        key = (name, _sorted(labels))
        value = _finite(name, value)
        gauge = self._gauges.get(key)
        if gauge is None:
            series = self._declared("gauge", name, labels)
            gauge = self._gauges[key] = Gauge(series, math.nan, 0.0, 0)
        gauge.round = self._round
        if value != gauge.value or now_s - gauge.sent_s >= REFRESH_S:
            gauge.series.set(value)
            gauge.value, gauge.sent_s = value, now_s

    def counter_to(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter by what its owner has counted since the last call.

        Triton keeps a counter when a model is reloaded, while the new process counts from 0.
        """
        counter = self._counter(name, labels)
        missing = _finite(name, total) - counter.total
        if missing > 0:
            counter.series.increment(missing)
            counter.total = total

    def take(self, observations: Observations) -> None:
        """Values of histograms one by one, amounts of counters summed up first."""
        self.has_lost_values = self.has_lost_values or observations.is_full
        amounts: dict[tuple[str, Labels], float] = {}
        for name, value, labels in observations.drain():
            if _metric(name).kind == "histogram":
                self._series("histogram", name, labels).observe(_finite(name, value))
            else:
                key = (name, _sorted(labels))
                amounts[key] = amounts.get(key, 0.0) + _finite(name, value)
        for (name, labels_of), amount in amounts.items():
            if amount > 0:
                self._counter(name, dict(labels_of)).series.increment(amount)

    def end_round(self) -> None:
        """After everything was published once: what is no more (a storage node) uses nothing."""
        for gauge in self._gauges.values():
            if gauge.round != self._round and gauge.value != 0.0:
                gauge.series.set(0.0)
                gauge.value = 0.0
        self._round += 1

    def clear(self) -> None:
        """A model that is gone uses nothing: Triton would show its last gauges for ever."""
        for gauge in self._gauges.values():
            gauge.series.set(0.0)
            gauge.value = 0.0

    def _counter(self, name: str, labels: dict[str, str]) -> Counter:
        self._series("counter", name, labels)
        return self._counters[(name, _sorted(labels))]

    def _series(self, kind: Kind, name: str, labels: dict[str, str]) -> Series:
        """Of a counter or histogram, made when it is first asked for."""
        key = (name, _sorted(labels))
        if kind == "counter":
            if key not in self._counters:
                self._counters[key] = Counter(self._declared(kind, name, labels), 0.0)
            return self._counters[key].series
        if key not in self._histograms:
            self._histograms[key] = self._declared(kind, name, labels)
        return self._histograms[key]

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
