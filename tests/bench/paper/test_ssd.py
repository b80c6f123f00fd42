"""The SSD tier of a simulated cluster: the directory spills and drops, disks take their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadtest.simulator.cluster import ssd
from loadtest.simulator.cluster.fleet import Fault, SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.site import ClusterSettings
from mooncake_store.node import spiller
from tests.loadtest.simulator.fleets import ONE_AND_ONE, OPEN, fleet, prompt, start_of_trace

SMALL = replace(ONE_AND_ONE, node_blocks=30)
TIERED = replace(SMALL, ssd_blocks=200)


def again(settings: ClusterSettings, at_s: float = 60.0) -> tuple[SimulatedJob, int]:
    """A prompt of 8 blocks that others have pushed out of the DRAM meanwhile; blocks spilled."""
    others = [prompt(n, 5.0 * n, range(100 * n, 100 * n + 8)) for n in range(1, 10)]
    tried = fleet(settings)
    jobs = tried.run([prompt(0, 0.0, range(8)), *others, prompt(10, at_s, range(8))])
    return jobs[-1], tried.site.ssds.spilled_blocks


def test_what_was_evicted_is_computed_again_without_an_ssd_and_restored_with_one() -> None:
    plain, _ = again(SMALL)
    tiered, spilled = again(TIERED)
    assert plain.cached_tokens < 8 * 512 and plain.restored_blocks == 0
    assert tiered.cached_tokens == 8 * 512 - 1 and 0 < tiered.restored_blocks <= 8
    assert tiered.fetched_blocks == 0 and spilled >= tiered.restored_blocks
    assert tiered.ttft_s < plain.ttft_s


def test_a_restore_takes_as_long_as_the_disk_reads() -> None:
    quick, _ = again(TIERED)
    slow, _ = again(replace(TIERED, ssd_read_bytes_per_s=1.2e9, ssd_write_bytes_per_s=1.2e9))
    assert quick.restored_blocks == slow.restored_blocks
    size_bytes = quick.restored_blocks * 512 * 320 * 1024
    more_s = size_bytes / 1.2e9 - size_bytes / 12e9
    assert slow.ttft_s - quick.ttft_s == pytest.approx(more_s, rel=1e-6)


def test_a_full_ssd_drops_its_coldest_blocks() -> None:
    job, spilled = again(replace(SMALL, ssd_blocks=16))
    assert spilled > 16, "it was written over"
    assert job.cached_tokens < 8 * 512


def test_a_block_that_is_evicted_before_it_is_written_is_not_on_the_ssd() -> None:
    crawling = replace(TIERED, ssd_write_bytes_per_s=1e6)  # three minutes a block
    job, _ = again(crawling)
    assert job.restored_blocks == 0


class FetchingFleet(SimulatedFleet):
    """The last prompt goes to the worker that did not compute it before, and may fetch it all."""

    def _submit(self, job: SimulatedJob, order_key_s: float) -> None:
        if job.number == 20:
            assert job.route is not None
            before = self.jobs[0].prefill
            job.prefill = "p1" if before == "p0" else "p0"
            source = before.replace("p", "s")
            job.route = replace(job.route, fetch_blocks=8, fetch_node=source)
        super()._submit(job, order_key_s)


def test_what_only_the_ssd_of_another_node_has_goes_through_its_dram() -> None:
    tried = FetchingFleet(OPEN, replace(TIERED, prefills=2, decodes=2), Roofline())
    offered: Sequence[Offered] = [
        prompt(0, 0.0, range(8)),
        *(prompt(n, 5.0 * n, range(100 * n, 100 * n + 8)) for n in range(1, 20)),
        prompt(20, 120.0, range(8)),
    ]
    jobs = tried.run(offered)
    assert (jobs[-1].cached_tokens, jobs[-1].fetched_blocks) == (8 * 512 - 1, 8)
    assert jobs[-1].restored_blocks == 0, "its own SSD had nothing"
    copies = tried.site.store.find(jobs[0].keys, "s0", "me").copies[0]
    assert {copy.node_id for copy in copies} >= {"s0", "s1"}


@pytest.mark.parametrize("kind", ["kill", "host"])
def test_requests_survive_the_loss_of_a_node_whose_ssd_is_in_use(kind: str, seed: int) -> None:
    settings = ClusterSettings(
        prefills=3,
        decodes=3,
        node_blocks=300,
        ssd_blocks=1_200,
        seed=seed,
        ssd_read_bytes_per_s=2e9,
        ssd_write_bytes_per_s=1e9,
    )
    faults = [Fault(12.0, "p1", kind)]  # type: ignore[arg-type]
    tried = fleet(settings, faults=faults)
    outcome = outcome_of(tried.run(start_of_trace()[:120]))
    assert outcome.finished == 120 and not outcome.refused
    assert tried.site.ssds.spilled_blocks > 0


def test_blocks_are_spilled_as_the_storage_node_does_it() -> None:
    assert (ssd.SPILL_BLOCKS_MAX, ssd.SPILL_IDLE_S) == (spiller.BLOCKS_MAX, spiller.IDLE_S)
