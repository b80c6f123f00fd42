"""What of `bench.plan` needs no server: limits, the choice of a speed, the targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan import (
    SHAPES,
    FleetCount,
    p90,
    planned_runs,
    served_count,
    spread_of,
    targets_of,
    unloaded_limits,
)
from loadtest.planner.engine import MeasuredEngine
from loadtest.planner.fleet_run import ServiceLevels
from loadtest.replay.trace import read_trace
from loadtest.results.metrics import COMPLETED, FAILED, REJECTED, RequestRecord
from loadtest.simulator.cluster.job import offered_of
from tests.loadtest.planner.profiles import DECODE, profile
from tests.loadtest.simulator.fleets import START


def counts(*within: int) -> dict[tuple[int, int], FleetCount]:
    return {shape: FleetCount(100, n, 0, 0.0, 0.0) for shape, n in zip(SHAPES, within, strict=True)}


def values(real: tuple[int, ...], planned: tuple[int, ...]) -> list[float | None]:
    return [target.value for target in targets_of(counts(*real), counts(*planned))]


def test_a_pair_counts_where_the_server_s_differ_by_more_than_the_margin() -> None:
    assert values((50, 80, 52), (50, 90, 40)) == [1.0, None, 1.0]
    assert values((50, 80, 20), (90, 50, 60)) == [0.0, 1.0, 0.0]
    assert values((50, 51, 52), (9, 50, 90)) == [None, None, None]
    assert values((80, 50, 50), (50, 50, 50))[0] == 0.0, "equal in the plan is no ranking"
    assert values((0, 50, 0), (0, 1, 0)) == [1.0, None, 1.0], "nothing within is a count too"


def record(outcome: str, *token_times_s: float) -> RequestRecord:
    return RequestRecord(
        index=0,
        request_id="r",
        due_s=0.0,
        sent_s=0.0,
        finished_s=9.0,
        prompt_tokens=1,
        output_tokens_asked=2,
        outcome=outcome,
        token_times_s=token_times_s,
        kind="x",
    )


def test_requests_of_the_server_are_counted_by_both_limits_and_failures_are_no_measurement() -> (
    None
):
    levels = ServiceLevels(1.0, 0.1)
    records = [
        record(COMPLETED, 0.5, 0.55),
        record(COMPLETED, 1.5, 1.55),
        record(COMPLETED, 0.5, 0.9),
        record(COMPLETED, 0.5),
        record(REJECTED),
    ]
    found = served_count(records, levels)
    assert (found.offered, found.within, found.unanswered) == (5, 2, 1)
    with pytest.raises(ValueError, match="1 of 1 requests failed, one with x"):
        served_count([record(FAILED)], levels)
    assert p90([]) == 0.0 and p90(list(range(1, 11))) == 9


@pytest.mark.slow
def test_limits_and_speed_come_from_the_profile() -> None:
    engine = MeasuredEngine.of(profile(), 2**26)
    offered = offered_of(read_trace(START, 60), 64, 0.0625)
    levels = unloaded_limits(offered, engine)
    step_s = DECODE.step_s(1, 1_000)
    assert 5 * step_s < levels.tbt_s < 5 * (step_s + 0.1)
    assert 10 * 0.006 < levels.ttft_s < 2.0
    apart = [replace(one, at_s=5.0 * one.number) for one in offered]
    idle = planned_runs(apart, engine, levels, 1.0, 0)
    assert list(idle) == list(SHAPES)
    assert all(run.share > 0.9 for run in idle.values()) and spread_of(idle) < 1.1
    strict = planned_runs(apart, engine, ServiceLevels(0.001, 1.0), 1.0, 0)
    assert spread_of(strict) == 0.0, "where nobody serves anything, nothing can be compared"
