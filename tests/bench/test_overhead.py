"""Times between tokens, as the benchmark of what serving adds takes them."""

from __future__ import annotations

import numpy as np
import pytest

from backends.text.tokenizer import Tokenizer
from bench.overhead.__main__ import BESIDE_STREAMS, BESIDE_TOKENS_MAX, CONDUCTOR, STREAMS, text_of
from bench.overhead.bare_engine import CHECKPOINT, BareEngine
from bench.overhead.served import TokenArrivals
from conductor.messages import Reject, Route
from loadtest.replay.prompts import TokenSource
from tests.conductor import fleet


def test_tokens_of_one_message_share_the_time_since_the_one_before() -> None:
    arrivals = TokenArrivals(0.0, [1.0, 2.0, 2.0, 2.5, 9.0], 4)
    assert arrivals.ttft_s == 1.0
    assert arrivals.intervals_s(1.0, 3.0) == [0.5, 0.5, 0.5]
    assert arrivals.intervals_s(1.5, 9.0) == [0.5, 6.5]


def test_a_prompt_in_the_same_batches_makes_their_steps_longer_and_gives_its_pages_back() -> None:
    engine = BareEngine(64, 1, kv_tokens=2 * (128 + 64) + 2_048)
    ids = np.arange(20, 84, dtype=np.int32)
    long = np.tile(ids, 32)
    for _ in range(2):  # the pages suffice for one round only
        alone = engine.intervals_s([ids, ids], 4, None, 512)
        beside = engine.intervals_s([ids, ids], 64, long, 512)
        assert len(alone) == 4 and len(beside) == -(-len(long) // 512)
        assert sum(beside) > sum(alone), "512 tokens more in each of its steps"


def test_streams_are_as_many_and_as_long_as_asked_for() -> None:
    engine = BareEngine(64, 1, kv_tokens=2 * 128)
    ids = np.arange(20, 52, dtype=np.int32)
    times_s = engine.streams_s([ids, ids], 8)
    assert [len(each) for each in times_s] == [8, 8]
    assert all(each == pytest.approx(sorted(each)) for each in times_s)


def test_a_text_is_read_as_about_as_many_tokens_as_its_prompt_has() -> None:
    tokenizer = Tokenizer.load(CHECKPOINT)
    source = TokenSource(2_048, [0, 1, 2], seed=123)
    for number in range(4):
        text = text_of(tokenizer, source.fresh(number, 512))
        assert 512 <= len(tokenizer.encode(text)) <= 516


def long_prompt_beside_streams(**config: str) -> tuple[Route | Reject, int]:
    """The conductor's answer to the long prompt, and the pages that are reserved then.

    For a minute 16 answers at once are asked for and end, as in the part before.
    """
    events = fleet.fleet(prefills=1, decodes=1, nodes=1, pages_max=512, slots_max=32)
    made = fleet.conductor(
        events,
        admission="predictive_lengths",
        ttft_slo_s=60.0,
        tbt_slo_s=1.0,
        report_s_max=1_000.0,
        **{name: float(value) for name, value in config.items()},
    )

    def ask(name: str, prompt_tokens: int, output_tokens: int, now_s: float) -> Route | Reject:
        asked = fleet.prompt(name, prompt_tokens=prompt_tokens, output=output_tokens)
        return made.on_request(asked, now_s)

    for at_s in range(0, 60, 12):
        for number in range(STREAMS):
            assert isinstance(ask(f"{at_s}-{number}", 512, 800, at_s), Route)
        for number in range(STREAMS):
            made.on_prefill_finished(f"{at_s}-{number}", at_s + 1.0, 448)
            made.on_finished(f"{at_s}-{number}", at_s + 10.0, 800)
    reports = [fleet.report("p0"), fleet.report("d0")]
    made.on_events([fleet.WorkerReported(each) for each in reports], 60.0)
    for number in range(BESIDE_STREAMS):
        assert isinstance(ask(f"beside-{number}", 512, BESIDE_TOKENS_MAX, 60.0), Route)
        made.on_prefill_finished(f"beside-{number}", 60.5, 448)
    workers = made._cluster.workers.values()
    [batch] = [worker.batch for worker in workers if worker.info.role == "decode"]
    reserved_pages = batch.load_reserved().pages
    return ask("long", 8_000, 2, 61.0), reserved_pages


def test_the_servers_conductor_expects_no_requests_beside_those_of_the_benchmark() -> None:
    """It would keep room for requests like those of the last minute, and none come."""
    answer, pages = long_prompt_beside_streams()
    assert isinstance(answer, Reject) and "no room on any of 1" in answer.reason
    assert pages == 348, "all other requests were released"
    answer, pages = long_prompt_beside_streams(**CONDUCTOR)
    assert isinstance(answer, Route) and pages == 348
