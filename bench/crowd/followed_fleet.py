"""A simulated fleet with failing processes, whose requests use the frontend's real state machine.

Directory, Conductor, workers and network are those of SimulatedFleet. The state machine of the real
frontend (backends/frontend/lifecycle) decides about a request: every failed call, lost worker and
timeout is an event to it, and its actions are carried out. A fault affects a process at its time:

    kill     it ends. Its open calls fail at once, later calls find no process; the directory misses
             its reports after the TTL. It is not restarted
    freeze   nothing happens in it for a while. Its calls stay open; the directory misses it if the
             freeze is longer than the TTL. Then it continues, registers again, and answers calls
             that the frontend has given up
    reload   a new process of the same name takes new calls; the old one ends its calls and exits

Storage nodes are processes of their own and stay. Each client has a timeout: when it has passed the
frontend stops the request at its workers, and the request ends with their call.

Not here: choosing the failing processes (bench/paper/experiments/crowd.py), a request
(followed_request.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from backends.config_pbtxt import FrontendConfig
from backends.errors import Cancelled, Overloaded, ServingError, WorkerUnavailable, WorkerUnreached
from backends.frontend.lifecycle import events
from backends.frontend.lifecycle.attempts import Attempts
from backends.frontend.lifecycle.events import LifecycleAction
from bench.crowd.followed_request import FollowedRequest
from bench.crowd.process import ProcessClock, site_of_process
from conductor import ConductorConfig
from conductor.messages import Reject
from loadtest.simulator.cluster.decode_node import DecodeNode
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import GpuModel
from loadtest.simulator.cluster.job import STOPPED, Offered, SimulatedJob
from loadtest.simulator.cluster.prefill_node import PrefillNode
from loadtest.simulator.cluster.site import ClusterSettings, SimulatedSite
from mooncake_store.records.events import Event, WorkerDown
from mooncake_store.records.membership import WorkerInfo

CALL_S = 0.001  # latency of a call or a message
Kind = Literal["kill", "freeze", "reload"]
Node = PrefillNode | DecodeNode
WorkerKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Breakage:
    at_s: float
    worker_id: str
    kind: Kind
    seconds: float = 0.0  # of a freeze


@dataclass(slots=True, eq=False)
class BreakableProcess:
    node: Node
    clock: ProcessClock
    info: WorkerInfo
    last_report_s: float = 0.0
    is_leaving: bool = False  # a new process of its name takes new calls

    @property
    def key(self) -> WorkerKey:
        return self.node.worker_id, self.node.incarnation

    @property
    def speaks(self) -> bool:
        return not (self.node.is_dead or self.clock.is_frozen)


class FollowedFleet(SimulatedFleet):
    """`give_up_s`: a request that has not ended by then is hung."""

    def __init__(
        self,
        config: ConductorConfig,
        settings: ClusterSettings,
        gpu: GpuModel,
        breakages: Sequence[Breakage] = (),
        timeout_s: float = math.inf,
        give_up_s: float = 1e6,
    ) -> None:
        self._clocks: dict[str, ProcessClock] = {}
        self.requests: dict[int, FollowedRequest] = {}
        self.processes: dict[WorkerKey, BreakableProcess] = {}
        self._decoding: dict[str, WorkerKey] = {}  # the process with the call of an attempt
        self._timeout_s, self._give_up_s = timeout_s, give_up_s
        self._counted_max = FrontendConfig(checkpoint="demo").attempts_max
        super().__init__(config, settings, gpu)
        infos = {info.worker_id: info for info in self.site.store.directory.workers(0.0)}
        for node in super()._workers:
            name = node.worker_id
            process = BreakableProcess(node, self._clocks[name], infos[name])
            self.processes[process.key] = process
        self._newest = {key[0]: process for key, process in self.processes.items()}
        for breakage in breakages:
            assert breakage.worker_id in self._newest, breakage
            self.clock.at(breakage.at_s, self._break, breakage)

    def _site_of(self, worker_id: str) -> SimulatedSite:
        site = site_of_process(self.site)
        assert isinstance(site.clock, ProcessClock)
        self._clocks[worker_id] = site.clock
        return site

    # -- arrivals, and the actions of the state machine

    def _arrive(self, came: Sequence[Offered]) -> None:
        now_s = self.clock.now_s
        for one in came:
            attempts = Attempts(
                self._counted_max, now_s, self.config.request_s_max, self._timeout_s
            )
            tokens_max = max(self._max_tokens, one.output_tokens)
            request = FollowedRequest(one, tokens_max, attempts, self.carry_out, now_s)
            self.requests[one.number] = request
            if self._timeout_s < math.inf:
                self.clock.after(self._timeout_s, self._time_out, request)

    def _time_out(self, request: FollowedRequest) -> None:
        if not request.is_over:
            limit = f"its timeout of {self._timeout_s * 1000:.0f} ms has passed"
            request.post(events.Unwanted(WorkerUnavailable(limit)))

    def carry_out(self, request: FollowedRequest, action: LifecycleAction) -> None:
        now_s = self.clock.now_s
        match action:
            case events.Pause():
                self.clock.after(action.seconds, self._end_pause, request)
            case events.Decide():
                self._decide_on(request, action)
            case events.CallPrefill():
                job = request.attempts[action.attempt]
                self._call(request, job, job.prefill, self._submit_there)
            case events.CallDecode():
                job = request.attempts[action.attempt]
                self._call(request, job, job.decode, self._decode_there)
            case events.NoteLoss():
                request.losses[action.loss.name] += 1
            case events.NotePrefill():
                job = request.attempts[action.attempt]
                self._of(job).on_prefill_finished(
                    job.request_id, now_s, job.cached_tokens, job.compute_s
                )
            case events.NoteFailed():
                self.conductor.on_worker_failed(*action.worker, now_s)
            case events.NoteUnreached():
                self.conductor.on_worker_reached(*action.worker, False, now_s)
            case events.NoteRefused():
                self.conductor.on_worker_refused(*action.worker, now_s)
            case events.StopWorkers():
                self._stop_workers(request.attempts[action.attempt])
            case events.CancelCall():
                job = request.attempts[action.attempt]
                self._fail(request, job, Cancelled("its worker is gone"))
            case events.ReleaseKv():
                self.site.store.release(request.attempts[action.attempt].request_id)
            case events.EndAttempt():
                job = request.attempts[action.attempt]
                self._of(job).on_finished(job.request_id, now_s, action.output_tokens)
            case events.End():
                request.ended(action.error, now_s)
                self._count_over()
            case events.Send() | events.AbandonCall():
                pass  # no client reads the messages, and only its worker ends an abandoned call
            case _:
                raise AssertionError(f"an unknown action: {action}")

    def _end_pause(self, request: FollowedRequest) -> None:
        request.post(events.PauseOver(self.clock.now_s))

    def _decide_on(self, request: FollowedRequest, action: events.Decide) -> None:
        now_s = self.clock.now_s
        job = request.new_attempt(action, now_s)
        decision = self._of(job).on_request(job.request, now_s)
        if isinstance(decision, Reject):
            error = Overloaded(decision.kind, decision.reason, decision.retry_after_s)
            request.post(events.NotRouted(action.attempt, error, now_s))
            return
        job.route = decision
        prefill, decode = decision.prefill, decision.decode
        job.prefill, job.decode = prefill.worker_id, decode.worker_id
        request.post(
            events.Routed(
                action.attempt,
                (prefill.worker_id, prefill.incarnation),
                (decode.worker_id, decode.incarnation),
                now_s,
            )
        )

    def _stop_workers(self, job: SimulatedJob) -> None:
        """Stop the request at every process of the two names."""
        for process in list(self.processes.values()):
            if process.node.worker_id in (job.prefill, job.decode):
                stop = process.node.stop
                self.clock.after(CALL_S, process.clock.reach, stop, job.request_id)

    # -- calls and their results

    def _call(
        self,
        request: FollowedRequest,
        job: SimulatedJob,
        worker_id: str,
        there: Callable[[BreakableProcess, SimulatedJob], None],
    ) -> None:
        """The current process of that name receives the call, even if another one was routed to."""

        def arrives() -> None:
            process = self._newest[worker_id]
            if process.node.is_dead:
                self._fail(request, job, WorkerUnreached(f"{worker_id}: failed to connect"))
            else:
                process.clock.reach(there, process, job)

        self.clock.after(CALL_S, arrives)

    def _fail(self, request: FollowedRequest, job: SimulatedJob, error: ServingError) -> None:
        self.clock.after(CALL_S, lambda: request.failed(job, error, self.clock.now_s))

    def _submit_there(self, process: BreakableProcess, job: SimulatedJob) -> None:
        assert isinstance(process.node, PrefillNode) and job.route is not None
        process.node.submit(job, job.route.order_key_s)

    def _decode_there(self, process: BreakableProcess, job: SimulatedJob) -> None:
        node, request = process.node, self.requests[job.number]
        assert isinstance(node, DecodeNode) and job.route is not None
        self._decoding[job.request_id] = process.key
        if not node.expects(job.request_id):  # another process received its layers
            node.expect(job, job.route.prefill.node_id, 0.0)
        if not node.submit(job, self.config.arrival_tbt_slo_s(job.route.limits)):
            self._fail(request, job, Overloaded(job.refused, "this worker is full", 1.0))

    def _begun(self, job: SimulatedJob) -> None:
        if self._newest[job.decode].speaks:  # a message: no sender waits for it
            super()._begun(job)

    def _prefilled(self, job: SimulatedJob) -> None:
        request, now_s = self.requests[job.number], self.clock.now_s
        if job.refused:
            self._fail(request, job, _error_of(job))
        else:
            request.prefilled(job, now_s)

    def _over(self, job: SimulatedJob) -> None:
        """A decode worker has generated all tokens, or was stopped."""
        request = self.requests[job.number]
        if job.refused:
            self._fail(request, job, _error_of(job))
        else:
            request.replied(job, self._decoding[job.request_id], self.clock.now_s)

    # -- faults of processes

    def _break(self, breakage: Breakage) -> None:
        process = self._newest[breakage.worker_id]
        if process.node.is_dead or process.clock.is_frozen:
            return
        if breakage.kind == "kill":
            self._kill(process)
        elif breakage.kind == "freeze":
            self._bring_tokens(process)
            process.clock.is_frozen = True
            self.clock.after(breakage.seconds, self._thaw, process)
        else:
            self._reload(process)

    def _bring_tokens(self, process: BreakableProcess) -> None:
        """Deliver the tokens that the process has sent so far to the frontend."""
        if isinstance(process.node, DecodeNode):
            for job in process.node.jobs:
                tokens = process.node.decoded_tokens(job.request_id)
                request = self.requests[job.number]
                request.decoded(job, process.key, tokens, self.clock.now_s)

    def _kill(self, process: BreakableProcess) -> None:
        self._bring_tokens(process)
        for job in process.node.die():
            self._fail(self.requests[job.number], job, WorkerUnavailable("the call was closed"))

    def _thaw(self, process: BreakableProcess) -> None:
        """A process that the directory has dropped registers again before it does anything else."""
        self.site.store.add_worker(process.info)
        process.clock.thaw()

    def _reload(self, old: BreakableProcess) -> None:
        name, role = old.node.worker_id, old.info.role
        self._add_worker(name, old.node.node_id, role, incarnation_after(old.node.incarnation))
        node = self.prefills[name] if role == "prefill" else self.decodes[name]
        process = BreakableProcess(
            node, self._clocks[name], self._info(node, role), self.clock.now_s
        )
        self.processes[process.key] = self._newest[name] = process
        old.is_leaving = True

    # -- periodic actions

    @property
    def _workers(self) -> list[Node]:
        """Workers of all processes, including those of a former incarnation."""
        return [process.node for process in self.processes.values()]

    def _speaks(self, worker: Node) -> bool:
        process = self.processes[worker.worker_id, worker.incarnation]
        if process.speaks:
            process.last_report_s = self.clock.now_s
        return process.speaks

    def _report(self) -> None:
        super()._report()
        for process in [each for each in self.processes.values() if each.is_leaving]:
            if process.speaks and process.node.is_idle:
                process.is_leaving = False
                self.site.store.remove_worker(*process.key)

    def _on_events(self, events_: Sequence[Event]) -> None:
        super()._on_events(events_)
        for event in events_:
            if isinstance(event, WorkerDown):
                self._lost_worker((event.worker_id, event.incarnation))

    def _lost_worker(self, key: WorkerKey) -> None:
        heard_s = self.processes[key].last_report_s
        for request in self.requests.values():
            if not request.is_over:
                request.post(events.WorkerLost(key, heard_s, self.clock.now_s))

    def _goes_on(self) -> bool:
        return super()._goes_on() and self.clock.now_s < self._give_up_s

    @property
    def hung(self) -> list[FollowedRequest]:
        return [request for request in self.requests.values() if not request.is_over]

    def check(self) -> None:
        """Assert that requests left nothing behind; a hung request leaves something."""
        if not self.hung:
            self.jobs = [request.summed_up() for request in self.requests.values()]
            super().check()


def incarnation_after(incarnation: str) -> str:
    """The incarnation of the next process of that name."""
    word = incarnation.rstrip("0123456789")
    return f"{word}{int(incarnation.removeprefix(word)) + 1}"


def _error_of(job: SimulatedJob) -> ServingError:
    if job.refused == STOPPED:
        return Cancelled("it was stopped")
    return Overloaded(job.refused, "a limit of this worker is reached", 1.0)
