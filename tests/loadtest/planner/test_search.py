"""Which fleets are run and which is chosen, with a law of goodput in place of the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from loadtest.planner.engine import NodeEngine, PlanRefused
from loadtest.planner.fleet_run import FleetPlan, FleetRun, ServiceLevels, in_flight_max
from loadtest.planner.search import Bounds, Search, bounds_of, choose, explore, largest_batch
from loadtest.simulator.cluster.gpu import Roofline, prompt_s
from tests.loadtest.simulator.fleets import fleet, prompt, start_of_trace

ENGINE = NodeEngine.named("A800", "Llama-3-70B")
OFFERED = 1_000


def run_of(plan: FleetPlan, within: float) -> FleetRun:
    good = int(within)
    return FleetRun(plan, OFFERED, good, 0, 0, OFFERED - good, 100.0, 1.0, 0.05, 0.5, 0.5, 0.5, 9)


def law(
    prefills: float, decodes: float, blocks: int = 1, best: str = "adaptive"
) -> Callable[[Sequence[FleetPlan]], list[FleetRun]]:
    """Requests within follow the scarcer side, lose with too small a cache and another policy."""

    def run(plans: Sequence[FleetPlan]) -> list[FleetRun]:
        found = []
        for plan in plans:
            share = min(1.0, plan.prefills / prefills, plan.decodes / decodes)
            share *= min(1.0, plan.node_blocks / blocks) * (1.0 if plan.policy == best else 0.9)
            share *= 0.9 if plan.admission == "none" else 1.0
            found.append(run_of(plan, OFFERED * share))
        return found

    return run


def explored(
    prefills: float,
    decodes: float,
    bounds: tuple[float, float],
    nodes: int | None = None,
    share: float = 0.9,
    **more: int | str,
) -> tuple[Search, FleetRun]:
    run = law(prefills, decodes, **more)  # type: ignore[arg-type]
    search = explore(ENGINE, Bounds(*bounds, 1.0, 2.0, 0.03), share, nodes, run)
    return search, choose(search, run)


@pytest.mark.parametrize("need", [(1, 1), (2, 1), (3, 7), (9, 8), (20, 6)])
def test_the_smallest_fleet_is_found_although_the_bounds_are_too_low(need: tuple[int, int]) -> None:
    search, chosen = explored(*need, (need[0] * 0.6, need[1] * 0.8))
    least = (math.ceil(0.9 * need[0]), math.ceil(0.9 * need[1]))
    assert (chosen.plan.prefills, chosen.plan.decodes) == least
    plans = [run.plan for run in search.runs()]
    assert len(plans) == len(set(plans)) <= 40, "every fleet once, and not all that there are"


def test_bounds_that_are_too_high_do_not_make_the_fleet_larger() -> None:
    _, chosen = explored(3, 3, (6.0, 5.0))
    assert chosen.plan.nodes == 6


def test_of_a_given_number_of_nodes_the_best_split_is_chosen() -> None:
    for nodes in (2, 3, 10, 30):
        _, chosen = explored(20, 10, (20.0, 10.0), nodes=nodes)
        best = max(min(p / 20, (nodes - p) / 10) for p in range(1, nodes))
        assert chosen.share == pytest.approx(min(1.0, best), abs=2e-3), nodes


def test_the_smallest_cache_that_is_as_good_is_chosen() -> None:
    _, chosen = explored(2, 2, (2.0, 2.0), blocks=ENGINE.node_blocks_max // 5)
    assert chosen.plan.node_blocks == ENGINE.node_blocks_max // 4


def test_another_conductor_is_chosen_only_where_it_is_clearly_better() -> None:
    assert explored(2, 2, (2.0, 2.0))[1].plan.policy == "adaptive"
    assert explored(2, 2, (2.0, 2.0), best="kvcache_centric")[1].plan.policy == "kvcache_centric"


def test_a_fleet_that_cannot_be_large_enough_is_refused_and_one_that_is_not_is_said() -> None:
    with pytest.raises(PlanRefused, match="at least 180 nodes have to be busy"):
        explored(100, 100, (100.0, 100.0))
    search, chosen = explored(60, 60, (2.0, 2.0))
    assert chosen.plan.nodes == 64 and chosen.share < search.share


def test_bounds_are_the_work_of_what_an_unlimited_cache_does_not_have() -> None:
    gpu = Roofline()
    offered = [prompt(0, 0.0, range(8), 101), prompt(1, 10.0, [*range(8), 99], 101)]
    bounds = bounds_of(offered, ENGINE, ServiceLevels(10.0, 0.1), 1.0, 0.5)
    work_s = prompt_s(gpu, 0, 4_096, 2_048) + prompt_s(gpu, 4_096, 4_608, 2_048)
    assert bounds.prefills == pytest.approx(work_s / 10.0)
    context = (4_096 + 4_608) / 2 + 101
    batch = largest_batch(gpu, context, 0.1, 256)
    assert (
        gpu.decode_s(batch, batch * context) <= 0.1 < gpu.decode_s(batch + 1, (batch + 1) * context)
    )
    assert bounds.decodes == pytest.approx(200 / 10.0 * 0.1 / batch)


def test_limits_below_the_unloaded_time_are_refused_with_that_time() -> None:
    offered = start_of_trace()
    with pytest.raises(PlanRefused, match=r"--slo-ttft 0.1 is below .* 90% of the prompts"):
        bounds_of(offered, ENGINE, ServiceLevels(0.1, 0.1), 1.0, 0.9)
    with pytest.raises(PlanRefused, match=r"--slo-tbt 0.02 is below .* takes 0.0294 s"):
        bounds_of(offered, ENGINE, ServiceLevels(30.0, 0.02), 1.0, 0.9)


def test_a_request_that_no_gpu_holds_is_refused() -> None:
    one_gpu = NodeEngine.named("A800", "Qwen3-32B", gpus=1)
    offered = [prompt(0, 0.0, range(100))]
    with pytest.raises(PlanRefused, match=r"longest request has 51,202 tokens, .* 24,414 tokens"):
        bounds_of(offered, one_gpu, ServiceLevels(1e3, 1.0), 1.0, 0.9)


def test_requests_in_flight_are_counted_at_their_peak() -> None:
    cluster = fleet()
    jobs = cluster.run([prompt(n, at_s, [n], 9) for n, at_s in enumerate((0.0, 0.0, 100.0))])
    assert in_flight_max(jobs) == 2
    assert replace(FleetPlan(3, 1, 9), prefills=1).name == "1P+1D"
