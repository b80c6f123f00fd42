"""A running request gives its pages to one of higher priority, and goes on with the same tokens."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import KvMissing
from backends.metrics.page import MetricPage
from bench.harness.generate import generate
from tests.backends.metrics.test_page import Triton
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import WAIT_S, Asked, Pair, pairs, prompt
from tests.mooncake_store.client import world

BLOCK, PAGES = 64, 12
REQUESTS = int(os.environ.get("MOONCAKE_REQUESTS", "80"))
SEGMENT_BYTES = 2**28  # nothing is evicted
LONG, SHORT = 500, 40  # tokens that are asked for; the long one has 10 pages, the short one 4


def wanted(ids: list[int], tokens: int) -> list[int]:
    engine = TorchEngine.load(DEMO, pages_max=32, block_tokens=BLOCK)
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch, kv_pages=str(PAGES))


def preemptions(pair: Pair) -> float:
    triton = Triton()
    MetricPage("decode", triton).take(pair.decode.process.observations)
    return float(triton["mooncake_decode_preemptions_total"])


def before_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: int, happens: Callable[[], None]
) -> None:
    """Before this step of decode's engine."""
    engine: Any = pair.decode.driver.engine
    forward, numbers = engine.forward, itertools.count()

    def held(batch: Sequence[Work], *rest: Any) -> Any:
        if next(numbers) == step:
            happens()
        return forward(batch, *rest)

    monkeypatch.setattr(engine, "forward", held)


def wait_for_job(pair: Pair, asked: Asked) -> None:
    with pair.decode.lock:
        there = lambda: asked.request_id in pair.decode.jobs  # noqa: E731
        assert pair.decode.lock.wait_for(there, WAIT_S), "it never came to decode"


def long_and_short(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Asked, Asked]:
    """The long one decodes for a while, then the short one comes, which has a higher priority."""
    long = Asked(pair, "long", prompt(1, 100), max_tokens=LONG)
    short = Asked(pair, "short", prompt(2, 150), max_tokens=SHORT)
    short.priority = 1

    def short_comes() -> None:
        pair.submit(short)
        wait_for_job(pair, short)

    before_step(pair, monkeypatch, 101, short_comes)  # in the middle of a block
    pair.submit(long)
    return long, short


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_the_tokens_of_the_model(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = long_and_short(pair, monkeypatch)
    assert short.wait() == wanted(short.prompt, SHORT)
    assert not long._is_over.is_set(), "the short one waited for the long one"
    assert long.wait() == wanted(long.prompt, LONG)
    assert preemptions(pair) == 1
    pair.wait_until_idle()


@pytest.mark.slow
def test_one_that_is_stopped_while_it_waits_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = long_and_short(pair, monkeypatch)
    save = pair.decode.writer.save

    def saving(put: Any) -> Any:
        refs = save(put)
        pair.decode.stop("long")
        return refs

    monkeypatch.setattr(pair.decode.writer, "save", saving)
    long.wait_over()
    assert long.decode_reply is not None and long.decode_reply.finish_reason == "cancelled"
    assert long.output_ids == wanted(long.prompt, LONG)[: len(long.output_ids)]
    assert short.wait() == wanted(short.prompt, SHORT)
    pair.wait_until_idle()


def test_kv_that_is_gone_meanwhile_is_a_loss_behind_which_the_request_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend has what it has until now, and computes the rest anew elsewhere."""
    long, short = long_and_short(pair, monkeypatch)
    save = pair.decode.writer.save

    def losing(put: Any) -> Any:
        refs = save(put)
        return [ref.__class__(ref.index, ref.node_id, ref.slot, ref.generation, 1) for ref in refs]

    monkeypatch.setattr(pair.decode.writer, "save", losing)
    assert isinstance(long.wait_failed(), KvMissing)
    assert short.wait() == wanted(short.prompt, SHORT)
    pair.wait_until_idle()


@pytest.mark.slow
def test_many_requests_of_any_priority_some_of_them_stopped_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With every thread of theirs, and prompts that pass layer by layer among them."""
    monkeypatch.setattr(world, "SEGMENT_BYTES", SEGMENT_BYTES)
    chance = random.Random(seed)
    stems = [[chance.randrange(20, 2000) for _ in range(400)] for _ in range(5)]
    for pair in pairs(tmp_path, monkeypatch, kv_pages="24", chunk_tokens="128"):
        asked: list[Asked] = []
        for number in range(REQUESTS):
            tail = [chance.randrange(20, 2000) for _ in range(chance.choice((1, 30, 200)))]
            ids = chance.choice(stems)[: chance.randint(1, 400)] + tail
            asked.append(Asked(pair, f"r{number}", ids, max_tokens=chance.choice((1, 8, 60))))
            asked[-1].priority = chance.choice((0, 0, 1, 2))
            pair.submit(asked[-1])
            if number >= 12:
                asked[number - 12].wait_over()
            if chance.random() < 0.2:
                stopped = chance.choice(asked[-12:])
                pair.prefill.stop(stopped.request_id)
                pair.decode.stop(stopped.request_id)
        for each in asked:
            each.wait_over()
            if each.error is not None:  # as its frontend does
                pair.decode.stop(each.request_id)
                pair.prefill.process.owners.release(each.request_id)
        pair.wait_until_idle()
        failed = Counter(type(each.error).__name__ for each in asked if each.error is not None)
        print(f"{preemptions(pair):g} preemptions, failed: {dict(failed)}")
        for worker in (pair.prefill, pair.decode):
            assert not len(worker.process.owners), "leases of nobody are renewed"
        whole = [each for each in asked if len(each.output_ids) == each.sampling.max_tokens]
        assert len(whole) > REQUESTS / 2
        for each in chance.sample(whole, 12):
            assert each.output_ids == wanted(each.prompt, each.sampling.max_tokens)
