"""The thread that publishes one model's metrics every PERIOD_S."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from backends.metrics.page import MetricPage

log = logging.getLogger(__name__)
PERIOD_S = 0.2  # pause between two rounds

Publish = Callable[[MetricPage, Any, float], None]  # (page, subject, now_s)


class MetricsLoop:
    def __init__(self, make_page: Callable[[], MetricPage], publish: Publish, subject: Any) -> None:
        """The thread calls `make_page`, which takes dozens of round trips to Triton."""
        self._make_page = make_page
        self._publish = publish
        self._subject = subject
        self.page: MetricPage | None = None  # None until the thread has made it
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the final counters, and set gauges to 0. `subject` must be closed before."""
        self._is_closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            is_last = self._is_closing.wait(PERIOD_S)
            try:
                page = self.page = self.page or self._make_page()
                self._publish(page, self._subject, time.monotonic())
                page.end_round()
                if page.has_lost_values:
                    log.warning("may have lost values of metrics: too many came between two rounds")
                    page.has_lost_values = False
            except Exception:  # Catch all: metrics must not end the model
                log.exception("metrics were not published")
            if is_last:
                break
        if self.page is not None:
            self.page.clear()
