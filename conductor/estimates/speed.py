"""How much slower or faster a worker is than its calibration says.

A worker measures its coefficients when it starts, alone. Later it shares cores, caches and links,
so work takes longer by a factor that moves slowly. The conductor sees both sides (the seconds it
estimated and the seconds that were measured) and keeps the ratio of their recent sums. Sums, not a
mean of ratios: ten prompts that shared one step count as one piece of work.

Old sums fade, and PRIOR keeps the ratio near 1 while little is measured. Without that, a worker
whose first prompt was slow (a cold cache, a page fault) would never be chosen again on a quiet
cluster, and so would never get the chance to be measured anew.

Not here: fitting coefficients (estimates.py).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

RATIO_MAX = 4.0  # beyond, the calibration is wrong rather than the moment
OUTLIER_MAX = 10.0  # one measurement counts as at most so many times its estimate
PRIOR = 0.5  # as much work as this was as estimated
HALF_LIFE_S = 30.0


class SpeedRatio:
    """Measured / estimated; 1.0 until something was measured."""

    def __init__(self) -> None:
        self._measured = 0.0
        self._estimated = 0.0
        self._at_s = -math.inf

    def learn(self, measured: float, estimated: float, now_s: float) -> None:
        """Work of one kind that was estimated as `estimated` took `measured`, in any one unit."""
        if estimated <= 0 or measured < 0:
            return
        kept = self._kept(now_s)
        self._measured = self._measured * kept + min(measured, OUTLIER_MAX * estimated)
        self._estimated = self._estimated * kept + estimated
        self._at_s = now_s

    @property
    def sums(self) -> tuple[float, float, float]:
        """Measured, estimated, and when they were last added to."""
        return (self._measured, self._estimated, self._at_s)

    def at(self, now_s: float) -> float:
        """The ratio to expect at `now_s`."""
        if not self._estimated:
            return 1.0
        kept = self._kept(now_s)
        ratio = (self._measured * kept + PRIOR) / (self._estimated * kept + PRIOR)
        return min(RATIO_MAX, max(1 / RATIO_MAX, ratio))

    def _kept(self, now_s: float) -> float:
        """The share of the sums that has not faded since the last measurement."""
        return math.pow(2.0, -max(0.0, now_s - self._at_s) / HALF_LIFE_S)


def ratios(measured: Column, estimated: Column, at_s: Column, now_s: float) -> Column:
    """SpeedRatio.at for the `sums` of many."""
    kept = np.exp2(np.minimum(at_s - now_s, 0.0) / HALF_LIFE_S)
    found: Column = (measured * kept + PRIOR) / (estimated * kept + PRIOR)
    return np.minimum(np.maximum(found, 1 / RATIO_MAX), RATIO_MAX)
