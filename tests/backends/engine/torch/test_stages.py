"""A model cut into stages computes what the whole model does: the same logits, the same pages."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.model_config import CheckpointError, read_model_config
from backends.engine.torch.torch_engine import TorchEngine
from mooncake_store.layout import LayerRange
from tests.backends.engine.checkpoints import make_checkpoint

BLOCK_TOKENS, PAGES = 16, 64
SEED = int(os.environ.get("MOONCAKE_TEST_SEED", "1"))


@pytest.fixture(scope="module", params=["llama", "qwen3", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    is_tied = request.param == "qwen3"
    return make_checkpoint(
        request.param, path, num_hidden_layers=5, tie_word_embeddings=is_tied, vocab_size=320
    )


def stage_of(
    checkpoint: Path, stage: int, stages: int, dtype: str = "float32", kv_dtype: str = "auto"
) -> TorchEngine:
    return TorchEngine.load(
        checkpoint, PAGES, BLOCK_TOKENS, dtype=dtype, stage=stage, stages=stages, kv_dtype=kv_dtype
    )


def pages_of(engine: TorchEngine) -> NDArray[np.uint8]:
    """[pages, layers of the engine, bytes of a layer]"""
    return engine.kv_pool.reshape(PAGES, len(engine.layers), engine.layout.layer_bytes)


def through(stages: list[TorchEngine], batch: list[Work]) -> NDArray[np.float32]:
    hidden = None
    for stage in stages[:-1]:
        hidden = stage.forward_stage(batch, hidden)
    return stages[-1].forward_last(batch, hidden)


def random_batch(
    chance: random.Random, computed: dict[int, int], tables: dict[int, list[int]]
) -> list[Work]:
    """A ragged step: some requests get a chunk, some a single token; they go on from before."""
    batch = []
    for name in sorted(chance.sample(sorted(tables), chance.randint(1, len(tables)))):
        room = len(tables[name]) * BLOCK_TOKENS - computed[name]
        tokens = min(room, chance.choice((1, 1, 7, 16, 33, 70)))
        if tokens:
            ids = [chance.randrange(320) for _ in range(tokens)]
            batch.append(Work(ids, computed[name], tables[name]))
            computed[name] += tokens
    return batch


# One stage is first and last, of three the second is neither; two have no branch of their own.
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]
)
def test_random_ragged_batches_give_the_same_bits_through_stages_as_through_the_whole_model(
    checkpoint: Path, count: int, dtype: str, kv_dtype: str
) -> None:
    if kv_dtype == "fp8" and read_model_config(checkpoint).family == "deepseek_v3":
        with pytest.raises(CheckpointError, match="fp8"):
            stage_of(checkpoint, 0, count, dtype, kv_dtype)
        return
    chance = random.Random(SEED)
    whole = stage_of(checkpoint, 0, 1, dtype, kv_dtype)
    stages = [stage_of(checkpoint, stage, count, dtype, kv_dtype) for stage in range(count)]
    free = list(range(PAGES))
    chance.shuffle(free)
    tables = {name: [free.pop() for _ in range(chance.randint(2, 14))] for name in range(4)}
    computed = dict.fromkeys(tables, 0)
    for _ in range(12):
        if batch := random_batch(chance, computed, tables):
            np.testing.assert_array_equal(through(stages, batch), whole.forward(batch))
    assert sum(computed.values()) > 100, "the batches were too few to show anything"
    parts = np.concatenate([pages_of(stage) for stage in stages], axis=1)
    np.testing.assert_array_equal(parts, pages_of(whole))


def test_a_stage_announces_its_layers_by_their_number_in_the_model(checkpoint: Path) -> None:
    first, last = (stage_of(checkpoint, stage, 2) for stage in (0, 1))
    batch, announced = [Work(list(range(40)), 0, [3, 1, 2])], list[int]()
    hidden = first.forward_stage(batch, None, announced.append)
    last.forward_last(batch, hidden, announced.append)
    assert announced == [0, 1, 2, 3, 4]


def test_a_stage_has_pages_for_its_own_layers_and_the_fingerprint_of_the_whole_model(
    checkpoint: Path,
) -> None:
    whole, last = stage_of(checkpoint, 0, 1), stage_of(checkpoint, 1, 2)
    assert (last.layers, whole.layers) == (LayerRange(3, 5), LayerRange(0, 5))
    assert last.kv_pool.nbytes == whole.kv_pool.nbytes * 2 // 5
    assert (last.layout, last.weights_id) == (whole.layout, whole.weights_id)
    assert last.pages.pages_max == whole.pages.pages_max == PAGES


def test_hidden_states_of_another_batch_are_refused(checkpoint: Path) -> None:
    first, last = (stage_of(checkpoint, stage, 2) for stage in (0, 1))
    hidden = first.forward_stage([Work(list(range(40)), 0, [0, 1, 2])], None)
    with pytest.raises(AssertionError):
        last.forward_last([Work(list(range(16)), 0, [0])], hidden)


def test_a_stage_does_not_pass_for_the_whole_model(checkpoint: Path) -> None:
    with pytest.raises(AssertionError):
        stage_of(checkpoint, 0, 2).forward([Work([1, 2], 0, [0])])


def test_more_stages_than_layers_are_refused_by_number(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="5 layers, too few for 6 pipeline stages"):
        stage_of(checkpoint, 0, 6)


def test_shares_of_layers_are_contiguous_whole_and_as_equal_as_can_be(checkpoint: Path) -> None:
    model = read_model_config(checkpoint)
    for layers in range(1, 40):
        config = replace(model, layers=layers)
        for stages in range(1, layers + 1):
            shares = [config.stage_layers(stage, stages) for stage in range(stages)]
            assert [shares[0].first, shares[-1].stop] == [0, layers]
            assert all(a.stop == b.first for a, b in itertools.pairwise(shares))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
