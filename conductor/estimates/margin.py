"""How far above its limit a prediction must stay below it: a limit that carries its own error.

A request whose predicted TTFT is just below the limit misses it about half the time, more often
when predictions are too low. So a limit is divided by a quantile of `actual / predicted` as it was
measured lately, for each class of prompt length: long prompts are overtaken by short ones after
they were predicted, and so are off by more.

    limit_s = ttft_slo_s / max(1, quantile of actual / predicted in this class)

The quantile weighs each sample by its predicted seconds. A prompt that was predicted at 50 ms and
took 300 ms says nothing about predictions of 9 s, and those are the ones a limit of 10 s judges.
Samples fade with a half-life; PRIOR_SHARE of a limit's worth of seconds counts as predicted
exactly, so that one surprise does not close the door and an empty class comes back to 1. The ratio
is never below 1: predictions that were too high are corrected where they are made (speed.py), and
a promise is not widened because it was kept easily.

Not here: what the limit is for (admission.py), telling the error to people (accuracy.py).
"""

from __future__ import annotations

import math

from conductor.estimates.forward_decay import ForwardDecay
from conductor.estimates.length_class import CLASSES, length_class

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
        # Rounded up: a ratio stands for those just below it.
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
