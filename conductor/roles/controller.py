"""When a lasting imbalance is worth a flip, and which worker it should be.

    short(p, d) = max(0, prefills wanted - LOAD_MAX x p) + max(0, decodes wanted - LOAD_MAX x d)

is how many workers the load lacks with `p` prefill and `d` decode workers. The best number of flips
in one direction is the largest of which each takes away at least GAIN_MIN workers of it: that is
the hysteresis, as a flip that gains so much would lose as much on its way back. What those flips
together would gain is counted as a debt, in worker-seconds; a moment at which nothing is to be
gained pays as much back as one worker could have gained, and a change of direction clears it.

A flip has a price, in worker-seconds too: while the worker drains it takes no work, and as a
worker of its new role it begins with nothing. As soon as the debt has reached the price of the
cheapest worker, that one flips and the debt falls by its price. So whoever lost nothing pays
nothing, and what is paid is never more than what was lost before by waiting, however the load goes
on (the argument of ski rental: at most twice the cost of who knew the future).

Never: the last of a role, or the last that can hold the longest requests of its role; more than
one in DRAINING_SHARE of a pool at a time; a worker that is still warming up (worker.py); anybody
while a worker drains that was not told to by us, as an operator or another frontend has begun
something. Of several frontends one proposes (conductor.py).

Not here: what is wanted (demand.py), telling the worker (the shell).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conductor.config import ConductorConfig
from conductor.load.worker import WorkerKey, WorkerState
from conductor.messages import RoleFlip

OTHER_ROLE: Mapping[str, str] = {"prefill": "decode", "decode": "prefill"}
ROLES = tuple(OTHER_ROLE)

# Prompts come in bursts and differ in length by a factor of a hundred: a pool that is busier than
# this for long lets its queue grow, though the mean of what is asked for would just fit.
LOAD_MAX = 0.85
# Of one worker. Demand is known no better than predictions, which are off by 10 to 20 %.
GAIN_MIN = 0.5
DRAINING_SHARE = 4  # so a pool keeps three quarters of itself whatever is decided
# Beside the drain: until it has registered, reported and got its first requests.
CHANGE_S = 2.0
# A worker that was told to change and has not for so long does not count as changing any more.
ORDER_S_MAX = 120.0
# One that takes requests so long after it was told has kept its role, or never heard of it.
ORDER_HEARD_S = 5.0
DRY_RUN_S = 30.0  # between proposals that nobody carries out


@dataclass(frozen=True, slots=True)
class RolePool:
    """The workers of a role, and what the load wants of them."""

    takers: Sequence[WorkerState]
    wanted: float
    joined_lately: frozenset[WorkerKey] = frozenset()  # they are still warming up


@dataclass(slots=True)
class _Order:
    role: str  # that it shall take
    at_s: float


class RoleController:
    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._debt_s = 0.0  # worker-seconds that flips would have saved
        self._towards = ""  # which role they would have gone to
        self._looked_s = math.inf
        self._proposed_s = -math.inf
        self._orders: dict[WorkerKey, _Order] = {}

    def propose(
        self,
        pools: Mapping[str, RolePool],
        draining: Sequence[WorkerState],
        decode_s: float,
        is_our_turn: bool,
        now_s: float,
    ) -> RoleFlip | None:
        """`draining`: workers that could flip and take no requests because they drain. `decode_s`:
        how long a request decodes. About every second, also while nothing may be proposed: the
        debt is counted here."""
        passed_s, self._looked_s = max(0.0, now_s - self._looked_s), now_s
        taking = {worker.key for pool in pools.values() for worker in pool.takers}
        known = taking | {worker.key for worker in draining}
        self._orders = {
            key: order
            for key, order in self._orders.items()
            if key in known
            and now_s - order.at_s < (ORDER_HEARD_S if key in taking else ORDER_S_MAX)
        }
        counts = {role: self._count(role, pool) for role, pool in pools.items()}
        role, flips, gain = best_flips({r: p.wanted for r, p in pools.items()}, counts)
        if role != self._towards and flips:
            self._towards, self._debt_s = role, 0.0
        self._debt_s = max(0.0, self._debt_s + passed_s * (gain if flips else -1.0))
        if (
            not flips
            or not is_our_turn
            or any(worker.key not in self._orders for worker in draining)
        ):
            return None
        if self._config.role_flips == "dry_run" and now_s - self._proposed_s < DRY_RUN_S:
            return None
        return self._cheapest(role, pools[OTHER_ROLE[role]], gain, decode_s, now_s)

    def _count(self, role: str, pool: RolePool) -> int:
        """Of those that have the role or will have it."""
        coming = sum(order.role == role for order in self._orders.values())
        return coming + sum(worker.key not in self._orders for worker in pool.takers)

    def _cheapest(
        self, role: str, source: RolePool, gain: float, decode_s: float, now_s: float
    ) -> RoleFlip | None:
        """The worker of the other role that drains soonest, if the debt pays for it."""
        is_dry = self._config.role_flips == "dry_run"  # what would be, if they could
        staying = [worker for worker in source.takers if worker.key not in self._orders]
        changing = sum(order.role == role for order in self._orders.values())
        if len(staying) < 2 or changing >= max(1, (len(staying) + changing) // DRAINING_SHARE):
            return None
        priced = [
            (price_s(worker, decode_s, now_s, self._config), worker.info.worker_id, worker)
            for worker in staying
            if (worker.info.can_flip or is_dry)
            and not worker.info.pipeline_group  # it has a share of the layers only
            and worker.key not in source.joined_lately
            and not _is_only_one_as_large(worker, staying)
        ]
        if not priced:
            return None
        least_s, _, worker = min(priced)
        if self._debt_s < least_s:
            return None
        self._debt_s -= least_s
        self._proposed_s = now_s
        if not is_dry:
            self._orders[worker.key] = _Order(role, now_s)
        reason = (
            f"the load lacks {gain:.1f} {role} workers that the other role can spare, "
            f"and a flip costs {least_s:.1f} worker-seconds"
        )
        return RoleFlip(worker.ref, role, reason)

    def check(self) -> None:
        """Prove the invariants."""
        assert self._debt_s >= 0.0, self._debt_s
        assert all(order.role in OTHER_ROLE for order in self._orders.values())


def short(wanted: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Workers that the load lacks."""
    return sum(max(0.0, wanted[role] - LOAD_MAX * counts[role]) for role in wanted)


def best_flips(wanted: Mapping[str, float], counts: Mapping[str, int]) -> tuple[str, int, float]:
    """(to which role, how many flips, how many workers less are lacking); no flips: ("", 0, 0)."""
    before = short(wanted, counts)
    for role, other in OTHER_ROLE.items():
        flips, lacking = 0, before
        while counts[other] - flips > 1:
            after = {role: counts[role] + flips + 1, other: counts[other] - flips - 1}
            if lacking - short(wanted, after) < GAIN_MIN:
                break
            flips, lacking = flips + 1, short(wanted, after)
        if flips:
            return role, flips, before - lacking
    return "", 0, 0.0


def price_s(worker: WorkerState, decode_s: float, now_s: float, config: ConductorConfig) -> float:
    """Worker-seconds until it works in its other role: what is queued at a prefill worker, or the
    longest of the answers at a decode worker (the mean of the longest of n, where each goes on for
    `decode_s` in the mean, is decode_s x (1 + 1/2 + ... + 1/n))."""
    ratio = worker.speed_ratio(now_s, config)
    if worker.info.role == "prefill":
        return CHANGE_S + ratio * worker.queue.work_s(now_s)
    answers = math.ceil(worker.batch.load_reserved().sequences)
    return CHANGE_S + decode_s * sum(1.0 / n for n in range(1, answers + 1))


def _is_only_one_as_large(worker: WorkerState, staying: Sequence[WorkerState]) -> bool:
    """Nobody else of its role could hold the longest requests that it can."""
    info = worker.info
    return not any(
        other is not worker
        and other.info.context_tokens_max >= info.context_tokens_max
        and other.info.pages_max * other.info.block_tokens >= info.pages_max * info.block_tokens
        for other in staying
    )
