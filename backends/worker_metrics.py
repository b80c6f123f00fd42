"""What a worker shows on Triton's metrics port: names, units, where each number comes from.

`MetricsLoop` (triton_io.py) calls these a few times a second. Not here: Triton's metric API.
"""

from __future__ import annotations

from typing import Protocol

from backends.decode_worker import DecodeWorker
from backends.prefill_worker import PrefillWorker
from backends.worker import Worker


class MetricSink(Protocol):
    def gauge(self, name: str, help_text: str, value: float, **labels: str) -> None: ...
    def counter_to(self, name: str, help_text: str, total: float, **labels: str) -> None: ...


def prefill(sink: MetricSink, worker: PrefillWorker) -> None:
    common(sink, worker.worker)
    report = worker.report()
    sink.gauge("mooncake_queue_requests", "requests waiting or being worked on, not decoding",
               report.queue_requests)  # fmt: skip
    sink.gauge("mooncake_queue_tokens", "prompt tokens not computed yet", report.queue_tokens)
    sink.gauge("mooncake_pages_used", "pages of the engine's KV memory in use", report.pages_used)
    for path, tokens in worker.tokens_by_path.items():
        sink.counter_to("mooncake_prompt_tokens_total",
                        "prompt tokens by how their KV came: computed, local, fetched",
                        tokens, path=path)  # fmt: skip


def decode(sink: MetricSink, worker: DecodeWorker) -> None:
    common(sink, worker.worker)
    report = worker.report()
    sink.gauge("mooncake_queue_requests", "requests waiting or being worked on, not decoding",
               report.queue_requests)  # fmt: skip
    sink.gauge("mooncake_slots_used", "requests in the running batch", report.running)
    sink.gauge("mooncake_pages_used", "pages of the engine's KV memory in use", report.pages_used)
    sink.gauge("mooncake_context_tokens", "KV tokens of the running batch", report.context_tokens)
    sink.counter_to("mooncake_output_tokens_total", "tokens decoded", worker.tokens_generated)


def common(sink: MetricSink, worker: Worker) -> None:
    sink.gauge("mooncake_pages_max", "pages of the engine's KV memory", worker.info.pages_max)
    sink.gauge("mooncake_leases_held", "requests whose blocks this worker keeps leased",
               len(worker.owners))  # fmt: skip
    for transport, counters in worker.store.counters().items():
        for direction in ("read", "write"):
            sink.counter_to(
                "mooncake_transfer_bytes_total", "bytes moved between store and this worker",
                getattr(counters, f"{direction}_bytes"), transport=transport, direction=direction,
            )  # fmt: skip
        sink.counter_to("mooncake_transfer_failures_total", "transfers that failed or timed out",
                        counters.failures + counters.timeouts, transport=transport)  # fmt: skip
