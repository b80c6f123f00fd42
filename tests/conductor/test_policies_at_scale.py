"""The policies' order on a whole workload is the paper's, and predictions are near what came."""

from __future__ import annotations

import random
from functools import lru_cache

from conductor import ConductorConfig
from loadtest.trace import TRACE_BLOCK_TOKENS, TraceRow
from tests.conductor.toy_fleet import Outcome, ToyFleet

TBT_SLO_S = 0.1


def conversations(seed: int, count: int) -> list[TraceRow]:
    """Turns of conversations, each prompt the last one plus two to six blocks."""
    rng, rows, fresh = random.Random(seed), [], iter(range(1_000_000))
    open_ones: list[list[int]] = []
    for number in range(count):
        if not open_ones or rng.random() < 0.35:
            open_ones.append([next(fresh) for _ in range(rng.randint(4, 30))])
        history = rng.choice(open_ones[-60:])
        history += [next(fresh) for _ in range(rng.randint(2, 6))]
        tokens = len(history) * TRACE_BLOCK_TOKENS
        rows.append(TraceRow(number, number * 400.0, tokens, rng.randint(5, 200), tuple(history)))
    return rows


@lru_cache
def replayed(
    routing: str, admission: str, rate: float, ttft_slo_s: float, tbt_slo_s: float
) -> Outcome:
    config = ConductorConfig(
        policy=routing, admission=admission, ttft_slo_s=ttft_slo_s,
        tbt_slo_s=tbt_slo_s, decode_s_expected=15.0,
    )  # fmt: skip
    return ToyFleet(config, 4, 4, cache_blocks=900).run(conversations(7, 600), rate)


def ttft_mean_s(routing: str) -> float:
    found = replayed(routing, "baseline", 1.0, 1e4, 1e4).ttfts_s
    assert len(found) == 600
    return sum(found) / len(found)


def test_more_of_the_cache_and_of_the_load_means_less_ttft() -> None:
    means = [ttft_mean_s(p) for p in ("kvcache_centric", "cache_aware", "load_balance", "random")]
    assert means == sorted(means), means
    assert means[0] < 0.7 * means[2] < means[3], means


def test_predicted_ttft_is_near_what_came_although_work_is_noisy() -> None:
    errors = replayed("kvcache_centric", "baseline", 1.0, 1e4, 1e4).errors
    assert sum(errors) / len(errors) < 0.15


def test_under_overload_what_is_admitted_keeps_its_service_level() -> None:
    reserved, early, baseline = (
        replayed("kvcache_centric", admission, 3.0, 5.0, TBT_SLO_S)
        for admission in ("reserved", "early", "baseline")
    )
    kept = [found.within(1.1 * TBT_SLO_S) for found in (reserved, early, baseline)]
    broken = [len(o.tbts_s) - k for o, k in zip((reserved, early, baseline), kept, strict=True)]
    assert broken[0] < 0.05 * kept[0], "an admission is a promise"
    assert broken[0] < broken[1] < broken[2], broken
    assert kept[0] > 1.5 * kept[2], kept
    assert max(reserved.ttfts_s) < 6.0
