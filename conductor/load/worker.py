"""One worker as the conductor sees it: what it said, what is reserved there, how fast it is.

**Warm-up.** A worker that joins others at work is given its share little by little. It is idle, so
by prediction alone everything goes there until its queue is as long as the others'. But nothing is
known of it yet: its coefficients were measured alone, its caches are cold, its links untried; and
if it is slow, a whole queue waits to find out. So for `slow_start_s` after it joined its work is
taken to last longer than predicted, by a factor that falls to 1:

    warm_up = 1 - age / slow_start_s                       1 when it joins, 0 from slow_start_s on
    cost    = cost + warm_up x SLOWER x (wait + prefill)   for the choice of a worker only

What is shown as predicted, and what admission judges, stays the prediction. Copies of hot prefixes
to its node have `1 - warm_up` of the budget of others (hotspots.py). A cluster that starts as a
whole has nobody in warm-up: there is nobody to wait for.

Not here: who is there (cluster.py), the same figures of all workers as columns (pool.py).
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

SLOWER = 3.0  # four times as long at first: as much as SpeedRatio ever corrects
BUDGET_LEAST = 0.125  # of copies, or a newcomer would never get the first


def warm_up(joined_s: float, now_s: float, slow_start_s: float) -> float:
    """1 when it joins, 0 from slow_start_s on."""
    if slow_start_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - (now_s - joined_s) / slow_start_s))


def budget(whole: int, warm_up: float) -> int:
    """Of blocks to a node that is so new; at least one."""
    return max(1, int(whole * max(BUDGET_LEAST, 1.0 - warm_up)))


WorkerKey = tuple[str, str]  # (worker_id, incarnation)
PREFILLS_KEPT = 256  # ended ones, to tell what of a longer one's time was theirs


class MeasuredPaths(NamedTuple):
    """What a worker measured of transfers to it, in short: rates in bytes per second."""

    # The least and the most stand for all: they tell whether there are different ones.
    rates: tuple[float, ...]
    latencies_s: tuple[float, ...]  # from other nodes
    own_rate: float  # from its own node
    far_rate_max: float

    @classmethod
    def of(cls, info: WorkerInfo) -> MeasuredPaths:
        """Looked at once: in a large fleet each worker has measured a thousand."""
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
    """One incarnation of a worker: what it said, and what is reserved there."""

    def __init__(self, info: WorkerInfo, now_s: float, preempts: bool) -> None:
        self.info, self.paths = info, MeasuredPaths.of(info)
        self.ref = WorkerRef(
            info.worker_id, info.incarnation, info.node_id, info.inbox, info.grpc_address
        )
        self.key: WorkerKey = (info.worker_id, info.incarnation)
        self.decode_estimate = DecodeEstimate.of(info.decode_coefficients)
        # Its own layers only, until it leads a whole group (pipeline_groups.py).
        self.pipeline = PipelineEstimate.of((PrefillEstimate.of(info.prefill_coefficients),))
        self.queue = PrefillQueue(self.pipeline, now_s, preempts)
        self.batch = DecodeBatch()
        self.speed = SpeedRatio()
        self.joined_s = self.reported_at_s = now_s  # registering is the first sign of life
        self.is_draining = self.is_unreached = False
        self.failed_at_s: float | None = None
        self.stages: tuple[WorkerState, ...] = (self,)  # whom a prompt goes through, itself first
        self.leader = self  # whose stage it is
        self.broken = ""  # why its pipeline group computes nothing
        self._prefills: deque[tuple[float, float]] = deque(maxlen=PREFILLS_KEPT)  # end, seconds
        self.routed_at = 0  # number of the last request routed here, 0 before the first
        self.row = -1  # in the pool of its role; -1 while it is in none

    def alone(self) -> None:
        """It belongs to no group that is known."""
        self.stages, self.leader, self.broken = (self,), self, ""

    def lead(
        self, stages: tuple[WorkerState, ...], broken: str, pipeline: PipelineEstimate
    ) -> None:
        """It is stage 0 of this group."""
        self.stages, self.broken = stages, broken
        for stage in stages:
            stage.leader = self
        if not broken:
            self.pipeline = pipeline
            self.queue.goes_through(pipeline)

    @property
    def is_follower(self) -> bool:
        """Another stage of its pipeline group is called: it is never a candidate itself."""
        return not self.info.is_called

    @property
    def heard_at_s(self) -> float:
        """When the stage was heard that was silent for longest."""
        return min(stage.reported_at_s for stage in self.stages)

    @property
    def is_away(self) -> bool:
        return any(stage.is_draining or stage.is_unreached for stage in self.stages)

    @property
    def last_failed_s(self) -> float:
        """When a call to one of its stages failed; minus infinity: none did."""
        failures_s = (stage.failed_at_s for stage in self.stages)
        return max((at_s for at_s in failures_s if at_s is not None), default=-math.inf)

    def on_report(self, report: WorkerReport, now_s: float, config: ConductorConfig) -> None:
        self.reported_at_s = now_s
        self.is_draining = report.is_draining
        if self.failed_at_s is not None and now_s > self.failed_at_s + config.report_lag_s:
            self.failed_at_s = None
        if self.is_follower:
            return  # what its group has to do, stage 0 says
        if self.info.role == "prefill":
            requests = max(report.queue_requests, report.running)  # the queue's head runs
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
        """Learn from a prefill. Prompts that shared steps each say the seconds of all of them, so
        time that those accounted for which ended meanwhile does not count again. A prompt that was
        overtaken between two chunks keeps all but their time. `fill_s`: what a pipeline group needs
        on top, but for a prompt right behind another one, whose own hides it."""
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
