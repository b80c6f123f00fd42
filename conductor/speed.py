"""How much slower or faster a worker is than its calibration says.

A worker measures its coefficients when it starts, alone. Later it shares cores, caches and links,
so a step takes longer by a factor that moves slowly. The conductor sees both sides (the seconds it
estimated and the seconds that were measured) and keeps their ratio, smoothed.

The ratio fades towards 1 while nothing is measured. Without that, a worker whose first prompt was
slow (a cold cache, a page fault) would never be chosen again on a quiet cluster, and so would
never get the chance to be measured anew.

Not here: fitting coefficients (estimates.py).
"""

from __future__ import annotations

import math

RATIO_MAX = 4.0  # beyond, the calibration is wrong rather than the moment
WEIGHT = 0.2  # of one measurement
HALF_LIFE_S = 30.0


class SpeedRatio:
    """Measured seconds / estimated seconds; 1.0 until something was measured."""

    def __init__(self) -> None:
        self._ratio = 1.0
        self._at_s = -math.inf

    def learn(self, measured_s: float, estimated_s: float, now_s: float) -> None:
        if measured_s <= 0 or estimated_s <= 0:
            return
        seen = min(RATIO_MAX, max(1 / RATIO_MAX, measured_s / estimated_s))
        before = self.at(now_s)
        self._ratio = before + WEIGHT * (seen - before)
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The ratio to expect at `now_s`."""
        if self._ratio == 1.0:
            return 1.0
        fading = math.pow(2.0, -max(0.0, now_s - self._at_s) / HALF_LIFE_S)
        return 1.0 + (self._ratio - 1.0) * fading
