"""Greedy tokens in float32 are those of transformers, however the work is cut and batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import backends
from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate
from tests.backends.engine.checkpoints import (
    LLAMA3_ROPE,
    YARN_ROPE,
    load_reference,
    make_checkpoint,
    use_old_rope_keys,
)
from tests.backends.engine.reference import Comparison, Reference, greedy

OUTPUT_TOKENS = 48
BLOCK_TOKENS = (16, 64)
DEMO_CHECKPOINT = Path(backends.__file__).parent / "demo_checkpoint"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biased": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 32},
    ),
    "mistral": ("mistral", {"sliding_window": 512, "head_dim": 24}),
    "qwen2": ("qwen2", {"max_shard_size": "60KB", "num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-own-head": ("qwen3", {"tie_word_embeddings": True}),
    # As Qwen documents it: max_position_embeddings stays the original context.
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 64}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN_ROPE}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    ),
}


def lengths_around(block_tokens: int) -> list[int]:
    """Prompts that end within a page, at its end and in the next one, and one of many pages."""
    return [1, block_tokens - 1, block_tokens, block_tokens + 1, 5 * block_tokens + 3]


class Case:
    """A checkpoint, prompts of every interesting length, and what transformers makes of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        chance = random.Random(7)
        lengths = {n for block_tokens in BLOCK_TOKENS for n in lengths_around(block_tokens)}
        model = load_reference(path)
        vocabulary = range(model.config.vocab_size)
        self.prompts = {n: chance.choices(vocabulary, k=n) for n in sorted(lengths)}
        self.references: dict[int, Reference] = {
            n: greedy(model, prompt, OUTPUT_TOKENS) for n, prompt in self.prompts.items()
        }

    def compare(
        self, block_tokens: int, chunk_tokens: int, slots_max: int, lengths: Sequence[int]
    ) -> None:
        engine = TorchEngine.load(self.path, 4096 // block_tokens, block_tokens)
        outputs = generate(
            engine,
            [self.prompts[n] for n in lengths],
            SamplingParams(max_tokens=OUTPUT_TOKENS),
            chunk_tokens,
            slots_max,
        )
        comparison = Comparison()
        for n, output in zip(lengths, outputs, strict=True):
            comparison.add(f"prompt of {n} tokens", output, self.references[n])
        comparison.check()
        engine.pages.check()
        assert engine.pages.used_pages == 0


# Variants of a family whose other model is in `make test-quick`.
SLOW = {"llama-biased", "qwen3-own-head", "deepseek_v3-plain"}
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS]


@pytest.fixture(scope="module", params=[*PARAMS, "demo"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "demo":
        return Case(DEMO_CHECKPOINT)
    family, overrides = MODELS[request.param]
    path = make_checkpoint(family, tmp_path_factory.mktemp(request.param), **overrides)
    if request.param == "qwen3-own-head":
        tensors = load_file(path / "model.safetensors")
        # transformers unties what config.json ties, where the file has two matrices.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0) * 0.1
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Case(path)


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_each_prompt_alone_in_one_piece_is_equal(case: Case, block_tokens: int) -> None:
    lengths = lengths_around(block_tokens)
    case.compare(block_tokens, chunk_tokens=1024, slots_max=1, lengths=lengths)


@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_sixteen_prompts_at_once_in_chunks_are_equal(case: Case, block_tokens: int) -> None:
    lengths = [n for n in case.prompts for _ in range(2)]  # so that 16 run at once
    case.compare(block_tokens, chunk_tokens=block_tokens, slots_max=16, lengths=lengths)


def test_a_chunk_may_start_and_end_inside_a_page(case: Case) -> None:
    engine = TorchEngine.load(case.path, 8, 64)
    prompt = case.prompts[5 * 64 + 3]
    model = load_reference(case.path)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    pages = engine.pages.take(6)
    assert pages is not None
    start = 0
    for tokens in (1, 30, 33, 63, 2, 100, 1, 93):
        logits = engine.forward([Work(prompt[start : start + tokens], start, pages)])[0]
        start += tokens
        np.testing.assert_allclose(logits, expected[start - 1], atol=1e-4)


def test_the_rope_keys_of_transformers_4_mean_the_same(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, rope_parameters=LLAMA3_ROPE)
    new = TorchEngine.load(tmp_path, 8, 16)
    use_old_rope_keys(tmp_path)
    old = TorchEngine.load(tmp_path, 8, 16)
    assert old.config == new.config
    assert old.weights_id == new.weights_id
    assert old.config.rope.type == "llama3"


def test_the_llama3_scaling_changes_the_result(tmp_path: Path) -> None:
    plain = TorchEngine.load(make_checkpoint("llama", tmp_path / "plain"), 8, 16)
    scaled_path = make_checkpoint("llama", tmp_path / "scaled", rope_parameters=LLAMA3_ROPE)
    scaled = TorchEngine.load(scaled_path, 8, 16)
    work = [Work(list(range(100)), 0, list(range(8)))]
    assert np.abs(plain.forward(work) - scaled.forward(work)).max() > 0.01
    assert plain.weights_id != scaled.weights_id, "the config belongs to the weights' identity"


def test_bfloat16_follows_the_bfloat16_of_transformers(case: Case) -> None:
    engine = TorchEngine.load(case.path, 8, 64, dtype="bfloat16")
    assert engine.layout.dtype == "bfloat16"
    prompt = case.prompts[5 * 64 + 3]
    ends = range(1, len(prompt), 16)
    exact = load_reference(case.path)
    rounded = load_reference(case.path, torch.bfloat16)
    with torch.inference_mode():
        expected = exact(torch.tensor([prompt])).logits[0].numpy()[[end - 1 for end in ends]]
        theirs = rounded(torch.tensor([prompt])).logits[0].float().numpy()
    theirs = theirs[[end - 1 for end in ends]]
    ours = np.stack([engine.forward([Work(prompt[:end], 0, list(range(6)))])[0] for end in ends])
    # Of each logits the mean, of these the median: at a near-tie rounding gives a token to another
    # expert, and what follows is no error of rounding.
    their_error, our_error = (
        np.median(np.abs(logits - expected).mean(axis=1)) for logits in (theirs, ours)
    )
    print(f"error of bfloat16: ours {our_error:.4f}, transformers' {their_error:.4f}")
    assert our_error < 1.3 * their_error
    [output] = generate(engine, [prompt], SamplingParams(max_tokens=8))
    assert len(output) == 8
