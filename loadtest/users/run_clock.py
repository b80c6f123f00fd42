"""Seconds since a run began, the same on every machine whose wall clock is right.

Intervals come from the monotonic clock; the wall clock only says once where it stands.
"""

from __future__ import annotations

import time


class RunClock:
    def __init__(self, began_unix_s: float) -> None:
        self.began_unix_s = began_unix_s
        self._offset_s = time.time() - time.perf_counter() - began_unix_s

    def now_s(self) -> float:
        return time.perf_counter() + self._offset_s
