"""Sends spans by OpenTelemetry's exporter. Only this module imports OpenTelemetry's packages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from backends.tracing.request_spans import SpanRecord
from mooncake_store.keys.curve import is_loopback

SCOPE = InstrumentationScope("mooncake-triton")
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class OtlpSender:
    """Implements export.Sender."""

    def __init__(self, endpoint: str) -> None:
        # The exporter would log every failed batch. export.py logs the first failure in a row.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
        host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""
        # No proxy for a collector on this machine. For other hosts gRPC obeys `no_proxy`.
        options = (("grpc.enable_http_proxy", 0),) if is_loopback(f"{host}:0") else ()
        self._exporter = OTLPSpanExporter(endpoint=endpoint, channel_options=options)

    def send(self, spans: Sequence[SpanRecord]) -> bool:
        sent = self._exporter.export([_readable(span) for span in spans])
        return sent is SpanExportResult.SUCCESS

    def stop(self) -> None:
        self._exporter.shutdown(timeout_millis=0)


def _readable(span: SpanRecord) -> ReadableSpan:
    parent = None
    if span.parent_span_id:
        parent = _context(span.context.trace_id, span.parent_span_id)
    return ReadableSpan(
        name=span.name,
        context=_context(span.context.trace_id, span.context.span_id),
        parent=parent,
        resource=_resource(span.service, span.instance),
        attributes=span.attributes,
        events=[Event(name, timestamp=at_ns) for name, at_ns in span.events],
        kind=KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=SCOPE,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=sampled)


@lru_cache(maxsize=1024)
def _resource(service: str, instance: str) -> Resource:
    """Resource.create also adds the attributes of OTEL_RESOURCE_ATTRIBUTES."""
    given = {"service.name": service}
    if instance:
        given["service.instance.id"] = instance
    return Resource.create(given)
