"""A prompt that passes layer by layer, in rings: the numbers of one computed chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.engine.interface import Work
from backends.engine.torch.torch_engine import TorchEngine
from backends.token_logprobs import PromptScores
from bench.harness.random_checkpoint import LlamaShape, make_llama

BLOCK_TOKENS, CHUNK_TOKENS, PAGES = 64, 128, 40


def engine_of(folder: Path, layers: int, seed: int, kv_dtype: str = "auto") -> TorchEngine:
    shape = LlamaShape(layers=layers, hidden=64, heads=2, kv_heads=1, intermediate=128)
    engine = TorchEngine.load(
        make_llama(folder, shape, seed), PAGES, BLOCK_TOKENS, kv_dtype=kv_dtype
    )
    engine.kv_pool[:] = 0xFF  # not numbers: what nobody wrote must not matter
    return engine


@pytest.mark.parametrize("tokens", [1000, 960, 257])
@pytest.mark.parametrize(
    ("layers", "kv_dtype"),
    [(2, "auto"), (6, "auto"), (7, "auto"), (16, "auto"), (7, "fp8"), (16, "fp8")],
)
def test_logits_and_kv_are_those_of_the_prompt_computed_chunk_by_chunk(
    layers: int, kv_dtype: str, tokens: int, tmp_path: Path, seed: int
) -> None:
    engine = engine_of(tmp_path, layers, seed % 1000, kv_dtype)
    chance = np.random.default_rng(seed)
    ids = chance.integers(3, 2000, tokens).tolist()
    blocks = -(-tokens // BLOCK_TOKENS)
    chunks = [(at, min(CHUNK_TOKENS, tokens - at)) for at in range(0, tokens, CHUNK_TOKENS)]
    pages = chance.permutation(PAGES)[:blocks].tolist()
    logits = [
        engine.forward([Work(ids[start : start + count], start, pages)]) for start, count in chunks
    ]
    layer_bytes = engine.layout.layer_bytes
    right = engine.kv_pool.reshape(PAGES, layers, layer_bytes)[pages].copy()
    engine.kv_pool[:] = 0xFF
    assert engine.rings is not None
    size = engine.rings.layers_at_once
    assert size == (3 if layers in (6, 16) else layers)
    pages = chance.permutation(PAGES)[: engine.rings.pages_for(blocks)].tolist()
    rings = engine.rings.in_pages(pages, blocks)
    passing = engine.begin_pass(ids, 0, rings)
    cells = engine.kv_pool.reshape(-1, layer_bytes)
    for layer in range(layers):
        last = [passing.compute(layer, start, count) for start, count in chunks][-1]
        whole = tokens // BLOCK_TOKENS  # what is behind the end of a prompt is nobody's
        here = cells[np.array(rings) * size + layer % size]
        assert np.array_equal(here[:whole], right[:whole, layer]), f"layer {layer}"
    assert last is not None and np.array_equal(last, logits[-1][0])


@pytest.mark.parametrize("layers", [2, 7])
def test_logprobs_of_the_prompt_are_those_of_chunks(layers: int, tmp_path: Path) -> None:
    engine, tokens = engine_of(tmp_path, layers, 5), 700
    ids = np.random.default_rng(5).integers(3, 2000, tokens)
    blocks = -(-tokens // BLOCK_TOKENS)
    assert engine.rings is not None
    rings = engine.rings.in_pages(range(engine.rings.pages_for(blocks)), blocks)
    found, right = (PromptScores(ids.astype(np.int32), 3) for _ in range(2))
    passing = engine.begin_pass(ids.tolist(), 0, rings, found)
    chunks = [(at, min(CHUNK_TOKENS, tokens - at)) for at in range(0, tokens, CHUNK_TOKENS)]
    for layer in range(layers):
        for start, count in chunks:
            passing.compute(layer, start, count)
    for start, count in chunks:
        token_ids = ids[start : start + count].tolist()
        engine.forward([Work(token_ids, start, range(blocks), right)])
    assert (right.log_probs[1:] < 0).all() and found.packed() == right.packed()


def test_a_stage_of_a_pipeline_has_no_rings(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, LlamaShape(layers=2, hidden=64, heads=2, kv_heads=1))
    assert TorchEngine.load(folder, 4, BLOCK_TOKENS, stage=1, stages=2).rings is None
