"""Threads that answer requests, because a reply blocks until Triton has taken it.

The engine's thread must not wait for that. Not here: what is answered (decode_job.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

log = logging.getLogger(__name__)
REPLIERS = 8


class Repliers:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(REPLIERS, thread_name_prefix="replier")
        self._replies: set[Future[None]] = set()
        begun = threading.Barrier(REPLIERS + 1)  # all its threads now, and none under load
        for _ in range(REPLIERS):
            self._pool.submit(begun.wait)
        begun.wait()

    def send(self, reply: Callable[[], None]) -> None:
        """Soon, in a thread of ours."""
        future = self._pool.submit(reply)
        self._replies.add(future)
        future.add_done_callback(self._sent)

    def close(self, timeout_s: float) -> None:
        """Wait for those that are on their way, at most so long."""
        wait(list(self._replies), timeout=timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sent(self, reply: Future[None]) -> None:
        self._replies.discard(reply)
        if not reply.cancelled() and (error := reply.exception()) is not None:
            log.error("a reply was not sent", exc_info=error)
