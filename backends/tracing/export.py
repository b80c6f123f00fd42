"""Sends spans to an OpenTelemetry collector over OTLP's gRPC, in a thread of its own.

Requests append spans to a bounded queue and never wait for a collector. If the queue is full, all
spans of a request are dropped. Spans of a failed message to the collector are dropped too. Exported
and dropped spans are counted. OpenTelemetry's batch processor does not count what it drops, and
drops single spans instead of whole requests, so it is not used.

OpenTelemetry's packages (extra `tracing`) are imported only where an endpoint is configured. They
read OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _TIMEOUT, and OTEL_RESOURCE_ATTRIBUTES.

Not here: which spans (request_spans.py), which requests are sampled (trace_context.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from backends import extras
from backends.tracing.request_spans import SpanRecord
from backends.tracing.request_trace import RequestTrace, new_span_id
from backends.tracing.trace_context import (
    TRACEPARENT,
    TraceContext,
    new_trace,
    parse_traceparent,
    share_sampled,
)

log = logging.getLogger(__name__)
ENDPOINT_VARIABLE = "MOONCAKE_OTLP_ENDPOINT"  # http://HOST:4317, or https://; unset: no tracing
WAITING_MAX = 16_384  # most spans in the queue: some megabytes
BATCH_MAX = 512  # most spans in one message to the collector
PERIOD_S = 1.0  # longest pause between two messages; it ends early if BATCH_MAX spans are queued
CLOSE_S_MAX = 1.0  # time for sending the queue when the process ends


def problems(environment: Mapping[str, str]) -> list[str]:
    """Each mistake in the environment variables of tracing, with its remedy."""
    if not (endpoint := environment.get(ENDPOINT_VARIABLE)):
        return []
    found = []
    scheme, separator, address = endpoint.partition("://")
    if scheme not in ("http", "https") or not separator or not address.strip("/"):
        found.append(f"{ENDPOINT_VARIABLE} is {endpoint!r}; give http://HOST:4317, or https://")
    if lacking := extras.missing("tracing"):
        line = extras.install_line("tracing")
        found.append(f"traces need {lacking}, which is not installed: {line}")
    try:
        share_sampled(environment)
    except ValueError as error:
        found.append(str(error))
    return found


class Sender(Protocol):
    """Connection to one collector."""

    def send(self, spans: Sequence[SpanRecord]) -> bool:
        """Whether the collector accepted the spans. May block for seconds."""

    def stop(self) -> None:
        """Cancel a running `send`. Any thread."""


class SpanExport:
    """A bounded queue of spans and the thread that empties it."""

    def __init__(self, sender: Sender, waiting_max: int = WAITING_MAX) -> None:
        self._sender = sender
        self._waiting: deque[SpanRecord] = deque()
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self.exported = 0  # spans that the collector accepted
        self.lost = 0  # spans that were dropped
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[SpanRecord]) -> None:
        """Queue the spans of one request, or drop all of them. Any thread; does no I/O."""
        with self._lock:
            room = self._waiting_max - len(self._waiting)
            if self._is_closing or len(spans) > room:  # queue all spans of a request, or none
                self.lost += len(spans)
                return
            self._waiting.extend(spans)
            is_batch = len(self._waiting) >= BATCH_MAX
        if is_batch:
            self._is_due.set()

    def close(self) -> None:
        """Send the queued spans, for at most CLOSE_S_MAX. Later spans are dropped."""
        self._is_closing = True
        self._is_due.set()
        self._thread.join(timeout=CLOSE_S_MAX)
        self._sender.stop()

    def _run(self) -> None:
        while True:
            self._is_due.wait(PERIOD_S)
            self._is_due.clear()
            is_last = self._is_closing
            while batch := self._take():
                self._send(batch)
            if is_last:
                return

    def _take(self) -> list[SpanRecord]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]

    def _send(self, batch: list[SpanRecord]) -> None:
        try:
            is_taken = self._sender.send(batch)
        except Exception:  # Catch all: a failure of tracing must not end the process
            log.exception("spans were not sent")
            is_taken = False
        with self._lock:
            self.exported += len(batch) if is_taken else 0
            self.lost += 0 if is_taken else len(batch)
        if is_taken == self._is_failing:
            self._is_failing = not is_taken
            log.warning(
                "the collector accepts spans again"
                if is_taken
                else "the collector does not accept spans: they are dropped"
            )


class Tracing:
    """Traces the requests of one process."""

    def __init__(self, export: SpanExport, share: float) -> None:
        self.export = export
        self._share = share

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Tracing | None:
        """None: no endpoint is configured. Raises ValueError for mistakes in the environment."""
        if not (endpoint := environment.get(ENDPOINT_VARIABLE)):
            return None
        if found := problems(environment):
            raise ValueError("; ".join(found))
        from backends.tracing.otlp import OtlpSender  # imported here, as the import takes 0.25 s

        return cls(SpanExport(OtlpSender(endpoint)), share_sampled(environment))

    def begin(self, parameters: Mapping[str, Any], arrived_s: float) -> RequestTrace:
        """The trace of a request. `parameters`: its KServe parameters, maybe with a traceparent."""
        root, parent_span_id = self.context_of(parameters.get(TRACEPARENT))
        offer = self.export.offer if root.is_sampled else None
        return RequestTrace(root, parent_span_id, arrived_s, offer)

    def context_of(self, traceparent: object) -> tuple[TraceContext, str]:
        """(context of a new span, span id of its parent).

        Without a valid traceparent the span begins a new trace, and the parent's id is "".
        """
        parent = parse_traceparent(traceparent)
        if parent is None:
            return new_trace(self._share, os.urandom(24)), ""
        return TraceContext(parent.trace_id, new_span_id(), parent.is_sampled), parent.span_id

    def close(self) -> None:
        self.export.close()


def begin_trace(
    tracing: Tracing | None, parameters: Mapping[str, Any], arrived_s: float
) -> RequestTrace:
    """The trace of a request. Without `tracing`, the trace has only the client's trace id."""
    if tracing is not None:
        return tracing.begin(parameters, arrived_s)
    parent = parse_traceparent(parameters.get(TRACEPARENT))
    return RequestTrace(parent or TraceContext("", "", False), "", arrived_s)
