"""What the conductor model shows on Triton's metrics port: where each number comes from.

`MetricsLoop` calls `front` a few times a second. Not here: what the names mean (metrics/table.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.frontend.frontend import Frontend
from backends.frontend.store_watch import StoreWatch
from backends.metrics.page import MetricPage


@dataclass(frozen=True, slots=True)
class Front:
    """What `front` reads."""

    door: Frontend
    store: StoreWatch
    started_at_s: float  # Unix time


def front(page: MetricPage, subject: Front, now_s: float) -> None:
    door = subject.door
    page.take(door.observations)
    page.gauge("mooncake_start_time_seconds", subject.started_at_s, now_s)
    page.gauge("mooncake_requests_live", len(door.live), now_s)
    stats = door.cluster.stats()
    page.counter_to("mooncake_routed_total", stats.routed)
    page.counter_to("mooncake_fetches_total", stats.fetches)
    page.counter_to("mooncake_replicated_blocks_total", stats.replicated_blocks)
    page.counter_to("mooncake_self_checks_total", door.cluster.self_check.passed)
    for role in ("prefill", "decode"):
        page.gauge("mooncake_workers_live", door.cluster.workers_live(role), now_s, role=role)
    store(page, subject.store, now_s)


def store(page: MetricPage, watch: StoreWatch, now_s: float) -> None:
    """Nothing while the directory does not answer: its gauges go to 0 then."""
    seen = watch.seen
    if seen is None:
        return
    page.gauge("mooncake_store_leases", seen.leases, now_s)
    for node in seen.nodes:
        labels = {"node": node.node_id}
        used_bytes = node.used_bytes
        page.gauge("mooncake_store_bytes_used", used_bytes, now_s, **labels)
        page.gauge("mooncake_store_bytes_max", node.segment_bytes, now_s, **labels)
        page.gauge("mooncake_store_blocks", node.ready_blocks, now_s, **labels)
    for node_id, evictions in watch.evictions.items():
        page.counter_to("mooncake_store_evictions_total", evictions, node=node_id)
