"""Coupled engines: a lone request takes what the model says, and each engine has its own fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.paper.coupled import ENGINES, CoupledFleet, CoupledSettings
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.outcome import outcome_of
from tests.loadtest.simulator.fleets import everything, prompt, start_of_trace

ONE = CoupledSettings("vllm", nodes=1, jitter=0.0)


def test_a_lone_request_takes_what_the_model_says() -> None:
    gpu = Roofline()
    job = CoupledFleet(ONE, gpu).run([prompt(0, 1.0, range(8), output_tokens=21)])[0]
    assert job.prefilled_s == pytest.approx(1.0 + gpu.prefill_s([(0, 8 * 512)]))
    steps_s = [gpu.mixed_s([], 1, 8.0 * 512 + 1 + step) for step in range(20)]
    assert job.finished_s == pytest.approx((job.prefilled_s or 0.0) + sum(steps_s))
    assert job.tbt_s == pytest.approx(sum(steps_s[-2:]) / 2)


def test_a_long_prompt_stalls_a_stream_unless_it_is_cut() -> None:
    offered = [prompt(0, 0.0, range(4), output_tokens=200), prompt(1, 2.0, range(100, 200))]
    tbts_s = {
        engine: CoupledFleet(replace(ONE, engine=engine), Roofline()).run(offered)[0].tbt_s
        for engine in ("vllm", "chunked")
    }
    assert tbts_s["vllm"] > 3 * 0.03, "one interval of the longest twenty holds a whole prompt"
    whole = CoupledFleet(replace(ONE, engine="chunked", chunk_tokens=512), Roofline()).run(offered)
    assert whole[0].tbt_s < tbts_s["chunked"]


def test_every_request_ends_and_leaves_nothing(seed: int) -> None:
    settings = CoupledSettings("chunked", nodes=3, seed=seed)
    outcome = outcome_of(CoupledFleet(settings, Roofline()).run(start_of_trace()[:60], 2.0))
    assert outcome.finished == 60 and outcome.tbt_s.most > 0


def test_prompts_go_on_beside_a_running_batch_in_small_chunks() -> None:
    """A step of 512 tokens has room for 511 of a prompt beside one decoding sequence."""
    small = replace(ONE, engine="chunked", chunk_tokens=512)
    offered = [prompt(0, 0.0, range(1), output_tokens=500), prompt(1, 1.0, range(100, 110))]
    first, second = CoupledFleet(small, Roofline()).run(offered)
    assert second.prefilled_s is not None and first.finished_s is not None
    assert second.prefilled_s < first.finished_s - 5.0


def test_a_step_that_carries_prompt_tokens_is_charged_wholly_to_them() -> None:
    gpu, settings = Roofline(), replace(ONE, engine="chunked", chunk_tokens=512)
    offered = [prompt(0, 0.0, range(1), output_tokens=500), prompt(1, 1.0, [7])]
    second = CoupledFleet(settings, gpu).run(offered)[1]
    assert second.started_s is not None and second.prefilled_s is not None
    assert second.own_compute_s == pytest.approx(second.prefilled_s - second.started_s)
    assert second.own_compute_s > 2 * gpu.decode_s(1, 1_024.0)


def test_the_prefix_cache_is_a_switch_of_its_own() -> None:
    turns = [prompt(0, 0.0, range(10)), prompt(1, 20.0, range(10), tail_tokens=9)]
    for engine in ENGINES:
        for is_on, cached in ((False, 0), (True, 5_120)):
            settings = replace(ONE, engine=engine, has_prefix_cache=is_on)
            assert CoupledFleet(settings, Roofline()).run(turns)[1].cached_tokens == cached


def test_a_step_without_chunked_prefill_computes_whole_prompts() -> None:
    """Two prompts of 1,024 tokens do not share a step of 1,536, nor is one of them cut."""
    settings = replace(ONE, prompts_tokens=1_536)
    offered = [prompt(0, 0.0, range(2)), prompt(1, 0.0, range(100, 102))]
    first, second = CoupledFleet(settings, Roofline()).run(offered)
    assert first.prefilled_s == pytest.approx(Roofline().prefill_s([(0, 1_024)]))
    assert second.prefilled_s == pytest.approx(2 * (first.prefilled_s or 0.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_taken_together_are_the_same_as_one_after_the_other(engine: str, seed: int) -> None:
    settings = CoupledSettings(engine, nodes=2, has_prefix_cache=True, seed=seed)
    runs = [
        CoupledFleet(replace(settings, steps_at_once=at_once), Roofline()).run(
            start_of_trace()[:80], 3.0
        )
        for at_once in (0, 1)
    ]
    assert everything(runs[0]) == everything(runs[1])
