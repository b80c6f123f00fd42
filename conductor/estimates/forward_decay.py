"""Sums that fade with a half-life, without being walked: forward decay.

Instead of shrinking every old sum as time passes, each new amount weighs 2^(age / half-life) more
than one at the origin. A sum in units of its own time is `sum / weight(now)`. So a sum is one
number, and adding to it is one multiplication. (Cormode et al., "Forward Decay", ICDE 2009.)

Weights grow, so once in a while all sums are divided and the origin moves: the owner asks
`rescaled` before it adds, and divides by the answer.

Not here: the sums.
"""

from __future__ import annotations

import math

EXPONENT_MAX = 40.0  # half-lives from the origin before sums are rescaled
EXPONENT_FLOAT = 1000.0  # 2^1000 still is a float; a sum divided by it is nothing


class ForwardDecay:
    """Weights of moments; the first one asked about is the origin."""

    def __init__(self, half_life_s: float) -> None:
        assert half_life_s > 0, half_life_s
        self.half_life_s = half_life_s
        self.began_s = math.inf  # the first moment that was asked about
        self._origin_s = math.inf

    def rescaled(self, now_s: float) -> float:
        """What all sums are to be divided by before anything is added; mostly 1."""
        if self.began_s == math.inf:
            self.began_s = self._origin_s = now_s
        exponent = (now_s - self._origin_s) / self.half_life_s
        if exponent <= EXPONENT_MAX:
            return 1.0
        self._origin_s = now_s
        return float(2.0 ** min(exponent, EXPONENT_FLOAT))

    def weight(self, at_s: float) -> float:
        """Of an amount that is added at this moment."""
        if self.began_s == math.inf:
            return 1.0
        exponent = (at_s - self._origin_s) / self.half_life_s
        return float(2.0 ** min(exponent, EXPONENT_FLOAT))

    def window_s(self, now_s: float) -> float:
        """Seconds that a sum stands for: a steady rate is sum / weight / window."""
        if self.began_s == math.inf:
            return 0.0
        faded = 2.0 ** max(-EXPONENT_FLOAT, (self.began_s - now_s) / self.half_life_s)
        return float(self.half_life_s / math.log(2.0) * (1.0 - faded))
