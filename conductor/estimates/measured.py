"""What was measured against what was estimated: three figures from the same comparison.

**Speed ratio** (`SpeedRatio`): how much slower or faster a worker is than its calibration says, as
the ratio of recent sums of measured and estimated seconds. Sums, not a mean of ratios: ten prompts
that shared one step count as one piece of work. Old sums fade, and PRIOR keeps the ratio near 1
while little is measured, or a worker whose first prompt was slow would never be measured anew.

**Accuracy** (`RelativeErrors`): how far predictions were from what came, recently, for people.

**Margin** (`Margin`): how far below its limit a prediction must stay. A limit is divided by a
quantile of `actual / predicted` as it was measured lately, for each class of prompt length:

    limit_s = ttft_slo_s / max(1, quantile of actual / predicted in this class)

The quantile weighs each sample by its predicted seconds, samples fade with a half-life, and
PRIOR_SHARE of a limit's worth of seconds counts as predicted exactly.

Why each is made so: docs/reference/conductor.md ("Measured against estimated"). Not here: fitting
coefficients (estimates.py), what the limit is for (admission.py).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from conductor.estimates.forward_decay import ForwardDecay
from conductor.estimates.lengths import CLASSES, length_class
from conductor.messages import ErrorPercentiles

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
        self._at_s = max(self._at_s, now_s)  # of another frontend's prefill it is heard late

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


STEPS_PER_OCTAVE = 8  # ratios are told apart to 9 %
OCTAVES = 3  # ... up to 8; what is further off counts as 8
RATIOS = 1 + STEPS_PER_OCTAVE * OCTAVES
PRIOR_SHARE = 1.0  # of the limit, in predicted seconds that count as exact


class Margin:
    """Measured errors of predicted TTFT per length class, and limits that allow for them."""

    def __init__(self, quantile: float, limit_s: float, half_life_s: float) -> None:
        self._quantile, self._prior_s = quantile, PRIOR_SHARE * limit_s
        self._decay = ForwardDecay(half_life_s)
        self._seconds = [[0.0] * RATIOS for _ in range(CLASSES)]  # predicted, by ratio
        self._ratios = [1.0] * CLASSES

    def learn(self, prompt_tokens: int, predicted_s: float, actual_s: float, now_s: float) -> None:
        """A request was predicted to take `predicted_s` until its first token, and took longer or
        shorter."""
        if predicted_s <= 0 or actual_s < 0:
            return
        weight = self._weight(now_s)
        steps = STEPS_PER_OCTAVE * math.log2(max(actual_s / predicted_s, 1.0))
        length = length_class(prompt_tokens)
        # Steps are rounded up, so that a bucket's ratio is not below any sample in it.
        self._seconds[length][min(RATIOS - 1, math.ceil(steps - 1e-9))] += weight * predicted_s
        self._ratios[length] = self._quantile_of(self._seconds[length], weight * self._prior_s)

    def ratio(self, prompt_tokens: int) -> float:
        """Actual / predicted that only (1 - quantile) of the predicted seconds exceed; from 1."""
        return self._ratios[length_class(prompt_tokens)]

    def _quantile_of(self, seconds: list[float], exact_s: float) -> float:
        rest = (1 - self._quantile) * (sum(seconds) + exact_s)
        for step in range(RATIOS - 1, 0, -1):
            rest -= seconds[step]
            if rest < 0:
                return float(2.0 ** (step / STEPS_PER_OCTAVE))
        return 1.0

    def _weight(self, now_s: float) -> float:
        divisor = self._decay.rescaled(now_s)
        if divisor != 1.0:
            self._seconds = [[value / divisor for value in row] for row in self._seconds]
        return self._decay.weight(now_s)

    def fade(self, now_s: float) -> None:
        """Once a second or so: a class that nobody finishes in is trusted again with time."""
        weight = self._weight(now_s)
        for length, seconds in enumerate(self._seconds):
            if any(seconds):
                self._ratios[length] = self._quantile_of(seconds, weight * self._prior_s)

    def check(self) -> None:
        """Prove the invariants."""
        assert all(1 <= ratio <= 2**OCTAVES for ratio in self._ratios), self._ratios
        assert all(value >= 0 for row in self._seconds for value in row)
