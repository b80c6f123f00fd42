"""The Prometheus page of a server, such as Triton's metrics port serves: read once, or sampled.

`prometheus_client` parses the text without its comment lines: with a `# TYPE` line a counter would
get another name (`nv_inference_count` as `nv_inference_count_total`).

A sampler reads the page about once a second and only cuts out the lines that it keeps. They are
parsed after the run, because parsing would make the sender late. A page that cannot be read is left
out. Plain threads and sockets also work where gevent has replaced both.

Not here: rates from counters (report/timeline.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from backends.direct_http import get
from loadtest.results.recording import Sample

FETCH_S_MAX = 5.0
SAMPLED_PREFIX = "mooncake_"
SETTLE_S = 0.5  # a server updates its page a few times a second, not at once


def fetch_page(metrics_url: str, key: str = "") -> str:
    """OSError when the page cannot be read; ValueError when the address or the text is invalid.
    `key`: the API key for the page of a gateway with API keys; no other page receives one."""
    return get(metrics_url, key, FETCH_S_MAX).decode()


def series_of(lines: Iterable[str]) -> Iterator[Series]:
    """Name, labels and value of each line that is no comment; ValueError for another line."""
    for line in lines:
        if line.strip() and not line.startswith("#"):
            for family in text_string_to_metric_families(line):
                yield from family.samples


def series_key(series: Series) -> str:
    """Its name on the page, without the value: `mooncake_pages_used{model="prefill_0"}`."""
    if not series.labels:
        return series.name
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in series.labels.items())
    return f"{series.name}{{{labels}}}"


def counter_sum(page: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """The sum over all series of `name` that carry `labels`; None without any."""
    wanted = (labels or {}).items()
    lines = (line for line in page.splitlines() if line.startswith(name))
    found = [
        series.value
        for series in series_of(lines)
        if series.name == name and all(series.labels.get(k) == value for k, value in wanted)
    ]
    return sum(found) if found else None


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class MetricsSampler:
    """`start()`, then `stop()` once, which takes a last sample and returns all samples."""

    def __init__(
        self,
        metrics_url: str,
        now_s: Callable[[], float],
        period_s: float = 1.0,
        settle_s: float = SETTLE_S,
        key: str = "",
    ) -> None:
        assert period_s > 0, f"period_s {period_s} must be positive"
        self.metrics_url = metrics_url
        self._key = key
        self.problem = ""  # why the latest unreadable page could not be read
        self._now_s = now_s
        self._period_s = period_s
        self._settle_s = settle_s
        self._cuts: list[tuple[float, list[str]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        self._is_over.set()
        self._thread.join(self._settle_s + 2 * FETCH_S_MAX)
        return [
            sample for time_s, lines in list(self._cuts) if (sample := self._parse(time_s, lines))
        ]

    def _sample(self) -> None:
        due_s = time.monotonic()
        while True:
            is_last = self._is_over.is_set()
            if is_last:
                time.sleep(self._settle_s)
            self._take()
            if is_last:
                return
            due_s = max(due_s + self._period_s, time.monotonic())
            self._is_over.wait(due_s - time.monotonic())

    def _take(self) -> None:
        try:
            page = fetch_page(self.metrics_url, self._key)
        except (OSError, ValueError) as error:
            self.problem = f"{self.metrics_url}: {error}"
            return
        self._cuts.append((self._now_s(), [line for line in page.splitlines() if is_kept(line)]))

    def _parse(self, time_s: float, lines: list[str]) -> Sample | None:
        try:
            found = {series_key(series): series.value for series in series_of(lines)}
        except ValueError as error:
            self.problem = f"{self.metrics_url}: {error}"
            return None
        values = {key: value for key, value in found.items() if math.isfinite(value)}
        if not values:
            self.problem = f"{self.metrics_url}: no series begins with {SAMPLED_PREFIX}"
            return None
        return Sample(time_s, values)


def is_kept(line: str) -> bool:
    """A series of this project that is no bucket of a histogram."""
    name = line.partition("{")[0]
    return line.startswith(SAMPLED_PREFIX) and not name.endswith("_bucket")
