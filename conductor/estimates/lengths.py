"""Kaplan-Meier survival curves of answer lengths, by class of prompt length and tenant.

**Classes of prompt length.** A prompt of 100k tokens costs fifty times as much as one of 2k. Long
prompts are few, so statistics over all requests describe them badly. Fair shares, TTFT margins and
output lengths are therefore kept for each class. The bounds are a factor of four apart.

**Classes of answers.** A class of answers is a class of prompt length and a tenant, because the
tenant predicts the length of an answer best. For each class, the finished answers give a *survival
curve*

    S(n) = share of answers with more than n tokens

An answer with n tokens gets more than m further tokens with probability S(n + m) / S(n). The future
load of a decode worker is computed from these probabilities (decode_forecast.py). For an answer of
which n is unknown, the *residual* curve gives the probability of more than m further tokens.

A curve is a product over the buckets of lengths up to n (Kaplan-Meier):

    S(n) = product of (1 - answers that ended in the bucket / answers that reached the bucket)

An answer that max_tokens cut *reached* the bucket and did not *end* there, so limits of clients do
not count as lengths of answers. Counts decay (forward_decay.py). As a prior, each class gets
CLASS_PRIOR answers with the distribution over all classes. All classes together get PRIOR answers
with S(n) = 1 / (1 + n / expected), whose median is `expected`. An answer longer than all known
answers thus doubles its length with a probability of about one half.

An octave of lengths has two buckets, and lengths are uniform inside a bucket. A curve is computed
on demand, at most once in CURVE_S.

Not here: uses of the classes of prompts (fair_share.py, measured.py).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from conductor.estimates.forward_decay import ForwardDecay

BOUNDS_TOKENS = (4_096, 16_384, 65_536)  # a prompt as long as a bound is in the longer class
CLASSES = len(BOUNDS_TOKENS) + 1


def length_class(prompt_tokens: int) -> int:
    """0 for the shortest prompts, CLASSES - 1 for the longest."""
    return bisect_right(BOUNDS_TOKENS, prompt_tokens)


def class_name(number: int) -> str:
    """The class as text, such as `4k-16k tokens`."""
    low, high = (0, *BOUNDS_TOKENS)[number], (*BOUNDS_TOKENS, 0)[number]
    if not low:
        return f"under {high // 1024}k tokens"
    return f"{low // 1024}k-{high // 1024}k tokens" if high else f"over {low // 1024}k tokens"


Vector = npt.NDArray[np.float64]

EDGES: Vector = np.array([0.0, 1.0] + [f * 2.0**k for k in range(1, 18) for f in (1.0, 1.5)])
BUCKETS = len(EDGES) - 1  # the last bucket has no upper bound
CURVE_S = 1.0  # seconds for which a computed curve is reused
CLASS_PRIOR, PRIOR = 8.0, 8.0  # weights of the priors, in answers
TENANTS_MAX = 64  # the first ones get classes of their own; all other tenants count as ""
HALF_LIFE_S = 600.0  # decay of the counts
LEAST = 1e-6  # lower bound of a curve, so that each ratio is defined

ClassKey = tuple[int, str]  # (length class of the prompt, tenant)


@dataclass(slots=True)
class _Counts:
    ended: Vector = field(default_factory=lambda: np.zeros(BUCKETS))  # answers, by bucket
    cut: Vector = field(default_factory=lambda: np.zeros(BUCKETS))  # cut by max_tokens


class OutputLengths:
    """Learns from finished answers, and returns survival curves."""

    def __init__(self, expected_tokens: float) -> None:
        self._decay = ForwardDecay(HALF_LIFE_S)
        self._all = _Counts()
        self._classes: dict[ClassKey, _Counts] = {}
        self._tenants: set[str] = set()
        prior = 1 / (1 + EDGES / expected_tokens)
        self._prior = np.append(prior[:-2] - prior[1:-1], prior[-2])  # answers ended, by bucket
        self._curves: dict[ClassKey | None, tuple[float, Vector]] = {}

    def class_of(self, prompt_tokens: int, tenant: str) -> ClassKey:
        """The class of a request."""
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                tenant = ""
            self._tenants.add(tenant)
        return (length_class(prompt_tokens), tenant)

    def learn(self, key: ClassKey, tokens: float, is_cut: bool, now_s: float) -> None:
        """Count an answer of `tokens`. `is_cut`: True if max_tokens ended it."""
        divisor = self._decay.rescaled(now_s)
        if divisor != 1.0:
            for counts in (self._all, *self._classes.values()):
                counts.ended /= divisor
                counts.cut /= divisor
        # S(n) counts answers longer than n, so an answer at an edge ends in the bucket below it.
        bucket = min(BUCKETS - 1, max(0, int(np.searchsorted(EDGES, tokens, side="left")) - 1))
        weight = self._decay.weight(now_s)
        for counts in (self._all, self._classes.setdefault(key, _Counts())):
            (counts.cut if is_cut else counts.ended)[bucket] += weight

    def curve(self, key: ClassKey | None, now_s: float) -> Vector:
        """S at each of EDGES; starts at 1, never increases, never reaches 0. `key` None: over all
        classes."""
        known = self._curves.get(key)
        if known is not None and now_s - known[0] < CURVE_S:
            return known[1]
        weight = self._decay.weight(now_s)
        if key is None:
            found = survival(self._all.ended / weight + PRIOR * self._prior, self._all.cut / weight)
        else:
            found = pooled = self.curve(None, now_s)
            if (counts := self._classes.get(key)) is not None:
                lost = np.append(pooled[:-2] - pooled[1:-1], pooled[-2])
                found = survival(counts.ended / weight + CLASS_PRIOR * lost, counts.cut / weight)
        self._curves[key] = (now_s, found)
        return found

    def check(self) -> None:
        for counts in (self._all, *self._classes.values()):
            assert counts.ended.min() >= 0 and counts.cut.min() >= 0
        for _, curve in self._curves.values():
            assert curve[0] == 1.0 and (np.diff(curve) <= 0).all() and curve[-1] >= LEAST
        assert len(self._tenants) <= TENANTS_MAX + 1


def survival(ended: Vector, cut: Vector) -> Vector:
    """Kaplan-Meier estimate at each of EDGES, from counts by bucket."""
    reached = (ended + cut)[::-1].cumsum()[::-1]
    # Half of the answers that were cut inside a bucket count as not having reached the bucket.
    at_risk = np.maximum(reached - cut / 2, 1e-12)
    kept = np.clip(1.0 - ended / at_risk, 0.0, 1.0)
    curve = np.append(1.0, kept.cumprod())
    curve[-1] = curve[-2] / 2  # the last bucket has no upper bound, so its survival is a guess
    return np.maximum(curve, LEAST)


def residual(curve: Vector) -> Vector:
    """At each of EDGES, the probability that an answer has more tokens left than this edge, at a
    random moment of decoding. It is the area under the curve beyond the edge / the whole area."""
    areas = (curve[1:] + curve[:-1]) / 2 * np.diff(EDGES)
    right = np.append(areas[::-1].cumsum()[::-1], 0.0)
    return np.asarray(right / right[0])
