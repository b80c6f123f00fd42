"""Answers leave in order per request, and a request whose receiver is stuck holds up no other.

Sending a response blocks until Triton has taken it, and a receiver that is stuck or gone may make
that long. So each request's messages are sent by one thread at a time out of a pool, and never by
the engine's thread. Not here: what is sent.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class OrderedSender:
    def __init__(self, threads_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="sender")
        self._queues: dict[str, deque[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def send(self, request_id: str, action: Callable[[], None]) -> None:
        """Run `action` after every earlier one of this request; returns at once."""
        with self._lock:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.append(action)
                return
            self._queues[request_id] = deque([action])
        self._pool.submit(self._drain, request_id)

    def close(self, is_waiting: bool) -> None:
        """`is_waiting`: for what was handed in; a stuck receiver would make that for ever."""
        self._pool.shutdown(wait=is_waiting)

    @property
    def pending_requests(self) -> int:
        with self._lock:
            return len(self._queues)

    def _drain(self, request_id: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[request_id]
                if not queue:
                    del self._queues[request_id]
                    return
                action = queue.popleft()
            try:
                action()
            except Exception:  # edge: an answer that cannot be sent must not stop the others
                log.exception("an answer of %s was not sent", request_id)
