"""One client request from arrival to answer: its mailbox, and the actions of its lifecycle.

Calls to workers, worker messages and the watches for lost clients and workers post events to one
mailbox. The thread that posts to an empty mailbox becomes the owner and handles events in order
until the mailbox is empty. Other threads append their event and return. So a token is not passed to
another thread before it is sent. The state machine (lifecycle/machine.py) returns the actions for
an event, and the owner carries them out. Actions that block (pause, decision, call, release) run in
the frontend's thread pool. Each of them, except a release, returns a further event.

Not here: which actions follow from an event (lifecycle/), the set of requests in flight
(live_requests.py), the tensors of answers (answer.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from backends.config_pbtxt import FrontendConfig
from backends.errors import (
    TIMEOUT_PASSED,
    Cancelled,
    InvalidRequest,
    Overloaded,
    ServingError,
    WorkerGone,
    WorkerUnavailable,
)
from backends.frontend import grpc_calls
from backends.frontend import request as client_request
from backends.frontend.answer import ReplyStream, StreamedAnswer, WholeAnswer, describe
from backends.frontend.assignment import Assignment, prefilled_copies
from backends.frontend.cluster_view import ClusterView, Served
from backends.frontend.decisions.fields import (
    decode_fields,
    prefill_fields,
    reject_fields,
    route_fields,
)
from backends.frontend.lifecycle import events
from backends.frontend.lifecycle.attempts import CALL_SILENCE_S_MAX, Attempts, is_silent
from backends.frontend.lifecycle.events import LifecycleAction, LifecycleEvent
from backends.frontend.lifecycle.machine import Phase, State, due_s, step
from backends.frontend.request import ClientRequest, RequestLimits
from backends.frontend.request_times import (
    RequestTimes,
    end_attributes,
    end_of_span,
    request_attributes,
)
from backends.frontend.token_streams import TokenStreams, delta_of, first_text
from backends.frontend.traffic_recorder import EndedRequest
from backends.frontend.unreached_workers import UnreachedWorkers
from backends.tenants.principal import Principal
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import NO_LOGPROBS
from backends.tracing.request_trace import RequestTrace
from backends.workers.protocol import DecodeReply, FirstToken, PrefillReply, Stop, WorkerOutbox
from conductor.messages import Reject, Request
from mooncake_store.block_keys import block_keys, chain_seed

log = logging.getLogger(__name__)
FULL_WORKERS_MAX = 2  # limit of retries of a new request after rejections by full workers
SERVED_WAIT_S = 2.0  # longest wait of a request for the first worker to register

Work = Callable[[], LifecycleEvent | None]  # may block; returns the next event, if there is one


@dataclass(frozen=True, slots=True)
class Services:
    """The frontend's services, shared by all of its requests."""

    config: FrontendConfig
    tokenizer: Tokenizer
    cluster: ClusterView
    calls: grpc_calls.GrpcCalls
    streams: TokenStreams
    outbox: WorkerOutbox
    unreached: UnreachedWorkers
    start: Callable[..., None]  # runs a function in a thread of the pool
    abandon: Callable[[str, tuple[str, str]], None]  # cancels the call once its worker is lost
    on_end: Callable[[LiveRequest], None]  # called once per request


class LiveRequest:
    """Any thread may `post` events. Only the handling of an event changes `state`."""

    def __init__(
        self,
        services: Services,
        request_id: str,
        client: ReplyStream,
        times: RequestTimes,
        arrived_s: float,
        principal: Principal,
        trace: RequestTrace,
        copies: Sequence[LiveRequest] = (),
    ) -> None:
        """`copies`: further answers to the same prompt. They begin after the prefill of this
        request, which samples a first token for each of them."""
        self.request_id = request_id  # made by the frontend, because clients' ids may repeat
        self._principal = principal
        self.tenant = principal.tenant
        self.state = State()
        self.times = times
        self.trace = trace
        self._in_log = {"request_id": request_id, "trace_id": trace.trace_id}
        self._services = services
        self._client = client
        self._arrived_s = arrived_s
        self._timeout_s = math.inf  # the client's timeout in seconds after the arrival
        self._is_timed_out = False  # True once the client's timeout has ended the request
        self._events: deque[LifecycleEvent] = deque()
        self._owned = threading.Lock()
        self._is_done = threading.Event()
        self._assignments: dict[int, Assignment] = {}
        self._sent_ids: list[int] = []  # answer tokens sent to the client
        self._counted_id = ""  # id of the attempt charged to the tenant's limits; "": none
        self._send_error: Exception | None = None
        self._request: ClientRequest | None = None  # None until parsed, as the next two fields
        self._served: Served | None = None
        self._answer: StreamedAnswer | WholeAnswer | None = None
        self._copies = list(copies)  # not begun yet
        self._given: tuple[int, PrefillReply] | None = None  # prefill of a copy, until it is routed

    # --- the mailbox

    def start(self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> None:
        self._services.start(self._run, partial(self._understand, inputs, parameters))

    def _begin(self, given: tuple[int, PrefillReply] | None) -> None:
        """Begin a copy. `given`: its first token and the reply of the shared prefill. None: it
        needs a prefill of its own, because the engine samples one token of a prompt."""
        self._given = given
        self.post(self._first_event(is_admitted=True))
        if self.state.phase is Phase.DONE and self._given is not None:  # it had ended before
            self._services.start(self._let_go, self._given)

    def post(self, event: LifecycleEvent) -> None:
        """Handle the event, or leave it to the owner. Only sending a message may block."""
        for work in self._handle(event):
            self._services.start(self._run, work)

    def _run(self, work: Work) -> None:
        """Do blocking work, then handle its outcome. Runs in a thread of the pool."""
        following: Work | None = work
        while following is not None:
            try:
                event = following()
            except Exception as error:  # Catch all: one bad request must not fail others
                event = events.Failed(error)
            works = self._handle(event) if event is not None else []
            following = works[0] if works else None
            for other in works[1:]:
                self._services.start(self._run, other)

    def _handle(self, event: LifecycleEvent) -> list[Work]:
        """Append the event. The owner handles all events, and returns blocking work to be run."""
        self._events.append(event)
        works: list[Work] = []
        while self._events and self._owned.acquire(blocking=False):
            try:
                while self._events:
                    self._step(self._events.popleft(), works)
            finally:
                self._owned.release()
        return works

    def _step(self, event: LifecycleEvent, works: list[Work]) -> None:
        try:
            self.state, actions = step(self.state, event)
        except Exception as error:  # Catch all: a bug ends one request, not the thread
            log.exception("request %s: %s failed", self.request_id, event, extra=self._in_log)
            self.state, actions = step(self.state, events.Failed(error))
        for action in actions:
            try:
                work = self._carry_out(action)
            except Exception as error:  # Catch all: the remaining actions are still carried out
                text = "request %s: %s failed: %s"
                log.warning(text, self.request_id, action, error, extra=self._in_log)
                self._events.append(events.Failed(error))
            else:
                if work is not None:
                    works.append(work)

    def look(self, now_s: float, awake_s: float) -> None:
        """Post events that are due. `awake_s`: seconds since the watch began or last stalled."""
        state = self.state
        if state.phase in (Phase.STOPPING, Phase.ENDING) or (due_s(state) or now_s) < now_s:
            self.post(events.TimePassed(now_s))
        if state.phase not in (Phase.STOPPING, Phase.DONE):
            if self._client.is_cancelled():
                self.post(events.Unwanted(Cancelled("the client disconnected")))
            elif now_s - self._arrived_s > self._timeout_s:
                limit = f"{TIMEOUT_PASSED} {self._timeout_s * 1000:.0f} ms has passed"
                self._is_timed_out = True
                self.post(events.Unwanted(WorkerUnavailable(limit)))
        worker = state.attempt.worker
        # After a stall of this process, heartbeats may be unread, so silence does not count yet.
        if worker is not None and awake_s > CALL_SILENCE_S_MAX:
            seen_s = self._services.streams.seen_s(self._id_of(state.attempt.number))
            if is_silent(now_s, seen_s):
                text = "%s sends no heartbeat for request %s"
                log.warning(text, worker[0], self.request_id, extra=self._in_log)
                self.post(events.WorkerSilent(worker, now_s))

    def held_ids(self) -> set[str]:
        """Ids of the open attempts, and of the attempt charged to the tenant's limits."""
        held = {assignment.request_id for assignment in list(self._assignments.values())}
        return held | {self._counted_id} if self._counted_id else held

    def ended(self) -> EndedRequest | None:
        """The request for a traffic recording; None if it is invalid or a `describe` request."""
        if self._request is None:
            return None
        return EndedRequest(
            arrived_s=self._arrived_s,
            prompt_ids=self._request.prompt_ids,
            output_tokens=len(self._sent_ids),
            cache_salt=self._request.cache_salt,
        )

    def first_token(self, attempt: int, message: FirstToken) -> None:
        """Post a first token that came by message. Called by the inbox's thread; never raises."""
        if (assignment := self._assignments.get(attempt)) is not None:
            try:
                first = self._first_text(assignment, message.token_id, message)
                self.post(events.FirstTokenArrived(attempt, first, time.monotonic()))
            except Exception as error:  # Catch all: messages of other requests are still read
                self.post(events.Failed(error))

    def _id_of(self, attempt: int) -> str:
        return f"{self.request_id}-{attempt}"

    # --- blocking work; each function returns the event that follows

    def _understand(
        self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]
    ) -> LifecycleEvent:
        services = self._services
        served = self._wait_served()
        limits = RequestLimits(
            context_tokens_max=served.context_tokens_max,
            vocabulary_tokens=services.tokenizer.vocabulary_tokens,
            output_tokens_default=services.config.output_tokens_default,
        )
        request = client_request.parse(inputs, parameters, services.tokenizer, limits)
        if self._principal.known is not None:
            wanted = request.priority if "request_priority" in parameters else None
            request = replace(
                request,
                cache_salt=self._principal.salt(request.cache_salt),
                priority=self._principal.priority(wanted),
            )
        if request.describe:
            causes = services.unreached.causes()
            described = describe(served, limits, causes, self._client.outputs)
            self._client.send(described, is_final=True)
            return events.Described()
        self._accept(request, served)
        for index, copy in enumerate(self._copies, 1):
            copy._accept(replace(request, sampling=request.sampling.of_answer(index)), served)
        return self._first_event()

    def _accept(self, request: ClientRequest, served: Served) -> None:
        self._request, self._served = request, served
        self._answer = (StreamedAnswer if request.is_stream else WholeAnswer)(request, self._client)
        self.times.is_stream = request.is_stream
        self.trace.read(time.monotonic(), request_attributes(request, self.request_id))
        if request.timeout_ms:
            self._timeout_s = request.timeout_ms / 1000

    def _first_event(self, is_admitted: bool = False) -> events.Understood:
        request, services = self._understood()[0], self._services
        attempts = Attempts(
            services.config.attempts_max,
            self._arrived_s,
            services.cluster.config.request_s_max,
            self._timeout_s,
            FULL_WORKERS_MAX if services.cluster.has_other_frontends else 0,
            was_admitted=is_admitted,
        )
        return events.Understood(attempts, request.is_paced, time.monotonic())

    def _wait_served(self) -> Served:
        give_up_s = time.monotonic() + SERVED_WAIT_S
        while (served := self._services.cluster.served()) is None:
            if self._is_done.wait(0.05) or time.monotonic() > give_up_s:
                raise Overloaded("no_prefill_worker", "no worker has registered yet", 1.0)
        return served

    def _pause(self, action: events.Pause) -> LifecycleEvent:
        self._is_done.wait(action.seconds)
        return events.PauseOver(time.monotonic())

    def _decide(self, action: events.Decide) -> LifecycleEvent | None:
        if self.state.phase is Phase.DONE:
            return None
        if action.attempt > 1:
            self.times.retried()
        self.trace.attempt_began(action.attempt, time.monotonic())
        request, served = self._understood()
        token_ids = np.concatenate([request.prompt_ids, np.array(self._sent_ids, np.int32)])
        seed = chain_seed(served.fingerprint, cache_salt=request.cache_salt)
        keys = block_keys(token_ids, served.block_tokens, seed)
        request_id = self._id_of(action.attempt)
        given, self._given = self._given, None
        try:
            decided = self._services.cluster.decide(
                Request(
                    request_id=request_id,
                    prompt_tokens=len(token_ids),
                    # A prompt whose logprobs are wanted is computed without its cached prefix.
                    block_keys=[] if request.sampling.scores_prompt else keys,
                    output_tokens_max=request.sampling.max_tokens - len(self._sent_ids),
                    priority=request.priority,
                    tenant=self.tenant,
                    excluded_workers=self._pinned_out(action.is_resumed) | action.avoided,
                    is_resumed=action.is_resumed,
                    is_prefilled=given is not None,
                    answers=1 + len(self._copies),
                    limits=None if self._counted_id else self._principal.limits,
                ),
                wants_candidates=request.wants_decision,
            )
        except ServingError as error:
            self._let_go(given)
            now_s = time.monotonic()
            self.trace.decided(action.attempt, now_s, {}, end_of_span(error))
            return events.NotRouted(action.attempt, error, now_s)
        if isinstance(decided, Reject):
            self._let_go(given)
            log.info("decision %s", decided, extra=self._in_log)
            rejection = Overloaded(decided.kind, decided.reason, decided.retry_after_s)
            now_s = time.monotonic()
            fields = reject_fields(decided, self._services.cluster.config)
            self.trace.decided(action.attempt, now_s, fields, end_of_span(rejection))
            return events.NotRouted(action.attempt, rejection, now_s)
        log.info("decision %s", decided.route, extra=self._in_log)
        if self._principal.known is not None:
            self._counted_id = self._counted_id or request_id
        now_s = time.monotonic()
        if self.trace.is_on:
            fields = route_fields(decided, self._services.cluster.config)
            self.trace.decided(action.attempt, now_s, fields, "")
        self._assignments[action.attempt] = Assignment(
            request_id, token_ids, decided, now_s, given, is_copy=bool(given)
        )
        if self.state.phase is Phase.DONE:  # it ended during the decision, which took `given`
            self._let_go(given)
        prefill, decode = decided.route.prefill, decided.route.decode
        return events.Routed(
            action.attempt,
            (prefill.worker_id, prefill.incarnation),
            (decode.worker_id, decode.incarnation),
            now_s,
        )

    def _release(self, attempt: int) -> None:
        """Release the attempt's leases, and those of copies that have not begun."""
        for request in (self._id_of(attempt), *(copy._id_of(1) for copy in self._copies)):
            self._services.cluster.release(request)

    def _let_go(self, given: tuple[int, PrefillReply] | None) -> None:
        """Release the leases of a copy that was prefilled but is not routed."""
        if given is not None:
            self._services.cluster.release(self._id_of(1))

    def _pinned_out(self, is_resumed: bool) -> frozenset[tuple[str, str]]:
        """All workers that the client's pins exclude: the other workers of a pinned role."""
        request, _ = self._understood()
        cluster = self._services.cluster
        try:
            return cluster.excluded_by_pins(request.prefill_worker, request.decode_worker)
        except InvalidRequest as error:  # the pinned worker is not registered now
            if is_resumed:
                raise WorkerGone(str(error)) from None
            raise

    def _prefill(self, action: events.CallPrefill, assignment: Assignment) -> LifecycleEvent:
        request, _ = self._understood()
        if assignment.prefilled is None:
            # A further attempt begins with the first answer's tokens, which copies do not have.
            copies = [] if self._sent_ids else [copy._id_of(1) for copy in self._copies]
            call = assignment.prefill_call(
                request, self._services.streams, action.is_resumed, self.trace.trace_id, copies
            )
            worker = assignment.decided.route.prefill
            self.trace.called(action.attempt, worker.worker_id, time.monotonic())
            ids, reply = grpc_calls.ask(
                self._services.calls, worker, call, assignment.token_ids, PrefillReply
            )
            assignment.prefilled, assignment.replied_s = (int(ids[0]), reply), time.monotonic()
            self.trace.prefilled(action.attempt, reply, assignment.replied_s)
        token_id, reply = assignment.prefilled
        if reply.prompt_logprobs.ranks and self._answer is not None:
            self._answer.prompt_logprobs = reply.prompt_logprobs
            # Further attempts do not compute them again.
            sampling = replace(request.sampling, prompt_logprobs=NO_LOGPROBS)
            self._request = replace(request, sampling=sampling)
        fields: dict[str, object] = {}
        if request.wants_decision:
            fields = route_fields(assignment.decided, self._services.cluster.config)
            fields |= prefill_fields(reply)
        first = self._first_text(assignment, token_id, reply)
        now_s = assignment.replied_s or time.monotonic()
        return events.PrefillReplied(action.attempt, first, reply.compute_s, fields, now_s)

    def _decode(self, action: events.CallDecode, assignment: Assignment) -> LifecycleEvent:
        request, _ = self._understood()
        assert assignment.prefilled is not None
        limits, config = assignment.decided.route.limits, self._services.cluster.config
        slo_s = 0.0 if action.is_resumed else config.arrival_tbt_slo_s(limits)
        call = assignment.decode_call(
            request, self._services.streams, action.is_resumed, self.trace.trace_id, slo_s
        )
        token_ids = np.append(assignment.token_ids, np.int32(assignment.prefilled[0]))
        worker = assignment.decided.route.decode
        self.trace.called(action.attempt, worker.worker_id, time.monotonic(), is_decode=True)
        ids, reply = grpc_calls.ask(self._services.calls, worker, call, token_ids, DecodeReply)
        now_s = time.monotonic()
        self.trace.decoded(action.attempt, reply, now_s)
        return events.DecodeReplied(
            attempt=action.attempt,
            tokens_before=reply.tokens_before,
            last=delta_of(reply, ids.tolist(), is_stopped=reply.finish_reason == "stop_word"),
            finish_reason=reply.finish_reason,
            fields=decode_fields(reply) if request.wants_decision else {},
            now_s=now_s,
        )

    def _called(
        self,
        call: Callable[[Any, Assignment], LifecycleEvent],
        action: events.CallPrefill | events.CallDecode,
    ) -> LifecycleEvent:
        """Call a worker, unless the attempt has ended. Returns the reply's event or CallFailed."""
        state = self.state
        try:
            if state.attempt.number != action.attempt or state.phase is Phase.DONE:
                raise WorkerGone("the attempt ended before its worker was called")
            return call(action, self._assignments[action.attempt])
        except Exception as error:  # Catch all: any exception ends the call
            self.trace.call_failed(action.attempt, time.monotonic())
            return events.CallFailed(action.attempt, error, time.monotonic())

    def _understood(self) -> tuple[ClientRequest, Served]:
        assert self._request is not None and self._served is not None
        return self._request, self._served

    def _first_text(
        self, assignment: Assignment, token_id: int, source: FirstToken | PrefillReply
    ) -> events.FirstText:
        """The first token as text, made once, because message and reply carry the same token."""
        if assignment.first is None:
            request, tokenizer = self._understood()[0], self._services.tokenizer
            ids = assignment.token_ids
            assignment.first = first_text(request, tokenizer, ids, token_id, source)
        return assignment.first

    # --- carrying out actions; an action that blocks is returned as Work

    def _carry_out(self, action: LifecycleAction) -> Work | None:
        services = self._services
        match action:
            case events.Send():
                self._send(action)
            case events.Pause():
                return partial(self._pause, action)
            case events.Decide():
                return partial(self._decide, action)
            case events.CallPrefill():
                request_id = self._id_of(action.attempt)
                services.streams.listen(request_id, self, action.attempt)
                return partial(self._called, self._prefill, action)
            case events.CallDecode():
                services.streams.called(self._id_of(action.attempt))
                return partial(self._called, self._decode, action)
            case events.NotePrefill():
                self._note_prefill(self._assignments[action.attempt])
            case events.NoteLoss():
                request_id = self._id_of(action.attempt)
                text, now_s = "request %s, %s: %s", time.monotonic()
                log.warning(text, request_id, action.loss.value, action.error, extra=self._in_log)
                error = end_of_span(action.error)
                self.trace.lost(action.attempt, action.loss.value, error, now_s)
            case events.NoteFailed():
                services.cluster.worker_failed(*action.worker)
            case events.NoteUnreached():
                services.unreached.add(action.worker, action.error)
            case events.NoteRefused():
                services.cluster.worker_refused(*action.worker)
                self.times.prefill_wasted(action.wasted_s)
            case events.StopWorkers():
                self._stop_workers(action)
            case events.CancelCall():
                services.calls.cancel(self._id_of(action.attempt))
            case events.AbandonCall():
                services.abandon(self._id_of(action.attempt), action.worker)
            case events.ReleaseKv():
                del self._assignments[action.attempt]
                return partial(self._release, action.attempt)
            case events.EndAttempt():
                request_id = self._id_of(action.attempt)
                services.streams.forget(request_id)
                services.cluster.finished(request_id, action.output_tokens)
                if self.state.phase is Phase.DONE:  # a late decision may have charged the request
                    self._note_used(is_served=bool(self._sent_ids))
            case events.End():
                self._end(action.error or self._send_error)
        return None

    def _send(self, message: events.Send) -> None:
        assert self._answer is not None
        self._sent_ids += message.delta.token_ids
        if message.finish_reason:
            self._note_used(is_served=True)  # before the client can send its next request
        try:
            self._answer.add(message)
        except Exception as error:
            self._send_error = error
            raise
        self.times.sent(message.output_tokens, time.monotonic())

    def _note_prefill(self, assignment: Assignment) -> None:
        assert assignment.prefilled is not None
        _, reply = assignment.prefilled
        request_id, cached_tokens = assignment.request_id, reply.cached_tokens
        self._services.cluster.prefill_finished(request_id, cached_tokens, reply.compute_s)
        if self._request is not None:
            self.times.read(len(self._request.prompt_ids), cached_tokens)
        if not assignment.is_copy:
            took_s = assignment.replied_s - assignment.routed_s
            self.times.prefilled(assignment.decided.route, took_s)
        copies, self._copies = self._copies, []
        for copy, given in zip_longest(copies, prefilled_copies(reply)):
            copy._begin(given)

    def _stop_workers(self, action: events.StopWorkers) -> None:
        """Send Stop to every process of both workers; a worker that reloads has two processes."""
        assignment = self._assignments[action.attempt]
        route = assignment.decided.route
        for worker in (route.prefill, route.decode):
            others = self._services.cluster.inboxes(worker.worker_id)
            for inbox in dict.fromkeys((worker.inbox, *others)):
                self._services.outbox.send(inbox, Stop(assignment.request_id, action.reason))

    def _end(self, error: Exception | None) -> None:
        """Complete the client's answer or fail the client's call, then end metrics and trace."""
        try:
            self._note_end(error)
            if error is None and self._answer is not None:
                self._answer.finish()
            elif isinstance(error, Cancelled):
                self._client.finish()
            elif error is not None:
                self._client.fail(error)
        except Exception as problem:  # Catch all: an answer that cannot be sent is an error
            error = problem
            self._client.fail(problem)
        finally:
            self._is_done.set()
            if self._given is not None:
                self._services.start(self._let_go, self._given)
            self._services.on_end(self)
            now_s = time.monotonic()
            self.times.ended(error, now_s)
            attributes = end_attributes(self.state, error)
            self.trace.ended(end_of_span(error), now_s, self.times.first_s, attributes)

    def _note_end(self, error: Exception | None) -> None:
        if isinstance(error, InvalidRequest) and self._principal.limits and not self._counted_id:
            self._services.cluster.charged(self.tenant)  # parsing took time, so the request counts
        is_unwanted = isinstance(error, Cancelled) or self._is_timed_out
        self._note_used(bool(self._sent_ids) or error is None or is_unwanted)

    def _note_used(self, is_served: bool) -> None:
        """Return unused tokens to the tenant's limits. Only the first call has an effect.

        `is_served` False: the request failed before its first token, so all tokens are returned.
        """
        if self._counted_id and self._request is not None:
            tokens = len(self._request.prompt_ids) + len(self._sent_ids) if is_served else 0
            self._services.cluster.used(self._counted_id, tokens)
