"""Large fleets: copies of a trace share nothing, and metering a run changes nothing in it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.paper import pictures
from bench.paper.experiments import scale
from bench.paper.experiments.scheduling import config_for
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import start_of_trace

SMALL = scale.ScaleCase(4, copies=3)


def test_copies_of_a_trace_follow_each_other_and_share_no_block() -> None:
    offered = start_of_trace()[:40]
    copied = scale.copied(offered, 3)
    assert [one.number for one in copied] == list(range(120))
    assert [one.at_s for one in copied] == sorted(one.at_s for one in copied)
    keys = [
        {key for one in copied[first : first + 40] for key in one.keys} for first in (0, 40, 80)
    ]
    assert keys[0] == {key for one in offered for key in one.keys}
    assert [len(found) for found in keys] == [len(keys[0])] * 3
    assert len(set.union(*keys)) == 3 * len(keys[0])


@pytest.mark.slow
def test_a_metered_run_is_the_run_and_every_second_is_in_one_part() -> None:
    offered = start_of_trace()[:60]
    counted: list[None] = []
    began_s = time.process_time()
    metered = scale.run(offered, SMALL, config_for("adaptive"), 0, lambda: counted.append(None))
    took_s = time.process_time() - began_s
    plain = SimulatedFleet(
        config_for("adaptive"), ClusterSettings(prefills=4, decodes=4), Roofline()
    )
    jobs = plain.run(scale.copied(offered, 3), SMALL.speed)
    assert metered.outcome == outcome_of(jobs)
    assert len(counted) == len(offered), "the progress bar has a step for each row of the trace"
    assert all(seconds > 0 for seconds in metered.cpu_s.values())
    assert metered.cpu_s.keys() == set(scale.PARTS)
    assert metered.all_cpu_s <= took_s
    assert metered.decision_s[0] * metered.outcome.offered <= metered.cpu_s[scale.DECISIONS] * 1.01


def test_the_target_is_of_the_size_that_was_promised(tmp_path: Path) -> None:
    run = scale.run(start_of_trace()[:20], scale.ScaleCase(2), config_for("adaptive"))
    assert scale.target_of([run]).value is None
    whole = scale.ScaleRun(
        scale.PROMISED, run.outcome, run.within_slo, dict.fromkeys(scale.PARTS, 50.0), (0, 0, 0)
    )
    assert scale.target_of([run, whole]).value == 300.0
    assert scale.target_of([run, whole], "only the first 20").value is None
    picture = tmp_path / "scale.svg"
    pictures.SAVE["scale"](picture, scale.rows_of([run, whole]))
    assert all(part in picture.read_text() for part in ("svg", "path"))


@pytest.mark.parametrize("copies", [1, 3, 10])
def test_progress_counts_a_row_when_all_of_its_copies_may_be_over(copies: int) -> None:
    counted: list[None] = []
    steps = scale._every(copies, lambda: counted.append(None))
    for _ in range(4 * copies):
        next(steps)
    assert len(counted) == 4
