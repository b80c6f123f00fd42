"""Whatever breaks in a fleet: each request ends once, in time, whole or with an error of a type."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.crowd.followed_fleet import Breakage, FollowedFleet, incarnation_after
from bench.paper import pictures
from bench.paper.experiments import crowd
from conductor import ConductorConfig
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.cluster.store import INCARNATION
from tests.loadtest.simulator.fleets import OPEN, fleet, prompt, start_of_trace

FEW = ClusterSettings(prefills=3, decodes=4)
TIMEOUT_S = 40.0


def broken(
    breakages: Sequence[Breakage],
    requests: int = 60,
    timeout_s: float = TIMEOUT_S,
    settings: ClusterSettings = FEW,
    config: ConductorConfig = OPEN,
) -> FollowedFleet:
    """A run to its end; `run` checks that no lease, page or reservation stayed anywhere."""
    tried = FollowedFleet(config, settings, Roofline(), breakages, timeout_s, give_up_s=2_000.0)
    tried.run(start_of_trace()[:requests])
    assert not tried.hung
    return tried


def judge(tried: FollowedFleet, timeout_s: float = TIMEOUT_S) -> Counter[str]:
    """Every request ended in time, and whoever has no error has all tokens."""
    offered = {one.number: one for one in start_of_trace()}
    for request in tried.requests.values():
        assert request.ended_s is not None
        assert request.ended_s <= request.arrived_s + timeout_s + crowd.STOP_S, request.kind
        assert request.kind != crowd.UNTYPED, repr(request.error)
        if request.error is None:
            assert request.state.sent_tokens == offered[request.number].output_tokens
    return Counter(request.kind for request in tried.requests.values())


def test_where_nothing_breaks_the_machine_leads_each_request_as_the_plain_fleet_does() -> None:
    tried = broken((), timeout_s=1e4)
    plain = fleet(FEW)
    jobs = plain.run(start_of_trace()[:60])
    assert judge(tried, 1e4) == {"finished": 60}
    # Calls take a millisecond there, so times differ by some of those and the rest not at all.
    assert [job.prefill for job in tried.jobs] == [job.prefill for job in jobs]
    assert sum(job.cached_tokens for job in tried.jobs) == sum(job.cached_tokens for job in jobs)
    ends = [
        (job.finished_s or 0.0, other.finished_s or 0.0)
        for job, other in zip(tried.jobs, jobs, strict=True)
    ]
    assert all(abs(one - other) < 1.0 for one, other in ends)


@pytest.mark.slow
def test_whatever_breaks_each_request_ends_in_time_whole_or_with_a_typed_error(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        workers = [f"p{n}" for n in range(3)] + [f"d{n}" for n in range(4)]
        breakages = [
            Breakage(
                chance.uniform(0.0, 30.0),
                chance.choice(workers),
                chance.choice(crowd.KINDS),
                chance.uniform(0.5, 60.0),
            )
            for _ in range(chance.randrange(1, 7))
        ]
        timeout_s = chance.choice((3.0, 15.0, TIMEOUT_S))
        print(f"{breakages} timeout_s={timeout_s}")
        ends = judge(broken(breakages, timeout_s=timeout_s), timeout_s)
        assert sum(ends.values()) == 60


def test_a_run_is_the_same_again_with_the_same_seed(seed: int) -> None:
    case = crowd.CrowdCase(4, 8, 0.3, seed)
    offered = start_of_trace()[:50]
    first, again = (crowd.run(offered, case, crowd.config_of_crowd()) for _ in range(2))
    assert first == again
    assert first.hung == 0 and first.within_deadline == first.requests == 50


def test_requests_of_a_killed_worker_go_on_with_what_their_clients_have() -> None:
    tried = broken([Breakage(14.0, "d0", "kill"), Breakage(14.0, "p0", "kill")], timeout_s=1e4)
    assert judge(tried, 1e4) == {"finished": 60}
    went_on = [request for request in tried.requests.values() if request.losses]
    assert {kind for request in went_on for kind in request.losses} >= {"WORKER_FAILED"}
    rest = [request.attempts[len(request.attempts)] for request in went_on]
    assert any(job.output_tokens < tried.requests[job.number].state.sent_tokens for job in rest)
    assert outcome_of(tried.jobs).finished == 60


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_a_frozen_worker_is_missed_after_the_ttl_and_its_late_answers_are_dropped(
    seconds: float,
) -> None:
    tried = broken([Breakage(14.0, "d1", "freeze", seconds)], timeout_s=1e4)
    assert judge(tried, 1e4) == {"finished": 60}
    lost = sum(sum(request.losses.values()) for request in tried.requests.values())
    assert bool(lost) == (seconds > 5.0), "a short one is not noticed"
    names = {status.worker.worker_id for status in tried.conductor.status(tried.clock.now_s)}
    assert "d1" in names, "it registered again"


def test_a_reloaded_worker_ends_what_it_has_and_the_new_process_takes_the_next() -> None:
    reloads = [Breakage(14.0, "d1", "reload"), Breakage(14.0, "p1", "reload")]
    tried = broken(reloads, timeout_s=1e4)
    assert judge(tried, 1e4) == {"finished": 60}
    there = {
        (s.worker.worker_id, s.worker.incarnation)
        for s in tried.conductor.status(tried.clock.now_s)
    }
    again = incarnation_after(INCARNATION)
    assert {("d1", again), ("p1", again)} <= there
    assert ("p1", INCARNATION) not in there, "it had ended what it had long ago"
    assert not any(request.losses for request in tried.requests.values())


def test_whoever_is_stopped_leaves_its_workers_at_once() -> None:
    tried = broken((), timeout_s=2.0)
    ends = judge(tried, 2.0)
    assert ends["WorkerUnavailable"] > 0, "nobody was stopped"
    late_s = [(r.ended_s or 0.0) - r.arrived_s - 2.0 for r in tried.requests.values()]
    assert max(late_s) < 2.0, "of live workers the call ends with the chunk under way"


def test_a_request_without_an_end_is_counted_as_hung() -> None:
    tried = FollowedFleet(OPEN, FEW, Roofline(), (), give_up_s=30.0)
    tried.clock.at(0.5, setattr, tried.prefills["p0"]._site.clock, "is_frozen", True)
    tried._speaks = lambda worker: True  # type: ignore[method-assign]
    tried.run([prompt(number, 1.0, range(number * 50, number * 50 + 40)) for number in range(6)])
    assert 0 < len(tried.hung) < 6


def test_rows_and_targets_say_what_came(tmp_path: Path) -> None:
    offered = start_of_trace()[:40]
    runs = [
        crowd.run(offered, crowd.CrowdCase(3, 6, share, 1), crowd.config_of_crowd())
        for share in (0.0, 0.3)
    ]
    rows = crowd.rows_of(runs)
    assert [row["requests"] for row in rows] == [40, 40]
    assert sum(int(rows[1][f"{kind}s"] or 0) for kind in crowd.KINDS) == 3
    assert all(target.is_met for target in crowd.targets_of(runs))
    assert all(target.value is None for target in crowd.targets_of(runs, "fewer workers"))
    picture = tmp_path / "crowd.svg"
    pictures.SAVE["crowd"](picture, rows)
    assert "<svg" in picture.read_text()
