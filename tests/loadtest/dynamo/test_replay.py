"""Whole replays of the first 500 requests of the trace: the gate, and the conductor's books."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.simulator.asked import Asked
from loadtest.simulator.dynamo.arrivals import jobs_of, spread_ticks
from loadtest.simulator.dynamo.conductor_scheduler import (
    ConductorScheduler,
    profile_decode,
    profile_prefill,
)
from loadtest.simulator.dynamo.peer import RECORDED, RUNS, PeerRun, digest, read_recorded
from loadtest.simulator.dynamo.replay import Replay
from loadtest.simulator.dynamo.round_robin import RoundRobin
from loadtest.simulator.dynamo.targets import Case, gate_percent, targets_of
from loadtest.simulator.experiments.dynamo_replay import all_cases, answer, config_for, run
from loadtest.trace import TraceRow, read_trace

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return read_trace(DATA / "conversation_start.jsonl")


GATE = [case for case in all_cases() if case.policy == "round_robin"]


@pytest.mark.parametrize("case", GATE, ids=lambda case: case.name)
def test_round_robin_agrees_with_dynamos_own_replay(case: Case, rows: list[TraceRow]) -> None:
    recorded_of, recorded = read_recorded(DATA / "conversation_start_dynamo.json")
    assert recorded_of == digest(rows)
    theirs = recorded[PeerRun("round_robin", case.blocks, case.speed)]
    found = run(case, rows).outcome
    assert found.good == theirs.good and found.requests == theirs.requests
    assert max(gate_percent(found, theirs).values()) <= 0.5


def test_round_robin_agrees_with_dynamos_replay_where_sequences_are_preempted(
    rows: list[TraceRow],
) -> None:
    replay, jobs = Replay(RoundRobin(), 512, 3, 2), jobs_of(rows, 4.0)
    replay.run(jobs)
    replay.check()
    assert sum(found.preemptions for found in jobs) == 6  # as many as Dynamo's, and its mean
    mean_s = sum(found.ttft_s for found in jobs) / len(jobs)
    assert mean_s == pytest.approx(69.732610, rel=0.005)


def test_what_was_recorded_of_the_whole_trace_has_every_run() -> None:
    _, recorded = read_recorded(RECORDED)
    assert set(recorded) == set(RUNS)
    assert {result.requests for result in recorded.values()} == {12_031}


def test_every_request_ends_once_and_leaves_nothing_behind(rows: list[TraceRow]) -> None:
    scheduler = ConductorScheduler(config_for("adaptive", "shortest_first"))
    replay, jobs = Replay(scheduler, 2_048, overhead_tokens=800.0), jobs_of(rows, 8.0)
    replay.run(jobs)
    replay.check()
    scheduler.conductor.check()
    assert scheduler.conductor.stats().in_flight == 0
    for found in jobs:
        if found.is_rejected:
            continue
        times = (found.arrived_s, found.started_s, found.prefilled_s, found.joined_s,
                 found.first_token_s, found.finished_s)  # fmt: skip
        assert list(times) == sorted(times)
        assert found.computed_tokens == found.prompt_tokens
    for pool in [w.pool for w in replay.prefills] + [w.pool for w in replay.decodes]:
        assert pool.room == pool.blocks


def test_the_conductor_sees_the_caches_as_they_are(rows: list[TraceRow]) -> None:
    scheduler = ConductorScheduler(config_for("adaptive", "shortest_first"))
    replay, jobs = Replay(scheduler, 512), jobs_of(rows[:200], 1.0)
    replay.run(jobs)
    scheduler.flush()
    seen = set()
    for found in jobs:
        for candidate in scheduler.conductor.explain(scheduler.request_of(found), replay.now_s):
            worker = replay.prefills[int(candidate.prefill.worker_id[1:])]
            assert candidate.local_blocks == len(worker.pool.hits(found.keys))
            seen.add(candidate.local_blocks > 1)
    assert seen == {True, False}


def test_the_same_trace_gives_the_same_decisions(rows: list[TraceRow]) -> None:
    case = Case("adaptive", "shortest_first", "shared", 2_048, 4.0)
    assert run(case, rows).outcome == run(case, rows).outcome


def test_nothing_is_fetched_where_there_is_nothing_to_fetch_with(rows: list[TraceRow]) -> None:
    for policy in ("kvcache_centric", "adaptive"):
        scheduler = ConductorScheduler(config_for(policy, "fifo"))
        Replay(scheduler, 2_048).run(jobs_of(rows, 1.0))
        assert scheduler.conductor.stats().fetches == 0


def test_queue_order_and_shared_passes_each_shorten_the_wait(rows: list[TraceRow]) -> None:
    means = [
        run(Case(policy, order, passes, 2_048, 1.0), rows).outcome.ttft_mean_s
        for policy, order, passes in (
            ("round_robin", "fifo", "filled"),
            ("kvcache_centric", "fifo", "filled"),
            ("adaptive", "shortest_first", "filled"),
            ("adaptive", "shortest_first", "shared"),
        )
    ]
    assert means == sorted(means, reverse=True)
    assert means[3] < 0.7 * means[0]


def test_spread_ticks_keep_order_and_their_tick(rows: list[TraceRow]) -> None:
    spread = spread_ticks(rows)
    times = [row.timestamp_ms for row in spread]
    assert times == sorted(times) and len(set(times)) == len(times)
    for before, after in zip(rows, spread, strict=True):
        assert after == replace(before, timestamp_ms=after.timestamp_ms)
        assert 0 <= after.timestamp_ms - before.timestamp_ms < 3_000


def test_the_fitted_estimates_are_close_to_the_engine() -> None:
    assert profile_prefill().error_mean < 0.06
    assert profile_decode(16_384).error_mean < 0.08


def test_an_outcome_counts_each_length_class(rows: list[TraceRow]) -> None:
    found = run(Case("round_robin", "fifo", "filled", 2_048, 1.0), rows).outcome
    assert sum(part.requests for part in found.classes) == found.requests == 500
    assert sum(part.good for part in found.classes) == found.good


def test_a_shortened_experiment_names_what_it_cannot_say(tmp_path: Path) -> None:
    lines = (DATA / "conversation_start.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "conversation_trace.jsonl").write_text("".join(lines[:60]))
    picture = tmp_path / "found.png"
    result = answer(Asked(folder=tmp_path, requests=50, blocks=(2_048,), picture=picture))
    assert picture.stat().st_size > 10_000
    assert all(target.value is None and target.why for target in result.targets)
    said = json.loads(result.to_json())
    assert {row["engine"] for row in said["rows"]} == {"here"}


def test_targets_are_there_when_all_was_run() -> None:
    names = [target.name for target in targets_of([], {}, why_no_peer="not run")]
    assert len(names) == len(set(names)) == 6 + 2 * 7 + 2 * 5
