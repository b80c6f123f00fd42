"""One worker in the conductor's state: reports, reservations, speed and warm-up.

**Warm-up (slow start).** A worker that joins a running cluster gets requests gradually. A new
worker is idle, so the predictions alone would route every request to it until its queue is as long
as the others. Its coefficients were measured without load, and its caches are cold. If it is slower
than predicted, a whole queue of requests would be delayed. For `slow_start_s` after a worker
joined, its work therefore counts as longer, by a factor that falls to 1:

    warm_up = 1 - age / slow_start_s                       1 when it joins, 0 from slow_start_s on
    cost    = cost + warm_up x SLOWER x (wait + prefill)   only for the choice of a worker

The predictions in a Route and admission do not include the warm-up. The budget of copies of hot
prefixes to a new node grows in the same way (`budget`, replication/hotspots.py). A worker is in
warm-up only if another worker of its role joined at least `slow_start_s` earlier.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from conductor.config import ConductorConfig
from conductor.estimates.estimates import DecodeEstimate, PrefillEstimate
from conductor.estimates.measured import SpeedRatio
from conductor.estimates.pipeline import PipelineEstimate
from conductor.load.decode_batch import DecodeBatch
from conductor.load.prefill_queue import PrefillQueue
from conductor.messages import WorkerRef
from mooncake_store.records.membership import WorkerInfo, WorkerReport

SLOWER = 3.0  # the first cost factor, 1 + SLOWER, is the largest ratio of SpeedRatio
BUDGET_LEAST = 0.125  # least share of the copy budget, for a node that joins


def warm_up(joined_s: float, now_s: float, slow_start_s: float) -> float:
    """The remaining part of a warm-up: 1 when the worker joins, 0 from slow_start_s on."""
    if slow_start_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - (now_s - joined_s) / slow_start_s))


def budget(whole: int, warm_up: float) -> int:
    """The part of a budget of `whole` blocks that a node in warm-up gets; at least one block."""
    return max(1, int(whole * max(BUDGET_LEAST, 1.0 - warm_up)))


WorkerKey = tuple[str, str]  # (worker_id, incarnation)
PREFILLS_KEPT = 256  # finished prefills kept to correct the time of overlapping ones (prefilled)


class MeasuredPaths(NamedTuple):
    """Summary of the transfers that a worker measured; rates in bytes per second."""

    rates: tuple[float, ...]  # (minimum, maximum); () if no rate was measured
    latencies_s: tuple[float, ...]  # (minimum, maximum) from other nodes; () if not measured
    own_rate: float  # rate from the worker's own node; 0 if not measured
    far_rate_max: float  # highest rate from another node; 0 if not measured

    @classmethod
    def of(cls, info: WorkerInfo) -> MeasuredPaths:
        """Called once per worker, because a worker of a large cluster measures 1,000 nodes."""
        measured, latencies_s = info.transfer_bytes_per_s, info.transfer_latency_s
        rates = measured.values()
        far = [rate for node_id, rate in measured.items() if node_id != info.node_id]
        far_s = [seconds for node_id, seconds in latencies_s.items() if node_id != info.node_id]
        return cls(
            (min(rates), max(rates)) if rates else (),
            (min(far_s), max(far_s)) if far_s else (),
            measured.get(info.node_id, 0.0),
            max(far, default=0.0),
        )


class WorkerState:
    """One incarnation of a worker with its reports, reservations and measured speed."""

    def __init__(self, info: WorkerInfo, now_s: float) -> None:
        self.info, self.paths = info, MeasuredPaths.of(info)
        self.ref = WorkerRef(
            info.worker_id, info.incarnation, info.node_id, info.inbox, info.grpc_address
        )
        self.key: WorkerKey = (info.worker_id, info.incarnation)
        self.decode_estimate = DecodeEstimate.of(info.decode_coefficients)
        # The estimate of its own layers, or of the pipeline group of which it is stage 0.
        self.pipeline = PipelineEstimate.of((PrefillEstimate.of(info.prefill_coefficients),))
        self.queue = PrefillQueue(self.pipeline, now_s, info.preempts_prompts)
        self.batch = DecodeBatch()
        self.speed = SpeedRatio()
        self.joined_s = self.reported_at_s = now_s  # the registration counts as a report
        self.is_draining = self.is_unreached = False
        self.failed_at_s: float | None = None
        # All stages of its pipeline group, if this worker is stage 0 of a complete group.
        self.stages: tuple[WorkerState, ...] = (self,)
        self.leader = self  # stage 0 of its complete pipeline group; else the worker itself
        self.broken = ""  # reason why its pipeline group is incomplete; "" if it is complete
        self._prefills: deque[tuple[float, float]] = deque(maxlen=PREFILLS_KEPT)  # (end, seconds)
        self.routed_at = 0  # number of the last request routed to this worker; 0 if none
        self.row = -1  # its row in the pool of its role; -1 if it is in no pool

    def leave_group(self) -> None:
        """Reset to a worker outside any pipeline group, but keep the estimate (`pipeline`)."""
        self.stages, self.leader, self.broken = (self,), self, ""

    def lead_group(
        self, stages: tuple[WorkerState, ...], broken: str, pipeline: PipelineEstimate
    ) -> None:
        """Make this worker stage 0 of a pipeline group."""
        self.stages, self.broken = stages, broken
        for stage in stages:
            stage.leader = self
        if not broken:
            self.pipeline = pipeline
            self.queue.estimate = pipeline

    @property
    def is_follower(self) -> bool:
        """True for the pipeline stages after stage 0. Requests are routed only to stage 0."""
        return not self.info.is_called

    @property
    def oldest_report_s(self) -> float:
        """The time of the latest report of the pipeline stage that is silent for longest."""
        return min(stage.reported_at_s for stage in self.stages)

    @property
    def is_away(self) -> bool:
        return any(stage.is_draining or stage.is_unreached for stage in self.stages)

    @property
    def last_failed_s(self) -> float:
        """The time of the latest failed call to one of its stages; minus infinity if none."""
        failures_s = (stage.failed_at_s for stage in self.stages)
        return max((at_s for at_s in failures_s if at_s is not None), default=-math.inf)

    def on_report(self, report: WorkerReport, now_s: float, config: ConductorConfig) -> None:
        self.reported_at_s = now_s
        self.is_draining = report.is_draining
        if self.failed_at_s is not None and now_s > self.failed_at_s + config.report_lag_s:
            self.failed_at_s = None
        if self.is_follower:
            return  # stage 0 reports the load of the group
        if self.info.role == "prefill":
            requests = max(report.queue_requests, report.running)
            self.queue.on_report(report.queue_tokens, requests, now_s, config.report_lag_s)
            self.queue.step_s = report.step_s
            return
        self.batch.on_report(report, now_s, config.report_lag_s)
        estimated_s = self.decode_estimate.step_s(report.running, report.context_tokens)
        if report.running and report.step_s > 0 and estimated_s > 0:
            self.speed.learn(report.step_s / estimated_s, 1.0, now_s)

    def prefilled(
        self, began_s: float, seconds: float, estimated_s: float, now_s: float, fill_s: float = 0.0
    ) -> None:
        """Learn the speed from a finished prefill. Each prompt of a shared step reports the seconds
        of the whole step, and a prompt may be overtaken between two chunks. The time of prefills
        that ended after `began_s` is therefore subtracted. `fill_s`: estimated fill time of a
        pipeline group (pipeline.py). It is not added for a prompt directly after another one,
        because it overlaps with the fill time of the earlier prompt."""
        free_s = now_s - began_s
        for ended_s, its_s in reversed(self._prefills):
            if ended_s <= began_s:
                break
            free_s -= min(its_s, ended_s - began_s)
        measured_s = min(seconds, max(0.0, free_s))
        if free_s >= seconds:
            estimated_s += fill_s
        self.speed.learn(measured_s, estimated_s, now_s)
        self._prefills.append((now_s, measured_s))

    def speed_ratio(self, now_s: float, config: ConductorConfig) -> float:
        return self.speed.at(now_s) if config.learn_speed else 1.0
