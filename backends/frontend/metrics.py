"""Metrics of the conductor model on Triton's metrics port: the source of each number.

`MetricsLoop` calls `show` a few times a second. `StoreWatch` gets the storage nodes' numbers from
the directory in its own thread, so that `show` never waits for a directory that does not answer.

Not here: the meaning of the names (metrics/table.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from backends.frontend.frontend import Frontend
from backends.metrics.page import MetricPage
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.records.status import DirectoryStats

log = logging.getLogger(__name__)
PERIOD_S = 1.0
Incarnation = tuple[object, ...]  # of a counting process; changes when its counts restart from 0
Series = tuple[str, str, str]  # (metric, label, label's value); the last two "" without a label


class Totals:
    """Counts since the first `look`, added up across restarts of the counting process. Pure.

    The directory's own counts cannot be published as counters. They restart from 0 with the
    directory, and a reloaded conductor would add all of them again. While a conductor reloads, the
    old and the new process both publish the directory's counts, so they grow twice as fast.
    """

    def __init__(self) -> None:
        self._last: dict[Series, tuple[Incarnation, int]] = {}
        self._is_first = True
        self.totals: dict[Series, int] = {}

    def look(self, counts: Mapping[Series, tuple[Incarnation, int]]) -> None:
        for name, (incarnation, count) in counts.items():
            seen_incarnation, seen = self._last.get(name, (incarnation, 0))
            if self._is_first:
                seen = count  # an earlier process has published this count
            new = count - seen if incarnation == seen_incarnation else count
            self.totals[name] = self.totals.get(name, 0) + new
        self._last |= counts
        self._is_first = False


def counts_of(stats: DirectoryStats) -> dict[Series, tuple[Incarnation, int]]:
    lookups = "mooncake_store_lookup_blocks_total"
    found: dict[Series, tuple[Incarnation, int]] = {}
    for series, count in (
        ((lookups, "result", "dram"), stats.hit_blocks - stats.hit_ssd_blocks),
        ((lookups, "result", "ssd"), stats.hit_ssd_blocks),
        ((lookups, "result", "miss"), stats.lookup_blocks - stats.hit_blocks),
        (("mooncake_store_spills_total", "", ""), stats.spills),
        (("mooncake_store_bad_copies_total", "", ""), stats.bad_copies),
    ):
        found[series] = (stats.epoch,), count
    for node in stats.nodes:
        series = ("mooncake_store_evictions_total", "node", node.node_id)
        found[series] = (stats.epoch, node.incarnation), node.evictions
    return found


class StoreWatch:
    """Reads the directory's counts every PERIOD_S, in its own thread."""

    def __init__(self, directory: DirectoryClient) -> None:
        self.seen: DirectoryStats | None = None  # None before the first answer, and after a failure
        self._directory = directory
        self._counts = Totals()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[Series, int]:
        return dict(self._counts.totals)

    def close(self) -> None:
        """Stop reading. Call this method before the directory's client is closed."""
        self._is_closing.set()
        self._thread.join(timeout=self._directory.timeout_s + 1.0)

    def _run(self) -> None:
        while True:
            try:
                stats = self._directory.stats()
                self._counts.look(counts_of(stats))
                self.seen = stats
            except StoreError as error:
                if self.seen is not None:
                    log.warning("the directory does not answer: %s", error)
                self.seen = None
            if self._is_closing.wait(PERIOD_S):
                return


@dataclass(frozen=True, slots=True)
class Shown:
    """The objects whose numbers `show` publishes."""

    frontend: Frontend
    store: StoreWatch
    started_at_s: float  # Unix time


def show(page: MetricPage, shown: Shown, now_s: float) -> None:
    frontend = shown.frontend
    page.take(frontend.observations)
    page.gauge("mooncake_start_time_seconds", shown.started_at_s, now_s)
    page.gauge("mooncake_requests_live", len(frontend.live), now_s)
    for tenant, live in frontend.requests_of_tenants().items():
        page.gauge("mooncake_tenant_requests_live", live, now_s, tenant=tenant)
    stats = frontend.cluster.stats()
    page.counter_to("mooncake_routed_total", stats.routed)
    page.counter_to("mooncake_fetches_total", stats.fetches)
    page.counter_to("mooncake_replicated_blocks_total", stats.replicated_blocks)
    page.gauge("mooncake_slo_seconds", stats.ttft_slo_s, now_s, limit="ttft")
    page.gauge("mooncake_slo_seconds", stats.tbt_slo_s, now_s, limit="tbt")
    for found in frontend.cluster.copies_by_heat:
        page.gauge("mooncake_hot_blocks", found.blocks, now_s, heat=str(found.heat))
        page.gauge("mooncake_hot_block_copies", found.copies, now_s, heat=str(found.heat))
    for role, wanted in stats.workers_wanted.items():
        page.gauge("mooncake_workers_wanted", wanted, now_s, role=role)
    for role, proposed in stats.flips_proposed.items():
        page.counter_to("mooncake_role_flips_proposed_total", proposed, role=role)
    page.gauge("mooncake_frontends_known", stats.frontends_known, now_s)
    page.gauge("mooncake_routed_elsewhere", stats.routed_elsewhere, now_s)
    notes = frontend.cluster.notes
    batches = {
        "sent": notes.batches_sent,
        "unsent": notes.batches_unsent,
        "received": stats.note_batches_received,
        "missed": stats.note_batches_missed,
    }
    for result, count in batches.items():
        page.counter_to("mooncake_routing_note_batches_total", count, result=result)
    if (recorder := frontend.recorder) is not None:
        for result, count in (("written", recorder.written), ("dropped", recorder.dropped)):
            page.counter_to("mooncake_recorded_requests_total", count, result=result)
    if (tracing := frontend.tracing) is not None:
        for result, count in (("exported", tracing.export.exported), ("lost", tracing.export.lost)):
            page.counter_to("mooncake_trace_spans_total", count, result=result)
    page.counter_to("mooncake_self_checks_total", frontend.cluster.self_check.passed)
    for role in ("prefill", "decode"):
        page.gauge("mooncake_workers_live", frontend.cluster.workers_live(role), now_s, role=role)
    for worker, (cause, _) in frontend.unreached.causes().items():
        page.gauge("mooncake_worker_unreached", 1, now_s, worker=worker, cause=cause)
    show_store(page, shown.store, now_s)


def show_store(page: MetricPage, watch: StoreWatch, now_s: float) -> None:
    """Publish the store's metrics. While the directory does not answer, nothing is published, so
    MetricPage sets the gauges to 0."""
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
    for (name, label, value), count in watch.counts.items():
        page.counter_to(name, count, **({label: value} if label else {}))
