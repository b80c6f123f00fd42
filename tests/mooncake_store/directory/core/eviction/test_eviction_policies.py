"""Orders of eviction on their own: the contract for each of them, and what `density` learns."""

from __future__ import annotations

import random
import tracemalloc
from collections import OrderedDict

import pytest

from mooncake_store.directory.core.eviction import POLICIES, make_eviction
from mooncake_store.directory.core.eviction import density as density_module
from mooncake_store.directory.core.eviction.density import (
    AGAIN,
    AGAIN_WEIGHT,
    BUCKETS,
    NAMES_MAX,
    NAMES_MIN,
    NOTHING_KNOWN,
    ONCE,
    WIDTHS,
    Density,
    Ghosts,
    ReuseTimes,
    bucket_of,
    values_of,
)
from mooncake_store.directory.core.eviction.lru import RecencyQueue


def names(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(16) for _ in range(count)]


# ---- the contract


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_at_once_is_its_blocks_one_after_the_other(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    at_once, one_by_one = make_eviction(policy), make_eviction(policy)
    keys, idle, leased = names(rng, 2_000), list[bytes](), list[bytes]()
    for step in range(1_200):
        chain = rng.sample(keys, rng.randrange(1, 40))
        if step % 3 == 0:
            there = set(idle)
            at_once.discard(chain)
            for key in chain:
                one_by_one.discard([key])
            leased += [key for key in chain if key in there]
        elif step % 3 == 1:
            back, leased = leased, []
            new = [key for key in chain if key not in at_once and key not in back]
            at_once.add(back + new)
            for key in back + new:
                one_by_one.add([key])
        else:
            count = rng.randrange(30)
            taken = at_once.take_coldest(count)
            assert len(taken) == min(count, len(one_by_one)), "too few, or too many"
            for key in taken:
                assert one_by_one.keys(1) == [key]
                one_by_one.evicted(key)
        idle = at_once.keys()
        assert idle == one_by_one.keys()
        assert not set(leased) & set(idle)
    at_once.check()
    assert len(idle) > 20, "too dull to prove it"


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_done_candidates_are_what_is_idle(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    order = make_eviction(policy)
    keys = names(rng, 400)
    idle: set[bytes] = set()
    leased: set[bytes] = set()
    for step in range(12_000):
        key = rng.choice(keys)
        act = rng.random()
        if act < 0.1 and len(idle) > 150:
            idle.remove(*order.take_coldest(1))
        elif act < 0.13:
            order.forget(key)
            idle.discard(key)
            leased.discard(key)
        elif key in idle and act < 0.4:
            order.touch(key)
        elif key in idle:
            order.discard([key])
            idle.remove(key)
            leased.add(key)
        else:
            order.add([key])
            idle.add(key)
            leased.discard(key)
        assert len(order) == len(idle) and (key in order) == (key in idle)
        if step % 100 == 0:
            order.check()
            assert set(order.keys()) == idle
            assert order.keys(7) == order.keys()[:7]


@pytest.mark.parametrize("policy", POLICIES)
def test_draining_gives_the_order_that_keys_announced(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    order = make_eviction(policy)
    for key in names(rng, 3_000):
        order.add([key])
    for key in rng.sample(order.keys(), 500):
        order.touch(key)
    announced, drained = order.keys(), []
    while coldest := order.keys(1):
        drained += coldest
        order.forget(coldest[0])
    assert drained == announced and len(order) == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_an_order_needs_less_than_120_bytes_a_key_ghosts_included(policy: str, seed: int) -> None:
    keys = names(random.Random(seed), 200_000)
    there, more = keys[:160_000], keys[160_000:]
    tracemalloc.start()
    order = make_eviction(policy)
    for key in there:
        order.add([key])
    for key in more:  # full: one goes for each that comes
        assert order.take_coldest(1)
        order.add([key])
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes / len(order) < 120


# ---- the queue


def test_a_queue_is_an_ordered_dict(seed: int) -> None:
    rng = random.Random(seed)
    queue, expected = RecencyQueue(), OrderedDict[bytes, int]()
    for step in range(30_000):
        act = rng.random()
        if act < 0.5 or not expected:
            key = rng.randbytes(16)
            queue.append(key, step)
            expected[key] = step
        elif act < 0.75:
            key = next(iter(expected))
            assert queue.head() == (key, expected[key])
            assert queue.pop(key) == expected.pop(key)
        else:
            key = rng.choice(list(expected)) if step % 50 == 0 else rng.randbytes(16)
            assert queue.pop(key) == expected.pop(key, None)
        assert len(queue) == len(expected)
        if step % 500 == 0:
            queue.check()
            assert list(queue.items()) == list(expected.items())


# ---- what density does with it


def test_density_is_lru_as_long_as_nothing_is_known(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density_module, "STAMP_USES_MIN", 1)  # those of one stamp are alike
    rng = random.Random(seed)
    density, lru = Density(), make_eviction("lru")
    keys = names(rng, 250)
    for _ in range(700):
        key = rng.choice(keys)
        for order in (density, lru):
            if key in order:
                order.touch(key)
            else:
                order.add([key])
    assert density.keys() == lru.keys()


def kept_after_scans(policy: str, rng: random.Random) -> int:
    """Of 40 blocks that come back every 900 uses into a cache of 300: how many are there?"""
    order, there = make_eviction(policy), set[bytes]()
    regulars, kept = names(rng, 40), 0
    for _ in range(30):
        kept = len(there.intersection(regulars))
        for key in (*regulars, *names(rng, 860)):
            if key in there:
                order.touch(key)
                continue
            if len(there) == 300:
                there.remove(*order.take_coldest(1))
            order.add([key])
            there.add(key)
    order.check()
    return kept


def test_blocks_that_come_back_survive_what_never_does(seed: int) -> None:
    rng = random.Random(seed)
    assert kept_after_scans("lru", rng) == 0
    assert kept_after_scans("density", rng) >= 38


def test_uses_that_follow_each_other_count_once(seed: int) -> None:
    rng = random.Random(seed)
    order = Density()
    for key in names(rng, 2_000):
        order.add([key])
    written = rng.randbytes(16)
    order.add([written])
    for _ in range(3):  # decode reads what prefill has just written
        order.discard([written])
        order.add([written])
    assert written in order._once
    for key in names(rng, 200):
        order.add([key])
    order.discard([written])
    order.add([written])
    assert written in order._again


def test_an_evicted_name_is_remembered_and_a_forgotten_one_is_not(seed: int) -> None:
    rng = random.Random(seed)
    order = Density()
    evicted, forgotten, leased = names(rng, 3)
    for key in (evicted, forgotten, leased):
        order.add([key])
    order.discard([leased])
    order.forget(leased)
    order.evicted(evicted)
    order.forget(forgotten)
    order.check()
    for key in (evicted, forgotten, leased):
        order.add([key])
    assert evicted in order._again
    assert forgotten in order._once and leased in order._once


def test_ghosts_are_the_last_names_and_no_others(seed: int) -> None:
    rng = random.Random(seed)
    ghosts = Ghosts()
    assert not ghosts.take(rng.randbytes(16))
    ghosts.resize(1)
    keys = names(rng, 3 * NAMES_MIN)
    for key in keys:
        ghosts.remember((key,))
    ghosts.check()
    last, older = keys[-NAMES_MIN:], keys[: -NAMES_MIN - 100]
    assert sum(map(ghosts.take, older)) <= 2, "old names, or names that were never there"
    found = sum(map(ghosts.take, last))
    assert found >= 0.99 * NAMES_MIN
    assert not any(map(ghosts.take, last)), "a name is taken once"
    ghosts.check()


def test_ghosts_are_bounded() -> None:
    ghosts = Ghosts()
    ghosts.resize(10**12)
    assert ghosts.table_bytes < 8 * NAMES_MAX
    ghosts.check()


# ---- what is learned


def test_a_bucket_is_half_an_octave() -> None:
    edges = [1.0]
    for width in WIDTHS[:40]:
        edges.append(edges[-1] + width)
    for age in (*range(2, 3_000), 10**6, 2**20, 2**20 - 1):
        bucket = bucket_of(age)
        power = 2 ** (bucket // 2)
        assert power * (1 + bucket % 2 / 2) <= age < power * (1.5 + bucket % 2 / 2)
        assert abs(edges[bucket] - power * (1 + bucket % 2 / 2)) <= power * 0.1 or bucket > 39
    assert bucket_of(0) == bucket_of(1) == 0 and bucket_of(2**47) < BUCKETS


def test_without_facts_the_older_is_worth_less() -> None:
    values = values_of([0.0] * BUCKETS, [0.0] * BUCKETS)
    assert values == sorted(values, reverse=True) and values[0] > values[-1] > 0


def test_a_block_is_worth_most_just_before_the_age_at_which_blocks_return() -> None:
    returned, never = [0.0] * BUCKETS, [0.0] * BUCKETS
    returned[bucket_of(1_000)] = 900.0
    never[bucket_of(4_000)] = 100.0
    values = values_of(returned, never)
    before, after = values[bucket_of(1_000)], values[bucket_of(3_000)]
    assert values[bucket_of(300)] < values[bucket_of(700)] < before
    assert after < before / 4


def test_a_block_used_again_is_never_worth_less_than_its_weight(seed: int) -> None:
    rng = random.Random(seed)
    reuse = ReuseTimes()
    assert reuse.value is NOTHING_KNOWN
    keys = names(rng, 3_000)
    for clock in range(1, 40_001):
        reuse.used(rng.choice(keys) if rng.random() < 0.3 else rng.randbytes(16), clock, 1)
        if clock >= reuse.next_update:
            reuse.learn(clock, 500)
            reuse.check()
    assert reuse.value is not NOTHING_KNOWN
    pairs = zip(reuse.value[ONCE], reuse.value[AGAIN], strict=True)
    assert all(again >= AGAIN_WEIGHT * once for once, again in pairs)


def test_no_more_names_are_watched_than_the_sample_allows(seed: int) -> None:
    rng = random.Random(seed)
    reuse = ReuseTimes()
    for clock in range(1, 120_000):
        key = rng.randbytes(16)
        if key[-1] < reuse.sampled:
            reuse.used(key, clock, 1)
        if clock >= reuse.next_update:
            reuse.learn(clock, 30_000)
    reuse.learn(clock, 30_000)
    reuse.check()
    assert len(reuse._seen) <= 16_384 and 1 <= reuse.sampled < 256
