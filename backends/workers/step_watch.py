"""Is the engine hung? How long its step has been under way, and when that is too long. Pure.

A worker whose engine hangs goes on reporting: that is life, not progress. What it computes has a
predicted time, so a step that takes many times as long, and half a minute at least, will not end.
Time in which nobody watched does not count: then the whole process stood still, the step as well.

Not here: what becomes of a hung worker (worker.py), the mean time of steps (step_times.py).
"""

from __future__ import annotations

HUNG_S_MIN = 30.0  # a busy machine makes a step slow, not hung
HUNG_RATIO = 20.0  # times as long as predicted
GAP_S_MAX = 5.0  # between two looks of one who watches


def limit_s(predicted_s: float) -> float:
    """A step that takes longer is hung."""
    return max(HUNG_S_MIN, HUNG_RATIO * predicted_s)


class StepWatch:
    """Told of the steps by the thread that makes them, looked at by another."""

    def __init__(self) -> None:
        self._step: tuple[float, float] | None = None  # (when it began, its predicted seconds)
        self._looked_s = self._watched_since_s = float("-inf")

    def began(self, now_s: float, predicted_s: float = 0.0) -> None:
        self._step = now_s, predicted_s

    def ended(self) -> None:
        self._step = None

    def is_busy(self, now_s: float, busy: bool, predicted_s: float = 0.0) -> None:
        """Of an engine that shows no steps: it has something to do, or has not."""
        step = self._step
        if not busy:
            self._step = None
        else:
            self._step = step[0] if step is not None else now_s, predicted_s

    def progressed(self, now_s: float) -> None:
        """A sign of life from an engine that shows no steps: the next one begins."""
        if (step := self._step) is not None:
            self._step = now_s, step[1]

    def age_s(self, now_s: float) -> float:
        """Of the step that is under way; 0 when there is none."""
        step = self._step
        return max(0.0, now_s - step[0]) if step is not None else 0.0

    def is_hung(self, now_s: float) -> bool:
        """Asked every second or so, by one thread."""
        if now_s - self._looked_s > GAP_S_MAX:
            self._watched_since_s = now_s
        self._looked_s = now_s
        step = self._step
        if step is None:
            return False
        began_s, predicted_s = step
        return now_s - max(began_s, self._watched_since_s) > limit_s(predicted_s)
