"""An engine that fails again and again is given up, once; a single accident is none."""

from __future__ import annotations

from backends.engine.connected.generation import FAILURES_MAX, EngineHealth


def test_failures_in_a_row_mean_that_the_engine_is_lost() -> None:
    reasons: list[str] = []
    health = EngineHealth(reasons.append)
    for number in range(FAILURES_MAX - 1):
        health.failed(f"accident {number}")
    health.went_well()
    for number in range(FAILURES_MAX - 1):
        health.failed(f"accident {number}")
    assert not health.is_lost and not reasons
    health.failed("the last one")
    health.failed("one more")
    assert health.is_lost and reasons == ["the last one"]


def test_a_connector_that_is_broken_is_enough() -> None:
    reasons: list[str] = []
    health = EngineHealth(reasons.append)
    health.lose("rank 1 could not copy KV")
    health.lose("again")
    assert reasons == ["rank 1 could not copy KV"]
