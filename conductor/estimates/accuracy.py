"""How far predictions were from what came, recently.

A scheduler that works in predicted seconds is as good as its predictions, so their error is a
figure to watch: `prefill` is the worker's coefficients, `ttft` adds queue and transfer. A mean
hides what a limit has to allow for, so there are percentiles too.

Not here: correcting for it (speed.py).
"""

from __future__ import annotations

from collections import deque

from conductor.messages import ErrorPercentiles

SAMPLES_MAX = 512


class RelativeErrors:
    """|actual - predicted| / actual of the last SAMPLES_MAX requests."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=SAMPLES_MAX)

    def add(self, predicted_s: float, actual_s: float) -> None:
        """What took no time has no relative error: it is left out."""
        if actual_s > 0:
            self._errors.append(abs(actual_s - predicted_s) / actual_s)

    @property
    def mean(self) -> float:
        """0.0 before the first sample."""
        return sum(self._errors) / len(self._errors) if self._errors else 0.0

    def percentiles(self) -> ErrorPercentiles:
        """The nearest sample at or above each rank."""
        ordered = sorted(self._errors)
        at = [ordered[(len(ordered) - 1) * p // 100] if ordered else 0.0 for p in (50, 90, 99)]
        return ErrorPercentiles(*at)


class Accuracy:
    """Of prefill seconds, and of the time from routing to the end of prefill."""

    def __init__(self) -> None:
        self.prefill = RelativeErrors()
        self.ttft = RelativeErrors()
