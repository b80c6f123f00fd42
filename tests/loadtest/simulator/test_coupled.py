"""Coupled engines: a lone request takes what the model says, and each engine has its own fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.simulator.cluster.coupled import DISPATCHES, CoupledFleet, CoupledSettings
from loadtest.simulator.cluster.gpu import Roofline
from loadtest.simulator.cluster.outcome import outcome_of
from tests.loadtest.simulator.fleets import prompt, start_of_trace

ONE = CoupledSettings("vllm", nodes=1, jitter=0.0)


def test_a_lone_request_takes_what_the_model_says() -> None:
    gpu = Roofline()
    job = CoupledFleet(ONE, gpu).run([prompt(0, 1.0, range(8), output_tokens=21)])[0]
    assert job.prefilled_s == pytest.approx(1.0 + gpu.prefill_s([(0, 8 * 512)]))
    steps_s = [gpu.mixed_s([], 1, 8.0 * 512 + 1 + step) for step in range(20)]
    assert job.finished_s == pytest.approx((job.prefilled_s or 0.0) + sum(steps_s))
    assert job.tbt_s == pytest.approx(sum(steps_s[-2:]) / 2)


def test_a_prefix_is_cached_where_there_is_a_cache() -> None:
    turns = [prompt(0, 0.0, range(10)), prompt(1, 20.0, range(10), tail_tokens=9)]
    for engine, cached in (("vllm", 0), ("prefix", 5_120), ("chunked", 5_120)):
        jobs = CoupledFleet(replace(ONE, engine=engine), Roofline()).run(turns)
        assert jobs[1].cached_tokens == cached, engine


def test_a_long_prompt_stalls_a_stream_unless_it_is_cut() -> None:
    offered = [prompt(0, 0.0, range(4), output_tokens=200), prompt(1, 2.0, range(100, 200))]
    tbts_s = {
        engine: CoupledFleet(replace(ONE, engine=engine), Roofline()).run(offered)[0].tbt_s
        for engine in ("vllm", "chunked")
    }
    assert tbts_s["vllm"] > 3 * 0.03, "one interval of the longest twenty holds a whole prompt"
    whole = CoupledFleet(replace(ONE, engine="chunked", chunk_tokens=512), Roofline()).run(offered)
    assert whole[0].tbt_s < tbts_s["chunked"]


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_every_request_ends_and_leaves_nothing(dispatch: str, seed: int) -> None:
    settings = CoupledSettings("chunked", nodes=3, dispatch=dispatch, seed=seed)
    outcome = outcome_of(CoupledFleet(settings, Roofline()).run(start_of_trace()[:60], 2.0))
    assert outcome.finished == 60 and outcome.tbt_s.most > 0
