"""What one tenant offered lately, by class of prompt length and by cost; and how much of it fits.

The *cost* of a request is its predicted prefill seconds, divided by what its priority is worth
(fair_share.py). Costs are counted in a histogram with four buckets an octave; `split` cuts it:

    admit a request of class c  if its cost is below cut[c]
    cut[c] = the same for every class, raised where that would admit less than a floor:
             admitted share of c >= floor x admitted share of all

and it is the largest one whose work fits into the seconds that are granted. Admitting the
cheapest first gives the most requests for the seconds there are; the floor is what that costs in
fairness. Inside a class the cheapest go first too, so a floor is met at the least cost.

A cut is a place in the histogram: whole buckets, and a part of the next one. Costs are often equal
(a benchmark sends one prompt length), so inside that bucket turns are taken: each request that
comes adds the part to a *credit*, and one is admitted when the credit has reached one.

All sums fade together, so what is kept are sums in units of the weight of today (the same forward
decay as in hotspots.py): the owner tells the weight of a request, and divides by today's.

Not here: time, tenants against each other, single decisions (fair_share.py).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from conductor.estimates.length_class import CLASSES

Vector = npt.NDArray[np.float64]

COST_MIN_S = 2.0**-16  # costs are told apart from here ...
BUCKETS_PER_OCTAVE = 4
BUCKETS = 28 * BUCKETS_PER_OCTAVE  # ... to 2^12 s, over an hour
FIXED_POINT_ROUNDS = 6  # each brings the admitted share nearer by a factor of at least two


def bucket(cost_s: float) -> int:
    if cost_s <= COST_MIN_S:
        return 0
    return min(BUCKETS - 1, int(BUCKETS_PER_OCTAVE * math.log2(cost_s / COST_MIN_S)))


def cost_at(cut: float) -> float:
    """The cost at a place of the histogram, counted in buckets; nobody costs 0, so 0 is nobody."""
    return COST_MIN_S * 2.0 ** (cut / BUCKETS_PER_OCTAVE) if cut > 0 else 0.0


class Demand:
    """Faded sums of one tenant: requests and prefill seconds, offered and admitted."""

    def __init__(self) -> None:
        self.offered: Vector = np.zeros((CLASSES, BUCKETS))
        self.offered_s: Vector = np.zeros((CLASSES, BUCKETS))
        self.recent_s = 0.0  # offered work again, fading faster: what has changed lately
        self.offered_of = [0.0] * CLASSES  # requests, all costs together
        self.admitted_of = [0.0] * CLASSES
        self.cuts = NO_CUTS  # of the latest plan
        self._credit = [0.0] * CLASSES  # of the bucket that a cut goes through; 0 .. 1

    def is_within(self, length: int, cost_s: float) -> bool:
        """Whether the cuts admit one more request of this cost."""
        cut, place = self.cuts[length], bucket(cost_s)
        if math.isinf(cut) or place != int(cut):
            return place < cut
        return self._credit[length] + cut - int(cut) >= 1.0

    def note(
        self, length: int, cost_s: float, work_s: float, weight: float, is_admitted: bool
    ) -> None:
        """Count a request that was decided on."""
        cut, place = self.cuts[length], (length, bucket(cost_s))
        if math.isfinite(cut) and place[1] == int(cut):
            credit = self._credit[length] + cut - int(cut) - is_admitted
            self._credit[length] = min(1.0, max(0.0, credit))
        if is_admitted:
            self.admitted_of[length] += weight
        self.offered[place] += weight
        self.offered_s[place] += weight * work_s
        self.offered_of[length] += weight

    def is_owed(self, length: int, floor: float, weight: float) -> bool:
        """Whether the class is at or below its floor even when this one is admitted."""
        share = sum(self.admitted_of) / (sum(self.offered_of) + weight)
        offered = self.offered_of[length] + weight
        return self.admitted_of[length] + weight <= floor * share * offered

    def rescale(self, divisor: float) -> None:
        self.offered /= divisor
        self.offered_s /= divisor
        self.offered_of = [value / divisor for value in self.offered_of]
        self.admitted_of = [value / divisor for value in self.admitted_of]

    def split(self, granted_s: float, floor: float) -> None:
        """Make the cuts that admit `granted_s` (in units of the sums) of what was offered."""
        below = _cumulated(self.offered)  # [class, cut]: requests below each cut
        below_s = _cumulated(self.offered_s)
        of_class = below[:, -1]
        share = below.sum(axis=0) / of_class.sum()
        for _ in range(FIXED_POINT_ROUNDS):  # what a floor adds raises the share it refers to
            admitted = np.maximum(below, floor * share * of_class[:, None])
            share = admitted.sum(axis=0) / of_class.sum()
        admitted = np.minimum(admitted, of_class[:, None])
        work_s = np.array([
            np.interp(admitted[c], below[c], below_s[c]) for c in range(CLASSES)
        ]).sum(axis=0)  # fmt: skip
        cut = max(0, int(np.searchsorted(work_s, granted_s, side="right")) - 1)
        if cut >= BUCKETS:
            self.cuts = NO_CUTS
            return
        step_s = float(work_s[cut + 1] - work_s[cut])
        part = min(1.0, max(0.0, (granted_s - float(work_s[cut])) / step_s)) if step_s > 0 else 0.0
        wanted = admitted[:, cut] + part * (admitted[:, cut + 1] - admitted[:, cut])
        plain = below[:, cut] + part * (below[:, cut + 1] - below[:, cut])
        self.cuts = [
            # Raised: as far as the floor asks for.
            max(cut + part, float(np.interp(wanted[c], below[c], CUTS)))
            if wanted[c] > plain[c]
            else cut + part
            for c in range(CLASSES)
        ]

    def check(self) -> None:
        """Prove the invariants."""
        assert np.allclose(self.offered.sum(axis=1), self.offered_of)
        assert self.offered.min() >= 0 and self.offered_s.min() >= 0
        assert all(0 <= credit <= 1 for credit in self._credit), self._credit
        for admitted, offered in zip(self.admitted_of, self.offered_of, strict=True):
            assert -1e-9 <= admitted <= offered * (1 + 1e-9) + 1e-9, (admitted, offered)


NO_CUTS = [math.inf] * CLASSES  # nobody is turned away
CUTS = np.arange(BUCKETS + 1, dtype=np.float64)


def _cumulated(rows: Vector) -> Vector:
    return np.concatenate([np.zeros((CLASSES, 1)), rows.cumsum(axis=1)], axis=1)
