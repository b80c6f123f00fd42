"""The frontend: admits requests and holds the services that all its requests share.

Blocking work of a request (tokenising, deciding, calling a worker) runs in a bounded pool of
threads. The Conductor (cluster_view.py) makes the routing decisions. A fleet may have several
frontends, because they report their routing decisions to each other (routing_notes.py).

Not here: Triton's API (triton_io.py), the course of a request (live_request.py).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from backends.config_pbtxt import FrontendConfig
from backends.errors import Forbidden, Overloaded, ServingError, WorkerUnavailable
from backends.frontend.answer import AnswerGroup, ReplyStream, described
from backends.frontend.cluster_view import ClusterView
from backends.frontend.decisions.fields import overview
from backends.frontend.grpc_calls import GrpcCalls
from backends.frontend.lifecycle.events import Unwanted, WorkerLost
from backends.frontend.live_request import LiveRequest, Services
from backends.frontend.live_requests import LiveRequests, TenantCap
from backends.frontend.request import answers_wanted
from backends.frontend.request_times import RequestTimes, end_of_span, outcome_of
from backends.frontend.token_streams import TokenStreams
from backends.frontend.traffic_recorder import TrafficRecorder
from backends.frontend.unreached_workers import UnreachedWorkers
from backends.launch_secret import secret_of_launch
from backends.metrics.page import Observations
from backends.tenants.api_keys import ApiKeys
from backends.tenants.principal import Principal, check_is_gateway, principal_of
from backends.tenants.tenant_labels import TenantLabels
from backends.tensors import CHARGE, CLUSTER
from backends.text.tokenizer import Tokenizer
from backends.tracing.export import Tracing, begin_trace
from backends.tracing.request_spans import Attribute
from backends.tracing.request_trace import RequestTrace
from backends.workers.protocol import TakeRole, WorkerOutbox
from conductor.messages import RoleFlip

log = logging.getLogger(__name__)
FAIL_S_MAX = 2.0  # longest wait in `close` for the end of requests that `close` failed, in seconds
# Answers a call whose parameter `describe` has a certain value: request parameters -> facts.
Verb = Callable[[dict[str, Any]], dict[str, object]]


class Frontend:
    """Serves requests until it is closed. `observations` has values for the metrics page."""

    def __init__(
        self,
        config: FrontendConfig,
        tokenizer: Tokenizer,
        cluster: ClusterView,
        calls: GrpcCalls,
        streams: TokenStreams,
        outbox: WorkerOutbox,
        recorder: TrafficRecorder | None = None,
        keys: ApiKeys | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._keys, self._secret = keys, secret_of_launch()
        self.labels = TenantLabels()
        self.cluster = cluster
        self._calls = calls
        self.recorder = recorder
        self.tracing = tracing
        # requests_max threads serve requests, and requests_max threads wait for abandoned calls.
        self._pool = ThreadPoolExecutor(2 * config.requests_max, thread_name_prefix="request")
        self._abandoned: dict[str, tuple[str, str]] = {}  # id of an abandoned call -> worker
        self._abandoning = threading.Lock()  # guards _abandoned
        self._running: set[Future[None]] = set()
        self._cap = TenantCap(config.requests_max, config.tenant_requests_share)
        self._entering = threading.Lock()
        self.observations = Observations()
        self.live = LiveRequests(config.cancel_poll_s)
        self.unreached = UnreachedWorkers(cluster, calls.probe)
        self._services = Services(
            config=config,
            tokenizer=tokenizer,
            cluster=cluster,
            calls=calls,
            streams=streams,
            outbox=outbox,
            unreached=self.unreached,
            start=self._start,
            abandon=self._abandon,
            on_end=self._ended,
        )
        cluster.on_worker_down = self._worker_down
        self._verbs: dict[str, Verb] = {CLUSTER: self._cluster, CHARGE: self._charge}
        cluster.on_flip = self._send_flip
        cluster.held = self.live.held_ids

    def submit(
        self, inputs: dict[str, np.ndarray], parameters: dict[str, Any], client: ReplyStream
    ) -> None:
        if (verb := self._verbs.get(str(parameters.get("describe")))) is not None:
            self._start(self._answer, verb, parameters, client)
            return
        now_s = time.monotonic()
        answers = answers_wanted(inputs, parameters)
        times = [RequestTimes(self.observations, now_s) for _ in range(answers)]
        traces = [begin_trace(self.tracing, parameters, now_s) for _ in range(answers)]
        requests: list[LiveRequest] = []  # the first of them shares its prefill with the others
        refused: ServingError | None = None
        try:
            principal = principal_of(parameters, self._keys, self._secret, time.time())
        except Forbidden as error:
            refused = error
        else:
            clients = AnswerGroup(client, answers).streams if answers > 1 else [client]
            of_answers = list(zip(clients, times, traces, strict=True))
            copies = [self._live_request(*each, now_s, principal) for each in of_answers[1:]]
            first = self._live_request(*of_answers[0], now_s, principal, copies)
            requests = [first, *copies]
            with self._entering:
                for each in times:
                    each.tenant = self.labels.of(principal)
                refused = self._no_room(principal, answers, now_s)
                for request in requests if refused is None else ():
                    self.live.add(request)
        if refused is not None:
            attributes: dict[str, Attribute] = {"mooncake.outcome": outcome_of(refused)}
            for each, trace in zip(times, traces, strict=True):
                each.ended(refused, now_s)
                trace.ended(end_of_span(refused), now_s, 0.0, attributes)
            client.fail(refused)
            return
        requests[0].start(inputs, parameters)

    def _live_request(
        self,
        client: ReplyStream,
        times: RequestTimes,
        trace: RequestTrace,
        now_s: float,
        principal: Principal,
        copies: Sequence[LiveRequest] = (),
    ) -> LiveRequest:
        request_id = uuid.uuid4().hex
        return LiveRequest(
            self._services, request_id, client, times, now_s, principal, trace, copies
        )

    def _no_room(self, principal: Principal, answers: int, now_s: float) -> Overloaded | None:
        """The rejection of a request for several answers, each of which counts; None: none."""
        in_flight = self.live.of_tenants()
        own = in_flight.get(principal.tenant, 0)
        if (used_up := self._used_up(principal, own, answers)) is not None:
            return used_up
        for more in range(answers):
            counted = {**in_flight, principal.tenant: own + more}
            kind, reason = self._cap.rejection(principal.tenant, counted, now_s)
            if kind:
                return Overloaded(kind, reason, 1.0)
        return None

    def _used_up(
        self, principal: Principal, in_flight: int | None, answers: int = 1
    ) -> Overloaded | None:
        """The rejection by the tenant's limits that apply before the prompt is parsed, or None."""
        if principal.limits is None:
            return None
        found = self.cluster.arrived(principal.tenant, principal.limits, in_flight, answers)
        return found and Overloaded(found.kind, found.reason, found.retry_after_s)

    def _answer(self, verb: Verb, parameters: dict[str, Any], client: ReplyStream) -> None:
        """Answer a call whose parameter `describe` is in `_verbs`. It counts as no request."""
        try:
            client.send(described(verb(parameters), client.outputs), is_final=True)
        except Exception as error:  # Catch all: the pool would drop the exception
            client.fail(error)

    def _charge(self, parameters: dict[str, Any]) -> dict[str, object]:
        """Charge one request to a tenant, because the gateway tokenises a text for it."""
        principal = principal_of(parameters, self._keys, self._secret, time.time())
        if (refused := self._used_up(principal, None)) is not None:
            raise refused
        if principal.limits is not None:
            self.cluster.charged(principal.tenant)
        return {}

    def _cluster(self, parameters: dict[str, Any]) -> dict[str, object]:
        check_is_gateway(parameters, self._keys, self._secret, time.time())
        return overview(self.cluster.reading(), self.cluster.config)

    def requests_of_tenants(self) -> dict[str, int]:
        """Tenant label -> requests in flight; empty without API keys."""
        if self._keys is None:
            return {}
        with self._entering:
            return self.labels.sums(self.live.of_tenants())

    def _ended(self, request: LiveRequest) -> None:
        self.live.discard(request)
        if self.recorder is not None and (ended := request.ended()) is not None:
            self.recorder.note(ended)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work` in a thread of the pool; `close` waits for it."""
        future = self._pool.submit(work, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for requests to end, then fail the other requests. Each client
        gets an answer or an error, and workers get a Stop before this process exits."""
        self._wait_idle(timeout_s)
        for request in self.live.all():
            request.post(Unwanted(WorkerUnavailable("the frontend is shutting down")))
        self._wait_idle(FAIL_S_MAX)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.live.close()
        self.unreached.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.tracing is not None:
            self.tracing.close()

    def _wait_idle(self, timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        self.live.wait_until_empty(timeout_s)
        wait(list(self._running), timeout=max(give_up_s - time.monotonic(), 0.0))

    def _worker_down(self, worker_id: str, incarnation: str, seen_s: float) -> None:
        """Post WorkerLost to every request, and cancel abandoned calls to this worker."""
        self._calls.keep(self.cluster.grpc_addresses())
        lost = WorkerLost((worker_id, incarnation), seen_s, time.monotonic())
        for request in self.live.all():
            request.post(lost)
        with self._abandoning:
            left = [name for name, worker in self._abandoned.items() if worker == lost.worker]
            for request_id in left:
                del self._abandoned[request_id]
        for request_id in left:
            self._calls.cancel(request_id)

    def _send_flip(self, flip: RoleFlip) -> None:
        worker = flip.worker
        self._services.outbox.send(worker.inbox, TakeRole(flip.role, worker.incarnation))

    def _abandon(self, request_id: str, worker: tuple[str, str]) -> None:
        with self._abandoning:
            self._abandoned[request_id] = worker
            if len(self._abandoned) > self._config.requests_max:  # the oldest has probably ended
                del self._abandoned[next(iter(self._abandoned))]
