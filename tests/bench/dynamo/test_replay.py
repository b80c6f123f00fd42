"""Whole replays of the first 500 requests of the trace: the gate, and the conductor's books."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.dynamo.fleet import DynamoFleet, RoundRobinFleet, profile_decode, profile_prefill
from bench.dynamo.peer import (
    RECORDED,
    RUNS,
    PeerRun,
    ReplayTimes,
    digest,
    p99_ratio,
    read_recorded,
    read_times,
    write_times,
)
from bench.dynamo.targets import DynamoCase, gate_percent, targets_of
from bench.paper.__main__ import PaperExperiment, answer
from bench.paper.experiments.dynamo_replay import all_cases, cases_of, config_for, run
from conductor import Reject, Request
from loadtest.replay.trace import TraceRow, read_trace
from loadtest.simulator.cluster.job import Offered, SimulatedJob, offered_of, spread_ticks
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.options import SimulationOptions

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return read_trace(DATA / "conversation_start.jsonl")


@pytest.fixture(scope="module")
def offered(rows: list[TraceRow]) -> list[Offered]:
    return offered_of(rows)


GATE = [case for case in all_cases() if case.policy == "round_robin"]


@pytest.mark.parametrize("case", GATE, ids=lambda case: case.name)
def test_round_robin_agrees_with_dynamos_own_replay(
    case: DynamoCase, rows: list[TraceRow], offered: list[Offered]
) -> None:
    recorded_of, recorded = read_recorded(DATA / "conversation_start_dynamo.json")
    assert recorded_of == digest(rows)
    theirs = recorded[PeerRun("round_robin", case.blocks, case.speed)].outcome
    found = run(case, offered).outcome
    assert found.good == theirs.good and found.offered == theirs.offered
    assert found.good_tokens_per_s == pytest.approx(theirs.good_tokens_per_s)
    assert max(gate_percent(found, theirs).values()) <= 0.5


def test_round_robin_agrees_with_dynamos_replay_where_sequences_are_preempted(
    offered: list[Offered],
) -> None:
    jobs = RoundRobinFleet(512, 3, 2).run(offered, 4.0)
    assert sum(found.preemptions for found in jobs) == 6  # as many as Dynamo's, and its mean
    mean_s = sum(found.ttft_s for found in jobs) / len(jobs)
    assert mean_s == pytest.approx(69.732610, rel=0.005)


def test_what_was_recorded_of_the_whole_trace_has_every_run() -> None:
    _, recorded = read_recorded(RECORDED)
    assert set(recorded) == set(RUNS)
    assert {result.outcome.offered for result in recorded.values()} == {12_031}


def test_the_recorded_times_come_to_the_recorded_figures() -> None:
    for path, lines in ((RECORDED, None), (DATA / "conversation_start_dynamo.json", 500)):
        _, recorded = read_recorded(path)
        timed = {run: found for run, found in recorded.items() if found.times is not None}
        assert set(timed) == {run for run in RUNS if run.keeps_times}
        for found in timed.values():
            assert found.times is not None
            assert lines is None or len(found.times.ttft_ms) == lines
            assert int(found.times.is_good.sum()) == found.outcome.good
            p99_ms = np.percentile(found.times.ttft_ms[found.times.is_good], 99)
            assert p99_ms == pytest.approx(1e3 * found.outcome.good_ttft_p99_s, abs=1.0)


def test_times_come_back_from_a_file_as_they_were(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [
        ReplayTimes(
            rng.integers(0, 2**32, 50, dtype=np.uint32), rng.integers(0, 256, 50, dtype=np.uint8)
        )
        for _ in range(3)
    ]
    write_times(tmp_path / "times.xz", runs)
    back = read_times(tmp_path / "times.xz", 50)
    for wrote, read in zip(runs, back, strict=True):
        assert (wrote.ttft_ms == read.ttft_ms).all() and (wrote.itl_ms == read.itl_ms).all()


def served(number: int, arrived_s: float, ttft_s: float, rest_s: float) -> SimulatedJob:
    first_s = arrived_s + ttft_s
    return SimulatedJob(
        number,
        Request(f"r{number}", 1_000, (), 100),
        100,
        arrived_s,
        prefilled_s=first_s,
        first_token_s=first_s,
        finished_s=first_s + rest_s,
    )


def rejected(number: int) -> SimulatedJob:
    request = Request(f"r{number}", 1_000, (), 100)
    reject = Reject(
        request_id=request.request_id, kind="ttft_slo", reason="", predicted=None, retry_after_s=1.0
    )
    return SimulatedJob(number, request, 100, 0.0, reject=reject)


def test_good_tokens_are_divided_by_the_time_in_which_requests_arrive() -> None:
    # The last of them takes 90 s more: it is not good, and nobody is divided by its seconds.
    jobs = [served(0, 0.0, 1.0, 2.0), served(1, 5.0, 2.0, 2.0), served(2, 10.0, 90.0, 9.0)]
    found = outcome_of(jobs)
    assert found.good == 2 and found.good_tokens_per_s == 200 / 10.0
    assert found.good_ttft_p99_s == pytest.approx(1.99) and found.ttft_s.p99 > 80.0


def test_p99_is_compared_over_the_requests_that_are_good_in_both_runs() -> None:
    ours = ReplayTimes.of([served(0, 0, 1.0, 1.0), served(1, 0, 4.0, 1.0), rejected(2)])
    theirs = ReplayTimes.of(
        [served(0, 0, 2.0, 1.0), served(1, 0, 99.0, 1.0), served(2, 0, 3.0, 1.0)]
    )
    assert ours.is_good.tolist() == [True, True, False]
    assert theirs.is_good.tolist() == [True, False, True]
    assert p99_ratio(ours, theirs) == 0.5  # only the first is good in both


def test_every_request_ends_once_and_leaves_nothing_behind(offered: list[Offered]) -> None:
    fleet = DynamoFleet(config_for("adaptive", "shortest_first"), 2_048, overhead_tokens=800.0)
    jobs = fleet.run(offered, 8.0)
    assert fleet.conductor.stats().in_flight == 0
    assert len(jobs) == len(offered) and any(found.reject for found in jobs)
    for found in jobs:
        if found.reject:
            continue
        times_s = (
            found.arrived_s,
            found.started_s,
            found.prefilled_s,
            found.joined_s,
            found.first_token_s,
            found.finished_s,
        )
        known_s = [time_s for time_s in times_s if time_s is not None]
        assert len(known_s) == 6 and known_s == sorted(known_s)
    assert all(pool.room == pool.blocks for pool in fleet.pools)


def test_the_conductor_sees_the_caches_as_they_are(offered: list[Offered]) -> None:
    fleet = DynamoFleet(config_for("adaptive", "shortest_first"), 512)
    jobs = fleet.run(offered[:200])
    fleet.flush()
    seen = set()
    for found in jobs:
        for candidate in fleet.conductor.explain(found.request, fleet.clock.now_s).candidates:
            worker = fleet.prefills[candidate.prefill.worker_id]
            assert candidate.local_blocks == len(worker.pool.hits(found.keys))
            seen.add(candidate.local_blocks > 1)
    assert seen == {True, False}


def test_the_same_trace_gives_the_same_decisions(offered: list[Offered]) -> None:
    case = DynamoCase("adaptive", "shortest_first", "shared", 2_048, 4.0)
    assert run(case, offered).outcome == run(case, offered).outcome


def test_nothing_is_fetched_where_there_is_nothing_to_fetch_with(offered: list[Offered]) -> None:
    for policy in ("kvcache_centric", "adaptive"):
        fleet = DynamoFleet(config_for(policy, "fifo"), 2_048)
        fleet.run(offered)
        assert fleet.conductor.stats().fetches == 0


@pytest.mark.slow
def test_queue_order_and_shared_passes_each_shorten_the_wait(offered: list[Offered]) -> None:
    means = [
        run(DynamoCase(policy, order, passes, 2_048, 1.0), offered).outcome.ttft_s.mean
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


def test_an_outcome_counts_each_length_class(offered: list[Offered]) -> None:
    found = run(DynamoCase("round_robin", "fifo", "filled", 2_048, 1.0), offered).outcome
    assert sum(part.requests for part in found.classes) == found.offered == 500
    assert sum(part.good for part in found.classes) == found.good


def test_a_shortened_experiment_names_what_it_cannot_say(tmp_path: Path) -> None:
    lines = (DATA / "conversation_start.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "conversation_trace.jsonl").write_text("".join(lines[:60]))
    picture = tmp_path / "found.png"
    result = answer(
        PaperExperiment.DYNAMO_REPLAY,
        SimulationOptions(folder=tmp_path, requests=50, blocks=(2_048,), picture=picture),
    )
    assert picture.stat().st_size > 10_000
    assert all(target.value is None and target.why for target in result.targets)
    said = json.loads(result.to_json())
    assert {row["engine"] for row in said["rows"]} == {"here"}


def test_targets_are_there_when_all_was_run() -> None:
    names = [target.name for target in targets_of([], {}, why_no_peer="not run")]
    assert len(names) == len(set(names)) == 6 + 2 * 7 + 2 * 9


def test_any_case_can_be_asked_for(tmp_path: Path) -> None:
    asked = SimulationOptions(speeds=(3.0,), blocks=(1_000,), prefills=3)
    cases = cases_of(asked)
    assert {(c.blocks, c.speed, c.prefills, c.decodes) for c in cases} == {(1_000, 3.0, 3, 2)}
    assert [case.policy for case in cases][:1] == ["round_robin"] and len(cases) == 5
    lines = (DATA / "conversation_start.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other_trace.jsonl").write_text("".join(lines[:60]))
    result = answer(
        PaperExperiment.DYNAMO_REPLAY,
        replace(asked, folder=tmp_path, traces=("other",), policies=("adaptive",)),
    )
    assert [row["workers"] for row in result.rows] == ["3P2D"] * 3
    assert any("3P2D" in target.name for target in result.targets)
