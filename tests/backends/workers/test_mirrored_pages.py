"""Workers whose engine has its pages in memory of their own, as on a GPU, and a mirror of them.

What goes to the store is read from the mirror, so it must have been brought there. On a CPU the two
are the same memory, and nothing of this can go wrong; here the memory is split on the CPU too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch import torch_engine
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import Pair, pairs, prompt
from tests.backends.workers.test_preemption import long_and_short

BLOCK, TOKENS = 64, 200


def wanted(ids: list[int], tokens: int) -> list[int]:
    engine = TorchEngine.load(DEMO, pages_max=32, block_tokens=BLOCK)
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


@pytest.fixture(params=["short steps", "long steps"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    """KV of short steps is written as a whole, that of long ones layer by layer."""
    monkeypatch.setattr(torch_engine, "KvMemory", functools.partial(KvMemory, is_mirrored=True))
    chunk_tokens = {"short steps": "64", "long steps": "512"}[request.param]
    yield from pairs(tmp_path, monkeypatch, kv_pages="12", chunk_tokens=chunk_tokens)


@pytest.mark.slow
def test_the_next_turn_reads_what_decode_has_generated(pair: Pair) -> None:
    ids = prompt(5, 150)
    first = pair.ask(ids, max_tokens=TOKENS)
    assert first.wait() == wanted(ids, TOKENS)
    pair.wait_until_idle()
    turn = [*ids, *first.output_ids, 7, 8, 9]
    second = pair.ask(turn, max_tokens=20)
    assert second.wait() == wanted(turn, 20)
    assert second.prefill_reply is not None
    filled = (len(ids) + TOKENS - 1) // BLOCK * BLOCK
    assert second.prefill_reply.cached_tokens == filled > len(ids) + BLOCK


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_the_same_tokens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = long_and_short(pair, monkeypatch)
    for asked in (long, short):
        assert asked.wait() == wanted(asked.prompt, asked.sampling.max_tokens)
    pair.wait_until_idle()
