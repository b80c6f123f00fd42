"""Logprobs of a prompt are those of transformers, however the prompt is cut and batched."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.engine.interface import Work
from backends.engine.torch import scoring
from backends.engine.torch.gpu.decode_graph import Recorder
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.tokenizer import Tokenizer
from backends.token_logprobs import PromptScores, token_logprobs
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.engine.test_equal_to_transformers import DEMO_CHECKPOINT, MODELS
from tests.backends.engine.test_logprobs import TEXT, of_transformers
from tests.backends.engine.torch.gpu.device_engines import device_engine

TOP, PAGES, BLOCK = 4, 24, 16


def random_ids(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=tokens)


def scores_of(ids: list[int], top: int = TOP) -> PromptScores:
    return PromptScores(np.array(ids, np.int32), top)


def scored(engine: TorchEngine, ids: list[int], cuts: list[int], top: int = TOP) -> PromptScores:
    """The prompt computed in chunks that end at `cuts` and at its end."""
    scores, start = scores_of(ids, top), 0
    for end in [*cuts, len(ids)]:
        engine.forward([Work(ids[start:end], start, list(range(PAGES)), scores)])
        start = end
    return scores


def check(found: PromptScores, expected: np.ndarray, ids: list[int], atol: float = 1e-3) -> None:
    """`expected` [tokens, vocabulary]: logprobs after each token."""
    rows, targets = np.arange(len(ids) - 1), ids[1:]
    expected = expected[: len(ids) - 1]
    own = expected[rows, targets]
    np.testing.assert_allclose(found.log_probs[1:], own, atol=atol)
    best = np.take_along_axis(expected, found.top_ids[1:].astype(np.int64), axis=1)
    np.testing.assert_allclose(found.top_log_probs[1:], best, atol=atol)
    largest = -np.sort(-expected, axis=1)[:, : found.top]
    np.testing.assert_allclose(found.top_log_probs[1:], largest, atol=atol)
    assert found.ranks[0] == found.log_probs[0] == 0, "the first token has none"
    above = (expected > own[:, None] + 2 * atol).sum(1) + 1
    below = (expected > own[:, None] - 2 * atol).sum(1) + 1
    assert (above <= found.ranks[1:]).all() and (found.ranks[1:] <= below).all()


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> TorchEngine:
    return TorchEngine.load(checkpoint, PAGES, BLOCK)


@pytest.mark.parametrize("name", ["demo", *MODELS])
def test_in_float32_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    if name == "demo":
        path, ids = DEMO_CHECKPOINT, Tokenizer.load(DEMO_CHECKPOINT).encode(TEXT)
    else:
        path = make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
        ids = random_ids(40, 7)
    found = scored(TorchEngine.load(path, PAGES, BLOCK), ids, [])
    check(found, of_transformers(path, ids, torch.float32), ids)


def test_random_chunks_give_the_logprobs_of_the_whole_prompt(
    engine: TorchEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        ids = random_ids(chance.randint(2, 300), chance.randrange(10**6))
        whole = scored(engine, ids, [])
        cuts = sorted(chance.sample(range(1, len(ids)), k=min(len(ids) - 1, chance.randint(1, 5))))
        monkeypatch.setattr(scoring, "PART_SCALARS", 320 * chance.choice([1, 7, 64]))
        cut = scored(engine, ids, cuts)
        np.testing.assert_allclose(cut.log_probs, whole.log_probs, atol=1e-4)
        np.testing.assert_allclose(cut.top_log_probs, whole.top_log_probs, atol=1e-4)
        monkeypatch.undo()


def test_each_token_alone_gives_the_logprobs_of_the_whole_prompt(engine: TorchEngine) -> None:
    ids = random_ids(20, 3)
    found, whole = scored(engine, ids, list(range(1, 20))), scored(engine, ids, [])
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=1e-4)


@pytest.mark.parametrize("is_mirrored", [True, False])
def test_recorded_steps_do_not_leave_scores_out(checkpoint: Path, is_mirrored: bool) -> None:
    engine = device_engine(checkpoint, PAGES, BLOCK, recorder=Recorder(), is_mirrored=is_mirrored)
    ids = random_ids(40, 5)
    whole = scored(engine, ids, [])
    found = scored(engine, ids, [1, 2, 30])
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=1e-4)


def test_a_batch_of_scored_and_plain_works_gives_each_what_it_gets_alone(
    engine: TorchEngine, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(5):
        free, batch, works = list(range(PAGES)), [], []
        for number in range(5):
            prefix, new = chance.choice([0, 1, 20]), chance.choice([1, 1, 2, 16, 33])
            ids = random_ids(prefix + new + chance.randint(0, 1), chance.randrange(10**6))
            pages = [free.pop() for _ in range(-(-(prefix + new) // BLOCK))]
            if prefix:
                engine.forward([Work(ids[:prefix], 0, pages)])
            top = chance.choice([0, 1, TOP])
            for into in (batch, works):
                scores = scores_of(ids, top) if number % 2 else None
                into.append(Work(ids[prefix : prefix + new], prefix, pages, scores))
        alone = [engine.forward([work])[0] for work in works]
        np.testing.assert_allclose(engine.forward(batch), alone, atol=2e-4)
        for ours, right in zip(batch, works, strict=True):
            if ours.scores is not None and right.scores is not None:
                assert ours.scores.log_probs == pytest.approx(right.scores.log_probs, abs=2e-4)
                assert ours.scores.top_log_probs == pytest.approx(
                    right.scores.top_log_probs, abs=2e-4
                )


def test_a_prompt_of_one_token_has_no_logprobs(engine: TorchEngine) -> None:
    found = scored(engine, [5], [])
    assert found.log_probs.tolist() == found.ranks.tolist() == [0]


def test_tokens_behind_the_prompt_are_not_scored(engine: TorchEngine) -> None:
    """As in a request that resumes with the answer so far."""
    ids = random_ids(50, 9)
    expected = scored(engine, ids[:30], [])
    scores = scores_of(ids[:30])
    engine.forward([Work(ids[:40], 0, list(range(PAGES)), scores)])
    engine.forward([Work(ids[40:], 40, list(range(PAGES)), scores)])
    np.testing.assert_allclose(scores.log_probs, expected.log_probs, atol=1e-4)


def test_without_best_tokens_there_are_logprobs_and_ranks(engine: TorchEngine) -> None:
    ids = random_ids(30, 2)
    found, whole = scored(engine, ids, [], top=0), scored(engine, ids, [])
    assert found.top_ids.shape == (30, 0)
    np.testing.assert_array_equal(found.log_probs, whole.log_probs)
    np.testing.assert_array_equal(found.ranks, whole.ranks)


@pytest.mark.parametrize("values", [3, 1000])
def test_the_best_are_those_of_a_sorted_vocabulary(values: int, seed: int) -> None:
    """With few values, most logits are equal, and the lowest ids are best."""
    chance = np.random.default_rng(seed)
    logits = (chance.integers(-values, values, (9, 500)) / 7).astype(np.float32)
    logits[logits == 0] *= -1.0  # minus zero is equal to zero
    logits[:, ::3] = np.abs(logits[:, ::3])
    targets = chance.integers(0, 500, 9)
    tensors = torch.from_numpy(logits), torch.from_numpy(targets)
    log_probs, top_ids, top_log_probs, ranks = scoring._scored(*tensors, 20)
    assert torch.equal(scoring._best_by_keys(tensors[0], 20), top_ids)
    for row, target in enumerate(targets.tolist()):
        right = token_logprobs(logits[row], target, 20)
        assert tuple(top_ids[row].tolist()) == right.top_ids
        assert log_probs[row].item() == pytest.approx(right.log_prob, abs=1e-9)
        assert top_log_probs[row].tolist() == pytest.approx(right.top_log_probs, abs=1e-9)
        assert ranks[row].item() == 1 + (logits[row] > logits[row, target]).sum()
