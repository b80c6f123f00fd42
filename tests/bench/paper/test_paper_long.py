"""Experiments with requests that are all alike, and those on the arXiv report's other figures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.paper.figures import cache_policies, real
from bench.paper.figures.cache_policies import CountingOrder, OrderedCache
from bench.paper.figures.poisson import (
    NODES,
    OF_PAPER,
    OTHERS,
    WARM_UP_S,
    Limits,
    gains_of,
    highest_rate,
    limits_of,
    rate_of,
    requests_of,
)
from bench.paper.figures.served import ServePlan, serve
from loadtest.replay.datasets import PREFIXES, DataSet
from loadtest.simulator.block_cache import BlockCache, key_of, play
from tests.bench.paper.test_paper import ran

HALF = DataSet("half", "half", 4_096, 20, 0.5)


def test_every_prefix_comes_to_every_node_before_the_workload() -> None:
    offered, first = requests_of(HALF, 2.0, 30, 0)
    assert first == PREFIXES * NODES and len(offered) == first + 30
    run = serve(offered, ServePlan("half", OTHERS["vllm + prefix cache"]))
    total = sum(one.prompt_tokens for one in offered)
    assert run.outcome.hit_share == pytest.approx(30 * 2_048 / total), "each node had them all"
    assert [one.number for one in offered] == list(range(len(offered)))


def test_arrivals_at_another_rate_are_the_same_scaled(seed: int) -> None:
    slow, first = requests_of(HALF, 1.0, 10, seed)
    fast, _ = requests_of(HALF, 4.0, 10, seed)
    start_s = slow[first - 1].at_s + WARM_UP_S
    for one, other in zip(slow[first:], fast[first:], strict=True):
        assert one.at_s - start_s == pytest.approx(4 * (other.at_s - start_s))
        assert one.keys == other.keys


@pytest.mark.parametrize("limit", [0.004, 0.9, 1.0, 7.3, 400.0])
def test_the_highest_rate_is_found_from_any_guess(limit: float) -> None:
    for guess in (0.1, 1.0, 30.0):
        rate = highest_rate(lambda rate: rate <= limit, guess)
        assert limit / 1.03 <= rate <= limit
    assert highest_rate(lambda rate: False, 1.0) == 0.0


def test_a_rate_is_not_above_what_the_nodes_compute() -> None:
    """However long a first token may take: requests come for longer than that."""
    cold = replace(HALF, cached_share=0.0, output_tokens=1)
    one = requests_of(cold, 1.0, 1, 0)[0]
    plan = ServePlan("half", OF_PAPER["vllm, one at a time"])
    computed_s = serve(one, plan).outcome.prefill_s
    rate = rate_of([], cold, plan, None, 0)
    assert 0.7 * NODES / computed_s <= rate <= 1.15 * NODES / computed_s
    assert rate_of([], cold, plan, 20, 0) > 1.15 * NODES / computed_s, "too few to say"


def test_a_tenth_of_the_requests_may_miss_a_limit() -> None:
    limits = Limits(1.0, 0.1)
    assert limits.are_kept(ran("", 1.0, [0.05] * 91 + [9.0] * 9), 0)
    assert not limits.are_kept(ran("", 1.0, [0.05] * 89 + [9.0] * 11), 0)
    assert limits.are_kept(ran("", 1.0, [9.0] * 20 + [0.05] * 20), 20), "after the first only"


def test_limits_are_those_of_one_request_alone() -> None:
    limits = limits_of(HALF)
    one = requests_of(replace(HALF, cached_share=0.0), 1.0, 1, 0)[0]
    alone = serve(one, ServePlan("half", OF_PAPER["vllm"]))
    assert limits == Limits(10 * alone.ttfts_s[0], 5 * alone.tbts_s[0])


def test_gains_are_over_the_paper_s_baseline_and_over_the_best() -> None:
    rates = dict.fromkeys((*OF_PAPER, *OTHERS), 1.0)
    rates |= {"mooncake 3P+1D": 3.0, "mooncake 2P+2D": 4.0, "chunked 512 + prefix cache": 2.0}
    assert gains_of(rates) == (3.0, 1.0)


def test_tbt_is_met_by_those_who_were_answered() -> None:
    ours, vllm = ran("a", 1.0, [0.05] * 100), ran("b", 1.0, [0.05] * 57 + [0.2] * 43)
    gain, met, apart = real.targets_of(ours, vllm)
    assert gain.value == pytest.approx(100 / 57 - 1, abs=1e-4) and gain.is_met
    assert met.is_met and apart.value == 0.0


def test_lfu_keeps_what_was_used_often_and_length_aware_the_start_of_prompts() -> None:
    often, once, other = (key_of(number) for number in range(3))
    for is_deep_first, dropped in ((False, once), (True, other)):
        order = CountingOrder({often: 0, once: 1, other: 5}, is_deep_first)
        cache = OrderedCache(3, order)
        for keys in ([often], [often], [once], [other]):
            cache.use(keys)
        assert order.keys(1) == [dropped]
        assert order.keys()[-1] == often
        cache.check()


def test_an_order_of_eviction_agrees_with_the_plain_rule(seed: int) -> None:
    """Against a search through all idle blocks, on random requests."""
    rng = random.Random(seed)
    depths = {key_of(number): number % 7 for number in range(60)}
    for is_deep_first in (False, True):
        order = CountingOrder(depths, is_deep_first)
        uses: dict[bytes, int] = {}
        idle: dict[bytes, int] = {}
        for step in itertools.count():
            if step == 2_000:
                break
            key = rng.choice(list(depths))
            if key not in idle:
                order.add([key])
                uses[key], idle[key] = uses.get(key, 0) + 1, step
            elif rng.random() < 0.5:
                order.discard([key])
                del idle[key]
            if len(idle) > 20:
                least = min(
                    idle, key=lambda k: (uses[k], -depths[k] if is_deep_first else 0, idle[k])
                )
                assert order.take_coldest(1) == [least]
                del idle[least], uses[least]
        order.check()


def test_ours_over_the_others_is_the_least_of_all_capacities() -> None:
    requests: Sequence[Sequence[bytes]] = [[key_of(1), key_of(2)], [key_of(1), key_of(3)]]
    found = {
        ("synthetic", blocks, policy): hits
        for (blocks, policy), hits in cache_policies.played(requests, lambda: None).items()
    }
    assert len(found) == len(cache_policies.CAPACITIES) * 4
    targets = cache_policies.targets_of(found)
    assert [target.value for target in targets] == [None] * 3 + [0.0] * 3
    assert play(BlockCache(2, "lru"), requests).hits == 1
