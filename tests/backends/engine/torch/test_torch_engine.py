"""Pages, layers and batches of the torch engine, beyond being equal to transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.engine.interface import Engine, Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate, generate_tokens
from mooncake_store.layout import blocks_touched
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.engine.torch.gpu.device_engines import device_engine

B = 16


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=3
    )


@pytest.fixture
def engine(checkpoint: Path) -> TorchEngine:
    return TorchEngine.load(checkpoint, pages_max=96, block_tokens=B)


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(tokens)]


def block(engine: Engine, page: int) -> NDArray[np.uint8]:
    size = engine.layout.block_bytes
    return engine.kv_pool[page * size : (page + 1) * size]


def test_it_has_what_the_interface_promises(engine: TorchEngine) -> None:
    typed: Engine = engine
    assert typed.kv_pool.dtype == np.uint8
    assert typed.kv_pool.nbytes == 96 * typed.layout.block_bytes
    assert typed.kv_pool.ctypes.data % 4096 == 0, "NIXL and O_DIRECT like whole memory pages"
    assert typed.pages.free_pages == 96
    assert (typed.vocabulary_tokens, typed.eos_token_ids) == (320, (2,))
    assert typed.context_tokens_max == 1024
    typed.close()


def test_the_context_is_bounded_by_the_pages(checkpoint: Path) -> None:
    assert TorchEngine.load(checkpoint, pages_max=5, block_tokens=B).context_tokens_max == 80


def test_more_pages_than_memory_is_refused_with_numbers(checkpoint: Path) -> None:
    with pytest.raises(MemoryError, match=r"1000000000 KV pages need .* lower kv_bytes"):
        TorchEngine.load(checkpoint, pages_max=10**9, block_tokens=B)


def test_kv_copied_into_other_pages_of_another_engine_goes_on_with_the_same_tokens(
    checkpoint: Path, engine: TorchEngine
) -> None:
    prompt = prompt_of(5 * B + 3)
    [expected] = generate(engine, [prompt], SamplingParams(max_tokens=20))
    pages = engine.pages.take(blocks_touched(len(prompt), B))
    assert pages is not None
    first = int(np.argmax(engine.forward([Work(prompt, 0, pages)])[0]))
    other = TorchEngine.load(checkpoint, pages_max=30, block_tokens=B)
    others = [17, 3, 29, 8, 1, 20, 11, 5]
    for page, target in zip(pages, others, strict=False):
        block(other, target)[:] = block(engine, page)
    other.import_pages(others[: len(pages)])
    tokens = [first]
    for step in range(19):
        work = Work([tokens[-1]], len(prompt) + step, others)
        tokens.append(int(np.argmax(other.forward([work])[0])))
    assert tokens == expected


def test_each_layer_is_in_the_pool_when_it_is_announced(engine: TorchEngine) -> None:
    works = [Work(prompt_of(40), 0, [4, 2, 9]), Work([7], 20, [6, 5]), Work(prompt_of(9), 3, [1])]
    seen: list[tuple[int, NDArray[np.uint8]]] = []
    shape = (96, engine.layout.layers, engine.layout.layer_bytes)

    def on_layer(layer: int) -> None:
        seen.append((layer, engine.kv_pool.reshape(shape).copy()))

    engine.forward(works, on_layer)
    final = engine.kv_pool.reshape(shape)
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, pool in seen:
        np.testing.assert_array_equal(pool[:, : layer + 1], final[:, : layer + 1])
        assert not pool[:, layer + 1 :].any(), "a later layer cannot be there yet"
    written = {page for page in range(96) if final[page].any()}
    assert written == {4, 2, 9, 5, 1}


def test_only_the_pages_of_a_work_are_written(engine: TorchEngine) -> None:
    engine.kv_pool[:] = np.random.default_rng(0).integers(0, 60, engine.kv_pool.nbytes, np.uint8)
    before = engine.kv_pool.copy()
    engine.forward([Work(prompt_of(20), 0, [50, 51]), Work([3], 17, [60, 61])])
    size = engine.layout.block_bytes
    changed = [p for p in range(96) if (before != engine.kv_pool)[p * size : (p + 1) * size].any()]
    assert changed == [50, 51, 61]


def test_garbage_left_in_a_page_by_its_last_owner_does_not_leak(engine: TorchEngine) -> None:
    prompt = prompt_of(2 * B + 5)
    [expected] = generate(engine, [prompt], SamplingParams(max_tokens=2 * B))
    engine.kv_pool[:] = 0xFF  # NaN in every number, as after a transfer that went wrong
    [output] = generate(engine, [prompt], SamplingParams(max_tokens=2 * B))
    assert output == expected


def test_a_mixed_batch_gives_each_work_what_it_gets_alone(engine: TorchEngine, seed: int) -> None:
    chance = random.Random(seed)
    works, prefixes = [], []
    free = list(range(96))
    chance.shuffle(free)
    for index in range(10):
        prefix, new = chance.choice([0, 1, B, 70]), chance.choice([1, 1, 1, 2, B, 40])
        pages = [free.pop() for _ in range(blocks_touched(prefix + new, B))]
        token_ids = prompt_of(prefix + new, seed + index)
        if prefix:
            prefixes.append(Work(token_ids[:prefix], 0, pages))
        works.append(Work(token_ids[prefix:], prefix, pages))
    for work in prefixes:
        engine.forward([work])
    alone = [engine.forward([work])[0] for work in works]
    np.testing.assert_allclose(engine.forward(works), alone, atol=2e-4)


def test_works_of_very_unlike_context_are_right_too(engine: TorchEngine) -> None:
    lengths = [1, 2, 600, 5, 590, 40]
    pages = [engine.pages.take(blocks_touched(n, B)) or [] for n in lengths]
    prompts = [prompt_of(n, n) for n in lengths]
    for prompt, own in zip(prompts, pages, strict=True):
        if len(prompt) > 1:
            engine.forward([Work(prompt[:-1], 0, own)])
    works = [Work(p[-1:], len(p) - 1, own) for p, own in zip(prompts, pages, strict=True)]
    alone = [engine.forward([work])[0] for work in works]
    np.testing.assert_allclose(engine.forward(works), alone, atol=2e-4)


def test_a_mirrored_pool_exports_layers_and_imports_pages(
    checkpoint: Path, engine: TorchEngine
) -> None:
    prompt = prompt_of(3 * B + 2)
    mirrored = device_engine(checkpoint, 20, B)
    announced: list[int] = []

    def on_layer(layer: int) -> None:
        engine_layer = mirrored.layout.layer_offset_bytes(layer)
        span = slice(engine_layer, engine_layer + mirrored.layout.layer_bytes)
        for page in range(4):
            assert block(mirrored, page)[span].any(), f"layer {layer} is not in the mirror"
        announced.append(layer)

    expected = engine.forward([Work(prompt, 0, [0, 1, 2, 3])])
    np.testing.assert_array_equal(
        mirrored.forward([Work(prompt, 0, [0, 1, 2, 3])], on_layer), expected
    )
    assert announced == [0, 1, 2]
    for page in range(4):
        np.testing.assert_array_equal(block(mirrored, page), block(engine, page))
    for page in range(4):
        block(mirrored, 10 + page)[:] = block(engine, page)
    mirrored.import_pages([10, 11, 12, 13])
    token = Work([5], len(prompt), [10, 11, 12, 13])
    np.testing.assert_array_equal(
        mirrored.forward([token]), engine.forward([Work([5], len(prompt), [0, 1, 2, 3])])
    )
    mirrored.export_pages([13])
    np.testing.assert_array_equal(block(mirrored, 13), block(engine, 3))


def test_an_abandoned_generation_gives_its_pages_back(engine: TorchEngine) -> None:
    tokens = generate_tokens(engine, [prompt_of(20), prompt_of(30)], SamplingParams(max_tokens=50))
    next(tokens)
    assert engine.pages.used_pages > 0
    tokens.close()
    assert engine.pages.used_pages == 0
    engine.pages.check()


@pytest.mark.slow
def test_more_prompts_than_slots_and_pages_all_finish(engine: TorchEngine) -> None:
    prompts = [prompt_of(n, n) for n in range(1, 200, 7)]
    params = [
        SamplingParams(max_tokens=1 + n % 9, temperature=1.0, seed=n) for n in range(len(prompts))
    ]
    together = generate(engine, prompts, params, chunk_tokens=32, slots_max=5)
    alone = [generate(engine, [p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone
    assert [len(output) for output in together] == [params.max_tokens for params in params]


def test_an_end_id_ends_a_generation(engine: TorchEngine) -> None:
    [free] = generate(engine, [prompt_of(10)], SamplingParams(max_tokens=10))
    ending = SamplingParams(max_tokens=10, end_ids=(free[3],))
    [ended] = generate(engine, [prompt_of(10)], ending)
    assert ended == free[: free.index(free[3]) + 1]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work([], 0, [0]), "without tokens"),
        (Work([1] * 17, 0, [0]), "17 tokens in 1 pages of 16"),
        (Work([1], 1024, list(range(65))), "1024..1025 of a context of 1024"),
        (Work([320], 0, [0]), "token id 320"),
        (Work([1], 0, [96]), "page 96"),
        (Work([1], 0, [-1]), "page -1"),
        (Work([-1], 0, [0]), "token id -1"),
    ],
)
def test_an_impossible_work_is_our_mistake(engine: TorchEngine, work: Work, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        engine.forward([work])
