"""What breaks in a simulated cluster costs time, not requests."""

from __future__ import annotations

import pytest

from loadtest.simulator.block_cache import key_of
from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.fleet import Fault, SimulatedFleet
from loadtest.simulator.cluster.outcome import SimulationOutcome, outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from loadtest.simulator.cluster.store import SimulatedStore
from mooncake_store.records.events import BlockRemoved, Event, NodeDown
from tests.loadtest.simulator.fleets import fleet, prompt, start_of_trace


def broken(*faults: Fault) -> tuple[SimulatedFleet, SimulationOutcome]:
    tried = fleet(ClusterSettings(prefills=3, decodes=3), faults=faults)
    return tried, outcome_of(tried.run(start_of_trace()[:120]))


@pytest.mark.parametrize("worker", ["p1", "d1"])
@pytest.mark.parametrize("kind", ["kill", "host"])
def test_requests_of_a_lost_worker_are_tried_again_elsewhere(worker: str, kind: str) -> None:
    tried, outcome = broken(Fault(12.0, worker, kind))  # type: ignore[arg-type]
    assert outcome.finished == 120 and not outcome.refused
    again = [job for job in tried.jobs if job.attempts > 1]
    assert again, "nobody was there"
    for job in tried.jobs:
        assert job.route is not None and job.finished_s is not None
        used = (job.route.prefill.worker_id, job.route.decode.worker_id)
        assert worker not in used or job.finished_s <= 12.0 or worker == used[0]
    assert {status.worker.worker_id for status in tried.conductor.status(tried.clock.now_s)} == {
        f"{role}{number}" for role in "pd" for number in range(3)
    } - {worker}, "the directory misses its reports"


def test_a_thousand_nodes_run_and_one_of_them_is_lost() -> None:
    """More than a directory takes by itself, and than have measured the way to each other."""
    many = ClusterSettings(prefills=1_000, decodes=30)
    tried = fleet(many, faults=[Fault(1.0, "p0", "host")])
    offered = [prompt(number, number / 40, [number, number + 1_000]) for number in range(40)]
    assert outcome_of(tried.run(offered)).finished == 40
    assert len({job.prefill for job in tried.jobs}) > 20


@pytest.mark.slow
def test_the_loss_of_a_full_node_is_announced_whole() -> None:
    heard: list[Event] = []
    clock = VirtualClock()
    store = SimulatedStore(clock, heard.extend, "density", nodes=1, node_blocks=5_000)
    store.add_node("s0", 5_000)
    assert store.put([key_of(block) for block in range(5_000)], "s0", "request") == 5_000
    store.lose_node("s0")
    gone = [event for event in heard if isinstance(event, BlockRemoved)]
    assert len(gone) == 5_000 and isinstance(heard[-1], NodeDown)


def test_a_slow_worker_gets_less_work_once_it_is_known(seed: int) -> None:
    tried, outcome = broken(Fault(5.0, "p0", "slow", 4.0))
    assert outcome.finished == 120
    routed = [job.route.prefill.worker_id for job in tried.jobs[30:] if job.route is not None]
    assert routed.count("p0") < 0.7 * max(routed.count("p1"), routed.count("p2"))
