"""What Locust's statistics show of a request.

`total` is the request as a whole and goes through Locust's own event, so it is what the line
"Aggregated", the charts and other listeners see. `TTFT` and `TBT` are measured of the same request:
they get lines of their own, but are no further requests, so they are not in "Aggregated". A
rejection is a request without a response time, on a line per kind, and no failure.

Not here: exact numbers and limits (verdict.py); Locust rounds to whole milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord

TOTAL, TTFT, TBT, REJECTION = "total", "TTFT", "TBT", "rejected"


class RequestFailed(Exception):
    """How a failed request stands in Locust's list of failures."""


@dataclass(frozen=True, slots=True)
class Line:
    """One value for one line of the statistics."""

    kind: str  # Locust's "Type"
    name: str
    time_ms: float | None
    is_request: bool
    failure: str = ""


def lines(record: RequestRecord) -> list[Line]:
    if record.outcome == REJECTED:
        return [Line(REJECTION, f"{record.workload} {record.kind}", None, True)]
    total_ms = record.latency_s * 1e3
    if record.outcome != COMPLETED:
        failure = f"{record.kind}: {record.message}"
        return [Line(TOTAL, record.workload, total_ms, True, failure)]
    found = [Line(TOTAL, record.workload, total_ms, True)]
    for kind, value_s in ((TTFT, record.ttft_s), (TBT, record.tbt_s)):
        if value_s is not None:
            found.append(Line(kind, record.workload, value_s * 1e3, False))
    return found


def count(environment: Any, record: RequestRecord, answer_bytes: int) -> None:
    """Into the statistics of Locust's `environment`."""
    for line in lines(record):
        if line.is_request:
            environment.events.request.fire(
                request_type=line.kind,
                name=line.name,
                response_time=line.time_ms,
                response_length=answer_bytes,
                exception=RequestFailed(line.failure) if line.failure else None,
                context={},
            )
        else:
            environment.stats.entries[(line.name, line.kind)].log(line.time_ms, 0)
