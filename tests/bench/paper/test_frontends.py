"""Several frontends on the same simulated workers: with notes as good as one, else still safe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.paper.experiments import frontends
from conductor import ConductorConfig
from conductor.admission.fair_share import FairShare
from loadtest.replay.trace import read_trace
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob, offered_of, spread_ticks
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import START, fleet, start_of_trace

TWO_AND_TWO = ClusterSettings(prefills=2, decodes=2)
OPEN = ConductorConfig(policy="adaptive", admission="none", advisory=True)


def evenly(count: int) -> list[Offered]:
    return offered_of(spread_ticks(read_trace(START)[:count]))


def mean_ttft_s(settings: ClusterSettings, speed: float) -> float:
    jobs = SimulatedFleet(OPEN, settings, Roofline()).run(evenly(400), speed)
    return outcome_of(jobs).ttft_s.mean


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [0.005, 0.3, None])
@pytest.mark.parametrize("admission", ["none", "reserved", "predictive_lengths"])
def test_every_request_ends_once_and_leaves_nothing_at_any_frontend(
    admission: str, latency_s: float | None
) -> None:
    settings = replace(TWO_AND_TWO, frontends=4, notes_latency_s=latency_s)
    tried = fleet(settings, ConductorConfig(admission=admission, ttft_slo_s=5.0, tbt_slo_s=0.06))
    jobs = tried.run(start_of_trace()[:200], speed=4.0)  # `run` checks memory, leases, conductors
    outcome = outcome_of(jobs)
    assert outcome.finished + outcome.rejected_in_all == outcome.offered == 200
    stats = [one.stats() for one in tried.conductors]
    assert [one.in_flight for one in stats] == [0] * 4
    assert sum(one.routed for one in stats) >= outcome.finished > 0
    assert all((one.note_batches_received > 0) == (latency_s is not None) for one in stats)
    assert all(one.note_batches_missed == 0 for one in stats)


@pytest.mark.slow
def test_notes_make_four_frontends_as_quick_as_one() -> None:
    one_s = mean_ttft_s(ClusterSettings(prefills=4, decodes=4), 1.0)
    four = ClusterSettings(prefills=4, decodes=4, frontends=4)
    with_notes_s, without_s = (
        mean_ttft_s(replace(four, notes_latency_s=latency_s), 1.0) for latency_s in (0.005, None)
    )
    assert with_notes_s < 1.1 * one_s
    assert without_s > 1.2 * with_notes_s, "notes are good for something"


def overloaded_ttft_s(frontend_count: int) -> float:
    settings = replace(TWO_AND_TWO, frontends=frontend_count)
    config = ConductorConfig(policy="adaptive", ttft_slo_s=10.0, tbt_slo_s=9.0)
    outcome = outcome_of(SimulatedFleet(config, settings, Roofline()).run(evenly(500), 3.0))
    assert outcome.rejected_in_all > 100, "no overload"
    return outcome.ttft_s.mean


@pytest.mark.slow
def test_overload_is_held_about_where_a_single_frontend_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Because each tells what it is asked for; else each lets in what all the workers can do."""
    alone_s, four_s = overloaded_ttft_s(1), overloaded_ttft_s(4)
    monkeypatch.setattr(FairShare, "wanted_of", lambda self, now_s: {})
    assert four_s < 1.5 * alone_s < 0.6 * overloaded_ttft_s(4)


class Watched(SimulatedFleet):
    """Looks at every worker's limits after each decision and each report."""

    looks = 0
    fullest = 0

    def _decide(self, job: SimulatedJob) -> None:
        super()._decide(job)
        self.look()

    def _report(self) -> None:
        super()._report()
        self.look()

    def look(self) -> None:
        self.looks += 1
        settings, pages_max = self.settings, self.site.pages_max
        for worker in self._workers:
            assert worker._pool.used_pages <= pages_max
            assert worker._batching.waiting <= settings.waiting_max
        for decode in self.decodes.values():
            assert decode._batching.running <= settings.decode_slots
            self.fullest = max(self.fullest, decode._batching.running)


def test_without_notes_no_worker_goes_over_its_limits_and_who_is_refused_goes_elsewhere() -> None:
    settings = replace(
        TWO_AND_TWO, frontends=4, notes_latency_s=None, decode_slots=6, waiting_max=5, report_s=2.0
    )
    config = ConductorConfig(admission="reserved", ttft_slo_s=1e3, tbt_slo_s=1e3)
    tried = Watched(config, settings, Roofline())
    outcome = outcome_of(tried.run(start_of_trace()[:300], speed=3.0))
    assert tried.looks > 300 and tried.fullest == settings.decode_slots, "too dull to prove it"
    assert tried.refusals > 10, "nobody was refused by a worker"
    assert outcome.finished + outcome.rejected_in_all == 300
    refused_for_good = sum(outcome.refused.values())
    assert refused_for_good < tried.refusals, "hardly anybody found another worker"


def test_the_experiment_says_what_notes_buy_and_that_it_was_shortened() -> None:
    runs = [
        frontends.run(evenly(60), ("evenly", "adaptive", 2.0, count, latency_s), ClusterSettings())
        for count, latency_s in ((1, None), (4, 0.005))
    ]
    target = frontends.target_of(runs)
    assert target.name == "frontends_ttft_4_over_1" and target.value is not None
    table = frontends.rows_of(runs)
    assert table[1]["of_one_frontend"] == round(target.value, 3)
    assert table[0]["note_batches"] == 0 and int(str(table[1]["note_batches"])) > 0
    assert frontends.target_of(runs, "only some").value is None
