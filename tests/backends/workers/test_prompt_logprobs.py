"""Logprobs of a prompt from the real workers: with a cached prefix, by layers, and in a group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import InvalidRequest
from backends.token_logprobs import PromptLogprobs, PromptScores
from bench.harness.generate import generate
from tests.backends.small_tokenizers import DEMO
from tests.backends.workers.pair import Asked, Pair, pairs, prompt

TOKENS, TOP = 6, 3


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(DEMO, pages_max=32, block_tokens=64)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    yield from pairs(tmp_path, monkeypatch)


def wanted(engine: TorchEngine, ids: list[int]) -> PromptScores:
    scores = PromptScores(np.array(ids, np.int32), TOP)
    engine.forward([Work(ids, 0, list(range(32)), scores)])
    return scores


def check(found: PromptLogprobs, right: PromptScores) -> None:
    log_probs = np.frombuffer(found.log_probs, np.float32)
    np.testing.assert_allclose(log_probs, right.log_probs, atol=1e-3)
    best = np.frombuffer(found.top_log_probs, np.float32).reshape(-1, TOP)
    np.testing.assert_allclose(best, right.top_log_probs, atol=1e-3)
    assert len(found.ranks) == len(found.log_probs) and len(found.top_ids) == best.nbytes


def asked(pair: Pair, ids: list[int]) -> Asked:
    made = pair.ask(ids, max_tokens=TOKENS, prompt_logprobs=TOP)
    made.wait()
    assert made.prefill_reply is not None
    return made


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 200])
def test_a_cached_prompt_has_the_same_logprobs_and_counts_as_not_cached(
    tokens: int, pair: Pair, engine: TorchEngine
) -> None:
    ids = prompt(tokens, tokens)
    answer = generate(engine, [ids], SamplingParams(max_tokens=TOKENS))[0]
    for _ in ("a miss", "a hit", "a hit"):
        made = asked(pair, ids)
        assert made.output_ids == answer and made.prefill_reply is not None
        assert made.prefill_reply.cached_tokens == 0
        check(made.prefill_reply.prompt_logprobs, wanted(engine, ids))
        pair.wait_until_idle()
    plain = pair.ask(ids, max_tokens=TOKENS)
    assert plain.wait() == answer and plain.prefill_reply is not None
    stored = min(tokens // 64 * 64, tokens - 1)
    assert plain.prefill_reply.cached_tokens == stored
    assert plain.prefill_reply.prompt_logprobs == PromptLogprobs()


def test_requests_that_come_together_have_their_own_logprobs(
    pair: Pair, engine: TorchEngine
) -> None:
    """Some share a prefix, and some want no logprobs."""
    shared = prompt(3, 130)
    prompts = [[*shared, *prompt(number, 10 * number + 1)] for number in range(6)]
    together = [
        pair.ask(ids, max_tokens=TOKENS, **({"prompt_logprobs": TOP} if number % 3 else {}))
        for number, ids in enumerate(prompts)
    ]
    for number, (made, ids) in enumerate(zip(together, prompts, strict=True)):
        assert made.wait() == generate(engine, [ids], SamplingParams(max_tokens=TOKENS))[0]
        assert made.prefill_reply is not None
        if number % 3:
            check(made.prefill_reply.prompt_logprobs, wanted(engine, ids))
    pair.wait_until_idle()


@pytest.mark.parametrize("layerwise", ["true", "false"])
def test_long_prompts_are_scored_by_layers_and_in_chunks(
    layerwise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: TorchEngine
) -> None:
    ids = prompt(8, 700)
    right, params = wanted(engine, ids), SamplingParams(max_tokens=TOKENS)
    for pair in pairs(tmp_path, monkeypatch, chunk_tokens="128", layerwise=layerwise):
        for _ in ("a miss", "a hit"):
            made = asked(pair, ids)
            assert made.output_ids == generate(engine, [ids], params)[0]
            assert made.prefill_reply is not None and made.prefill_reply.cached_tokens == 0
            check(made.prefill_reply.prompt_logprobs, right)
            pair.wait_until_idle()


def test_a_pipeline_group_refuses_them_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pair in pairs(tmp_path, monkeypatch, stages=2, block_tokens="16"):
        pair.wait_until_whole()
        with pytest.raises(InvalidRequest, match=r"^prompt_logprobs is not supported by"):
            pair.ask(prompt(1, 20), prompt_logprobs=1)
        assert len(pair.ask(prompt(1, 20)).wait()) == 8
