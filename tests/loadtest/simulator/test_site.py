"""Workers that share cores slow each other down, and only while both compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backends.engine.batching.pages import PagePool
from conductor import ConductorConfig
from loadtest.profile.profile import Sharing
from loadtest.simulator.cluster.fleet import SimulatedFleet
from loadtest.simulator.cluster.gpu import MeasuredWorker
from loadtest.simulator.cluster.job import Offered, SimulatedJob
from loadtest.simulator.cluster.site import ClusterSettings, Cores, CountedPages
from mooncake_store.block_keys import block_keys, chain_seed

STEP_S, PROMPT_S = 0.01, 1.0  # whatever the batch, whatever the prompt
ALONE = ClusterSettings(prefills=1, decodes=1, block_tokens=64, chunk_tokens=2_048, jitter=0.0)
SHARED = replace(ALONE, sharing=Sharing(1.5, 2.0))


def serve(settings: ClusterSettings, *requests: tuple[float, int, int]) -> list[SimulatedJob]:
    """(when, prompt tokens, output tokens) of each; a chunk takes PROMPT_S."""
    offered = [
        Offered(n, at_s, prompt, output, block_keys([n] * prompt, 64, chain_seed("x")))
        for n, (at_s, prompt, output) in enumerate(requests)
    ]
    gpu = MeasuredWorker((PROMPT_S, 0.0, 0.0), (STEP_S, 0.0, 0.0), 1_024, 2**30)
    jobs = SimulatedFleet(ConductorConfig(admission="none"), settings, gpu).run(offered)
    assert all(job.finished_s is not None for job in jobs)
    return jobs


def decoded_s(job: SimulatedJob) -> float:
    assert job.finished_s is not None and job.joined_s is not None
    return job.finished_s - job.joined_s


def test_one_request_alone_is_as_fast_as_without_sharing() -> None:
    request = (0.0, 1_000, 100)
    assert decoded_s(serve(SHARED, request)[0]) == decoded_s(serve(ALONE, request)[0])


def test_a_prefill_beside_decoding_slows_both_down() -> None:
    requests = ((0.0, 1_000, 1_001), (2.0, 1_000, 2))
    alone, shared = serve(ALONE, *requests), serve(SHARED, *requests)
    assert alone[1].compute_s == pytest.approx(PROMPT_S)
    assert shared[1].compute_s == pytest.approx(1.5 * PROMPT_S)
    # 1.5 s of the first one's ten are at half the pace, so it takes 0.75 s longer.
    late_s = decoded_s(shared[0]) - decoded_s(alone[0])
    assert late_s == pytest.approx(0.75, abs=2 * STEP_S)


def test_every_worker_beside_costs_what_was_measured_of_its_role() -> None:
    cores, heard = Cores(Sharing(1.2, 1.5, 1.3, 1.6)), []
    cores.on_pace.append(lambda: heard.append(round(cores.factor("decode"), 6)))
    for role in ("decode", "prefill", "prefill", "decode"):
        cores.compute(role, True)
    assert heard == [1.5, 2.0, 2.6], "alone a decode step is as fast as ever"
    assert cores.factor("prefill") == pytest.approx(1.0 + 0.3 + 2 * 0.2)
    assert cores.computing("prefill", "decode") == 4
    for role in ("decode", "prefill", "decode"):
        cores.compute(role, False)
    assert cores.factor("prefill") == 1.0


SLIGHT = Sharing(1.1, 1.1, 1.1, 1.1)


def test_nobody_has_more_than_an_even_share_of_the_cores() -> None:
    few, many = Cores(SLIGHT, at_once=2), Cores(SLIGHT, at_once=16)
    for cores in (few, many):
        for _ in range(4):
            cores.compute("prefill", True)
    assert few.factor("prefill") == pytest.approx(4 / 2)
    assert many.factor("prefill") == pytest.approx(1.3)


def test_what_is_done_for_a_prompt_takes_longer_with_a_second_prefill_worker() -> None:
    """Where they share the cores; a prompt that nobody waits behind pays nothing."""
    settings = replace(ALONE, queued_prompt_s=0.25)
    one = serve(settings, *((0.0, 512, 1) for _ in range(2)))
    two = serve(replace(settings, prefills=2), *((0.0, 512, 1) for _ in range(4)))
    assert [job.compute_s for job in one] == pytest.approx([PROMPT_S + 0.25, PROMPT_S])
    assert max(job.compute_s for job in two) == pytest.approx(PROMPT_S + 2 * 0.25)


def test_counted_pages_run_out_as_numbered_ones_do_and_belong_to_one_request(seed: int) -> None:
    chance = random.Random(seed)
    counted, numbered = CountedPages(40), PagePool(40)
    held: list[tuple[Sequence[int], Sequence[int]]] = []
    for _ in range(300):
        if held and chance.random() < 0.5:
            mine, other = held.pop(chance.randrange(len(held)))
            counted.release(mine)
            numbered.release(other)
        else:
            pages = chance.randint(1, 15)
            mine_or_none, other_or_none = counted.take(pages), numbered.take(pages)
            assert (mine_or_none is None) == (other_or_none is None)
            if mine_or_none is not None and other_or_none is not None:
                held.append((mine_or_none, other_or_none))
        assert counted.used_pages == numbered.used_pages
        assert counted.free_pages == numbered.free_pages
        for pool in (counted, numbered):
            pool.release([])  # as of a request that left while it waited
        every = [page for mine, _ in held for page in mine]
        assert len(every) == len(set(every)) == counted.used_pages
        counted.check()
    for mine, _ in held[:1]:
        counted.release(mine)
        with pytest.raises(AssertionError, match="released twice"):
            counted.release(mine)
