"""A simulated run as a recording, like those that replay and Locust make of a real server.

A client has its first token when the prompt is computed; the part of the hand-over that prefill did
not hide is in the next interval. A job keeps only its first and last token time, so its record is
compact. Samples are those numbers of a real metrics page that simulated workers have.

Not here: which fleet and which requests (replayed.py, planner/fleet_run.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord, Slo
from loadtest.results.recording import Recording, Sample, Setting
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.job import STOPPED, SimulatedJob

SAMPLES_MAX = 300
FAILURES = frozenset({STOPPED, "worker_lost"})  # refusals by a worker that count as failures


class FleetSampler:
    """The load of all workers, as often as a page can show it."""

    def __init__(self, until_s: float) -> None:
        """`until_s`: the expected end of the run."""
        self._every_s = until_s / SAMPLES_MAX
        self.samples: list[Sample] = []

    def look(self, fleet: SimulatedFleet) -> None:
        now_s = fleet.clock.now_s
        if not self.samples or now_s >= self.samples[-1].time_s + self._every_s:
            self.samples.append(Sample(now_s, values_of(fleet)))


def values_of(fleet: SimulatedFleet) -> dict[str, float]:
    """Without decode steps: a worker counts many at a time, too coarse for a rate."""
    values: dict[str, float] = {}
    pages_max = float(fleet.site.pages_max)
    for worker in (*fleet.prefills.values(), *fleet.decodes.values()):
        report, of = worker.report(), f'{{model="{worker.worker_id}"}}'
        waiting = max(0, report.queue_requests)
        values |= {
            f"mooncake_requests_waiting{of}": float(waiting),
            f"mooncake_requests_running{of}": float(report.running),
            f"mooncake_pages_used{of}": float(report.pages_used),
            f"mooncake_pages_max{of}": pages_max,
        }
        if worker.worker_id in fleet.prefills:
            values[f"mooncake_queue_tokens{of}"] = float(report.queue_tokens)
            values[f"mooncake_step_seconds_total{of}"] = worker.busy_s
        else:
            values[f"mooncake_context_tokens{of}"] = float(report.context_tokens)
    return values


def recording_of(
    jobs: Sequence[SimulatedJob],
    name: str,
    title: str,
    settings: dict[str, Setting],
    slo: Slo,
    samples: Sequence[Sample] = (),
) -> Recording:
    return Recording(
        name=name,
        title=title,
        started_at="",
        settings=settings,
        requests=[record_of(job) for job in jobs],
        samples=list(samples),
        slo=slo,
    )


def record_of(job: SimulatedJob) -> RequestRecord:
    outcome, kind, message, retry_after_s = COMPLETED, "", "", None
    ended_s = job.finished_s
    if job.reject is not None:
        outcome, kind, message = REJECTED, job.reject.kind, job.reject.reason
        retry_after_s = job.reject.retry_after_s
    elif job.finished_s is None:
        outcome, kind = FAILED if job.refused in FAILURES else REJECTED, job.refused
        message = "refused by a worker after admission"
    if ended_s is None:
        known_s = (job.prefilled_s, job.started_s, job.arrived_s)
        ended_s = max(at_s for at_s in known_s if at_s is not None)
    times_s: tuple[float, ...] = ()
    if outcome == COMPLETED:
        assert job.prefilled_s is not None, job.request_id
        times_s = (job.prefilled_s, ended_s) if job.output_tokens > 1 else (job.prefilled_s,)
    return RequestRecord(
        index=job.number,
        request_id=job.request_id,
        due_s=job.arrived_s,
        sent_s=job.arrived_s,
        finished_s=ended_s,
        prompt_tokens=job.prompt_tokens,
        output_tokens_asked=job.output_tokens,
        outcome=outcome,
        kind=kind,
        message=message,
        retry_after_s=retry_after_s,
        token_times_s=times_s,
        cached_tokens=job.cached_tokens if outcome == COMPLETED else None,
        finish_reason="length" if outcome == COMPLETED else "",
        decision=decision_of(job) if outcome == COMPLETED else None,
        generated_tokens=job.output_tokens if outcome == COMPLETED else 0,
        longest_intervals_s=job.tbt_s if len(times_s) > 1 else None,
    )


def decision_of(job: SimulatedJob) -> dict[str, object]:
    """Its route, predictions and phases, under the names of a real decision."""
    assert job.route is not None and job.prefilled_s is not None
    predicted = job.route.predicted
    started_s = job.started_s if job.started_s is not None else job.prefilled_s
    found: dict[str, object] = {
        "prefill": job.prefill,
        "decode": job.decode,
        "predicted": {
            name: round(getattr(predicted, name), 6)
            for name in ("ttft_s", "queue_s", "transfer_s", "prefill_s", "handover_s", "tbt_s")
        },
        "queue_s": max(0.0, started_s - job.arrived_s - job.loading_s),
        "load_s": job.loading_s,
        "prefill_s": job.prefilled_s - started_s,
        "put_s": 0.0,  # layers are put while others are computed; the remainder is in decode_load_s
        "fetched_blocks": job.fetched_blocks,
    }
    if job.joined_s is not None and job.first_token_s is not None:
        found["decode_load_s"] = job.first_token_s - job.prefilled_s
        found["decode_queue_s"] = max(0.0, job.joined_s - job.first_token_s)
    return found
