"""Flips: never on a steady load, never the last of a role, never for less than they cost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from conductor import ConductorConfig
from conductor.load.worker import WorkerState
from conductor.messages import RoleFlip
from conductor.roles.controller import (
    DRAINING_SHARE,
    DRY_RUN_S,
    GAIN_MIN,
    LOAD_MAX,
    ORDER_HEARD_S,
    OTHER_ROLE,
    RoleController,
    RolePool,
    best_flips,
    price_s,
    short,
)
from tests.conductor.fleet import worker

ON = ConductorConfig(role_flips="on")


def workers(role: str, count: int, **changes: object) -> list[WorkerState]:
    return [
        WorkerState(worker(f"{role[0]}{n}", role, "s0", can_flip=True, **changes), 0.0)
        for n in range(count)
    ]


class Pools:
    """Two pools whose workers change when they are told to, `drain_s` later."""

    def __init__(self, prefills: int, decodes: int, config: ConductorConfig = ON) -> None:
        self.controller = RoleController(config)
        self.takers = {
            "prefill": workers("prefill", prefills),
            "decode": workers("decode", decodes),
        }
        self.draining: list[tuple[float, WorkerState, str]] = []
        self.now_s, self.made = 0.0, 0
        self.flips: list[RoleFlip] = []

    def counts(self) -> dict[str, int]:
        return {role: len(takers) for role, takers in self.takers.items()}

    def look(
        self,
        wanted: Mapping[str, float],
        seconds: float = 1.0,
        drain_s: float = 3.0,
        decode_s: float = 1.0,
    ) -> RoleFlip | None:
        self.now_s += seconds
        for due_s, drained, role in list(self.draining):
            if due_s <= self.now_s:
                self.draining.remove((due_s, drained, role))
                self.made += 1
                info = worker(f"n{self.made}", role, "s0", can_flip=True)
                self.takers[role].append(WorkerState(info, self.now_s))
        pools = {role: RolePool(self.takers[role], wanted[role]) for role in self.takers}
        draining = [drained for _, drained, _ in self.draining]
        flip = self.controller.propose(pools, draining, decode_s, True, self.now_s)
        self.controller.check()
        if flip is not None:
            self.flips.append(flip)
            source = self.takers[OTHER_ROLE[flip.role]]
            (told,) = [one for one in source if one.ref == flip.worker]
            source.remove(told)
            self.draining.append((self.now_s + drain_s, told, flip.role))
        return flip


def test_a_lasting_lack_of_one_role_moves_a_worker_of_the_other() -> None:
    pools = Pools(4, 4)
    for _ in range(60):
        pools.look({"prefill": 5.0, "decode": 1.0})
    assert {flip.role for flip in pools.flips} == {"prefill"}
    assert pools.counts() == {"prefill": 6, "decode": 2}, "5 workers of load, each at most at 0.85"


def test_a_short_burst_moves_nobody() -> None:
    pools = Pools(4, 4)
    for number in range(300):
        pools.look({"prefill": 5.0 if number % 30 == 0 else 2.0, "decode": 1.0})
    assert pools.flips == []


def test_who_serves_its_load_gains_nothing_by_a_flip(seed: int) -> None:
    """Loads that fit, however they vary."""
    chance = random.Random(seed)
    for _ in range(200):
        pools = Pools(chance.randint(1, 12), chance.randint(1, 12))
        counts = pools.counts()
        for _ in range(100):
            wanted = {role: chance.uniform(0.0, LOAD_MAX * n) for role, n in counts.items()}
            assert pools.look(wanted) is None


@pytest.mark.slow
def test_on_a_steady_load_flips_end_and_nobody_flips_back(seed: int) -> None:
    """Any load that does not change: at most as many flips as there are workers, in one
    direction."""
    chance = random.Random(seed)
    for _ in range(200):
        pools = Pools(chance.randint(1, 12), chance.randint(1, 12))
        in_all = sum(pools.counts().values())
        wanted = {role: chance.uniform(0.0, 1.5 * in_all) for role in OTHER_ROLE}
        for _ in range(300):
            pools.look(wanted, drain_s=chance.uniform(0.0, 20.0))
        assert len({flip.role for flip in pools.flips}) <= 1
        assert len(pools.flips) < in_all
        settled = len(pools.flips)
        for _ in range(200):
            pools.look(wanted)
        assert len(pools.flips) == settled


def test_noise_below_the_hysteresis_moves_nobody_back(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        pools = Pools(chance.randint(2, 10), chance.randint(2, 10))
        in_all = sum(pools.counts().values())
        steady = {role: chance.uniform(0.0, in_all) for role in OTHER_ROLE}
        for _ in range(400):
            shaken = {
                role: value + chance.uniform(-0.2, 0.2) * GAIN_MIN for role, value in steady.items()
            }
            pools.look(shaken)
        assert len({flip.role for flip in pools.flips}) <= 1


@pytest.mark.slow
def test_no_load_whatever_takes_the_last_of_a_role_or_too_many_at_once(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(150):
        pools = Pools(chance.randint(1, 8), chance.randint(1, 8))
        for _ in range(200):
            wanted = {role: chance.choice((0.0, chance.uniform(0, 40))) for role in OTHER_ROLE}
            flip = pools.look(wanted, chance.uniform(0.1, 30.0), chance.uniform(0.0, 60.0))
            assert min(pools.counts().values()) >= 1
            if flip is not None:
                source = OTHER_ROLE[flip.role]
                leaving = sum(role == flip.role for _, _, role in pools.draining)
                whole = pools.counts()[source] + leaving
                assert leaving <= max(1, whole // DRAINING_SHARE)


def test_a_flip_gains_what_it_promises_and_never_serves_less(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3_000):
        counts = {"prefill": chance.randint(1, 20), "decode": chance.randint(1, 20)}
        wanted = {role: chance.uniform(0.0, 40.0) for role in OTHER_ROLE}
        role, flips, gain = best_flips(wanted, counts)
        if not flips:
            assert gain == 0.0
            continue
        other = OTHER_ROLE[role]
        after = {role: counts[role] + flips, other: counts[other] - flips}
        assert min(after.values()) >= 1
        assert gain == pytest.approx(short(wanted, counts) - short(wanted, after))
        assert gain >= GAIN_MIN * flips - 1e-9
        assert best_flips(wanted, after)[1] == 0, "it is the best there is, and it stays"


def test_what_is_paid_for_flips_was_lost_before_by_waiting(seed: int) -> None:
    """Loads that keep changing their mind: the price of all flips is at most the loss of all
    moments at which the load lacked workers."""
    chance = random.Random(seed)
    pools, lost_s, paid_s = Pools(6, 6), 0.0, 0.0
    for _ in range(2_000):
        if pools.now_s % 20 < 1.0:
            wanted = {role: chance.uniform(0.0, 12.0) for role in OTHER_ROLE}
        prices = {
            one.key: price_s(one, 1.0, pools.now_s + 1.0, ON)
            for takers in pools.takers.values()
            for one in takers
        }
        counts = pools.counts()
        for _, _, role in pools.draining:
            counts[role] += 1
        flip = pools.look(wanted)
        lost_s += best_flips(wanted, counts)[2]
        if flip is not None:
            paid_s += prices[flip.worker.worker_id, flip.worker.incarnation]
    assert pools.flips and paid_s <= lost_s


def test_the_worker_that_drains_soonest_flips() -> None:
    pools = Pools(1, 3)
    busy, idle, _ = pools.takers["decode"]
    for one, count in zip(pools.takers["decode"], (5, 0, 2), strict=True):
        for number in range(count):
            one.batch.reserve(f"{one.key}{number}", 100, 2, 1.0, None, 0.0)  # type: ignore[arg-type]
    assert price_s(busy, 1.0, 0.0, ON) > price_s(idle, 1.0, 0.0, ON)
    while (flip := pools.look({"prefill": 2.0, "decode": 0.5})) is None:
        assert pools.now_s < 100
    assert flip.worker == idle.ref


def test_a_long_drain_needs_a_longer_imbalance() -> None:
    def first_flip_s(decode_s: float) -> float:
        pools = Pools(2, 2)
        for one in pools.takers["decode"]:
            one.batch.reserve("r", 100, 2, 1.0, None, 0.0)  # type: ignore[arg-type]
        while pools.look({"prefill": 2.5, "decode": 0.5}, decode_s=decode_s) is None:
            assert pools.now_s < 1_000
        return pools.now_s

    assert first_flip_s(30.0) > first_flip_s(1.0) + 20.0


def test_only_a_worker_that_can_flip_and_is_not_the_largest_is_chosen() -> None:
    pools = Pools(1, 0)
    pools.takers["decode"] = [
        *workers("decode", 1),
        WorkerState(worker("d8", "decode", "s0"), 0.0),
        WorkerState(worker("d9", "decode", "s0", can_flip=True, pages_max=9_000), 0.0),
    ]
    for _ in range(100):
        pools.look({"prefill": 9.0, "decode": 0.5})
    assert [flip.worker.worker_id for flip in pools.flips] == ["d0"]


def test_nobody_flips_while_somebody_else_drains_a_worker() -> None:
    pools = Pools(2, 3)
    drained = pools.takers["decode"].pop()
    pools.draining.append((1e9, drained, "decode"))
    for _ in range(100):
        assert pools.look({"prefill": 9.0, "decode": 0.1}) is None


def test_a_worker_that_kept_its_role_is_not_counted_on_for_long() -> None:
    controller = RoleController(ON)
    takers = {"prefill": workers("prefill", 2), "decode": workers("decode", 2)}
    pools = {role: RolePool(takers[role], 6.0 * (role == "prefill")) for role in OTHER_ROLE}
    told_s = [
        second
        for second in range(60)
        if controller.propose(pools, [], 1.0, True, float(second)) is not None
    ]
    assert len(told_s) >= 2, "somebody is told again, as all of them still take requests"
    assert min(b - a for a, b in pairwise(told_s)) >= ORDER_HEARD_S


def test_a_frontend_whose_turn_it_is_not_counts_and_says_nothing() -> None:
    pools = Pools(2, 4)
    wanted = {role: RolePool(pools.takers[role], 6.0 * (role == "prefill")) for role in OTHER_ROLE}
    for second in range(100):
        assert pools.controller.propose(wanted, [], 1.0, False, float(second)) is None
    assert pools.controller.propose(wanted, [], 1.0, True, 101.0) is not None, "it knows enough"


def test_a_dry_run_says_it_now_and_then_and_takes_nobody_for_gone() -> None:
    dry = RoleController(ConductorConfig(role_flips="dry_run"))
    takers = {
        "prefill": workers("prefill", 2),
        "decode": [WorkerState(worker(f"d{n}", "decode", "s0"), 0.0) for n in range(4)],
    }
    pools = {role: RolePool(takers[role], 6.0 * (role == "prefill")) for role in OTHER_ROLE}
    said = [
        second
        for second in range(200)
        if dry.propose(pools, [], 1.0, True, float(second)) is not None
    ]
    assert len(said) >= 3 and min(b - a for a, b in pairwise(said)) >= DRY_RUN_S
