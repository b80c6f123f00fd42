"""How far predictions were from what came, recently.

A scheduler that works in predicted seconds is as good as its predictions, so their error is a
figure to watch: `prefill` is the worker's coefficients, `ttft` adds queue and transfer.

Not here: correcting for it (speed.py).
"""

from __future__ import annotations

from collections import deque

SAMPLES_MAX = 256


class Accuracy:
    """Mean |actual - predicted| / actual over the last SAMPLES_MAX requests."""

    def __init__(self) -> None:
        self._prefill: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._ttft: deque[float] = deque(maxlen=SAMPLES_MAX)

    def prefill(self, predicted_s: float, actual_s: float) -> None:
        if actual_s > 0:
            self._prefill.append(abs(actual_s - predicted_s) / actual_s)

    def ttft(self, predicted_s: float, actual_s: float) -> None:
        if actual_s > 0:
            self._ttft.append(abs(actual_s - predicted_s) / actual_s)

    @property
    def prefill_error(self) -> float:
        """0.0 before the first sample."""
        return sum(self._prefill) / len(self._prefill) if self._prefill else 0.0

    @property
    def ttft_error(self) -> float:
        return sum(self._ttft) / len(self._ttft) if self._ttft else 0.0
