"""A decode worker: the real batching; a GPU model gives the time of a step.

The node follows backends/workers/decode_worker.py. Pages are reserved when the first layers of a
prompt are announced, and the KV is read while prefill continues. A request whose KV is complete
joins the batch at the next step. Consecutive steps of the same batch are computed at once, as one
plan. An arrival cuts the plan after the step under way. So the result equals that of single steps,
to the last bit (tested).

Not here: the rule of the admission re-check (conductor/admission/arrival_check.py), retries
(fleet.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backends.engine.batching.batching import DecodeBatching
from backends.workers.step_times import StepTimes
from conductor.admission.arrival_check import BatchOnArrival, refusal
from conductor.estimates.estimates import DecodeEstimate
from loadtest.simulator.cluster.job import STOPPED, SimulatedJob
from loadtest.simulator.cluster.site import SimulatedSite, SimulatedWorker
from loadtest.simulator.cluster.steps import Jitter, Seconds, StepLog, longest_tenth_s
from mooncake_store.records.membership import WorkerReport

NO_STEPS: Seconds = np.zeros(0)


@dataclass(slots=True, eq=False)
class DecodeArrival:
    """One request that this worker expects, from its first layer to its last token."""

    job: SimulatedJob
    prefill_node: str
    paced_s: float  # expected seconds of its prefill
    sent_s: float = 0.0  # when it got pages and its KV began to be sent
    is_here: bool = False  # the transfer of its KV has ended
    is_asked: bool = False  # the request itself has arrived
    is_ready: bool = False
    first_step: int = -1


class DecodeNode(SimulatedWorker):
    """`on_end`: called when a job has all its tokens."""

    def __init__(
        self,
        worker_id: str,
        node_id: str,
        site: SimulatedSite,
        jitter: Jitter,
        estimate: DecodeEstimate,
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        super().__init__(worker_id, node_id, site, jitter)
        self._on_end = on_end
        self._estimate = estimate  # measured by the worker at its start
        settings = site.settings
        self._batching = DecodeBatching(
            self._pool, settings.block_tokens, settings.decode_slots, settings.waiting_max
        )
        self._arrivals: dict[str, DecodeArrival] = {}
        self._ready: list[DecodeArrival] = []  # they join the batch at the next step
        self._running: dict[str, DecodeArrival] = {}
        self._tokens_at_end: dict[str, int] = {}  # of the running requests
        # measured seconds, and the worker's own estimates
        self._log, self._estimates = StepLog(), StepLog()
        self._base = 0  # steps before the plan
        self._ends_s: Seconds = NO_STEPS  # when each step of the plan ends
        self._plan = 0
        self._times, self._steps_known = StepTimes(), 0
        self._stopped: dict[str, None] = {}  # running requests that leave with the current step
        self._computes = False  # as reported to `cores`
        site.cores.on_pace.append(self._cut_plan)

    # -- receiving KV

    def expect(self, job: SimulatedJob, prefill_node: str, paced_s: float) -> None:
        """The first layers of this prompt were announced."""
        tokens_max = job.prompt_tokens + job.request.output_tokens_max
        if self.is_dead or not self._batching.add(job.request_id, 1, tokens_max - 1):
            return
        self._arrivals[job.request_id] = DecodeArrival(job, prefill_node, paced_s)
        self._admit()

    def submit(self, job: SimulatedJob, tbt_slo_s: float) -> bool:
        """The request and its first token arrived. False: refused. `tbt_slo_s` 0: no limit."""
        job.refused = self.refusal(job, tbt_slo_s)
        if job.refused:
            self.forget(job.request_id)
            return False
        arrival = self._arrivals[job.request_id]
        arrival.is_asked = True
        self._check_ready(arrival)
        return True

    def refusal(self, job: SimulatedJob, tbt_slo_s: float) -> str:
        """The admission re-check of an arriving request: the kind of the refusal, or ""."""
        if job.request_id not in self._arrivals:
            return "decode_queue_full"
        if not tbt_slo_s:
            return ""
        done, batching = self._steps_done(), self._batching
        running_context = batching.context_tokens + done * batching.running
        waiting = [a.job for a in self._arrivals.values() if a.is_asked and a.first_step < 0]
        left = [
            arrival.job.request.output_tokens_max - (self._end_of(done) - arrival.first_step)
            for arrival in self._running.values()
        ]
        there = BatchOnArrival(
            running_context + sum(other.prompt_tokens for other in waiting),
            [*left, *(other.request.output_tokens_max for other in waiting)],
            self._step_times(self._end_of(done)).speed,
        )
        refused = refusal(there, job.prompt_tokens, self._estimate, tbt_slo_s)
        return refused.kind if refused is not None else ""

    def forget(self, request_id: str) -> None:
        """Free the slot of a request that was cancelled or ended with its first token."""
        if self._arrivals.pop(request_id, None) is not None:
            self._pool_release(request_id)

    def stop(self, request_id: str) -> None:
        """Cancel a request: it leaves at once, or with the step that computes it."""
        arrival = self._arrivals.get(request_id)
        if arrival is None:
            return
        if request_id in self._running:
            self._stopped[request_id] = None
            self._cut_plan()
            return
        if arrival in self._ready:
            self._ready.remove(arrival)
        self.forget(request_id)
        self._end_stopped(arrival)

    def _end_stopped(self, arrival: DecodeArrival) -> None:
        if arrival.is_asked:
            arrival.job.refused = STOPPED
            self._on_end(arrival.job)

    def expects(self, request_id: str) -> bool:
        return request_id in self._arrivals

    @property
    def jobs(self) -> list[SimulatedJob]:
        return [arrival.job for arrival in self._arrivals.values()]

    def decoded_tokens(self, request_id: str) -> int:
        """Tokens generated here until now, without the prefill's first token."""
        arrival = self._running.get(request_id)
        if arrival is None:
            return 0
        return self._end_of(self._steps_done()) - arrival.first_step

    def _admit(self) -> None:
        site = self._site
        for admitted in self._batching.admit():
            arrival = self._arrivals[admitted.request_id]
            arrival.sent_s = site.clock.now_s
            size_bytes = arrival.job.prompt_tokens * site.gpu.token_bytes
            is_computed = arrival.job.prefilled_s is not None
            paced_s = 0.0 if is_computed else arrival.paced_s
            if arrival.prefill_node == self.node_id:
                site.clock.after(paced_s, self._sent, arrival)
                continue
            site.network.send(
                arrival.prefill_node,
                self.node_id,
                size_bytes,
                lambda arrival=arrival: self._sent(arrival),
                paced_s,  # type: ignore[misc]
            )

    def _sent(self, arrival: DecodeArrival) -> None:
        arrival.is_here = True
        self._check_ready(arrival)

    def _check_ready(self, arrival: DecodeArrival) -> None:
        """Start the hand-over once the request and its KV have both arrived."""
        if arrival.is_asked and arrival.is_here and not arrival.is_ready:
            arrival.is_ready = True
            # After all other actions of this moment, such as the next prefill step.
            self._site.clock.after(0.0, self._hand_over, arrival)

    def _hand_over(self, arrival: DecodeArrival) -> None:
        site, settings = self._site, self._site.settings
        gap_s = settings.handover_s + settings.handover_beside_s * site.cores.computing(
            "prefill", "decode"
        )
        site.clock.after(site.network.latency_s + gap_s, self._join, arrival)

    def _join(self, arrival: DecodeArrival) -> None:
        if self._arrivals.get(arrival.job.request_id) is not arrival or self.is_dead:
            return  # it was cancelled, or the worker died
        job = arrival.job
        assert job.prefilled_s is not None
        # From the first token, or from when decode had room, until the KV is complete.
        handover_s = self._site.clock.now_s - max(job.prefilled_s, arrival.sent_s)
        job.first_token_s = job.prefilled_s + handover_s
        self._site.store.release(job.request_id)
        self._ready.append(arrival)
        if len(self._ends_s):
            self._cut_plan()
        else:
            self._make_plan()

    # -- computing tokens

    def _make_plan(self) -> None:
        """Between two steps: add the ready requests, then plan steps until the batch changes."""
        now_s, batching = self._site.clock.now_s, self._batching
        for arrival in self._ready:
            job = arrival.job
            arrival.first_step, job.joined_s = self._log.steps, now_s
            batching.start(job.request_id, job.prompt_tokens + 1)
            self._running[job.request_id] = arrival
            self._tokens_at_end[job.request_id] = job.prompt_tokens + job.output_tokens
        self._ready.clear()
        steps = batching.steps_alike(self._tokens_at_end)
        if self._computes != bool(steps):
            self._computes = bool(steps)
            self._site.cores.compute("decode", self._computes)
        if not steps:
            self._ends_s = NO_STEPS
            self._step_times(self._log.steps).batch_is_empty()
            return
        steps = min(steps, self._site.settings.steps_at_once or steps)
        self._base = self._log.steps
        context = batching.context_tokens + batching.running * np.arange(float(steps))
        slowness = self.slowness * self._site.cores.factor("decode")
        factors = slowness * self._jitter.factors(self._base, steps)
        seconds = factors * self._site.gpu.decode_s(batching.running, context)
        self._log.append(seconds)
        base_s = self._estimate.step_s(batching.running, 0.0)
        self._estimates.append(base_s + self._estimate.per_context_token_s * context)
        self._ends_s = np.cumsum(np.concatenate(([now_s], seconds)))[1:]
        self._plan += 1
        self._site.clock.at(float(self._ends_s[-1]), self._planned, self._plan)

    def _cut_plan(self) -> None:
        """A request waits, or the pace changes: the step under way is the last of the plan."""
        steps = self._steps_done() + 1
        if steps >= len(self._ends_s):
            return
        self._ends_s = self._ends_s[:steps]
        self._log.cut(self._base + steps)
        self._estimates.cut(self._base + steps)
        self._plan += 1
        self._site.clock.at(float(self._ends_s[-1]), self._planned, self._plan)

    def _steps_done(self) -> int:
        return int(np.searchsorted(self._ends_s, self._site.clock.now_s, side="right"))

    def _planned(self, plan: int) -> None:
        if plan != self._plan or self.is_dead:
            return  # it was cut
        self._batching.advance(len(self._ends_s))
        self.busy_s += float(self._log.slice(self._base, self._log.steps).sum())
        ended = [
            arrival
            for name, arrival in self._running.items()
            if arrival.first_step + arrival.job.output_tokens - 1 == self._log.steps
        ]
        self._ends_s = NO_STEPS
        for arrival in ended:
            self._finish(arrival)
        if self._stopped:
            self._leave_stopped()
        self._make_plan()

    def _leave_stopped(self) -> None:
        for name in [name for name in self._stopped if name in self._running]:
            arrival = self._arrivals.pop(name)
            del self._running[name], self._tokens_at_end[name]
            self._pool_release(name)
            self._end_stopped(arrival)
        self._stopped.clear()

    def _finish(self, arrival: DecodeArrival) -> None:
        job, name = arrival.job, arrival.job.request_id
        assert job.joined_s is not None and job.prefilled_s is not None
        seconds = self._log.slice(arrival.first_step, self._log.steps)
        intervals = seconds.copy()
        intervals[0] += job.joined_s - job.prefilled_s  # from the first token to the second
        job.tbt_s, job.tbt_decode_s = longest_tenth_s(intervals), longest_tenth_s(seconds)
        job.finished_s = self._site.clock.now_s
        del self._running[name], self._tokens_at_end[name], self._arrivals[name]
        self._pool_release(name)
        self._on_end(job)

    def _pool_release(self, request_id: str) -> None:
        pages = self._batching.remove(request_id)
        if pages:
            self._pool.release(pages)
        self._admit()

    # -- reports

    @property
    def step_s(self) -> float:
        """The model's estimate of the current batch's step."""
        batching = self._batching
        if not batching.running:
            return 0.0
        return float(self._site.gpu.decode_s(batching.running, float(batching.context_tokens)))

    def report(self) -> WorkerReport:
        batching, done = self._batching, self._steps_done()
        context_tokens = batching.context_tokens + done * batching.running
        asked = sum(arrival.is_asked for arrival in self._arrivals.values())
        speed = self._step_times(self._end_of(done)).speed
        step_s = speed * self._estimate.step_s(batching.running, context_tokens)
        return WorkerReport(
            self.worker_id,
            self.incarnation,
            asked - batching.running,
            0,
            batching.running,
            self._pool.used_pages,
            context_tokens,
            step_s,
            self.is_draining,
        )

    def _end_of(self, done: int) -> int:
        return self._base + done if len(self._ends_s) else self._log.steps

    def _step_times(self, steps: int) -> StepTimes:
        known = self._steps_known
        if steps != known:
            measured_s, estimated_s = self._log.slice(known, steps), self._estimates
            self._times.took_many(measured_s.tolist(), estimated_s.slice(known, steps).tolist())
            self._steps_known = steps
        return self._times

    @property
    def is_idle(self) -> bool:
        return not self._arrivals

    def die(self) -> list[SimulatedJob]:
        """Kill the process; returns its jobs. Jobs in prefill learn of it later."""
        self.is_dead = True
        jobs = [arrival.job for arrival in self._arrivals.values() if arrival.is_asked]
        for known in (self._arrivals, self._running, self._tokens_at_end):
            known.clear()
        self._ready.clear()
        return jobs

    def check(self) -> None:
        """Prove the invariants; of an idle worker, that nothing stayed behind."""
        self._batching.check()
        self._pool.check()
        assert self._running.keys() == self._tokens_at_end.keys() <= self._arrivals.keys()
        if not self._arrivals and not self.is_dead:
            left = (self._pool.used_pages, self._batching.admitted, self._batching.waiting)
            assert left == (0, 0, 0), f"{self.worker_id} kept pages or requests: {left}"
