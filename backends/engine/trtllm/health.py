"""Is the engine still alive? Its processes may die, or its executor fail, without telling anybody.

A failure that is the request's own fault does not count; several others in a row, with nothing
that went well between them, mean that the engine is gone. Then the worker leaves the cluster and
its process ends: the launcher starts it again, with a fresh engine. Pure but for the last step.

Not here: what a failure is (llm_thread.py), starting again (../../launch.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
FAILURES_MAX = 3  # one may be an accident
LAST_WORDS_S = 1.0  # for answers that are on their way to clients


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


def end_process(*steps: Callable[[], None]) -> None:
    """Leave the cluster, end what can be ended (these `steps`), let answers out, and end.

    Triton's stub has no other way to say that its model is of no use any more.
    """

    def end() -> None:
        for step in steps:
            try:
                step()
            except Exception:  # edge: it is broken, and it will end
                log.exception("leaving")
        threading.Event().wait(LAST_WORDS_S)
        os._exit(1)

    threading.Thread(target=end, name="engine-lost", daemon=True).start()
