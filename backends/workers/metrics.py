"""Copies a worker's numbers into its metrics, which Triton's metrics port serves.

`MetricsLoop` calls `prefill` or `decode` regularly. The meaning of the names: metrics/table.py.
"""

from __future__ import annotations

from backends.metrics.page import MetricPage
from backends.workers.decode_worker import DecodeWorker
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.worker_process import WorkerProcess
from mooncake_store.records.membership import WorkerReport

# Counters of the store client. They do not restart when a worker changes its role.
LASTING = (
    "mooncake_transfers_total",
    "mooncake_transfer_bytes_total",
    "mooncake_transfer_seconds_total",
    "mooncake_transfer_failures_total",
    "mooncake_nic_bytes_total",
    "mooncake_nic_failures_total",
    "mooncake_nixl_agents_given_up_total",
    "mooncake_store_restored_blocks_total",
)


def prefill(page: MetricPage, worker: PrefillWorker, now_s: float) -> None:
    report = worker.report()
    common(page, worker.process, report, report.queue_requests - report.running, now_s)
    page.gauge("mooncake_queue_tokens", report.queue_tokens, now_s)


def decode(page: MetricPage, worker: DecodeWorker, now_s: float) -> None:
    report = worker.report()
    common(page, worker.process, report, report.queue_requests, now_s)
    page.gauge("mooncake_context_tokens", report.context_tokens, now_s)
    page.counter_to("mooncake_output_tokens_total", worker.tokens_generated)


def common(
    page: MetricPage, process: WorkerProcess, report: WorkerReport, waiting: int, now_s: float
) -> None:
    """`waiting`: number of requests that wait for pages or a slot."""
    page.take(process.observations)
    page.gauge("mooncake_requests_waiting", waiting, now_s)
    page.gauge("mooncake_requests_running", report.running, now_s)
    info = process.info
    labels = {"role": info.role, "node": info.node_id, "fingerprint": info.fingerprint}
    page.gauge("mooncake_worker_info", 1, now_s, block_tokens=str(info.block_tokens), **labels)
    page.gauge("mooncake_start_time_seconds", process.parts.started_at_s, now_s)
    page_bytes = info.block_bytes  # a page is a block (docs/decisions/0002)
    used_pages = process.engine.pages.used_pages  # including pages of ended requests
    page.gauge("mooncake_pages_used", used_pages, now_s)
    page.gauge("mooncake_pages_max", info.pages_max, now_s)
    page.gauge("mooncake_kv_bytes_used", used_pages * page_bytes, now_s)
    page.gauge("mooncake_kv_bytes_max", info.pages_max * page_bytes, now_s)
    byte_seconds = process.occupation.page_seconds(now_s) * page_bytes
    page.counter_to("mooncake_kv_occupation_byte_seconds_total", byte_seconds)
    page.counter_to("mooncake_steps_total", process.steps.steps)
    page.counter_to("mooncake_step_seconds_total", process.steps.total_s)
    page.gauge("mooncake_step_age_seconds", report.oldest_step_s, now_s)
    page.counter_to("mooncake_self_checks_total", process.self_check.passed)
    page.gauge("mooncake_leases_held", len(process.owners), now_s)
    page.counter_to("mooncake_store_restored_blocks_total", process.store.restored_blocks)
    transfers(page, process, now_s)
    for name, value_labels, value in process.driver.series():
        page.gauge(name, value, now_s, **value_labels)


def transfers(page: MetricPage, process: WorkerProcess, now_s: float) -> None:
    for transport, counted in process.store.counters().items():
        for direction, number, moved in (
            ("read", counted.reads, counted.read_bytes),
            ("write", counted.writes, counted.write_bytes),
        ):
            labels = {"transport": transport, "direction": direction}
            page.counter_to("mooncake_transfers_total", number, **labels)
            page.counter_to("mooncake_transfer_bytes_total", moved, **labels)
        failures = counted.failures + counted.timeouts
        page.counter_to("mooncake_transfer_seconds_total", counted.seconds, transport=transport)
        page.counter_to("mooncake_transfer_failures_total", failures, transport=transport)
    for nic, moved in process.store.nic_counters().items():
        page.counter_to("mooncake_nic_bytes_total", moved.read_bytes, nic=nic, direction="read")
        page.counter_to("mooncake_nic_bytes_total", moved.write_bytes, nic=nic, direction="write")
        page.counter_to("mooncake_nic_failures_total", moved.failures, nic=nic, kind="failed")
        page.counter_to("mooncake_nic_failures_total", moved.abandoned, nic=nic, kind="given_up")
        page.gauge("mooncake_nic_resting_paths", moved.cooling_down, now_s, nic=nic)
    page.counter_to("mooncake_nixl_agents_given_up_total", process.store.agents_abandoned)
