"""Requests in flight at the frontend, and the watch for clients that went away.

Triton tells a model that its client is gone only when asked, and does not pass it on to the
models called in turn. So one thread asks for every live request; of one that is cancelled, or
whose own timeout has passed, the workers are told by a message. Not here: serving (frontend.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from backends.errors import Cancelled, ServingError, WorkerUnavailable
from backends.frontend.attempts import CALL_SILENCE_S_MAX
from backends.frontend.request_times import RequestTimes
from conductor.messages import WorkerRef

log = logging.getLogger(__name__)
STOOD_STILL_S = 2.0  # a turn that comes so late: this process was frozen, or its machine


class Watched(Protocol):
    def is_cancelled(self) -> bool: ...


class RunningRequest(Protocol):
    """What the frontend needs of a request when a worker is lost (front_door.Running)."""

    def fell_silent(self, now_s: float) -> tuple[str, str] | None: ...
    def lost(self, worker_id: str, incarnation: str, heard_s: float) -> bool: ...


class LiveRequest:
    """One request between arrival and answer."""

    def __init__(
        self, request_id: str, client: Watched, times: RequestTimes, arrived_s: float,
        tenant: str = "",
    ) -> None:  # fmt: skip
        self.request_id = request_id  # unique, ours; clients may repeat theirs
        self.worker_request_id = request_id  # what its workers call it at the moment
        self.client = client
        self.times = times
        self.arrived_s = arrived_s
        self.tenant = tenant
        self.timeout_s = math.inf  # since its arrival, if its client named one
        self.workers: tuple[WorkerRef, ...] = ()  # who must be told to stop
        self.run: RunningRequest | None = None  # once it is understood
        self._ended = threading.Event()
        self._why: ServingError | None = None

    @property
    def is_ended(self) -> bool:
        """Nobody waits for its answer any more."""
        return self._ended.is_set()

    def end(self, why: ServingError) -> None:
        """From outside: its client went away, or has waited long enough."""
        self._why = why
        self._ended.set()

    def check(self) -> None:
        """Raises why it was ended, if it was."""
        if self._why is not None:
            raise self._why

    def pause(self, seconds: float) -> None:
        """Until then, or until it was ended; raises then."""
        self._ended.wait(seconds)
        self.check()


class LiveRequests:
    """The set of live requests; `on_cancel` is called for each that nobody waits for, `on_look`
    for each at every turn."""

    def __init__(
        self,
        poll_s: float,
        on_cancel: Callable[[LiveRequest], None],
        on_look: Callable[[LiveRequest, float], None] = lambda request, now_s: None,
    ) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._of_tenant: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._poll_s = poll_s
        self._on_cancel = on_cancel
        self._on_look = on_look
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._live)

    def of_tenants(self) -> dict[str, int]:
        """How many each tenant has in flight; those with none are left out."""
        with self._lock:
            return dict(self._of_tenant)

    def all(self) -> list[LiveRequest]:
        with self._lock:
            return list(self._live.values())

    def add(self, request: LiveRequest) -> None:
        with self._lock:
            self._live[request.request_id] = request
            self._of_tenant[request.tenant] += 1

    def discard(self, request: LiveRequest) -> None:
        with self._lock:
            if self._live.pop(request.request_id, None) is not None:
                self._of_tenant[request.tenant] -= 1
                self._of_tenant += Counter()  # drops those with none

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        awake_since_s = turn_s = time.monotonic()
        while not self._is_closing.wait(self._poll_s):
            now_s = time.monotonic()
            if now_s - turn_s > STOOD_STILL_S + self._poll_s:
                awake_since_s = now_s  # what came meanwhile waits to be read
            turn_s = now_s
            for request in self.all():
                try:
                    self._watch_one(request, now_s, now_s - awake_since_s)
                except Exception:  # edge: nobody else looks after the others
                    log.exception("looking at request %s failed", request.request_id)

    def _watch_one(self, request: LiveRequest, now_s: float, awake_s: float) -> None:
        if not request.is_ended and request.client.is_cancelled():
            request.end(Cancelled("the client went away"))
        if not request.is_ended and now_s - request.arrived_s > request.timeout_s:
            limit = f"its timeout of {request.timeout_s * 1000:.0f} ms has passed"
            request.end(WorkerUnavailable(limit))
        # Told again at every turn: the first message may have come before the request.
        if request.is_ended:
            self._on_cancel(request)
        if awake_s > CALL_SILENCE_S_MAX:  # who stood still has heard nothing, whoever spoke
            self._on_look(request, now_s)
