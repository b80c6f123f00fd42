"""Workers of a simulated cluster that take the other role, and the experiment about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper.experiments import roles
from bench.paper.experiments.scheduling import config_for
from bench.paper.pictures import save_roles
from loadtest.simulator.cluster.fleet import Fault, SimulatedFleet
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import fleet, start_of_trace

SHAPE = ClusterSettings(prefills=3, decodes=3)


def flipped(*at: tuple[float, str], faults: tuple[Fault, ...] = ()) -> SimulatedFleet:
    made = fleet(SHAPE, faults=faults)
    for at_s, worker_id in at:
        made.clock.at(at_s, made.flip, worker_id)
    outcome = outcome_of(made.run(start_of_trace()[:120]))
    assert outcome.finished == 120 and not outcome.refused
    return made


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["p1", "d1"])
def test_no_request_is_lost_when_a_worker_flips_there_and_back(worker: str) -> None:
    made = fleet(SHAPE)

    def flip_again(_: SimulatedFleet) -> None:
        there = made.prefills.get(worker) or made.decodes[worker]
        if not there.is_draining and len(made.flips) < 3:
            made.flip(worker)

    made.reported = flip_again
    outcome = outcome_of(made.run(start_of_trace()))
    assert outcome.finished == len(made.jobs) and not outcome.refused
    own, other = ("prefill", "decode") if worker == "p1" else ("decode", "prefill")
    assert [flip.role for flip in made.flips] == [other, own, other]
    incarnations = {
        ref.incarnation
        for job in made.jobs
        for ref in (job.route.prefill, job.route.decode)  # type: ignore[union-attr]
        if ref.worker_id == worker
    }
    assert len(incarnations) > 1, "it worked in both roles"


def test_a_worker_that_drains_gets_nothing_new() -> None:
    made = flipped((5.0, "d1"))
    (flip,) = made.flips
    for job in made.jobs:
        assert job.route is not None
        is_there = "d1" in (job.route.decode.worker_id, job.route.prefill.worker_id)
        assert not (is_there and flip.began_s < job.arrived_s < flip.ended_s)


def test_a_worker_that_dies_while_it_drains_does_not_flip() -> None:
    made = flipped((5.0, "p1"), faults=(Fault(5.1, "p1", "kill"),))
    assert made.flips == [] and len(made.prefills) == 3


@pytest.mark.slow
def test_the_controller_moves_workers_to_where_the_load_is() -> None:
    """Many prompts, answers of one token: decode has nothing to do."""
    config = replace(config_for("kvcache_centric"), role_flips="on", ttft_slo_s=5.0, tbt_slo_s=0.1)
    made = SimulatedFleet(config, ClusterSettings(prefills=2, decodes=4), roles.Roofline())
    offered = [replace(one, output_tokens=1) for one in start_of_trace()]
    assert outcome_of(made.run(offered, speed=6.0)).finished == len(offered)
    assert made.flips and made.flips[0].role == "prefill"
    assert made.decodes, "the last decode worker stays"


def test_the_phases_have_every_request_in_order() -> None:
    offered = start_of_trace()
    made, half_s = roles.in_phases(offered)
    assert [one.number for one in made] == [one.number for one in offered]
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    half = len(offered) // 2
    assert made[half].at_s == pytest.approx(half_s)
    assert made[half].output_tokens == 3 * offered[half].output_tokens
    assert made[0].output_tokens == max(1, round(offered[0].output_tokens / 3))


@pytest.mark.slow
def test_the_gain_is_over_the_best_split_and_a_flip_on_a_steady_trace_is_a_miss(
    tmp_path: Path,
) -> None:
    offered = start_of_trace()[:60]
    fixed = replace(config_for("kvcache_centric"), ttft_slo_s=30.0, tbt_slo_s=0.1)
    flips = replace(fixed, role_flips="on")
    plans = [
        roles.RolesPlan("fixed", fixed, replace(SHAPE, prefills=1)),
        roles.RolesPlan("fixed", fixed, SHAPE),
        roles.RolesPlan("oracle", fixed, SHAPE, prefills_then=2),
        roles.RolesPlan("controller", flips, SHAPE),
        *[roles.RolesPlan("steady", flips, SHAPE, has_phases=False)] * 2,
    ]
    runs = [roles.run(offered, plan) for plan in plans]
    assert runs[2].flips and runs[2].prefills_over_time().startswith("0:3 ")
    best = max(runs[0].within, runs[1].within)
    gain, *steady = roles.targets_of(runs)
    assert gain.value == pytest.approx(runs[3].within / best, abs=1e-4)
    assert [target.is_met for target in steady] == [True, True]
    moved = replace(runs[4], flips=runs[2].flips)
    assert roles.targets_of([*runs[:4], moved, runs[5]])[1].is_met is False
    assert roles.targets_of(runs, "too few")[0].value is None
    save_roles(tmp_path / "roles.png", roles.rows_of(runs))
    assert (tmp_path / "roles.png").stat().st_size > 0
