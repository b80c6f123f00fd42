"""The cost of noting and sending the spans of a request, without a server.

    python -m bench.tracing

CPU time in microseconds, the best of several rounds: of an untraced request, of one that is not
sampled, of a sampled one, and of sending its spans to a receiver in this process. The notes are
those of a request with one attempt (14 spans). Messages of a stream make no notes.

Not here: the real path (tests/e2e/test_traces.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import typer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from backends.tracing.export import SpanExport, Tracing, begin_trace
from backends.tracing.otlp import OtlpSender
from backends.tracing.request_spans import SpanRecord
from backends.workers.protocol import DecodeReply, PrefillReply

ROUNDS, REQUESTS, BATCH = 7, 2_000, 512
PREFILLED = PrefillReply("i", 64, 1, 10, [], 0.02, 0.01, 0.05, 0.004, load_at_s=0.01)
DECODED = DecodeReply("i", 3, "", [], 0, "length", 0.003, 0.002)
DECISION: dict[str, Any] = {
    "policy": "kvcache",
    "prefill": "prefill_0",
    "decode": "decode_0",
    "predicted": {f"term_{number}_s": 0.1 for number in range(10)},
}


class Discarding:
    """A collector that accepts all spans at once and keeps the last ones."""

    def __init__(self) -> None:
        self.kept: list[SpanRecord] = []

    def send(self, spans: Sequence[SpanRecord]) -> bool:
        self.kept = [*self.kept[:BATCH], *spans][:BATCH]
        return True

    def stop(self) -> None: ...


class TakingAll(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request: Any, context: Any) -> Any:
        return trace_service_pb2.ExportTraceServiceResponse()


def noted(tracing: Tracing | None) -> None:
    """The notes of a request with one attempt."""
    trace = begin_trace(tracing, {}, 1.0)
    trace.read(1.1, {"gen_ai.usage.input_tokens": 200})
    trace.attempt_began(1, 1.1)
    if trace.is_on:
        trace.decided(1, 1.2, DECISION, "")
    trace.called(1, "prefill_0", 1.2)
    trace.prefilled(1, PREFILLED, 1.3)
    trace.called(1, "decode_0", 1.3)
    trace.decoded(1, DECODED, 1.5)
    trace.ended("", 1.6, 1.3, {"mooncake.outcome": "answered"})


def best_us(act: Callable[[], None], times: int, clock: Callable[[], float]) -> float:
    found = []
    for _ in range(ROUNDS):
        started_s = clock()
        for _ in range(times):
            act()
        found.append((clock() - started_s) / times * 1e6)
    return min(found)


def main() -> None:
    """Print the cost of traces, as one line of JSON."""
    collector = Discarding()
    unsampled = Tracing(SpanExport(collector), 0.0)
    sampled = Tracing(SpanExport(collector, waiting_max=10**9), 1.0)
    result = {
        "untraced_us_per_request": best_us(lambda: noted(None), REQUESTS, time.thread_time),
        "unsampled_us_per_request": best_us(lambda: noted(unsampled), REQUESTS, time.thread_time),
        "sampled_us_per_request": best_us(lambda: noted(sampled), REQUESTS, time.thread_time),
    }
    unsampled.close()
    sampled.close()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TakingAll(), server)
    sender = OtlpSender(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    per_batch_us = best_us(lambda: _send(sender, collector.kept), 5, time.thread_time)
    result["export_us_per_span"] = per_batch_us / len(collector.kept)
    sender.stop()
    server.stop(None).wait()
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


def _send(sender: OtlpSender, spans: Sequence[SpanRecord]) -> None:
    assert sender.send(spans), "the receiver did not accept them"


if __name__ == "__main__":
    typer.run(main)
