"""The steps of one simulated worker: the jitter of each step, and how long each step took.

A step takes longer or shorter than the model predicts, by the same factor for the same seed. The
factor belongs to the number of the step, so the number of steps computed at once does not matter. A
request records the number of its first step, so its token intervals are a slice of the log.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DRAWN_AT_ONCE = 4_096

Seconds = npt.NDArray[np.float64]


class Jitter:
    def __init__(self, share: float, seed: int, node: int) -> None:
        self._share = share
        self._random = np.random.default_rng([seed, node])
        self._factors = np.ones(0)

    def factors(self, first: int, steps: int) -> Seconds:
        """Factors of the steps `first`, `first` + 1, ...; uniform over 1 +/- share."""
        while first + steps > len(self._factors):
            drawn = self._random.uniform(1 - self._share, 1 + self._share, DRAWN_AT_ONCE)
            self._factors = np.concatenate([self._factors, drawn])
        return self._factors[first : first + steps]


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
        """Discard the planned steps after the first `steps`."""
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
