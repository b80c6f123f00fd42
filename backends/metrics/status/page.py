"""One reading of the metrics page, and what changed between two. Pure.

Not here: fetching it (watch.py), what the numbers mean together (view.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "mooncake_"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Page:
    """Our series at one moment, by name as it stands on the page (`..._bucket` included)."""

    read_at_s: float  # a monotonic clock
    series: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whoever answered is no server of ours, or one that has not published anything yet."""
        return not self.series

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of `name` that carry `labels`; 0 when there is none."""
        return sum(self.by(name, "", **labels).values())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The same for each value of `label`."""
        found: dict[str, float] = {}
        for series_labels, value in self.series.get(name, ()):
            if labels.items() <= series_labels.items():
                key = series_labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def labels_of(self, name: str) -> list[Labels]:
        """Of the series of an info metric that are 1."""
        return [labels for labels, value in self.series.get(name, ()) if value == 1.0]


def parse(text: str, read_at_s: float) -> Page:
    """Raises ValueError when the text is no metrics page."""
    ours = [line for line in text.splitlines() if line.startswith(PREFIX)]
    series: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families("\n".join(ours) + "\n"):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Page(read_at_s, series)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two readings; without an earlier one, since the server began."""

    now: Page
    before: Page | None

    @property
    def seconds(self) -> float:
        """0 without an earlier reading: then there are amounts, but no rates."""
        return self.now.read_at_s - self.before.read_at_s if self.before else 0.0

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """How much a counter grew, for each value of `label`. A counter that fell began anew."""
        before = self.before.by(name, label, **labels) if self.before else {}
        return {
            key: value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value
            for key, value in self.now.by(name, label, **labels).items()
        }

    def total(self, name: str, **labels: str) -> float:
        return sum(self.by(name, "", **labels).values())

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Per second."""
        seconds = self.seconds
        grown = self.by(name, label, **labels)
        return {key: value / seconds if seconds > 0 else 0.0 for key, value in grown.items()}

    def quantile(self, name: str, q: float) -> float | None:
        """Of a histogram's values that came, as PromQL's histogram_quantile; None without any."""
        return quantile(self.by(f"{name}_bucket", "le"), q)


def quantile(count_at_most: Mapping[str, float], q: float) -> float | None:
    """`count_at_most`: bound as written ("0.1", "+Inf") -> values up to it.

    Linear inside a bucket, of which the first begins at 0. What lies beyond the last bound is
    known to be at least that.
    """
    steps = sorted((float(bound), count) for bound, count in count_at_most.items())
    if not steps or steps[-1][1] <= 0:
        return None
    rank = q * steps[-1][1]
    low, below = 0.0, 0.0
    for bound, count in steps:
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
