"""What the server says of the TTFT of a run's requests: the rise of its histogram around the run.

The mean of the very same requests is exact (`_sum` / `_count`); a histogram has no exact median.
Not here: the client's side (load.py), comparing the two (agreement.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadtest.metrics_page import counter_sum, fetch_page

HISTOGRAM = "mooncake_ttft_seconds"
FRONT = {"model": "conductor"}  # every request passes it, also through the ensemble
SETTLE_S_MAX = 5.0
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Totals:
    requests: float
    ttft_s: float

    def __sub__(self, before: Totals) -> Totals:
        return Totals(self.requests - before.requests, self.ttft_s - before.ttft_s)

    @property
    def ttft_ms_mean(self) -> float:
        assert self.requests > 0
        return self.ttft_s / self.requests * 1_000.0


def totals(metrics_url: str) -> Totals:
    """So far; zero before the first request."""
    page = fetch_page(metrics_url)
    requests = counter_sum(page, f"{HISTOGRAM}_count", FRONT)
    ttft_s = counter_sum(page, f"{HISTOGRAM}_sum", FRONT)
    return Totals(requests or 0.0, ttft_s or 0.0)


def rise(metrics_url: str, before: Totals, requests: int) -> Totals:
    """Since `before`, once `requests` are counted: the page lags behind the answers a little."""
    give_up_s = time.monotonic() + SETTLE_S_MAX
    while (found := totals(metrics_url) - before).requests < requests:
        if time.monotonic() > give_up_s:
            break
        time.sleep(POLL_S)
    return found
