"""A simulated cluster: every request ends once, steps at once are steps one by one, seeds rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor import ConductorConfig
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import Roofline, prompt_s
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of, within
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import (
    ONE_AND_ONE,
    OPEN,
    everything,
    fleet,
    prompt,
    start_of_trace,
)

FOUR = ClusterSettings(prefills=2, decodes=2)


class SmallGpu(Roofline):
    """Memory for 30 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pages_bytes = 30 * 512 * self.token_bytes


@pytest.mark.slow
def test_steps_taken_at_once_are_to_the_last_bit_steps_taken_one_by_one(seed: int) -> None:
    settings = ClusterSettings(prefills=4, decodes=4, seed=seed)
    at_once, one_by_one = (
        fleet(replace(settings, steps_at_once=steps)).run(start_of_trace()) for steps in (0, 1)
    )
    assert len(at_once) == 500
    assert everything(at_once) == everything(one_by_one)


def test_the_same_seed_is_the_same_run_and_another_is_not(seed: int) -> None:
    offered = start_of_trace()[:120]
    first, again, other = (
        everything(fleet(replace(FOUR, seed=number)).run(offered))
        for number in (seed, seed, seed + 1)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("admission", ["none", "baseline", "early", "predictive", "reserved"])
def test_under_overload_every_request_ends_exactly_once_and_leaves_nothing(admission: str) -> None:
    offered = start_of_trace()[:200]
    tried = fleet(FOUR, ConductorConfig(admission=admission, ttft_slo_s=5.0, tbt_slo_s=0.06))
    jobs = tried.run(offered, speed=4.0)  # `run` checks that memory and leases are back
    assert [job.number for job in jobs] == [one.number for one in offered]
    outcome = outcome_of(jobs)
    assert outcome.finished + outcome.rejected_in_all == outcome.offered == 200
    assert tried.conductor.stats().in_flight == 0
    assert 0 < within(jobs, 5.0, 0.06) <= outcome.finished


def test_a_lone_request_takes_what_the_models_say() -> None:
    gpu, tried = Roofline(), fleet()
    job = tried.run([prompt(0, 1.0, range(8), output_tokens=21)])[0]
    prefill_s = prompt_s(gpu, 0, 8 * 512, tried.settings.chunk_tokens)
    assert job.compute_s == pytest.approx(prefill_s)
    assert job.prefilled_s == pytest.approx(1.0 + prefill_s)
    # Its KV was sent while it was computed: only the latency of the last layer is left.
    assert job.first_token_s is not None and job.prefilled_s is not None
    handover_s = job.first_token_s - job.prefilled_s
    assert handover_s == pytest.approx(2 * tried.settings.nic_latency_s)
    assert job.ttft_s == pytest.approx(prefill_s + handover_s)
    assert job.finished_s is not None and job.joined_s is not None
    steps_s = [gpu.decode_s(1, 8.0 * 512 + 1 + step) for step in range(20)]
    assert job.finished_s - job.joined_s == pytest.approx(sum(steps_s))
    # 20 intervals: the longest two are the first, with the hand-over, and the last.
    assert job.tbt_s == pytest.approx((steps_s[0] + handover_s + steps_s[-1]) / 2)
    assert job.tbt_decode_s == pytest.approx((steps_s[-1] + steps_s[-2]) / 2)


def test_a_prefix_is_computed_once_and_an_answer_of_one_token_needs_no_decode_worker() -> None:
    tried = fleet()
    first, second = tried.run(
        [
            prompt(0, 0.0, range(10), output_tokens=1),
            prompt(1, 30.0, range(10), output_tokens=1, tail_tokens=100),
        ]
    )
    assert (first.cached_tokens, second.cached_tokens) == (0, 5_120)
    assert second.compute_s < 0.1 * first.compute_s
    assert first.joined_s is second.joined_s is None
    assert tried.decodes["d0"].busy_s == 0.0


def test_prompts_of_one_new_prefix_that_come_together_compute_it_once() -> None:
    jobs = fleet().run([prompt(number, 0.0, range(10), tail_tokens=50) for number in range(3)])
    assert sorted(job.cached_tokens for job in jobs) == [0, 5_120, 5_120]


def test_a_busy_nodes_prefix_is_fetched_by_an_idle_one_and_stays_there() -> None:
    tried = fleet(replace(FOUR, jitter=0.0))
    jobs = tried.run(
        [
            prompt(0, 0.0, range(60)),
            prompt(1, 20.0, range(1_000, 1_200)),  # takes one worker, whichever
            prompt(2, 20.0, range(60), tail_tokens=8),  # now the other one, by name or by need
            prompt(3, 20.0, range(60), tail_tokens=8),
            prompt(4, 20.0, range(60), tail_tokens=8),
        ]
    )
    routes = [job.route for job in jobs]
    assert all(job.cached_tokens == 60 * 512 for job in jobs[2:])
    fetched = [job for job in jobs if job.fetched_blocks]
    assert all(job.fetched_blocks == 60 for job in fetched)
    nodes = {route.prefill.node_id for route in routes if route is not None}
    assert len(nodes) == 2
    held = tried.site.store.find(jobs[0].keys, "s0", "me")
    copies = {copy.node_id for copy in held.copies[-1]}
    assert len(copies) == 1 + len(fetched)


def test_a_queue_without_room_refuses_and_the_request_ends() -> None:
    tried = fleet(replace(ONE_AND_ONE, waiting_max=1), gpu=SmallGpu())
    outcome = outcome_of(tried.run([prompt(n, 0.0, range(n * 99, n * 99 + 20)) for n in range(9)]))
    assert outcome.refused == {"prefill_queue_full": 9 - outcome.finished}
    assert 0 < outcome.finished < 9
    assert outcome.wasted_prefills == 0, "nothing was computed for them"


def test_what_decode_has_no_memory_for_waits_and_its_first_interval_says_so() -> None:
    jobs = fleet(gpu=SmallGpu()).run(
        [prompt(n, 0.0, range(n * 99, n * 99 + 20), output_tokens=50) for n in range(3)]
    )
    ends = [job.finished_s or 0.0 for job in jobs]
    assert all(
        job.joined_s is not None and job.joined_s >= end
        for job, end in zip(jobs[1:], ends, strict=False)
    )
    assert all(job.tbt_s > 2 * job.tbt_decode_s for job in jobs[1:])
    handovers_s = [(job.first_token_s or 0.0) - (job.prefilled_s or 0.0) for job in jobs]
    assert max(handovers_s) < 0.1, "waiting for room is no hand-over"


class HoleyFleet(SimulatedFleet):
    """A route that was decided on before blocks came and went: s1 is to send what s0 has by now."""

    def _submit(self, job: SimulatedJob, order_key_s: float) -> None:
        assert job.route is not None
        job.route = replace(job.route, fetch_blocks=2, fetch_node="s1")
        super()._submit(job, order_key_s)


def test_what_lies_behind_a_hole_on_the_own_node_is_not_sent_to_itself() -> None:
    tried = HoleyFleet(OPEN, ONE_AND_ONE, Roofline())
    asked = prompt(0, 1.0, range(4))
    for node_id, key in zip(("s0", "s1", "s0"), asked.keys, strict=False):
        tried.site.store.put([key], node_id, "before")
    tried.site.store.release("before")
    job = tried.run([asked])[0]
    assert job.cached_tokens == 3 * 512
    assert tried.site.network.moved_bytes == (1 + 4) * tried.site.block_bytes, "and to decode"
