"""The torch engine on a real GPU: the tokens of the CPU, and KV that goes out and comes back.

Skipped without a GPU:  python -m pytest tests/gpu/test_torch_engine.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU on this machine", allow_module_level=True)

from backends.engine.generate import generate  # noqa: E402
from backends.engine.interface import Work  # noqa: E402
from backends.engine.sampling_params import SamplingParams  # noqa: E402
from backends.engine.torch.torch_engine import TorchEngine  # noqa: E402
from tests.backends.engine.checkpoints import make_checkpoint  # noqa: E402

BLOCK_TOKENS, PROMPTS = 16, (1, 15, 16, 17, 83)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def engine_on(checkpoint: Path, device: str) -> TorchEngine:
    return TorchEngine.load(checkpoint, 64, BLOCK_TOKENS, device=device)


def prompts_of(vocabulary: int) -> list[list[int]]:
    chance = np.random.default_rng(7)
    return [chance.integers(3, vocabulary, tokens).tolist() for tokens in PROMPTS]


def test_greedy_tokens_are_those_of_the_cpu(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=32)
    found = {}
    for device in ("cpu", "cuda"):
        engine = engine_on(checkpoint, device)
        prompts = prompts_of(engine.vocabulary_tokens)
        found[device] = generate(engine, prompts, params, chunk_tokens=32, slots_max=4)
        engine.pages.check()
    assert found["cuda"] == found["cpu"]


def test_pages_that_went_to_host_memory_and_came_back_give_the_same_logits(
    checkpoint: Path,
) -> None:
    engine = engine_on(checkpoint, "cuda")
    prompt = prompts_of(engine.vocabulary_tokens)[-1]
    pages = engine.pages.take(-(-len(prompt) // BLOCK_TOKENS))
    expected = engine.forward([Work(prompt, 0, pages)])
    engine.export_pages(pages)
    kept = engine.kv_pool.copy()
    engine._memory.pool.zero_()
    engine.kv_pool[:] = kept
    engine.import_pages(pages)
    again = engine.forward([Work(prompt[-1:], len(prompt) - 1, pages)])
    assert np.abs(expected - again).max() < 1e-3


def test_layers_are_in_host_memory_when_they_are_announced(checkpoint: Path) -> None:
    engine = engine_on(checkpoint, "cuda")
    prompt = prompts_of(engine.vocabulary_tokens)[-1]
    pages = engine.pages.take(-(-len(prompt) // BLOCK_TOKENS))
    seen = []

    def look(layer: int) -> None:
        host = torch.from_numpy(engine.kv_pool).view(torch.float32)
        there = host.view(engine.pages.pages_max, engine.layout.layers, -1)[pages[0], layer]
        seen.append(bool(there.abs().sum() > 0))

    engine.forward([Work(prompt, 0, pages)], look)
    assert seen == [True] * engine.layout.layers
