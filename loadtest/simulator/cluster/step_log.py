"""The seconds of every decode step of one worker, done and planned.

A request remembers the number of its first step, so its token intervals are a slice of this.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


class StepLog:
    def __init__(self) -> None:
        self._seconds: Seconds = np.zeros(1_024)
        self.steps = 0

    def append(self, seconds: Seconds) -> None:
        end = self.steps + len(seconds)
        if end > len(self._seconds):
            grown = np.zeros(2 * end)
            grown[: self.steps] = self._seconds[: self.steps]
            self._seconds = grown
        self._seconds[self.steps : end] = seconds
        self.steps = end

    def cut(self, steps: int) -> None:
        """Forget what was planned after so many steps."""
        assert 0 <= steps <= self.steps, (steps, self.steps)
        self.steps = steps

    def slice(self, first: int, end: int) -> Seconds:
        assert 0 <= first <= end <= self.steps, (first, end, self.steps)
        return self._seconds[first:end]


def longest_tenth_s(intervals: Seconds) -> float:
    """A request's TBT: the mean of the longest 10 % of its token intervals (FAST'25, 5.1)."""
    if not len(intervals):
        return 0.0
    count = max(1, -(-len(intervals) // 10))
    return float(np.partition(intervals, len(intervals) - count)[-count:].mean())
