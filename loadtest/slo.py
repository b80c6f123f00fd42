"""Service levels of a request, and what of a run met them: goodput. Pure arithmetic on records.

A completed request met its level when its TTFT and its TBT (metrics.py) both did; an answer of one
token has no TBT and is judged by its TTFT alone. Rejected and failed requests meet nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.metrics import COMPLETED, RequestRecord, run_duration_s

# FAST'25, section 8.1: levels are multiples of what an unloaded server takes, held by 90 %.
TTFT_TIMES_UNLOADED = 10.0
TBT_TIMES_UNLOADED = 5.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None sets no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.outcome != COMPLETED or record.ttft_s is None:
            return False
        is_first_in_time = self.ttft_s is None or record.ttft_s <= self.ttft_s
        is_fluent = self.tbt_s is None or record.tbt_s is None or record.tbt_s <= self.tbt_s
        return is_first_in_time and is_fluent


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met their level: how many, per second of the run, and of all that were sent."""

    requests: int
    requests_per_s: float
    share: float


def goodput(
    records: Sequence[RequestRecord], slo: Slo, slo_by_workload: Mapping[str, Slo] | None = None
) -> Goodput:
    """`slo_by_workload` goes before `slo` for the workloads that it names."""
    by_workload = slo_by_workload or {}
    good = sum(by_workload.get(record.workload, slo).is_met(record) for record in records)
    duration_s = run_duration_s(records)
    return Goodput(
        requests=good,
        requests_per_s=good / duration_s if duration_s > 0 else 0.0,
        share=good / len(records) if records else 0.0,
    )
