"""The front: a request in, messages out. Tokenises, runs a Generation, shapes the answers.

A thread of a bounded pool serves one request, because a call to a worker blocks its thread.
No decision is made here and no state outlives a request, so a fleet may run many fronts.
Not here: Triton's API (triton_io.py), retries and workers (generation.py), the tensors of an
answer (backends/frontend/answer.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.errors import Cancelled, Overloaded, WorkerUnavailable
from backends.frontend import request as front_request
from backends.frontend.answer import Client, StreamedAnswer, WholeAnswer, describe
from backends.frontend.attempt import Message
from backends.frontend.attempts import Attempts
from backends.frontend.cluster_view import ClusterView, Served
from backends.frontend.generation import Generation
from backends.frontend.grpc_calls import GrpcCalls
from backends.frontend.live_requests import LiveRequest, LiveRequests
from backends.frontend.request import Limits
from backends.frontend.request_times import RequestTimes
from backends.frontend.tenant_cap import TenantCap
from backends.frontend.token_streams import TokenStreams
from backends.metrics.page import Observations
from backends.text.tokenizer import Tokenizer
from backends.workers.config import FrontConfig
from backends.workers.protocol import Stop, WorkerOutbox
from conductor.messages import WorkerRef

log = logging.getLogger(__name__)
LAST_WORDS_S = 2.0
SERVED_WAIT_S = 2.0  # a front that starts together with its workers waits this long for them


class FrontDoor:
    """Serves requests until closed; `observations` are for the metrics page."""

    def __init__(
        self,
        config: FrontConfig,
        tokenizer: Tokenizer,
        cluster: ClusterView,
        call: GrpcCalls,
        streams: TokenStreams,
        outbox: WorkerOutbox,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.cluster = cluster
        self._call = call
        self._streams = streams
        self._outbox = outbox
        # Threads beyond requests_max wait for the last word of workers that fell silent.
        self._pool = ThreadPoolExecutor(2 * config.requests_max, thread_name_prefix="request")
        self._abandoned: dict[str, tuple[str, str]] = {}  # a call, and the worker it waits for
        self._running: set[Future[None]] = set()
        self._cap = TenantCap(config.requests_max, config.tenant_requests_share)
        self._entering = threading.Lock()
        self.observations = Observations()
        cluster.on_worker_down = self._worker_down
        self.live = LiveRequests(config.cancel_poll_s, self._tell_workers_to_stop, self._look)

    def submit(
        self, inputs: dict[str, np.ndarray], parameters: dict[str, Any], client: Client
    ) -> None:
        now_s = time.monotonic()
        times = RequestTimes(self.observations, now_s)
        named = parameters.get("tenant", "")
        tenant = named if isinstance(named, str) else ""  # what else it may be is refused later
        live = LiveRequest(uuid.uuid4().hex, client, times, now_s, tenant)
        with self._entering:
            kind, reason = self._cap.objection(tenant, self.live.of_tenants(), now_s)
            if not kind:
                self.live.add(live)
        if kind:
            full = Overloaded(kind, reason, 1.0)
            times.ended(full, now_s)
            client.fail(full)
            return
        self._start(self._run, live, inputs, parameters, client)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """In a thread of the pool; `close` waits for it."""
        future = self._pool.submit(work, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def close(self, timeout_s: float) -> None:
        """Let every thread come to its end (at most `timeout_s`): clients get their answers, and
        no worker is left sending to a process that is gone. Who only waits then hears of it."""
        _, left = wait(list(self._running), timeout=timeout_s)
        for live in self.live.all():
            live.end(WorkerUnavailable("the frontend is shutting down"))
        wait(left, timeout=LAST_WORDS_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.live.close()

    def _run(
        self,
        live: LiveRequest,
        inputs: dict[str, np.ndarray],
        parameters: dict[str, Any],
        client: Client,
    ) -> None:
        with self._ending(live, client):
            served = self._wait_served()
            limits = Limits(
                context_tokens_max=served.context_tokens_max,
                vocabulary_tokens=self._tokenizer.vocabulary_tokens,
                output_tokens_default=self._config.output_tokens_default,
            )
            request = front_request.parse(
                inputs, parameters, live.request_id, self._tokenizer, limits
            )
            if request.describe:
                client.send(describe(served, limits, client.outputs), is_final=True)
                raise Answered
            answer = (StreamedAnswer if request.is_stream else WholeAnswer)(request, client)
            live.times.is_stream = request.is_stream
            live.timeout_s = request.timeout_ms / 1000 if request.timeout_ms else math.inf

            def send(message: Message) -> None:
                answer.add(message)
                live.times.sent(message.output_tokens, time.monotonic())

            attempts = Attempts(
                self._config.attempts_max, live.arrived_s, self.cluster.config.request_s_max,
                live.timeout_s,
            )  # fmt: skip
            generation = Generation(
                request, live, self.cluster, self._call, self._streams, self._tokenizer, send,
                attempts, self._stop,
            )  # fmt: skip
            live.run = Running(generation, answer, client, served)
        if live.run is not None:
            self._drive(live)

    def _drive(self, live: LiveRequest) -> None:
        """Run the request (on); the thread that completes it ends it."""
        running = live.run
        assert isinstance(running, Running)
        with self._ending(live, running.client):
            if running.generation.run(running.served):
                running.answer.finish()
                raise Answered

    def _worker_down(self, worker_id: str, incarnation: str, heard_s: float) -> None:
        """Take requests away from threads that wait for a worker that is gone."""
        self._call.keep(self.cluster.grpc_addresses())
        for live in self.live.all():
            stale_id = live.worker_request_id
            if live.run is not None and live.run.lost(worker_id, incarnation, heard_s):
                log.warning("%s is gone, request %s goes on", worker_id, live.request_id)
                self._stop(stale_id, live.workers, "it goes on elsewhere")
                self._call.cancel(stale_id)  # frees the thread that waits for it
                self._start(self._drive, live)
        for stale_id, worker in list(self._abandoned.items()):
            if worker == (worker_id, incarnation):
                self._abandoned.pop(stale_id, None)
                self._call.cancel(stale_id)

    def _look(self, live: LiveRequest, now_s: float) -> None:
        """Take a request away from a worker that says nothing of it. It is told to stop; its call
        ends with its answer, or with its leaving, and never by us: while it lives, that would keep
        its model from unloading."""
        stale_id = live.worker_request_id
        worker = live.run.fell_silent(now_s) if live.run is not None else None
        if worker is not None:
            log.warning("%s says nothing of request %s, it goes on", worker[0], live.request_id)
            self._abandoned[stale_id] = worker
            if len(self._abandoned) > self._config.requests_max:  # the oldest has ended long ago
                self._abandoned.pop(next(iter(self._abandoned)), None)
            self._stop(stale_id, live.workers, "it goes on elsewhere")
            self._start(self._drive, live)

    @contextlib.contextmanager
    def _ending(self, live: LiveRequest, client: Client) -> Iterator[None]:
        """Whatever ends a request inside is told to the client and counted, once."""
        problem: Exception | None = None
        try:
            yield
            return  # not over: it runs on, here or in another thread
        except Answered:
            pass
        except Cancelled as error:
            problem = error
            client.finish()
        except Exception as error:  # edge: one bad request must not fail its neighbours
            problem = error
            client.fail(error)
        live.run = None
        self.live.discard(live)
        live.times.ended(problem, time.monotonic())

    def _wait_served(self) -> Served:
        give_up_s = time.monotonic() + SERVED_WAIT_S
        while (served := self.cluster.served()) is None:
            if time.monotonic() > give_up_s:
                raise Overloaded("no_prefill_worker", "no worker has registered yet", 1.0)
            time.sleep(0.05)
        return served

    def _tell_workers_to_stop(self, live: LiveRequest) -> None:
        self._stop(live.worker_request_id, live.workers, "nobody waits for it any more")

    def _stop(self, worker_request_id: str, workers: Sequence[WorkerRef], reason: str) -> None:
        """Tell every process that may be at it, also one that stands still: it reads this first
        when it goes on."""
        for worker in workers:
            for inbox in {worker.inbox, *self.cluster.inboxes(worker.worker_id)}:
                self._outbox.send(inbox, Stop(worker_request_id, reason))


class Answered(Exception):
    """The request is complete."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request that was understood, with what is needed to run it on in another thread."""

    generation: Generation
    answer: StreamedAnswer | WholeAnswer
    client: Client
    served: Served

    def lost(self, worker_id: str, incarnation: str, heard_s: float) -> bool:
        return self.generation.lost(worker_id, incarnation, heard_s)

    def fell_silent(self, now_s: float) -> tuple[str, str] | None:
        return self.generation.fell_silent(now_s)
