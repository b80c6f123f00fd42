"""Whom overload turns away: the costly first, no class or tenant below its share, nobody idle."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import pytest

from conductor import ConductorConfig, Request
from conductor.admission.fair_share import (
    BUCKETS,
    COST_MIN_S,
    NO_CUTS,
    TENANTS_MAX,
    Demand,
    FairShare,
    Pressure,
    bucket,
    cost_at,
    max_min,
)
from conductor.estimates.lengths import CLASSES, class_name, length_class

SLO_S = 10.0
IDLE = Pressure(0.0, 2, 0.0, SLO_S)
BUSY = Pressure(4.0, 2, 0.0, SLO_S)  # at the target of a 10 s limit: as much may come as is done
TOKENS = (2_000, 8_000, 30_000, 90_000)  # one of each class


def asked(tokens: int, tenant: str = "", priority: int = 0) -> Request:
    return Request("r", tokens, [], 10, priority, tenant=tenant)


class Shop:
    """A fair share under constant pressure: the requests, and the admitted ones."""

    def __init__(self, **config: object) -> None:
        self.share = FairShare(ConductorConfig(**config))  # type: ignore[arg-type]
        self.now_s, self.came, self.went_in = 0.0, Counter[str](), Counter[str]()
        self.work_s = defaultdict[str, float](float)

    def ask(self, request: Request, work_s: float, name: str, pressure: Pressure = BUSY) -> bool:
        is_in = self.share.rejection(request, work_s, pressure) is None
        self.came[name] += 1
        self.share.note(request, work_s, pressure, self.now_s, is_in)
        if is_in:
            self.went_in[name] += 1
            self.work_s[name] += work_s
        if self.came[name] % 50 == 0:
            self.share.check()
        return is_in

    def rate(self, name: str) -> float:
        return self.went_in[name] / self.came[name]


def test_a_class_has_a_name_and_its_bounds_belong_to_the_longer_one() -> None:
    assert [length_class(n) for n in (1, 4_095, 4_096, 16_384, 65_535, 65_536)] == [
        0,
        0,
        1,
        2,
        2,
        3,
    ]
    names = [class_name(number) for number in range(CLASSES)]
    assert names == ["under 4k tokens", "4k-16k tokens", "16k-64k tokens", "over 64k tokens"]


def test_costs_keep_their_order_in_the_histogram() -> None:
    costs = [COST_MIN_S / 2 * 1.07**step for step in range(400)]
    places = [bucket(cost_s) for cost_s in costs]
    assert places == sorted(places) and places[0] == 0 and places[-1] == BUCKETS - 1
    for cost_s in costs:
        if COST_MIN_S < cost_s < cost_at(BUCKETS):
            assert (
                cost_at(bucket(cost_s))
                <= cost_s * (1 + 1e-9)
                < cost_at(bucket(cost_s) + 1) * (1 + 2e-9)
            )


def test_an_idle_cluster_admits_anybody_whatever_was_offered_before(seed: int) -> None:
    rng, shop = random.Random(seed), Shop(tenant_shares="a:9")
    for _ in range(500):
        shop.now_s += 0.01
        tokens = rng.choice(TOKENS)
        shop.ask(asked(tokens, rng.choice("abc"), rng.randint(-3, 3)), tokens / 1e4, "busy")
    for tokens in TOKENS:
        for tenant in "abcd":
            for priority in (-9, 0, 9):
                request = asked(tokens, tenant, priority)
                assert shop.ask(request, tokens / 1e4, "idle", IDLE)


def test_a_burst_on_an_idle_cluster_is_not_overload() -> None:
    shop = Shop()
    for number in range(28):
        queued = Pressure(number * 0.5 / 8, 8, 0.0, SLO_S)
        assert shop.ask(asked(30_000), 0.5, "burst", queued)


def test_what_fits_is_admitted_however_long_it_is() -> None:
    shop = Shop()
    for _ in range(600):
        shop.now_s += 1.0
        assert shop.ask(asked(90_000), 1.7, "long"), "2 workers do 2 s of work a second"


def test_overload_turns_the_costliest_away_first_and_keeps_a_floor_under_each_class() -> None:
    shop = Shop()
    for step in range(2_000):  # 2.45 s of work a second for 2 workers
        shop.now_s += 0.25
        for tokens in TOKENS if step % 10 == 0 else TOKENS[:3]:
            shop.ask(asked(tokens), tokens / 8e4, str(tokens))
    admitted_s = sum(shop.work_s.values()) / shop.now_s
    overall = shop.went_in.total() / shop.came.total()
    assert admitted_s == pytest.approx(2.0, rel=0.1), "all that fits, no more"
    assert shop.rate("2000") == shop.rate("8000") == 1.0
    assert 0.5 * overall <= shop.rate("90000") < 0.8 * overall
    assert 0.5 * overall <= shop.rate("30000")


def test_a_longer_queue_lets_less_in() -> None:
    admitted = []
    for backlog_s in (2.5, 4.0, 6.0, 9.0):
        shop = Shop()
        for _ in range(1_500):
            shop.now_s += 0.1
            for tokens in TOKENS[:3]:
                shop.ask(
                    asked(tokens), tokens / 1e5, str(tokens), Pressure(backlog_s, 2, 0.0, SLO_S)
                )
        admitted.append(sum(shop.work_s.values()) / shop.now_s)
    assert admitted == sorted(admitted, reverse=True)
    assert admitted[0] == pytest.approx(2 * 1.15, rel=0.1)
    assert admitted[-1] == pytest.approx(2 * 0.5, rel=0.15)


def test_higher_priority_is_turned_away_later_and_negative_earlier() -> None:
    shop = Shop(priority_weight=8.0)
    for _ in range(2_000):
        shop.now_s += 0.25
        for priority in (-1, 0, 1):
            shop.ask(asked(30_000, priority=priority), 0.5, str(priority))
    assert shop.rate("1") == 1.0
    assert shop.rate("-1") < 0.1 < shop.rate("1")
    assert shop.rate("-1") <= shop.rate("0") <= shop.rate("1")


def test_a_tenant_within_its_share_loses_nothing_to_one_that_floods() -> None:
    shop = Shop()
    for step in range(2_000):
        shop.now_s += 0.1
        shop.ask(asked(8_000, "flood"), 0.5, "flood")
        if step % 10 == 0:
            shop.ask(asked(8_000, "calm"), 0.5, "calm")
    assert shop.rate("calm") == 1.0
    assert shop.work_s["flood"] / shop.now_s == pytest.approx(1.5, rel=0.15), "2 less 0.5"


def test_tenants_that_all_want_more_get_their_weights() -> None:
    shop = Shop(tenant_shares="a:3,b:1")
    rng = random.Random(1)
    for _ in range(3_000):
        shop.now_s += 0.1
        for tenant in "ab":
            tokens = rng.choice(TOKENS[:3])
            shop.ask(asked(tokens, tenant), tokens / 3e4, tenant)
    assert shop.work_s["a"] / shop.work_s["b"] == pytest.approx(3, rel=0.15)


def test_rejections_for_decode_room_lower_what_is_let_in_until_there_is_room() -> None:
    shop, room = Shop(), 0.0
    for _ in range(1_200):
        shop.now_s += 0.1
        room = min(2.0, room + 0.6)  # decoding has room for 6 of the 12 requests of a second
        for name, count in (("flood", 1), ("calm", int(shop.now_s * 10) % 5 == 0)):
            for _ in range(count):
                load = Pressure(0.0, 2, 0.95, SLO_S)
                if shop.share.rejection(asked(8_000, name), 0.1, load) is None and room < 1:
                    shop.share.decode_is_short()  # and it is rejected for that
                    shop.share.note(asked(8_000, name), 0.1, load, shop.now_s, False)
                elif shop.ask(asked(8_000, name), 0.1, name, load):
                    room -= 1
    assert shop.rate("calm") > 0.95, "within its share"
    assert shop.rate("flood") < 0.5
    assert shop.ask(asked(8_000, "flood"), 0.1, "later", Pressure(0.0, 2, 0.5, SLO_S)), "room again"


def test_max_min_gives_what_is_wanted_or_a_fair_part(seed: int) -> None:
    assert max_min({"a": 1, "b": 5, "c": 9}, {}, 9) == {"a": 1, "b": 4, "c": 4}
    assert max_min({"a": 9, "b": 9}, {"a": 2}, 9) == {"a": 6, "b": 3}
    rng = random.Random(seed)
    for _ in range(300):
        wanted = {name: rng.expovariate(1) for name in "abcdef"[: rng.randint(1, 6)]}
        weights = {name: rng.uniform(0.1, 9) for name in "abc"}
        capacity = rng.expovariate(0.3)
        granted = max_min(wanted, weights, capacity)
        assert math.isclose(sum(granted.values()), min(capacity, sum(wanted.values())))
        levels = [granted[n] / weights.get(n, 1.0) for n in wanted if granted[n] < wanted[n] - 1e-9]
        assert all(math.isclose(level, max(levels)) for level in levels), "all the same level"
        for name in wanted:
            assert granted[name] <= wanted[name] + 1e-9


def test_a_split_admits_the_work_that_is_granted_and_no_class_below_its_floor(seed: int) -> None:
    rng, made = random.Random(seed), Demand()
    requests = []
    for _ in range(3_000):
        length = rng.choices(range(CLASSES), (30, 40, 25, 5))[0]
        cost_s = 0.02 * 4**length * rng.uniform(0.5, 2.0)
        made.note(length, cost_s, cost_s, 1.0, False)
        requests.append((length, cost_s))
    made.check()
    for part in (0.2, 0.5, 0.9):
        granted_s = part * sum(cost_s for _, cost_s in requests)
        made.split(granted_s, floor=0.5)
        taken = []
        for length, cost_s in requests:
            if made.is_within(length, cost_s):
                taken.append((length, cost_s))
            made.note(length, cost_s, cost_s, 0.0, made.is_within(length, cost_s))
        assert sum(cost_s for _, cost_s in taken) == pytest.approx(granted_s, rel=0.1)
        overall = len(taken) / len(requests)
        for length in range(CLASSES):
            offered = sum(c == length for c, _ in requests)
            share = sum(c == length for c, _ in taken) / offered
            assert share >= 0.45 * overall, (part, length, share, overall)
    made.split(math.inf, 0.5)
    assert made.cuts is NO_CUTS


def test_the_same_requests_are_decided_the_same_way(seed: int) -> None:
    decisions = []
    for _ in range(2):
        rng, shop = random.Random(seed), Shop()
        answers = []
        for _ in range(500):
            shop.now_s += rng.expovariate(5)
            tokens = rng.choice(TOKENS)
            request = asked(tokens, rng.choice("ab"), rng.randint(-1, 1))
            answers.append(
                shop.ask(request, tokens / 2e4, "x", Pressure(rng.uniform(0, 9), 2, 0.0, SLO_S))
            )
        decisions.append(answers)
    assert decisions[0] == decisions[1] and len(set(decisions[0])) == 2


def test_names_made_up_by_clients_do_not_fill_the_memory(seed: int) -> None:
    rng, share = random.Random(seed), FairShare(ConductorConfig())
    for number in range(3 * TENANTS_MAX):
        share.note(asked(8_000, f"t{number}"), rng.random(), BUSY, number * 0.01, True)
    share.check()
    share.note(asked(8_000, "late"), 1.0, BUSY, 1e6, True)
    share.check()


def beside(shop: Shop, other: Shop, step: int) -> Pressure:
    """100 steps a second; what is counted is counted anew when rates are known."""
    shop.now_s = step * 0.01
    if step == 6_000:
        shop.came.clear(), shop.went_in.clear(), shop.work_s.clear()
    return Pressure(4.0, 2, 0.0, SLO_S, elsewhere=other.share.wanted_of(shop.now_s))


def test_a_flood_at_another_frontend_leaves_a_tenant_its_share() -> None:
    flooded, calm = Shop(demand_half_life_s=10.0), Shop(demand_half_life_s=10.0)
    for step in range(9_000):
        for shop, other, tenant, every in ((flooded, calm, "flood", 1), (calm, flooded, "b", 12)):
            pressure = beside(shop, other, step)
            if step % every == 0:
                shop.ask(asked(8_000, tenant), 0.1, tenant, pressure)
    assert calm.rate("b") > 0.9, "it asks for 0.83 of 2 seconds per second"
    assert flooded.work_s["flood"] / 30 == pytest.approx(2 - 0.83, rel=0.15)


def test_a_tenant_at_two_frontends_has_one_share() -> None:
    first, second = Shop(demand_half_life_s=10.0), Shop(demand_half_life_s=10.0)
    for step in range(9_000):
        for shop, other in ((first, second), (second, first)):
            pressure = beside(shop, other, step)
            shop.ask(asked(8_000, "both"), 0.1, "both", pressure)
            if shop is first:
                shop.ask(asked(8_000, "one"), 0.1, "one", pressure)
    both_s = first.work_s["both"] + second.work_s["both"]
    assert both_s / 30 == pytest.approx(1.0, rel=0.15)
    assert first.work_s["one"] / 30 == pytest.approx(1.0, rel=0.15)
