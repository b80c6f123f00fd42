"""Logprobs are the log-softmax of the raw logits, and equal to those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.interface import Work
from backends.engine.sampling import draw
from backends.engine.sampling_params import SamplingLimits, SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import TokenLogprobs, token_logprobs
from tests.backends.engine.checkpoints import load_reference, make_checkpoint
from tests.backends.engine.test_equal_to_transformers import DEMO_CHECKPOINT, MODELS

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife."
)
TOP = 5


def of_every_token(path: Path, ids: list[int], dtype: str) -> list[TokenLogprobs]:
    """Of each token of a text, given those before it."""
    engine = TorchEngine.load(path, 8, 64, dtype=dtype)
    pages = list(range(8))
    rows = [engine.forward([Work(ids[:end], 0, pages)])[0] for end in range(1, len(ids))]
    return [token_logprobs(row, ids[end], TOP) for end, row in enumerate(rows, 1)]


def of_transformers(path: Path, ids: list[int], dtype: Any) -> np.ndarray:
    """[tokens, vocabulary]: behind each token of a text."""
    model = load_reference(path, dtype)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits, -1).numpy()


def differences(found: list[TokenLogprobs], path: Path, ids: list[int], dtype: Any) -> np.ndarray:
    """[tokens, 1 + TOP]: of the token itself and of the best ones, to what transformers says."""
    theirs = of_transformers(path, ids, dtype)
    return np.array(
        [
            [
                each.log_prob - row[token_id],
                *(np.array(each.top_log_probs) - row[list(each.top_ids)]),
            ]
            for each, row, token_id in zip(found, theirs, ids[1:], strict=False)
        ]
    )


@pytest.mark.parametrize("name", ["demo", *MODELS])
def test_in_float32_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    if name == "demo":
        path, ids = DEMO_CHECKPOINT, Tokenizer.load(DEMO_CHECKPOINT).encode(TEXT)
    else:
        path = make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
        ids = random.Random(7).choices(range(100), k=40)
    found = of_every_token(path, ids, "float32")
    assert np.abs(differences(found, path, ids, torch.float32)).max() < 1e-3


def test_in_bfloat16_they_are_those_of_transformers_but_for_its_rounding() -> None:
    """Each of their hidden states and logits (16 comes in sixteenths) is rounded there, so they are
    up to 0.08 from their own in float32, and two right programs as far from each other in single
    tokens. Over a text they are not, and ours are as near to float32 as theirs."""
    ids = Tokenizer.load(DEMO_CHECKPOINT).encode(TEXT)
    found = of_every_token(DEMO_CHECKPOINT, ids, "bfloat16")
    apart = np.abs(differences(found, DEMO_CHECKPOINT, ids, torch.bfloat16))
    print(f"bfloat16: tokens apart by {apart[:, 0].mean():.4f}, at most {apart.max():.4f}")
    assert apart[:, 0].mean() < 2e-2
    assert apart.max() < 0.25
    exact = of_transformers(DEMO_CHECKPOINT, ids, torch.float32)
    rounded = of_transformers(DEMO_CHECKPOINT, ids, torch.bfloat16)
    tokens = np.arange(len(ids) - 1)
    their_error = np.abs(rounded - exact)[tokens, ids[1:]].mean()
    our_error = np.abs(differences(found, DEMO_CHECKPOINT, ids, torch.float32))[:, 0].mean()
    print(f"from float32: ours {our_error:.4f}, transformers' {their_error:.4f}")
    assert our_error < 1.3 * their_error + 5e-3, "other processors round elsewhere"


def test_they_are_of_the_logits_before_penalties_and_temperature() -> None:
    logits = np.array([2.0, 1.0, 0.5, -3.0], np.float32)
    plain = SamplingParams(max_tokens=4, top_logprobs=2)
    changed = SamplingParams(
        max_tokens=4, top_logprobs=2, temperature=0.3, repetition_penalty=5.0, seed=3, top_k=2
    )
    expected = np.log(np.exp(logits) / np.exp(logits).sum())
    for params in (plain, changed):
        drawn = draw(logits, params, 1, [0], [0])
        assert drawn.logprobs is not None
        assert drawn.logprobs.log_prob == pytest.approx(expected[drawn.token_id], abs=1e-6)
        assert drawn.logprobs.top_ids == (0, 1)
        assert drawn.logprobs.top_log_probs == pytest.approx(tuple(expected[:2]), abs=1e-6)


def test_who_does_not_ask_gets_none() -> None:
    assert draw(np.zeros(4, np.float32), SamplingParams(max_tokens=1), 0, [1], []).logprobs is None


def test_among_equal_logits_the_lower_ids_are_better() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0, 2.0], np.float32)
    assert token_logprobs(logits, 0, 2).top_ids == (1, 2)
    assert token_logprobs(logits, 0, 20).top_ids == (1, 2, 3, 4, 0)
    assert token_logprobs(logits, 0, 0).top_ids == ()


@pytest.mark.parametrize("tokens", [1, 19, 256, 257, 5_000, 131_072])
def test_the_best_are_those_of_a_sorted_vocabulary(tokens: int) -> None:
    chance = np.random.default_rng(tokens)
    for logits in (chance.normal(size=tokens), chance.integers(0, 3, tokens), np.ones(tokens)):
        found = token_logprobs(logits.astype(np.float32), 0, 20)
        expected = np.argsort(-logits, kind="stable")[:20]
        assert found.top_ids == tuple(expected.tolist())


def test_huge_logits_do_not_overflow() -> None:
    found = token_logprobs(np.array([3e38, -3e38, 0.0], np.float32), 1, 1)
    assert found.top_log_probs == (0.0,) and found.log_prob == pytest.approx(-6e38)


@pytest.mark.parametrize("top", [-2, 21])
def test_too_many_or_too_few_are_refused_by_a_worker_too(top: int) -> None:
    limits = SamplingLimits(1, 512, 100)
    [problem] = SamplingParams(max_tokens=1, top_logprobs=top).problems(limits)
    assert problem == f"top_logprobs is {top}; use 0 to 20"
