"""One request's way through prefill and decode, with another attempt when one is lost.

An attempt starts from the prompt and whatever the client already has: sampling is a pure function
of (logits, seed, position), so a second one goes on with the very tokens that the first would have
produced, and finds most of their KV in the store. Whether there is a second one, and when, is
decided in attempts.py.

Triton never ends the answer stream of a worker process that was killed. So when the directory says
that a worker is gone, `lost` takes the request away from the thread that reads that stream, and
another one runs it on.

Not here: parsing and answering (backends/frontend/frontend.py), the choice of workers (conductor/).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from backends.errors import (
    InvalidRequest,
    Overloaded,
    ServingError,
    WorkerGone,
    WorkerUnavailable,
)
from backends.frontend import worker_calls
from backends.frontend.attempt import Message, Superseded, Try
from backends.frontend.attempts import (
    RULES,
    Attempts,
    Loss,
    is_silent,
    last_word,
    loss_by_death,
    loss_of,
)
from backends.frontend.cluster_view import ClusterView, Served
from backends.frontend.decision import Decided, decode_facts, prefill_facts
from backends.frontend.live_requests import LiveRequest
from backends.frontend.request import FrontRequest
from backends.frontend.token_streams import TokenStreams
from backends.text.text_stream import Emission, TextStream, merge
from backends.text.token_bytes import CONTEXT_TOKENS
from backends.text.tokenizer import Tokenizer
from backends.workers.protocol import (
    DecodeReply,
    DecodeRequest,
    FirstToken,
    PrefillReply,
    PrefillRequest,
)
from conductor.messages import Reject, Request, Route, WorkerRef
from mooncake_store.block_keys import block_keys, chain_seed

log = logging.getLogger(__name__)


class Generation:
    """Runs one request; `send` is called with each Message, in order."""

    def __init__(
        self,
        request: FrontRequest,
        live: LiveRequest,
        cluster: ClusterView,
        call: worker_calls.Call,
        streams: TokenStreams,
        tokenizer: Tokenizer,
        send: Callable[[Message], None],
        attempts: Attempts,
        stop: Callable[[str, Sequence[WorkerRef], str], None],
    ) -> None:
        self._request = request
        self._live = live
        self._cluster = cluster
        self._call = call
        self._streams = streams
        self._tokenizer = tokenizer
        self._send = send
        self._attempts = attempts
        self._stop = stop
        self._problem: ServingError | None = None  # of the latest attempt that was lost
        self._tries = 0
        self._lock = threading.Lock()
        self._try: Try | None = None
        self._started_s = time.monotonic()
        self._released: list[int] = []  # tokens the client has
        self._cached_tokens = 0  # of the first prefill: what the client is told
        self._avoided: set[tuple[str, str]] = set()  # by the next attempt

    def run(self, served: Served) -> bool:
        """Until the answer is complete; raises ServingError when the request is given up.

        False: the request was taken away from this thread (`lost`).
        """
        while True:
            self._pause()
            self._tries += 1
            if self._tries > 1:
                self._live.times.retried()
            mine = Try(f"{self._live.request_id}-{self._tries}")
            self._live.worker_request_id = mine.request_id
            with self._lock:
                self._try = mine
            before, is_complete = len(self._released), False
            try:
                self._attempt(served, mine)
                is_complete = True
                return True
            except Superseded:
                return False
            except ServingError as error:
                if not self._take_loss(mine, error):
                    return False
            finally:
                output_tokens = len(self._released) - before if is_complete else None
                self._cluster.finished(mine.request_id, output_tokens)

    def lost(self, worker_id: str, incarnation: str, heard_s: float) -> bool:
        """A worker process is gone, which reported last at `heard_s`. True: it was at this request,
        and `run` must be called again.

        While a config.pbtxt reloads, another process than the routed one may be at work. Then a
        request is taken from a healthy worker, which costs time and nothing else.
        """
        with self._lock:
            current = self._try
            if current is None or (current.worker_id, current.incarnation) != (
                worker_id, incarnation
            ):  # fmt: skip
                return False
            self._try = None
            loss = loss_by_death(current.called_s, heard_s)
            self._note_loss(loss, WorkerUnavailable(f"{worker_id} is gone"), worker_id, incarnation)
        self._cluster.finished(current.request_id)
        return True

    def fell_silent(self, now_s: float) -> tuple[str, str] | None:
        """(worker, incarnation) that has said nothing of this request for too long; `run` must be
        called again. Its call is not ended: a worker that lives ends it when it is told to stop,
        and a call that is cancelled keeps a model of Triton 2.51 from unloading."""
        with self._lock:
            current = self._try
            heard_s = self._streams.heard_s(current.request_id) if current is not None else None
            if current is None or not is_silent(now_s, heard_s):
                return None
            self._try = None
            worker = current.worker_id, current.incarnation
            problem = WorkerGone(f"{current.worker_id} says nothing of it")
            self._note_loss(Loss.WORKER_GONE, problem, *worker)
        self._cluster.worker_failed(*worker)
        self._cluster.finished(current.request_id)
        return worker

    def _take_loss(self, mine: Try, error: ServingError) -> bool:
        """The attempt ended with this. False: it was another thread's already; raises `error`
        where it is the answer."""
        with self._lock:
            if self._try is not mine:
                return False
            self._try = None
        self._live.check()
        loss = loss_of(error, self._attempts.is_resumed)
        if loss is None:
            raise error
        log.warning("request %s, %s: %s", mine.request_id, loss.value, error)
        self._note_loss(loss, error, mine.worker_id, mine.incarnation)
        if isinstance(error, WorkerUnavailable):
            self._cluster.worker_failed(mine.worker_id, mine.incarnation)
        return True

    def _note_loss(self, loss: Loss, error: ServingError, worker_id: str, incarnation: str) -> None:
        """By the one thread that took the attempt away."""
        self._attempts.lost(loss, len(self._released), time.monotonic())
        self._problem = error
        if RULES[loss].avoids:
            self._avoided.add((worker_id, incarnation))
        elif loss is Loss.NOBODY:
            self._avoided.clear()  # better somebody who failed at it before than nobody

    def _pause(self) -> None:
        """Before an attempt that follows a lost one; raises when there is to be none."""
        problem = self._problem
        if problem is None:
            return
        self._live.pause(self._attempts.pause_s(time.monotonic()))
        why = self._attempts.given_up(time.monotonic())
        if why:
            raise last_word(problem, why)

    def _attempt(self, served: Served, mine: Try) -> None:
        token_ids = np.concatenate([self._request.prompt_ids, np.array(self._released, np.int32)])
        decided = self._decide(served, token_ids, mine)
        route = decided.route
        mine.context_ids = token_ids[-CONTEXT_TOKENS:].tolist()
        decided_s = time.monotonic()
        is_taken_over = False
        try:
            with self._streams.expecting(mine.request_id, lambda letter: self._early(mine, letter)):
                first, reply = self._prefill(decided, token_ids, mine)
            self._live.times.prefilled(route.predicted, time.monotonic() - decided_s)
            untold = decided.facts(self._cluster.config)
            untold |= prefill_facts(reply)
            if not self._begin(mine, first, reply, untold):
                self._decode(route, reply, np.append(token_ids, np.int32(first)), mine, untold)
                is_taken_over = True
        finally:
            if not is_taken_over:  # leases are kept and a place is reserved for a decode call
                self._cluster.release(mine.request_id)
                self._stop(mine.request_id, (route.prefill, route.decode), "this attempt is over")

    def _early(self, mine: Try, letter: FirstToken) -> None:
        """In the letters' thread: the first token ahead of the reply. It ends nothing."""
        with mine.begin_lock:
            if mine.is_begun:
                return
            mine.is_begun = True
            try:
                reason, _ = self._emit_first(mine, letter.token_id, letter.cached_tokens, {})
                assert not reason, f"{letter} ends the answer: {reason}"
            except Exception as error:  # edge: for the thread that waits for the reply
                mine.problem = error

    def _begin(self, mine: Try, first: int, reply: PrefillReply, untold: dict[str, object]) -> str:
        """The first token, unless it is out already; returns why the answer ends with it, or "".

        What the client has not been told of the decision goes along, and is taken out of `untold`.
        """
        with mine.begin_lock:
            if mine.problem is not None:
                raise mine.problem
            if mine.is_begun:
                untold["ttft_s"] = mine.begun_at_s - self._started_s
                return ""
            mine.is_begun = True
            untold["ttft_s"] = time.monotonic() - self._started_s
            reason, is_told = self._emit_first(mine, first, reply.cached_tokens, dict(untold))
            if is_told:  # it was not held back as the begin of a stop word
                untold.clear()
            return reason

    def _emit_first(
        self, mine: Try, token_id: int, cached_tokens: int, decision: dict[str, object]
    ) -> tuple[str, bool]:
        """(Why the answer ends with this token, or ""; whether a message left.)"""
        if not self._released:
            self._cached_tokens = cached_tokens
        sampling = self._request.sampling
        text = TextStream(
            self._tokenizer, mine.context_ids, sampling.stop_words,
            sampling.end_ids, max(sampling.min_tokens - len(self._released), 0),
        )  # fmt: skip
        emission = text.push([token_id])
        reason = self._finish_reason(token_id, emission.is_stopped)
        if reason:
            emission = merge([emission, text.finish()])
        mine.begun_at_s = time.monotonic()
        return reason, self._emit(mine, emission, reason, decision)

    def _decide(self, served: Served, token_ids: np.ndarray, mine: Try) -> Decided:
        request = self._request
        seed = chain_seed(served.fingerprint, cache_salt=request.cache_salt)
        decided = self._cluster.decide(
            Request(
                request_id=mine.request_id,
                prompt_tokens=len(token_ids),
                block_keys=block_keys(token_ids, served.block_tokens, seed),
                output_tokens_max=request.sampling.max_tokens - len(self._released),
                priority=request.priority,
                tenant=request.cache_salt,
                excluded_workers=self._pinned_out() | frozenset(self._avoided),
                is_resumed=self._attempts.is_resumed,
            ),
            wants_candidates=request.wants_decision,
        )
        if isinstance(decided, Reject):
            log.info("decision %s", decided)
            raise Overloaded(decided.kind, decided.reason, decided.retry_after_s)
        log.info("decision %s", decided.route)
        self._live.workers = (decided.route.prefill, decided.route.decode)
        return decided

    def _pinned_out(self) -> frozenset[tuple[str, str]]:
        """Every worker but those that the client named, as they live now."""
        request = self._request
        try:
            return self._cluster.excluded_by_pins(request.prefill_worker, request.decode_worker)
        except InvalidRequest as error:  # the named one is away at the moment
            if self._attempts.is_resumed:
                raise WorkerGone(str(error)) from None
            raise

    def _prefill(
        self, decided: Decided, token_ids: np.ndarray, mine: Try
    ) -> tuple[int, PrefillReply]:
        request, route = self._request, decided.route
        self._live.check()
        self._now_at(mine, route.prefill)
        call = PrefillRequest(
            request_id=mine.request_id,
            prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            fetch_blocks=route.fetch_blocks,
            fetch_nodes=list(route.fetch_nodes),
            decode_inbox=route.decode.inbox if request.sampling.max_tokens > 1 else "",
            reserve_tokens=len(request.prompt_ids) + request.sampling.max_tokens,
            reply_inbox=self._streams.address,
            place_s=route.order_key_s - time.monotonic(),
            is_resumed=self._attempts.is_resumed,
        )
        first, reply = worker_calls.prefill(self._call, route.prefill, call, token_ids)
        self._live.check()
        self._cluster.prefill_finished(mine.request_id, reply.cached_tokens, reply.compute_s)
        return first, reply

    def _decode(
        self,
        route: Route,
        reply: PrefillReply,
        token_ids: np.ndarray,
        mine: Try,
        untold: dict[str, object],
    ) -> None:
        request, is_resumed = self._request, self._attempts.is_resumed
        self._now_at(mine, route.decode)
        call = DecodeRequest(
            request_id=mine.request_id,
            prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            blocks=reply.blocks,
            stream_interval=request.stream_interval if request.is_stream else 0,
            reply_inbox=self._streams.address,
            tbt_slo_s=0.0 if is_resumed else self._cluster.config.arrival_tbt_slo_s,
            is_resumed=is_resumed,
            native=reply.native,
        )

        def deliver(incarnation: str, emission: Emission) -> None:
            self._live.check()
            mine.incarnation = incarnation
            told = dict(untold)
            untold.clear()
            self._emit(mine, emission, "", told)

        try:
            with self._streams.reading(mine.request_id, deliver, request.is_paced) as stream:
                ids, end = worker_calls.decode(self._call, route.decode, call, token_ids)
                rest = stream.rest(end.tokens_before)
        except Overloaded:
            self._cluster.worker_refused(route.decode.worker_id, route.decode.incarnation)
            self._live.times.prefill_wasted(reply.compute_s)
            raise
        self._live.check()
        last = merge([*rest, emission_of(ids, end)])
        self._emit(mine, last, end.finish_reason, untold | decode_facts(end))

    def _now_at(self, mine: Try, worker: WorkerRef) -> None:
        with self._lock:
            if self._try is not mine:
                raise Superseded
            mine.worker_id, mine.incarnation = worker.worker_id, worker.incarnation
            mine.called_s = time.monotonic()

    def _emit(
        self, mine: Try, emission: Emission, finish_reason: str, decision: dict[str, object]
    ) -> bool:
        """Whether there was anything to send."""
        with self._lock:
            if self._try is not mine:
                raise Superseded
            self._released += emission.token_ids
            if not (emission.token_ids or emission.text or finish_reason):
                return False
            new_tokens = len(emission.token_ids)
            self._send(Message(emission, new_tokens, finish_reason, self._cached_tokens, decision))
            return True

    def _finish_reason(self, token_id: int, is_stopped: bool) -> str:
        sampling = self._request.sampling
        if is_stopped:
            return "stop_word"
        if token_id in sampling.end_ids:
            return "end_id"
        return "length" if len(self._released) + 1 >= sampling.max_tokens else ""


def emission_of(ids: np.ndarray, end: DecodeReply) -> Emission:
    return Emission(
        token_ids=tuple(ids.tolist()), text=end.text, cut_bytes=end.cut_bytes,
        is_stopped=end.finish_reason == "stop_word", context_ids=tuple(end.context_ids),
    )  # fmt: skip
