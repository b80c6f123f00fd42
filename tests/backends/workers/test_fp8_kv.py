"""KV as fp8 through a prefill worker, the store and a decode worker: the tokens of the bare engine.

The demo checkpoint, whose best two logits are far enough apart for the prompts here that a sum in
another order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import Pair, pairs, prompt
from tests.backends.workers.test_preemption import long_and_short, preemptions

BLOCK, CHUNK = 64, 128
FP8 = {"kv_dtype": "fp8", "chunk_tokens": str(CHUNK)}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch, **FP8)


def wanted(ids: list[int], tokens: int) -> list[int]:
    engine = TorchEngine.load(DEMO, pages_max=32, block_tokens=BLOCK, kv_dtype="fp8")
    return generate(engine, [ids], SamplingParams(max_tokens=tokens))[0]


def check_answers(pair: Pair) -> None:
    """Each prompt twice: computed, and with what the store has of it."""
    for length in (BLOCK, CHUNK + 1, 300, 500):
        ids = prompt(length, length)
        right = wanted(ids, 8)
        for cached in (0, (length - 1) // BLOCK * BLOCK):
            asked = pair.ask(ids, max_tokens=8)
            assert asked.wait() == right, (length, cached)
            assert asked.prefill_reply is not None
            assert asked.prefill_reply.cached_tokens >= cached
            pair.wait_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("layerwise", ["true", "false"])
def test_what_the_store_has_gives_the_tokens_of_what_was_computed(
    layerwise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs(tmp_path, monkeypatch, layerwise=layerwise, **FP8):
        check_answers(pair)


@pytest.mark.slow
def test_stages_of_a_pipeline_hand_over_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs(tmp_path, monkeypatch, stages=2, **FP8):
        pair.wait_until_whole()
        check_answers(pair)


@pytest.mark.slow
def test_a_request_that_was_preempted_and_restored_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs(tmp_path, monkeypatch, kv_pages="12", kv_dtype="fp8"):
        long, short = long_and_short(pair, monkeypatch)
        assert short.wait() == wanted(short.prompt, short.sampling.max_tokens)
        assert long.wait() == wanted(long.prompt, long.sampling.max_tokens)
        assert preemptions(pair) == 1
        pair.wait_until_idle()


def test_a_block_in_the_store_has_a_byte_for_each_number(pair: Pair) -> None:
    layout: Any = pair.prefill.driver.engine.layout
    assert layout.block_bytes == layout.layers * 2 * layout.kv_heads * BLOCK * layout.head_dim
    assert pair.decode.process.info.block_bytes == layout.block_bytes
