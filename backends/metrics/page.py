"""The metrics of one model: values are observed, checked and published.

**Observing.** Publishing a value takes a round trip to Triton (docs/decisions/0010). Threads that
serve requests therefore only append values to `Observations`, which takes a microsecond and no
lock. The metrics thread removes and publishes the values.

**Publishing.** Only the metrics thread uses `MetricPage`. The page checks each value against
table.py and sends only values that changed. An unchanged gauge is sent again once a second, because
the old process of a reloaded model sets its gauges to 0 when it exits.

The module is pure, because the caller passes the function that makes a series in Triton. Not here:
when to publish (triton/metrics_loop.py), which numbers (frontend/metrics.py, workers/metrics.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from backends.metrics.table import METRICS, Kind, Metric

VALUES_MAX = 100_000  # limit of queued values; the busiest frontend needs minutes to reach it


class Observation(NamedTuple):
    """One value of a histogram, or an amount to add to a counter."""

    name: str
    value: float
    labels: dict[str, str]


class Observations:
    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._waiting: deque[Observation] = deque(maxlen=values_max)

    def observe(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Queue a value; a full queue drops its oldest. Thread-safe, as deque.append is atomic."""
        self._waiting.append(Observation(name, value, labels))

    @property
    def is_full(self) -> bool:
        """True if values may have been dropped."""
        return len(self._waiting) == self._waiting.maxlen

    def drain(self) -> Iterator[Observation]:
        """Remove and yield the values that are queued now. Values appended later stay queued."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()


REFRESH_S = 1.0  # seconds after which an unchanged gauge is sent again
Labels = tuple[tuple[str, str], ...]


class Series(Protocol):
    """A time series in Triton: one metric name with one set of label values."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Undeclared(Exception):
    """table.py does not declare this name, kind, label or label value for this backend."""


@dataclass(slots=True)
class Published:
    """A series in Triton, and the state of its values."""

    series: Series
    value: float  # gauge: value last sent, NaN before the first; counter: last total of counter_to
    sent_s: float = 0.0  # gauge: time at which the value was sent, in seconds of the caller's clock
    round: int = 0  # gauge: number of `end_round` calls before the gauge was last set


class MetricPage:
    def __init__(self, publisher: str, make: Callable[[Metric, dict[str, str]], Series]) -> None:
        """`publisher`: conductor, prefill or decode. `make`: creates a series in Triton.

        Counters and histograms whose label values table.py lists are created at once with 0, so
        that a query finds them before the first value.
        """
        self._publisher = publisher
        self._make = make
        self._published: dict[tuple[Kind, str, Labels], Published] = {}
        self._round = 0
        self.has_lost_values = False  # True: values may be lost; the metrics loop resets the flag
        for metric in METRICS.values():
            if publisher in metric.publishers and metric.kind != "gauge":
                for labels in metric.series_labels():
                    self._get(metric.kind, metric.name, labels)

    def go_on_from(self, before: MetricPage, names: Collection[str]) -> None:
        """Let the counters `names` continue from their totals on an older page."""
        for key, counter in before._published.items():
            if key[0] == "counter" and key[1] in names:
                self._published[key] = replace(counter)

    def gauge(self, name: str, value: float, now_s: float, **labels: str) -> None:
        """Set a gauge. A gauge that is not set again before the next `end_round` becomes 0."""
        value = _finite(name, value)
        gauge = self._get("gauge", name, labels)
        gauge.round = self._round
        if value != gauge.value or now_s - gauge.sent_s >= REFRESH_S:
            gauge.series.set(value)
            gauge.value, gauge.sent_s = value, now_s

    def counter_to(self, name: str, total: float, **labels: str) -> None:
        """Increase a counter by the growth of `total` since the last call; never decrease it.

        `total` counts from 0 in each process. Triton's counter continues when a model is reloaded.
        """
        counter = self._get("counter", name, labels)
        missing = _finite(name, total) - counter.value
        if missing > 0:
            counter.series.increment(missing)
            counter.value = total

    def take(self, observations: Observations) -> None:
        """Publish the queued values, and sum the amounts of each counter. Raises for an invalid
        value, after the values before it were published; the values after it stay queued."""
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
        """Set gauges to 0 that were not set since the last call, as those of a lost node."""
        for gauge in self._gauges():
            if gauge.round != self._round and gauge.value != 0.0:
                gauge.series.set(0.0)
                gauge.value = 0.0
        self._round += 1

    def clear(self) -> None:
        """Set all gauges to 0, because Triton keeps the last values of an unloaded model."""
        for gauge in self._gauges():
            gauge.series.set(0.0)
            gauge.value = 0.0

    def _gauges(self) -> list[Published]:
        return [each for (kind, _, _), each in self._published.items() if kind == "gauge"]

    def _get(self, kind: Kind, name: str, labels: dict[str, str]) -> Published:
        """The series, made on first use. A new gauge has NaN, so that its first value is sent."""
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
