"""The policies' order on a whole workload is the paper's, and predictions are near what came."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from bench.paper.experiments import rejection, scheduling
from loadtest.replay.trace import TRACE_BLOCK_TOKENS, TraceRow
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, offered_of
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import start_of_trace

SETTINGS = ClusterSettings(prefills=4, decodes=4, node_blocks=900)


@lru_cache
def conversations() -> list[Offered]:
    """Turns of conversations, each prompt the last one plus two to six blocks."""
    rng, rows, fresh = random.Random(7), [], iter(range(1_000_000))
    open_ones: list[list[int]] = []
    for number in range(250):
        if not open_ones or rng.random() < 0.35:
            open_ones.append([next(fresh) for _ in range(rng.randint(4, 30))])
        history = rng.choice(open_ones[-60:])
        history += [next(fresh) for _ in range(rng.randint(2, 6))]
        tokens = len(history) * TRACE_BLOCK_TOKENS
        rows.append(TraceRow(number, number * 400.0, tokens, rng.randint(5, 200), tuple(history)))
    return offered_of(rows, TRACE_BLOCK_TOKENS)


@pytest.mark.slow
def test_more_of_the_cache_and_of_the_load_means_less_ttft() -> None:
    means = {
        policy: scheduling.run(conversations(), policy, 1.0, SETTINGS).outcome.ttft_s.mean
        for policy in ("random", "load_balance", "cache_aware", "kvcache_centric")
    }
    assert list(means.values()) == sorted(means.values(), reverse=True), means
    assert means["kvcache_centric"] < 0.7 * means["load_balance"] < 0.7 * means["random"], means


def test_predicted_ttft_is_near_what_came_although_work_is_noisy() -> None:
    fleet = SimulatedFleet(scheduling.config_for("kvcache_centric"), SETTINGS, Roofline())
    fleet.run(conversations())
    assert fleet.conductor.stats().ttft_error < 0.3
    assert fleet.conductor.stats().prefill_error < 0.15


@pytest.mark.slow
def test_when_decode_is_short_looking_at_it_before_prefill_wastes_less() -> None:
    short_of_decode = ClusterSettings(prefills=8, decodes=2)
    found = {
        name: rejection.run(start_of_trace()[:250], name, 1.5, short_of_decode).outcome
        for name in ("baseline", "early", "reserved")
    }
    wasted_s = {name: outcome.wasted_prefill_s for name, outcome in found.items()}
    assert wasted_s["reserved"] < 0.3 * wasted_s["baseline"], wasted_s
    assert wasted_s["early"] < 0.8 * wasted_s["baseline"], wasted_s
    assert found["reserved"].tbt_decode_s.p90 < rejection.TBT_SLO_S
