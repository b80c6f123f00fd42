"""Measured against estimated times: speed ratios, relative errors, and margins of the TTFT limit.

**Speed ratio** (`SpeedRatio`): the decayed sum of a worker's measured seconds, divided by the
decayed sum of the seconds that its calibration estimates. A mean of ratios would count ten prompts
that shared one step as ten measurements. PRIOR keeps the ratio near 1 while measurements are few.
Otherwise a worker whose first prompt was slow would get no further requests.

**Accuracy** (`RelativeErrors`): recent relative errors of predictions, for people.

**Margin** (`Margin`): the distance that a predicted TTFT must keep from the limit. For each class
of prompt length, the limit is divided by a quantile of the recent `actual / predicted` TTFTs:

    limit_s = ttft_slo_s / max(1, quantile of actual / predicted in this class)

The weight of a sample is its predicted seconds, and decays with a half-life. As a prior, each class
also has PRIOR_SHARE x ttft_slo_s seconds of exact predictions.

docs/reference/conductor.md ("Measured against estimated") gives the reasons. Not here: fitting
coefficients (estimates.py), the use of the limit (admission.py).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from conductor.estimates.forward_decay import ForwardDecay
from conductor.estimates.lengths import CLASSES, length_class

Column = npt.NDArray[np.float64]

RATIO_MAX = 4.0  # speed ratios are kept within 1 / RATIO_MAX .. RATIO_MAX
OUTLIER_MAX = 10.0  # one measurement counts as at most this multiple of its estimate
PRIOR = 0.5  # added to both sums of a SpeedRatio: seconds for prefill, reports for decode
HALF_LIFE_S = 30.0


class SpeedRatio:
    """Measured / estimated time of a worker; 1.0 without measurements."""

    def __init__(self) -> None:
        self._measured = 0.0
        self._estimated = 0.0
        self._at_s = -math.inf

    def learn(self, measured: float, estimated: float, now_s: float) -> None:
        """Add a measurement and its estimate. Without a positive estimate, nothing is added."""
        if estimated <= 0 or measured < 0:
            return
        kept = self._kept(now_s)
        self._measured = self._measured * kept + min(measured, OUTLIER_MAX * estimated)
        self._estimated = self._estimated * kept + estimated
        self._at_s = max(self._at_s, now_s)  # notes of other frontends bring older measurements

    @property
    def sums(self) -> tuple[float, float, float]:
        """(measured, estimated, time of the last addition). Both sums are decayed to that time."""
        return (self._measured, self._estimated, self._at_s)

    def at(self, now_s: float) -> float:
        """The expected ratio at `now_s`."""
        if not self._estimated:
            return 1.0
        kept = self._kept(now_s)
        ratio = (self._measured * kept + PRIOR) / (self._estimated * kept + PRIOR)
        return min(RATIO_MAX, max(1 / RATIO_MAX, ratio))

    @property
    def latest(self) -> float:
        """The expected ratio at the time of the latest measurement."""
        return self.at(self._at_s)

    def _kept(self, now_s: float) -> float:
        """The factor by which the sums have decayed since the last measurement; 1 is no decay."""
        return math.pow(2.0, -max(0.0, now_s - self._at_s) / HALF_LIFE_S)


def ratios(measured: Column, estimated: Column, at_s: Column, now_s: float) -> Column:
    """SpeedRatio.at for the `sums` of many workers."""
    kept = np.exp2(np.minimum(at_s - now_s, 0.0) / HALF_LIFE_S)
    found: Column = (measured * kept + PRIOR) / (estimated * kept + PRIOR)
    return np.minimum(np.maximum(found, 1 / RATIO_MAX), RATIO_MAX)


SAMPLES_MAX = 512


class RelativeErrors:
    """|actual - predicted| / actual of the last SAMPLES_MAX requests."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=SAMPLES_MAX)

    def add(self, predicted_s: float, actual_s: float) -> None:
        """Add an error. An actual time of 0 has no relative error, and is ignored."""
        if actual_s > 0:
            self._errors.append(abs(actual_s - predicted_s) / actual_s)

    @property
    def mean(self) -> float:
        """0.0 before the first sample."""
        return sum(self._errors) / len(self._errors) if self._errors else 0.0


STEPS_PER_OCTAVE = 8  # buckets of ratios per octave, so two neighbours differ by 9 %
OCTAVES = 3  # highest ratio: 8; larger ratios count as 8
RATIOS = 1 + STEPS_PER_OCTAVE * OCTAVES
PRIOR_SHARE = 1.0  # the prior's seconds of exact predictions, as a share of the limit


class Margin:
    """Quantiles of TTFT prediction errors by length class, as margins of the limit."""

    def __init__(self, quantile: float, limit_s: float, half_life_s: float) -> None:
        self._quantile, self._prior_s = quantile, PRIOR_SHARE * limit_s
        self._decay = ForwardDecay(half_life_s)
        self._seconds = [[0.0] * RATIOS for _ in range(CLASSES)]  # predicted seconds by ratio
        self._ratios = [1.0] * CLASSES

    def learn(self, prompt_tokens: int, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Count a first token that arrived after `actual_s` and was predicted for `predicted_s`."""
        if predicted_s <= 0 or actual_s < 0:
            return
        weight = self._weight(now_s)
        steps = STEPS_PER_OCTAVE * math.log2(max(actual_s / predicted_s, 1.0))
        length = length_class(prompt_tokens)
        # Rounding up makes the ratio of a bucket at least as large as that of each of its samples.
        self._seconds[length][min(RATIOS - 1, math.ceil(steps - 1e-9))] += weight * predicted_s
        self._ratios[length] = self._quantile_of(self._seconds[length], weight * self._prior_s)

    def ratio(self, prompt_tokens: int) -> float:
        """The quantile of actual / predicted in the class of this prompt length; 1 to 8."""
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
        """Update the margins as samples decay. To be called about twice a second."""
        weight = self._weight(now_s)
        for length, seconds in enumerate(self._seconds):
            if any(seconds):
                self._ratios[length] = self._quantile_of(seconds, weight * self._prior_s)

    def check(self) -> None:
        assert all(1 <= ratio <= 2**OCTAVES for ratio in self._ratios), self._ratios
        assert all(value >= 0 for row in self._seconds for value in row)
