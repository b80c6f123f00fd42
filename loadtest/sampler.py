"""Reads the server's metrics page about once a second while a run goes on, and keeps what it says.

Only the lines that are kept are cut out of the page meanwhile; they are parsed when the run has
ended. A sampler that used the sender's processor would make the sender late.

A page that cannot be read is left out: the run is about the requests, and a report without samples
says that there are none. Plain threads and sockets, so that it also works in a process where gevent
has replaced both.

Not here: the format of the page (metrics_page.py), what is made of the samples (report/series.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from loadtest.metrics_page import FETCH_S_MAX, fetch_page, series_key, series_of
from loadtest.recording import Sample

PREFIX = "mooncake_"
SETTLE_S = 0.5  # a server brings its page up to date a few times a second, not at once


class Sampler:
    """`start()`, then `stop()` once, which takes a last sample and returns them all."""

    def __init__(
        self,
        metrics_url: str,
        now_s: Callable[[], float],
        period_s: float = 1.0,
        settle_s: float = SETTLE_S,
    ) -> None:
        assert period_s > 0, f"period_s {period_s} must be positive"
        self.metrics_url = metrics_url
        self.problem = ""  # why the latest page that could not be read was not
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
            page = fetch_page(self.metrics_url)
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
            self.problem = f"{self.metrics_url}: no series begins with {PREFIX}"
            return None
        return Sample(time_s, values)


def is_kept(line: str) -> bool:
    """Ours, and no bucket of a histogram."""
    name = line.partition("{")[0]
    return line.startswith(PREFIX) and not name.endswith("_bucket")
