"""The counters of a gateway process, as a page for Prometheus.

Each process has its own page. The launcher merges the pages and serves them on its metrics port.

Not here: the meaning of the names (metrics/table.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from backends.gateway.request.fields import TABLES
from backends.metrics.table import METRICS
from backends.statuses import HttpRefusal
from backends.tracing.export import SpanExport

REQUESTS = "mooncake_gateway_requests_total"
REFUSALS = "mooncake_gateway_refusals_total"
REFUSED_FIELDS = "mooncake_gateway_refused_fields_total"
OTHER_FIELD = "other"
MESSAGES = "mooncake_gateway_messages_total"
LEFT = "mooncake_gateway_clients_left_total"
SPANS = "mooncake_gateway_trace_spans_total"
IN_FLIGHT = "mooncake_gateway_requests_in_flight"
KNOWN_FIELDS = frozenset(name for tables in TABLES.values() for table in tables for name in table)


class GatewayCounts:
    """Counters of one event loop, without a lock."""

    def __init__(self, name: str) -> None:
        """`name`: name of this process."""
        self._name = name
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.refusals: Counter[str] = Counter()  # by code
        self.refused_fields: Counter[str] = Counter()  # by name of the field
        self.messages = 0  # events of streams and whole answers that were sent
        self.left = 0  # clients that disconnected before the end of their answer
        self.in_flight = 0  # HTTP requests that have not ended
        self.spans: SpanExport | None = None  # None without tracing

    def refused(self, refusal: HttpRefusal) -> None:
        """Count a refusal by its code, and by the fields of the request that caused it."""
        self.refusals[refusal.code] += 1
        if refusal.status == 400:
            for name in refusal.fields:  # clients choose the names of unknown fields
                self.refused_fields[name if name in KNOWN_FIELDS else OTHER_FIELD] += 1

    def page(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        requests = {
            f'path="{path}",status="{status}"': n for (path, status), n in self.requests.items()
        }
        refusals = {f'code="{code}"': n for code, n in self.refusals.items()}
        fields = {f'field="{name}"': n for name, n in self.refused_fields.items()}
        spans: dict[str, int] = {}
        if self.spans is not None:
            spans = {'result="exported"': self.spans.exported, 'result="lost"': self.spans.lost}
        for name, samples in (
            (SPANS, spans),
            (REQUESTS, requests),
            (REFUSALS, refusals),
            (REFUSED_FIELDS, fields),
            (MESSAGES, {"": self.messages}),
            (LEFT, {"": self.left}),
            (IN_FLIGHT, {f'gateway="{self._name}"': self.in_flight}),
        ):
            yield f"# HELP {name} {METRICS[name].meaning}"
            yield f"# TYPE {name} {METRICS[name].kind}"
            for labels, value in samples.items():
                yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
