"""Weighted max-min fair shares between tenants, and cost cuts inside a tenant, under overload.

A limit on predicted TTFT alone ignores the cost of a request. Under overload, this limit keeps the
queue so long that a short prompt just meets the limit, and a long prompt never does. Fair shares
therefore hold the queue well below the limit. `backlog` is the mean of the prefill seconds queued
per worker, `target = backlog_share x ttft_slo_s`, and work is admitted at the rate

    capacity = workers x (1 + (target - backlog) / ttft_slo_s)      [prefill seconds per second]

The backlog thus approaches the target with the time constant ttft_slo_s. While decode workers are
full, the capacity is lower. If they have room, all requests are admitted up to half the target.

The capacity is divided among tenants max-min fairly, with the weights `tenant_shares`. Frontends
exchange the demand of each tenant. A frontend takes a part of a tenant's share, in proportion to
the tenant's demand at this frontend. A tenant that is granted less than its demand loses the
costliest requests of each class of prompt length. A request of class c is admitted if its cost is
below cut[c]. All classes have the same cut, except that a class below its floor gets a higher one:

    admitted share of c >= length_share_min x admitted share of all classes

A cut is a position in a histogram of costs with four buckets per octave. It admits whole buckets
and a part of the next bucket. Costs are often equal, so a *credit* selects the requests of the next
bucket. Each of them adds the part to the credit, and is admitted if the credit reaches one.
`FairShare` passes each `Demand` the weights of its decayed sums (forward_decay.py). It plans cuts
at most once in PLAN_S, so a decision needs few operations.

docs/reference/conductor.md ("Fair shares under overload") gives the reasons, and the roles of
priority, of classes below their floor and of decoding. Not here: limits of TTFT and TBT
(admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.config import ConductorConfig, parse_shares
from conductor.estimates.forward_decay import ForwardDecay
from conductor.estimates.lengths import CLASSES, length_class
from conductor.messages import Request

Vector = npt.NDArray[np.float64]

COST_MIN_S = 2.0**-16  # lower end of the histogram of costs
BUCKETS_PER_OCTAVE = 4
BUCKETS = 28 * BUCKETS_PER_OCTAVE  # upper end: 2^12 s, over an hour
FIXED_POINT_ROUNDS = 6  # each round multiplies the error by at most the floor


def bucket(cost_s: float) -> int:
    if cost_s <= COST_MIN_S:
        return 0
    return min(BUCKETS - 1, int(BUCKETS_PER_OCTAVE * math.log2(cost_s / COST_MIN_S)))


def cost_at(cut: float) -> float:
    """The cost in seconds at a cut in buckets. A cut of 0 admits no request."""
    return COST_MIN_S * 2.0 ** (cut / BUCKETS_PER_OCTAVE) if cut > 0 else 0.0


class Demand:
    """Decayed sums of one tenant: offered requests and prefill seconds, and admitted requests."""

    def __init__(self) -> None:
        self.offered: Vector = np.zeros((CLASSES, BUCKETS))  # requests
        self.offered_s: Vector = np.zeros((CLASSES, BUCKETS))  # prefill seconds
        self.steady_s = 0.0  # sum of `offered_s`
        self.recent_s = 0.0  # as `steady_s`, with a half-life shorter by the factor RECENT_FASTER
        self.offered_of = [0.0] * CLASSES  # requests by class, summed over costs
        self.admitted_of = [0.0] * CLASSES
        self.cuts = NO_CUTS  # cut of each class in the latest plan; 0 .. BUCKETS, or infinite
        self._credit = [0.0] * CLASSES  # credit of each class in its partly admitted bucket; 0 .. 1

    def is_within(self, length: int, cost_s: float) -> bool:
        """Whether the cuts admit one more request of this cost."""
        cut, position = self.cuts[length], bucket(cost_s)
        if math.isinf(cut) or position != int(cut):
            return position < cut
        return self._credit[length] + cut - int(cut) >= 1.0

    def note(
        self, length: int, cost_s: float, work_s: float, weight: float, is_admitted: bool
    ) -> None:
        """Count a decided request. `work_s`: its prefill time; `cost_s`: weighted by priority."""
        cut, position = self.cuts[length], (length, bucket(cost_s))
        if math.isfinite(cut) and position[1] == int(cut):
            credit = self._credit[length] + cut - int(cut) - is_admitted
            self._credit[length] = min(1.0, max(0.0, credit))
        if is_admitted:
            self.admitted_of[length] += weight
        self.offered[position] += weight
        self.offered_s[position] += weight * work_s
        self.steady_s += weight * work_s
        self.offered_of[length] += weight

    def is_below_floor(self, length: int, floor: float, weight: float) -> bool:
        """Whether the class is still at or below its floor with one more admitted request."""
        share = sum(self.admitted_of) / (sum(self.offered_of) + weight)
        offered = self.offered_of[length] + weight
        return self.admitted_of[length] + weight <= floor * share * offered

    def rescale(self, divisor: float) -> None:
        self.offered /= divisor
        self.offered_s /= divisor
        self.steady_s /= divisor
        self.offered_of = [value / divisor for value in self.offered_of]
        self.admitted_of = [value / divisor for value in self.admitted_of]

    def split(self, granted_s: float, floor: float) -> None:
        """Set the cuts that admit `granted_s` of the work `steady_s`. Both are decayed sums."""
        below = _cumulated(self.offered)  # [class, cut]: requests below each cut
        below_s = _cumulated(self.offered_s)
        of_class = below[:, -1]
        share = below.sum(axis=0) / of_class.sum()
        for _ in range(FIXED_POINT_ROUNDS):  # the floors depend on the mean share, and vice versa
            admitted = np.maximum(below, floor * share * of_class[:, None])
            share = admitted.sum(axis=0) / of_class.sum()
        admitted = np.minimum(admitted, of_class[:, None])
        work_s = np.array(
            [np.interp(admitted[c], below[c], below_s[c]) for c in range(CLASSES)]
        ).sum(axis=0)
        cut = max(0, int(np.searchsorted(work_s, granted_s, side="right")) - 1)
        if cut >= BUCKETS:
            self.cuts = NO_CUTS
            return
        step_s = float(work_s[cut + 1] - work_s[cut])
        part = min(1.0, max(0.0, (granted_s - float(work_s[cut])) / step_s)) if step_s > 0 else 0.0
        wanted = admitted[:, cut] + part * (admitted[:, cut + 1] - admitted[:, cut])
        plain = below[:, cut] + part * (below[:, cut + 1] - below[:, cut])
        self.cuts = [
            # A class below its floor has its cut raised to the floor.
            max(cut + part, float(np.interp(wanted[c], below[c], CUTS)))
            if wanted[c] > plain[c]
            else cut + part
            for c in range(CLASSES)
        ]

    def check(self) -> None:
        assert np.allclose(self.offered.sum(axis=1), self.offered_of)
        assert math.isclose(self.offered_s.sum(), self.steady_s, rel_tol=1e-6, abs_tol=1e-9)
        assert self.offered.min() >= 0 and self.offered_s.min() >= 0
        assert all(0 <= credit <= 1 for credit in self._credit), self._credit
        for admitted, offered in zip(self.admitted_of, self.offered_of, strict=True):
            assert -1e-9 <= admitted <= offered * (1 + 1e-9) + 1e-9, (admitted, offered)


NO_CUTS = [math.inf] * CLASSES  # all requests are admitted
CUTS = np.arange(BUCKETS + 1, dtype=np.float64)


def _cumulated(rows: Vector) -> Vector:
    return np.concatenate([np.zeros((CLASSES, 1)), rows.cumsum(axis=1)], axis=1)


PLAN_S = 0.5  # least time between two plans
RECENT_FASTER = 6.0  # demand is the larger of a steady rate and one that decays this much faster
IDLE_SHARE = 0.5  # share of the target up to which all is admitted, if decode has room
CAPACITY_MIN = 0.1  # share of the workers' capacity that is admitted even with the longest queue
WINDOW_MIN_S = 10.0  # minimum averaging window, so that one burst does not count as overload
TENANTS_MAX = 256  # above it, the tenant with the least offered work is dropped
FADED_REQUESTS = 1e-3  # a tenant with a smaller decayed sum of requests is dropped
PRIORITY_MAX = 4  # levels beyond -4 to 4 count as -4 or 4
DECODE_BUSY = 0.9  # load / limit from which a decode worker can be the bottleneck
# A plan multiplies `_decode_part` by DECODE_LESS after a rejection for decode load. Otherwise it
# adds DECODE_MORE.
DECODE_LESS, DECODE_MORE = 0.9, 0.01


NO_OTHERS: Mapping[str, float] = {}


class Pressure(NamedTuple):
    """The load of the prefill workers, and of the decode worker chosen for the request."""

    backlog_s: float  # mean seconds of prefill queued, over the workers that may take the request
    workers: int  # number of these workers
    decode_load: float  # largest of TBT with this request, slots and pages, each / its limit
    ttft_slo_s: float  # service level; with `auto`, the average of recent requests
    is_decoding: bool = True  # True if the batch of the decode worker is not empty
    # Prefill seconds per second that each tenant recently offered to other frontends.
    elsewhere: Mapping[str, float] = NO_OTHERS


@dataclass(frozen=True, slots=True)
class Shed:
    """A request rejected for fairness, with the figures of its limit."""

    length: int  # class of its prompt length
    work_s: float  # predicted prefill seconds
    limit_s: float  # upper bound of admitted `work_s` in this class, at the request's priority
    backlog_s: float  # as in Pressure
    target_s: float  # target of the backlog
    excess_s: float  # backlog above IDLE_SHARE of the target, >= 0
    wanted: float  # prefill seconds per second that the tenant recently offered to this frontend
    granted: float  # prefill seconds per second of `wanted` that are granted


class FairShare:
    """Tracks offered and admitted work, and decides which requests to shed under overload."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._weights = parse_shares(config.tenant_shares)
        self._demands: dict[str, Demand] = {}
        self._granted: dict[str, tuple[float, float]] = {}  # (wanted, granted), as in Shed
        self._decay = ForwardDecay(config.demand_half_life_s)
        self._recent = ForwardDecay(config.demand_half_life_s / RECENT_FASTER)
        self._planned_s = -math.inf
        self._noted_s = -math.inf  # when the latest request was counted
        self._decode_part = 1.0  # factor of the capacity, CAPACITY_MIN .. 1; 1 if decode has room
        self._is_decode_short = False  # True after a rejection for decode load since the last plan

    def rejection(self, request: Request, work_s: float, pressure: Pressure) -> Shed | None:
        """The figures of this request's rejection; None if it is admitted. Changes no state."""
        demand = self._demands.get(request.tenant)
        if demand is None or demand.cuts is NO_CUTS or self._is_idle(pressure):
            return None
        length, cost_s = length_class(request.prompt_tokens), self._cost_s(request, work_s)
        if demand.is_within(length, cost_s):
            return None
        weight = self._decay.weight(self._noted_s)
        is_below_floor = demand.is_below_floor(length, self._config.length_share_min, weight)
        if is_below_floor and request.priority >= 0:
            return None
        limit_s = cost_at(demand.cuts[length]) * work_s / cost_s
        wanted, granted = self._granted[request.tenant]
        backlog_s, target_s = pressure.backlog_s, self._target_s(pressure)
        excess_s = max(0.0, backlog_s - IDLE_SHARE * target_s)
        return Shed(length, work_s, limit_s, backlog_s, target_s, excess_s, wanted, granted)

    def wanted_of(self, now_s: float) -> dict[str, float]:
        """Prefill seconds per second that tenants offered here, decayed since the last plan."""
        faded = max(0.0, now_s - self._planned_s) / self._config.demand_half_life_s
        kept = math.pow(2.0, -faded)
        return {tenant: wanted * kept for tenant, (wanted, _) in self._granted.items()}

    def is_shedding(self, tenant: str) -> bool:
        """Whether the plan rejects some of this tenant's requests while there is a backlog."""
        demand = self._demands.get(tenant)
        return demand is not None and demand.cuts is not NO_CUTS

    def note(
        self, request: Request, work_s: float, pressure: Pressure, now_s: float, is_admitted: bool
    ) -> None:
        """Count a decided request, and plan new cuts if the last ones are older than PLAN_S."""
        weight = self._weight(now_s)
        demand = self._demands.get(request.tenant)
        if demand is None:
            demand = self._demands[request.tenant] = Demand()
            if len(self._demands) > TENANTS_MAX:
                self._forget(request.tenant)
        length = length_class(request.prompt_tokens)
        demand.note(length, self._cost_s(request, work_s), work_s, weight, is_admitted)
        demand.recent_s += work_s * self._recent.weight(now_s)
        if now_s - self._planned_s >= PLAN_S:
            self._planned_s = now_s
            self._make_plans(pressure, now_s)

    def _target_s(self, pressure: Pressure) -> float:
        """Target of the backlog, in seconds."""
        return self._config.backlog_share * pressure.ttft_slo_s

    def _is_idle(self, pressure: Pressure) -> bool:
        if pressure.backlog_s > IDLE_SHARE * self._target_s(pressure):
            return False
        is_busy = pressure.is_decoding and pressure.decode_load >= DECODE_BUSY
        return self._decode_part == 1.0 or not is_busy

    def decode_is_short(self) -> None:
        """Note that a request was rejected for decode room or TBT."""
        self._is_decode_short = True

    def _cost_s(self, request: Request, work_s: float) -> float:
        level = max(-PRIORITY_MAX, min(PRIORITY_MAX, request.priority))
        return float(work_s * self._config.priority_weight**-level)

    def _weight(self, now_s: float) -> float:
        divisor = self._decay.rescaled(now_s)
        if divisor != 1.0:
            for demand in self._demands.values():
                demand.rescale(divisor)
        divisor = self._recent.rescaled(now_s)
        if divisor != 1.0:
            for demand in self._demands.values():
                demand.recent_s /= divisor
        self._noted_s = now_s
        return self._decay.weight(now_s)

    def _make_plans(self, pressure: Pressure, now_s: float) -> None:
        """Set the cuts of every tenant from the offered work and the available capacity."""
        weight = self._weight(now_s)
        per_s = 1 / (weight * max(self._decay.window_s(now_s), WINDOW_MIN_S))
        recent_window_s = max(self._recent.window_s(now_s), WINDOW_MIN_S)
        recent_per_s = 1 / (self._recent.weight(now_s) * recent_window_s)
        faded = FADED_REQUESTS * weight
        self._demands = {t: d for t, d in self._demands.items() if sum(d.offered_of) > faded}
        self._granted.clear()
        demands = {
            t: max(d.steady_s * per_s, d.recent_s * recent_per_s) for t, d in self._demands.items()
        }
        everywhere = dict(pressure.elsewhere)
        for tenant, wanted in demands.items():
            everywhere[tenant] = everywhere.get(tenant, 0.0) + wanted
        capacity = self._capacity(pressure, sum(everywhere.values()))
        grants = max_min(everywhere, self._weights, capacity)
        for tenant, wanted in demands.items():
            # A tenant's share is divided among frontends in proportion to its demand at each.
            part = grants[tenant] / everywhere[tenant] if everywhere[tenant] > 0 else 1.0
            self._granted[tenant] = (wanted, wanted * part)
            if part < 1.0:
                floor = self._config.length_share_min
                # `part` is computed from the larger of the two rates. The cuts are computed from
                # the steady sums, which have more samples.
                self._demands[tenant].split(self._demands[tenant].steady_s * part, floor)
            else:
                self._demands[tenant].cuts = NO_CUTS

    def _capacity(self, pressure: Pressure, wanted: float) -> float:
        """Prefill seconds that may be admitted per second. Each call adapts `_decode_part`."""
        excess = (pressure.backlog_s - self._target_s(pressure)) / pressure.ttft_slo_s
        capacity = pressure.workers * max(CAPACITY_MIN, 1 - excess)
        if self._is_decode_short:
            self._decode_part = max(CAPACITY_MIN, DECODE_LESS * self._decode_part)
        else:
            self._decode_part = min(1.0, self._decode_part + DECODE_MORE)
        self._is_decode_short = False
        return capacity if self._decode_part == 1.0 else self._decode_part * min(capacity, wanted)

    def _forget(self, newest: str) -> None:
        others = (tenant for tenant in self._demands if tenant != newest)
        least = min(others, key=lambda tenant: (self._demands[tenant].steady_s, tenant))
        del self._demands[least]

    def check(self) -> None:
        assert len(self._demands) <= TENANTS_MAX
        for demand in self._demands.values():
            demand.check()


def max_min(
    wanted: Mapping[str, float], weights: Mapping[str, float], capacity: float
) -> dict[str, float]:
    """Weighted max-min fair allocation. In ascending order of demand per weight, each name gets its
    demand or, if less, its weight's part of the capacity that is left. The default weight is 1."""
    granted = dict(wanted)
    open_ones = sorted(wanted, key=lambda name: (wanted[name] / weights.get(name, 1.0), name))
    left, weight_left = capacity, sum(weights.get(name, 1.0) for name in wanted)
    for name in open_ones:
        weight = weights.get(name, 1.0)
        granted[name] = min(wanted[name], max(0.0, left) * weight / weight_left)
        left -= granted[name]
        weight_left -= weight
    return granted
