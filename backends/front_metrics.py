"""What the conductor model shows on Triton's metrics port. Not here: Triton's metric API."""

from __future__ import annotations

from backends.front_door import FrontDoor
from backends.worker_metrics import MetricSink


def front(sink: MetricSink, door: FrontDoor) -> None:
    sink.gauge("mooncake_requests_live", "requests in flight at this front", len(door.live))
    for outcome, count in list(door.counts.items()):
        sink.counter_to("mooncake_requests_total", "requests ended, by outcome", count,
                        outcome=outcome)  # fmt: skip
    stats = door.cluster.stats()
    for kind, count in stats.rejected.items():
        sink.counter_to("mooncake_rejections_total", "requests rejected early, by kind", count,
                        kind=kind)  # fmt: skip
    sink.counter_to("mooncake_routed_total", "requests routed", stats.routed)
    sink.counter_to("mooncake_fetches_total", "requests whose prefix was fetched from another node",
                    stats.fetches)  # fmt: skip
    sink.gauge("mooncake_ttft_error", "recent mean relative error of predicted TTFT",
               stats.ttft_error)  # fmt: skip
