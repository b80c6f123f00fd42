"""What the server says of the TTFT of a run's requests: how its counters rose around the run.

The front's histogram gives the exact mean of the very same requests (`_sum` / `_count`; there is no
exact median in a histogram). A request to the ensemble passes two models more, one before the
front's clock starts and one after it stopped: Triton's own statistics have their times.
Not here: the client's side (load.py), comparing the two (agreement.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from loadtest.client.metrics_page import counter_sum, fetch_page

HISTOGRAM = "mooncake_ttft_seconds"
FRONT = {"model": "conductor"}  # every request passes it, also through the ensemble
SETTLED_S = 1.5  # the server renews its page at least every second
SETTLE_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Sum:
    """So many events, and the seconds that they took together."""

    count: float = 0.0
    total_s: float = 0.0

    def __sub__(self, before: Sum) -> Sum:
        return Sum(self.count - before.count, self.total_s - before.total_s)

    @property
    def mean_ms(self) -> float:
        assert self.count > 0
        return self.total_s / self.count * 1_000.0


@dataclass(frozen=True, slots=True)
class Totals:
    front: Sum = Sum()
    preprocessing: Sum = Sum()  # of requests
    postprocessing: Sum = Sum()  # of responses

    def __sub__(self, before: Totals) -> Totals:
        return Totals(
            self.front - before.front,
            self.preprocessing - before.preprocessing,
            self.postprocessing - before.postprocessing,
        )

    def ttft_ms_mean(self, model: str) -> float | None:
        """None when a model that it would have passed counted nothing."""
        passed = [self.front]
        if model == "ensemble":
            passed += [self.preprocessing, self.postprocessing]
        if not all(each.count for each in passed):
            return None
        return sum(each.mean_ms for each in passed)


def totals(page: str) -> Totals:
    """What the counters of a metrics page say so far."""

    def of_model(model: str) -> Sum:
        labels = {"model": model}
        count = counter_sum(page, "nv_inference_request_success", labels)
        total_us = counter_sum(page, "nv_inference_request_duration_us", labels)
        return Sum(count or 0.0, (total_us or 0.0) / 1e6)

    count = counter_sum(page, f"{HISTOGRAM}_count", FRONT)
    ttft_s = counter_sum(page, f"{HISTOGRAM}_sum", FRONT)
    front = Sum(count or 0.0, ttft_s or 0.0)
    return Totals(front, of_model("preprocessing"), of_model("postprocessing"))


def settled_totals(metrics_url: str) -> Totals:
    """The counters once they have stopped moving: the page lags behind the answers."""
    give_up_s = time.monotonic() + SETTLE_S_MAX
    last = totals(fetch_page(metrics_url))
    while time.monotonic() < give_up_s:
        time.sleep(SETTLED_S)
        found = totals(fetch_page(metrics_url))
        if found == last:
            break
        last = found
    return last
