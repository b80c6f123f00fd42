"""Forward decay: sums with a half-life that need no pass over old values (Cormode et al., 2009).

A backward decay would shrink every old sum as time passes. Forward decay instead gives each new
amount a larger weight, 2^(seconds since the origin / half-life). The decayed sum at a time is
`sum / weight(time)`. So a sum is one number, and old sums are not touched (ICDE 2009).

Weights grow, so the origin must move before they overflow. The owner of the sums calls `rescaled`
before each addition, and divides all sums by the returned divisor.
"""

from __future__ import annotations

import math

EXPONENT_MAX = 40.0  # half-lives from the origin before sums are rescaled
EXPONENT_FLOAT = 1000.0  # 2^1000 is still a float; a sum divided by it is 0


class ForwardDecay:
    """The origin and the weights. The first time passed to `rescaled` is the first origin."""

    def __init__(self, half_life_s: float) -> None:
        assert half_life_s > 0, half_life_s
        self.half_life_s = half_life_s
        self.began_s = math.inf  # first time passed to `rescaled`; inf: none yet
        self._origin_s = math.inf

    def rescaled(self, now_s: float) -> float:
        """Divisor for all sums before the next addition; 1 unless the origin moves."""
        if self.began_s == math.inf:
            self.began_s = self._origin_s = now_s
        exponent = (now_s - self._origin_s) / self.half_life_s
        if exponent <= EXPONENT_MAX:
            return 1.0
        self._origin_s = now_s
        return float(2.0 ** min(exponent, EXPONENT_FLOAT))

    def weight(self, at_s: float) -> float:
        """Weight of an amount that is added at this time; 1 before the first `rescaled`."""
        if self.began_s == math.inf:
            return 1.0
        exponent = (at_s - self._origin_s) / self.half_life_s
        return float(2.0 ** min(exponent, EXPONENT_FLOAT))

    def window_s(self, now_s: float) -> float:
        """Seconds by which a decayed sum is divided to get a rate. 0 at the start."""
        if self.began_s == math.inf:
            return 0.0
        faded = 2.0 ** max(-EXPONENT_FLOAT, (self.began_s - now_s) / self.half_life_s)
        return float(self.half_life_s / math.log(2.0) * (1.0 - faded))
