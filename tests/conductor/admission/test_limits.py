"""Service levels of single requests: numbers, `auto`, and what may not change them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from conductor import Conductor, ConductorConfig, Reject, Request, Route
from conductor.admission.limits import (
    TYPICAL_TOKENS,
    UNMEASURED_TBT_S,
    UNMEASURED_TTFT_S,
    ServiceLimits,
)
from conductor.load.cluster import Cluster
from conductor.messages import AppliedLimits
from mooncake_store.records.events import NodeUp, WorkerDown, WorkerReported, WorkerUp
from tests.conductor.fleet import conductor, fleet, node, prompt, report, worker
from tests.conductor.load.test_pipeline_groups import stage

PREFILL, DECODE = (0.01, 1e-3, 1e-6), (0.02, 1e-3, 1e-6)


def limits_of(
    tokens: int,
    prefills: Sequence[tuple[float, ...]] = (PREFILL,),
    decodes: Sequence[tuple[float, ...]] = (DECODE,),
    **config: object,
) -> tuple[float, float]:
    cluster = Cluster(ConductorConfig(**config))  # type: ignore[arg-type]
    cluster.node_up(node("s0"))
    for number, of in enumerate(prefills):
        info = worker(f"p{number}", "prefill", "s0", prefill_coefficients=of)
        cluster.worker_up(info, 0.0)
    for number, of in enumerate(decodes):
        cluster.worker_up(worker(f"d{number}", "decode", "s0", decode_coefficients=of), 0.0)
    cluster.look(0.0)
    return ServiceLimits(cluster.config, cluster).of(tokens)


def test_auto_is_ten_times_the_prefill_and_five_times_the_step_of_the_request_alone() -> None:
    ttft_s, tbt_s = limits_of(1_000)
    assert ttft_s == pytest.approx(10 * (0.01 + 1.0 + 1e-6 * 1_000 * 500))
    assert tbt_s == pytest.approx(5 * (0.02 + 1e-3 + 1e-6 * 1_000))


def test_auto_is_never_below_one_second_and_fifty_milliseconds() -> None:
    assert limits_of(10) == (1.0, pytest.approx(5 * (0.021 + 1e-5)))
    assert limits_of(10, decodes=[(1e-3, 0.0, 0.0)]) == (1.0, 0.05)


def test_numbers_hold_for_every_prompt_and_can_be_mixed_with_auto() -> None:
    assert limits_of(9_000, ttft_slo_s=7.0, tbt_slo_s=0.3) == (7.0, 0.3)
    assert limits_of(9_000, tbt_slo_s=0.3) == (limits_of(9_000)[0], 0.3)
    assert limits_of(9_000, ttft_slo_s=7.0) == (7.0, limits_of(9_000)[1])


def test_the_fastest_worker_of_a_role_is_the_unloaded_system() -> None:
    slow = tuple(4 * value for value in PREFILL)
    assert limits_of(1_000, [slow, PREFILL]) == limits_of(1_000, [PREFILL])
    assert limits_of(1_000, decodes=[(1.0, 1.0, 0.0), DECODE]) == limits_of(1_000)


def test_a_role_without_measurements_has_the_long_limits_of_a_cold_start() -> None:
    assert limits_of(10, [()], [()]) == (UNMEASURED_TTFT_S, UNMEASURED_TBT_S)
    assert limits_of(10, [], []) == (UNMEASURED_TTFT_S, UNMEASURED_TBT_S)
    assert limits_of(1_000, [(), PREFILL]) == limits_of(1_000), "one measurement suffices"


def test_a_longer_prompt_never_has_a_shorter_limit() -> None:
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.randrange(1, 100_000)
        shorter, longer = limits_of(tokens), limits_of(tokens + rng.randrange(10_000))
        assert shorter[0] <= longer[0] and shorter[1] <= longer[1]


def applied(made: Conductor, tokens: int, priority: int = 0) -> AppliedLimits:
    found = made.explain(Request("?", tokens, (), 10, priority), 0.0).limits
    assert found is not None
    return found


def serve_fifty(made: Conductor, ended_s: float, prefill_s: float) -> None:
    """One request each 3 s, which ends `ended_s` after its arrival."""
    for number in range(50):
        now_s = 3.0 * number
        made.on_events([WorkerReported(report(name)) for name in ("p0", "p1", "d0", "d1")], now_s)
        assert isinstance(made.on_request(prompt(f"r{number}", prompt_tokens=500), now_s), Route)
        made.on_prefill_finished(f"r{number}", now_s + ended_s, 0, prefill_s)
        made.on_finished(f"r{number}", now_s + ended_s)


def test_slow_prefills_under_load_leave_the_service_levels_as_they_are() -> None:
    made = conductor()
    before = applied(made, 2_000)
    serve_fifty(made, ended_s=2.0, prefill_s=4 * 0.51)
    assert max(each.speed_ratio for each in made.status(150.0)) > 2
    after = applied(made, 2_000)
    assert (after.ttft_slo_s, after.tbt_slo_s) == (before.ttft_slo_s, before.tbt_slo_s)


def test_workers_that_are_faster_than_they_measured_shorten_the_service_levels() -> None:
    made = conductor()
    before = applied(made, 2_000)
    serve_fifty(made, ended_s=0.3, prefill_s=0.25)
    assert applied(made, 2_000).ttft_slo_s < 0.8 * before.ttft_slo_s


def test_a_stage_of_an_incomplete_pipeline_group_is_no_unloaded_system() -> None:
    made = Conductor(ConductorConfig())
    slow, part = (0.0, 8e-3, 0.0), (0.0, 2e-3, 0.0)
    alone = worker("p0", "prefill", "s0", prefill_coefficients=slow)
    first = stage(0, prefill_coefficients=part)
    decode = worker("d0", "decode", "s0")
    made.on_events([NodeUp(node("s0")), *map(WorkerUp, (alone, first, decode))], 0.0)
    assert applied(made, 100).ttft_slo_s == pytest.approx(8.0)


def test_workers_that_come_and_go_change_the_limits_at_once() -> None:
    made = Conductor(ConductorConfig())
    slow, fast = (0.0, 8e-3, 0.0), (0.0, 2e-3, 0.0)
    made.on_events([NodeUp(node("s0")), WorkerUp(worker("d0", "decode", "s0"))], 0.0)
    made.on_events([WorkerUp(worker("p0", "prefill", "s0", prefill_coefficients=slow))], 0.0)
    assert applied(made, 100).ttft_slo_s == pytest.approx(8.0)
    info = worker("p1", "prefill", "s0", prefill_coefficients=fast)
    made.on_events([WorkerUp(info)], 0.0)
    assert applied(made, 100).ttft_slo_s == pytest.approx(2.0)
    made.on_events([WorkerDown("p1", info.incarnation)], 0.0)
    assert applied(made, 100).ttft_slo_s == pytest.approx(8.0)


def test_priority_moves_the_predicted_limits_and_not_the_service_levels() -> None:
    made = conductor(low_priority_load_max=0.5)
    low, usual, high = (applied(made, 2_000, priority) for priority in (-1, 0, 1))
    assert low[:2] == usual[:2] == high[:2]
    assert usual[2:] == high[2:] == (usual.ttft_slo_s, pytest.approx(0.8 * usual.tbt_slo_s))
    assert low[2:] == pytest.approx([value / 2 for value in usual[2:]])


def test_only_auto_keeps_the_steps_below_the_service_level() -> None:
    fixed = applied(conductor(tbt_slo_s=0.3), 2_000)
    assert fixed.tbt_predicted_s == fixed.tbt_slo_s == 0.3


def rejected(made: Conductor, request: Request) -> Reject:
    found = made.on_request(request, 0.0)
    assert isinstance(found, Reject), found
    return found


def queued(**config: object) -> Conductor:
    """12 s of prompts at the one prefill worker."""
    made = conductor(fleet(prefills=1, slots_max=99), shedding="limit", **config)
    for number in range(6):
        assert isinstance(made.on_request(prompt(f"q{number}", prompt_tokens=2_000), 0.0), Route)
    return made


def test_a_short_prompt_is_rejected_where_a_long_one_still_keeps_its_limit() -> None:
    made = queued(queue_order="fifo")
    short = rejected(made, Request("short", 200, (), 10))
    assert (
        short.kind == "ttft_slo"
        and short.limits == made.explain(Request("short", 200, (), 10), 0.0).limits
    )
    assert "exceeds the 2.1 s limit (auto: 10x unloaded, at least 1 s, 200 tokens)" in short.reason
    long = made.on_request(Request("long", 2_000, (), 10), 0.0)
    assert isinstance(long, Route) and long.limits.ttft_slo_s > long.predicted.ttft_s


def test_a_rejection_by_a_number_names_no_auto() -> None:
    made = queued(queue_order="fifo", ttft_slo_s=13.0)
    number = rejected(made, Request("x", 2_000, (), 10))
    assert "exceeds the 13 s limit on the best of" in number.reason and "auto" not in number.reason
    assert number.limits is not None and number.limits.ttft_slo_s == 13.0


def test_a_rejection_for_the_step_names_the_rule_of_its_limit() -> None:
    made = conductor(fleet(slots_max=99), shedding="limit")
    refused = None
    for number in range(100):
        found = made.on_request(Request(f"r{number}", 10, (), 10), 0.0)
        if isinstance(found, Reject):
            refused = found
            break
    assert refused is not None and refused.kind == "tbt_slo", refused
    assert "(auto: 80% of 5x unloaded, at least 0.05 s, 10 tokens)" in refused.reason


@pytest.mark.parametrize(("slots_max", "kind"), [(4, "decode_full"), (99, "tbt_slo")])
def test_a_request_for_one_token_keeps_no_limit_of_decode(slots_max: int, kind: str) -> None:
    decode = WorkerUp(worker("d0", "decode", "s0", slots_max=slots_max))
    made = conductor([*fleet(decodes=0, slots_max=99), decode], shedding="limit")
    for number in range(100):
        if isinstance(made.on_request(Request(f"r{number}", 10, (), 10), 0.0), Reject):
            break
    assert rejected(made, Request("two", 10, (), 2)).kind == kind
    assert isinstance(made.on_request(Request("one", 10, (), 1), 0.0), Route)


def test_the_recent_limit_starts_with_that_of_a_usual_prompt_and_follows_requests() -> None:
    made = conductor()
    usual, stats = applied(made, TYPICAL_TOKENS), made.stats()
    assert (stats.ttft_slo_s, stats.tbt_slo_s) == usual[:2]
    for number in range(500):
        made.on_request(Request(f"r{number}", 200, (), 10), number / 1_000)
        made.on_finished(f"r{number}", number / 1_000)
    assert made.stats().ttft_slo_s == pytest.approx(applied(made, 200).ttft_slo_s)
    fixed = conductor(ttft_slo_s=4.0, tbt_slo_s=0.2).stats()
    assert (fixed.ttft_slo_s, fixed.tbt_slo_s) == (4.0, 0.2)


def test_a_resumed_request_has_limits_and_is_rejected_by_none() -> None:
    made = queued(queue_order="fifo")
    resumed = made.on_request(Request("r", 200, (), 10, is_resumed=True), 0.0)
    assert isinstance(resumed, Route) and resumed.predicted.ttft_s > resumed.limits.ttft_slo_s


@pytest.mark.parametrize("text", ["automatic", "", "0"])
def test_a_service_level_is_a_positive_number_or_auto(text: str) -> None:
    wrong = ConductorConfig(ttft_slo_s=text or -1.0)  # type: ignore[arg-type]
    assert any("ttft_slo_s" in problem for problem in wrong.problems())
