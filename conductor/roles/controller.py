"""Ski-rental controller of role flips: flip a worker once waiting has cost as much as the flip.

A flip changes a worker from prefill to decode or back. With `p` prefill and `d` decode workers, the
load lacks this number of workers:

    short(p, d) = max(0, prefills wanted - LOAD_MAX x p) + max(0, decodes wanted - LOAD_MAX x d)

A flip is worthwhile if it reduces `short` by at least GAIN_MIN. This gives hysteresis, because the
flip back would increase `short` by as much.

The possible reduction accumulates over time as a debt, in worker-seconds. While no flip is
worthwhile, the debt falls by one worker-second per second. A change of direction clears the debt. A
flip has a price in worker-seconds, because the worker takes no requests while it drains. When the
debt reaches the price of the cheapest worker, this worker flips, and the debt falls by the price.
The prices paid are thus at most the losses of waiting. The total cost is at most twice the cost
with knowledge of the future (the argument of ski rental).

The controller never flips these workers:

- the last worker of a role, and the last one that can hold the longest requests of its role,
- a worker of a pool of n workers, while max(1, n / DRAINING_SHARE) of them flip already,
- a worker in warm-up (worker.py) or of a pipeline group,
- any worker while another one drains without an order of this controller, because an operator or
  another frontend has then started a change.

Where several frontends run, one of them proposes (conductor.py). Not here: the demand (balance.py),
the message to the worker (backends/frontend).
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

# Prompts arrive in bursts and differ in length by a factor of a hundred. Above this utilisation the
# queue of a pool grows over time, although the mean demand fits.
LOAD_MAX = 0.85
# Workers. The bound is high because demand is as inexact as predictions, which are off by 10-20 %.
GAIN_MIN = 0.5
DRAINING_SHARE = 4  # so a pool of four or more workers keeps at least three quarters of them
# Seconds of a flip after the drain: registration, first report and first requests.
CHANGE_S = 2.0
# Age in seconds at which an order to flip is dropped, even if the worker still drains.
ORDER_S_MAX = 120.0
# Age in seconds at which an order is dropped if the worker still takes requests in its old role.
ORDER_HEARD_S = 5.0
DRY_RUN_S = 30.0  # least seconds between two proposals in a dry run


@dataclass(frozen=True, slots=True)
class RolePool:
    """The workers of a role, and the number that the load needs."""

    takers: Sequence[WorkerState]  # the workers of the role that take requests
    wanted: float  # number of fully used workers that the demand needs (balance.py)
    joined_lately: frozenset[WorkerKey] = frozenset()  # workers in warm-up


@dataclass(slots=True)
class _Order:
    role: str  # the new role
    at_s: float


class RoleController:
    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._debt_s = 0.0  # accumulated gain of flips not made, in worker-seconds, >= 0
        self._towards = ""  # new role of the flips that the debt counts; "" before the first
        self._looked_s = math.inf  # time of the last call of `propose`; inf: none
        self._proposed_s = -math.inf  # time of the last proposal
        self._orders: dict[WorkerKey, _Order] = {}

    def propose(
        self,
        pools: Mapping[str, RolePool],
        draining: Sequence[WorkerState],
        decode_s: float,
        is_our_turn: bool,
        now_s: float,
    ) -> RoleFlip | None:
        """A flip to order now, or None. To be called about twice a second, also if another frontend
        proposes, because each call updates the debt. `draining`: workers that can flip and are
        draining. `decode_s`: mean decode time of a request in seconds."""
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
        """Number of workers of the role after all ordered flips."""
        coming = sum(order.role == role for order in self._orders.values())
        return coming + sum(worker.key not in self._orders for worker in pool.takers)

    def _cheapest(
        self, role: str, source: RolePool, gain: float, decode_s: float, now_s: float
    ) -> RoleFlip | None:
        """The flip of lowest price to `role`, if the debt covers its price."""
        is_dry = self._config.role_flips == "dry_run"  # a dry run may propose any worker
        staying = [worker for worker in source.takers if worker.key not in self._orders]
        changing = sum(order.role == role for order in self._orders.values())
        if len(staying) < 2 or changing >= max(1, (len(staying) + changing) // DRAINING_SHARE):
            return None
        priced = [
            (price_s(worker, decode_s, now_s, self._config), worker.info.worker_id, worker)
            for worker in staying
            if (worker.info.can_flip or is_dry)
            and not worker.info.pipeline_group  # it has only part of the layers
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
        assert self._debt_s >= 0.0, self._debt_s
        assert all(order.role in OTHER_ROLE for order in self._orders.values())


def short(wanted: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """The number of workers that the load lacks. It may be a fraction."""
    return sum(max(0.0, wanted[role] - LOAD_MAX * counts[role]) for role in wanted)


def best_flips(wanted: Mapping[str, float], counts: Mapping[str, int]) -> tuple[str, int, float]:
    """(new role, number of worthwhile flips, gain in workers); ("", 0, 0) if there are none."""
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
    """Worker-seconds until the worker serves in its other role. A prefill worker first computes its
    queue. A decode worker first finishes its n answers. If their remaining times are exponential
    with mean `decode_s`, the longest is decode_s x (1 + 1/2 + ... + 1/n) on average."""
    ratio = worker.speed_ratio(now_s, config)
    if worker.info.role == "prefill":
        return CHANGE_S + ratio * worker.queue.work_s(now_s)
    answers = math.ceil(worker.batch.load_reserved().sequences)
    return CHANGE_S + decode_s * sum(1.0 / n for n in range(1, answers + 1))


def _is_only_one_as_large(worker: WorkerState, staying: Sequence[WorkerState]) -> bool:
    """Whether no other worker in `staying` can hold every request that this worker can hold."""
    info = worker.info
    return not any(
        other is not worker
        and other.info.context_tokens_max >= info.context_tokens_max
        and other.info.pages_max * other.info.block_tokens >= info.pages_max * info.block_tokens
        for other in staying
    )
