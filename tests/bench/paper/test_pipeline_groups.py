"""Pipeline groups in the simulated cluster, against schedules worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from bench.paper.experiments import pipeline_groups
from bench.paper.experiments.pipeline_groups import PipelinePlan, PipelineRun
from bench.paper.figures.served import POLICY
from loadtest.simulator.cluster.fleet import Fault
from loadtest.simulator.cluster.gpu import MeasuredWorker, Roofline, prompt_s
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of
from loadtest.simulator.cluster.pipeline import PipelineHead, hop_s
from loadtest.simulator.cluster.site import ClusterSettings
from tests.loadtest.simulator.fleets import OPEN, everything, fleet, prompt, start_of_trace

CHUNK = 2_048
GROUP = ClusterSettings(prefills=2, decodes=1, pipeline_groups=1, jitter=0.0)
# A second for 2,048 tokens of all layers; hidden states of 1 MB a token go at 100 GB/s.
TABLE = MeasuredWorker(
    (0.0, 1 / CHUNK, 0.0),
    (0.01, 0.001, 0.0),
    token_bytes=327_680,
    pages_bytes=10**12,
    hidden_bytes=10**6,
)
HOP_S = 0.001 + CHUNK * 1e6 / 100e9
KV_S = 0.001 + CHUNK * 327_680 / 2 / 100e9  # of half the layers


def blocks(count: int, first: int = 0) -> range:
    return range(first, first + count)


def ends_s(jobs: list[SimulatedJob]) -> list[float]:
    return [job.prefilled_s or 0.0 for job in jobs]


def test_three_chunks_and_then_one_pass_two_stages_as_worked_out_by_hand() -> None:
    """0.5 s a stage and chunk: stage 0 is busy until 2.0, stage 1 begins when the first chunk has
    come and never waits again."""
    tried = fleet(GROUP, gpu=TABLE)
    jobs = tried.run(
        [
            prompt(0, 0.0, blocks(12), output_tokens=1),
            prompt(1, 0.0, blocks(4, 100), output_tokens=1),
        ]
    )
    first_s = 3 * 0.5 + 0.5 + HOP_S + KV_S
    assert ends_s(jobs) == pytest.approx([first_s, first_s + 0.5])
    passed_s = 4 * 0.5 + HOP_S, 2 * 0.5 + HOP_S  # begin of the first chunk to end of the last
    assert [job.compute_s for job in jobs] == pytest.approx(passed_s)
    assert [job.own_compute_s for job in jobs] == pytest.approx([3.0, 1.0]), "both GPUs"
    assert tried.prefills["p0"].busy_s == tried.stages["p1"].busy_s == pytest.approx(2.0)


def test_a_stage_that_is_twice_as_slow_sets_the_pace() -> None:
    tried = fleet(GROUP, gpu=TABLE)
    tried.stages["p1"].slowness = 2.0
    jobs = tried.run([prompt(0, 0.0, blocks(12), output_tokens=1)])
    assert ends_s(jobs) == pytest.approx([0.5 + HOP_S + 3 * 1.0 + KV_S])


def test_short_prompts_share_a_step_of_the_group_as_they_do_on_a_worker_alone() -> None:
    costly = MeasuredWorker((0.5, 1 / CHUNK, 0.0), (0.01, 0.001, 0.0), 327_680, 10**12, 10**6)
    tried = fleet(GROUP, gpu=costly)
    jobs = tried.run(
        [prompt(number, 0.0, blocks(2, 100 * number), output_tokens=1) for number in range(5)]
    )
    alone = fleet(replace(GROUP, prefills=1, pipeline_groups=0), gpu=costly).run(
        [prompt(number, 0.0, blocks(2, 100 * number), output_tokens=1) for number in range(5)]
    )
    steps = len({round(job.prefilled_s or 0.0, 9) for job in alone})
    assert len({round(end_s, 9) for end_s in ends_s(jobs)}) == steps < 5


def test_each_stage_reads_its_layers_of_a_cached_prefix_and_the_rest_is_computed() -> None:
    tried = fleet(GROUP, gpu=TABLE)
    jobs = tried.run(
        [prompt(0, 0.0, blocks(8), output_tokens=1), prompt(1, 10.0, blocks(12), output_tokens=1)]
    )
    assert jobs[1].cached_tokens == 8 * 512
    read_s = 0.001 + 8 * 512 * 327_680 / 2 / 100e9  # slower than from the own DRAM, at 128
    last_s = jobs[1].prefilled_s or 0.0
    assert last_s == pytest.approx(10.0 + read_s + 2 * 0.5 + HOP_S + KV_S)


def test_a_prompt_alone_ends_when_the_conductor_said() -> None:
    """At the paper's nodes, with hops: what the estimate leaves out is the KV on its way home."""
    tried = fleet(replace(GROUP, prefills=4, pipeline_stages=4), gpu=Roofline())
    job = tried.run([prompt(0, 0.0, blocks(250), output_tokens=1)])[0]
    assert job.route is not None
    predicted = job.route.predicted
    assert job.prefilled_s == pytest.approx(predicted.ttft_s - predicted.handover_s, rel=0.05)
    assert job.compute_s == pytest.approx(predicted.prefill_s, rel=0.05)
    alone_s = prompt_s(Roofline(), 0, 250 * 512, CHUNK)
    assert job.prefilled_s < 0.3 * alone_s
    head = tried.prefills["p0"]
    assert isinstance(head, PipelineHead)
    assert predicted.fill_s > 3 * hop_s(tried.site)


def test_long_prompts_go_to_the_group_and_only_stage_0_is_called() -> None:
    settings = replace(GROUP, prefills=4, jitter=0.05)
    tried = fleet(settings)
    jobs = tried.run(start_of_trace()[:200], speed=0.5)
    assert outcome_of(jobs).finished == 200
    called = {job.prefill for job in jobs}
    assert called <= {"p0", "p2", "p3"}
    longest = [job for job in jobs if job.prompt_tokens - job.cached_tokens > 40_000]
    assert longest
    in_group = sum(job.prefill == "p0" for job in longest) / len(longest)
    assert in_group > 0.5, "two workers alone stand beside it"
    assert tried.prefills["p0"].busy_s == pytest.approx(tried.stages["p1"].busy_s, rel=0.05)


def test_when_stage_0_is_killed_its_requests_are_computed_elsewhere(seed: int) -> None:
    settings = replace(GROUP, prefills=4, seed=seed)
    offered = start_of_trace()[:80]
    tried = fleet(settings, faults=[Fault(offered[30].at_s + 0.1, "p0", "kill")])
    outcome = outcome_of(tried.run(offered))
    assert outcome.finished + outcome.rejected_in_all == 80
    assert outcome.finished == 80


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    settings = replace(GROUP, prefills=6, pipeline_groups=2, jitter=0.05, seed=seed)
    first, again = (everything(fleet(settings).run(start_of_trace()[:120])) for _ in range(2))
    assert first == again


def ran(mix: tuple[int, int], all_s: float, long_s: float, policy: str = POLICY) -> PipelineRun:
    shape = ClusterSettings(pipeline_groups=mix[0], pipeline_stages=mix[1])
    numbers = {"ttft_mean_s": all_s, "ttft_long_mean_s": long_s, "long_prompts": 9}
    empty = dict.fromkeys((f.name for f in fields(PipelineRun)), 0.0)
    return PipelineRun(**{**empty, **numbers, "plan": PipelinePlan(policy, OPEN, shape)})  # type: ignore[arg-type]


def test_the_best_mix_of_pairs_is_the_best_for_long_prompts_that_harms_no_others() -> None:
    runs = [
        ran((0, 2), 1.0, 10.0),
        ran((1, 2), 0.9, 8.0),
        ran((2, 2), 0.95, 5.9),
        ran((4, 2), 1.1, 5.0),
        ran((2, 4), 0.8, 3.0),
        ran((0, 2), 0.1, 0.2, "adaptive"),
    ]
    long, every = pipeline_groups.targets_of(runs)
    assert (long.value, long.is_met) == (0.59, True), "groups of 4 are no pairs"
    assert (every.value, every.is_met) == (0.95, True)
    assert "2 x 2 + 4 alone" in long.name
    best = [row["mix"] for row in pipeline_groups.rows_of(runs) if row["is_best_of_pairs"]]
    assert best == ["2 x 2 + 4 alone"]


def test_where_every_mix_harms_the_others_the_target_says_so() -> None:
    runs = [ran((0, 2), 1.0, 10.0), ran((4, 2), 1.1, 5.0)]
    assert [target.is_met for target in pipeline_groups.targets_of(runs)] == [True, False]
    assert [target.value for target in pipeline_groups.targets_of(runs, "shortened")] == [None] * 2
    assert [target.value for target in pipeline_groups.targets_of([])] == [None, None]
