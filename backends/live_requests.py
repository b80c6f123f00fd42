"""Requests in flight at the front, and the watch for clients that went away.

Triton tells a model that its client is gone only when asked, and does not pass it on to the
models called in turn. So one thread asks for every live request, and a cancelled one is told to
its workers by a letter. Not here: serving (front_door.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from backends.errors import Cancelled
from backends.request_times import RequestTimes


class Watched(Protocol):
    def is_cancelled(self) -> bool: ...


class RunningRequest(Protocol):
    """What the front needs of a request when a worker is lost (front_door.Running)."""

    def lost(self, worker_id: str, incarnation: str) -> bool: ...


class LiveRequest:
    """One request between arrival and answer."""

    def __init__(self, request_id: str, client: Watched, times: RequestTimes) -> None:
        self.request_id = request_id  # unique, ours; clients may repeat theirs
        self.worker_request_id = request_id  # what its workers call it at the moment
        self.client = client
        self.times = times
        self.is_cancelled = False
        self.worker_ids: tuple[str, ...] = ()  # who must be told to stop
        self.run: RunningRequest | None = None  # once it is understood

    def check(self) -> None:
        if self.is_cancelled:
            raise Cancelled("the client went away")


class LiveRequests:
    """The set of live requests; `on_cancel` is called once for each whose client left."""

    def __init__(self, poll_s: float, on_cancel: Callable[[LiveRequest], None]) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._lock = threading.Lock()
        self._poll_s = poll_s
        self._on_cancel = on_cancel
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[LiveRequest]:
        with self._lock:
            return list(self._live.values())

    def add(self, request: LiveRequest) -> None:
        with self._lock:
            self._live[request.request_id] = request

    def discard(self, request: LiveRequest) -> None:
        with self._lock:
            self._live.pop(request.request_id, None)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        while not self._is_closing.wait(self._poll_s):
            for request in self.all():
                if not request.is_cancelled and request.client.is_cancelled():
                    request.is_cancelled = True
                # Told again at every turn: the first letter may have come before the request.
                if request.is_cancelled:
                    self._on_cancel(request)
