"""Is the engine still alive? Its processes may die, or its executor fail, without telling anybody.

A failure that is the request's own fault does not count; several others in a row, with nothing
that went well between them, mean that the engine is gone. Then the worker leaves the cluster and
its process ends: the launcher starts it again, with a fresh engine. Pure.

Not here: what a failure is (llm_thread.py), the end (backends/workers/worker.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
FAILURES_MAX = 3  # one may be an accident


class EngineHealth:
    def __init__(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called once, with the reason, in whatever thread noticed it."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._failures = 0
        self.is_lost = False

    def went_well(self) -> None:
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Of one generation, through no fault of its own."""
        with self._lock:
            self._failures += 1
            is_gone = self._failures >= FAILURES_MAX
        if is_gone:
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """Nothing will work any more."""
        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
        log.critical("the engine is lost: %s", reason)
        self._on_lost(reason)
