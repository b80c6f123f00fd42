"""The shape of a trace replay: as many users as its requests in flight and soon due need.

The trace alone says when requests arrive; each user waits for its row's own moment. Locust only has
to have enough users, so the shape adds some a few seconds ahead and takes none away, and ends the
run when the last answer is there. If users are short in spite of that, requests are sent late, and
their records say how late.

Not here: whose row is next (trace_share.py).
"""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

from loadtest.users.session import Session
from loadtest.users.trace_share import users_needed

SPAWNED_PER_S = 100.0


class TraceShape(LoadTestShape):
    """Locust asks once a second."""

    def __init__(self, session: Session, options: Any) -> None:
        super().__init__()
        self._session = session
        self._options = options
        self._users = 1
        self._run_id = ""

    def tick(self) -> tuple[int, float] | None:
        run = self._session.run
        if run is None:  # not begun
            return 1, SPAWNED_PER_S
        if run.run_id != self._run_id:
            self._run_id, self._users = run.run_id, 1
        parts = self._session.trace_progress()
        run_s_max = self._options.run_time
        is_time_over = bool(run_s_max) and run.clock.now_s() >= run_s_max
        if is_time_over or all(part.is_over for part in parts):
            return None
        needed = users_needed(self._session.trace_due_s, parts, run.clock.now_s())
        self._users = max(self._users, needed)
        return self._users, SPAWNED_PER_S
