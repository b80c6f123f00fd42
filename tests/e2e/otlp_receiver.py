"""A collector of traces, made of OpenTelemetry's own service stubs: keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    error: str  # "": none
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    events: tuple[str, ...]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback, on any port."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        found = [
            _received(span, _values(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._lock:
            self._spans += found
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str = "") -> list[ReceivedSpan]:
        """Of one trace, or all."""
        with self._lock:
            return [span for span in self._spans if trace_id in ("", span.trace_id)]

    def close(self) -> None:
        self._server.stop(None).wait()


def _received(span: Any, resource: Mapping[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        error=span.status.message if span.status.code == ERROR else "",
        attributes=_values(span.attributes),
        resource=resource,
        events=tuple(event.name for event in span.events),
    )


def _values(pairs: Any) -> dict[str, Any]:
    def value(given: common_pb2.AnyValue) -> Any:
        return getattr(given, given.WhichOneof("value"))

    return {pair.key: value(pair.value) for pair in pairs}
