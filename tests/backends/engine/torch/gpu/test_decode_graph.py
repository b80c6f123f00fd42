"""Decode steps of padded shapes: the tokens of the ragged way, and nothing of the padding is seen.

A recorded step here is the same function called again, over the very tensors that a GPU replays.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.gpu.decode_graph import BATCHES, Recorder, Step, padded_inputs
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.generate import generate
from mooncake_store.layout import blocks_touched
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.engine.torch.gpu.device_engines import device_engine

B, PAGES = 16, 160


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def engines(checkpoint: Path, seed: int) -> tuple[TorchEngine, TorchEngine]:
    """The ragged one and the one that records, with the same numbers in all pages."""
    ragged = device_engine(checkpoint, PAGES, B)
    recording = device_engine(checkpoint, PAGES, B, recorder=Recorder())
    torch.manual_seed(seed)
    ragged._memory.pool.normal_()
    recording._memory.pool.copy_(ragged._memory.pool)
    return ragged, recording


def random_batch(chance: random.Random, works: int) -> list[Work]:
    free = list(range(PAGES))
    chance.shuffle(free)
    batch = []
    for index in range(works):
        room = (len(free) - (works - index - 1)) * B  # each of the others gets a page at least
        start = min(room - 1, chance.choice([0, 1, B - 1, B, chance.randrange(6 * B)]))
        spare = chance.randrange(3)  # pages that the request has for later tokens
        pages = [free.pop() for _ in range(blocks_touched(start + 1, B))]
        batch.append(Work([chance.randrange(320)], start, pages + pages[:1] * spare))
    return batch


def test_random_batches_have_the_logits_and_pages_of_the_ragged_way(
    checkpoint: Path, seed: int
) -> None:
    chance = random.Random(seed)
    ragged, recording = engines(checkpoint, seed)
    for works in [1, 2, 3, 5, 8, 13, 33, *[chance.randrange(1, 60) for _ in range(8)]]:
        batch = random_batch(chance, works)
        recording._memory.pool.copy_(ragged._memory.pool)
        expected, ours = ragged.forward(batch), recording.forward(batch)
        np.testing.assert_allclose(ours, expected, atol=2e-4)
        # Pages of others hold the same bits: nothing was written there by either.
        written = [work.pages[work.start // B] for work in batch]
        kept = torch.ones(PAGES, dtype=torch.bool)
        kept[written] = False
        assert torch.equal(recording._memory.pool[kept], ragged._memory.pool[kept])
        torch.testing.assert_close(
            recording._memory.pool[written], ragged._memory.pool[written], atol=1e-4, rtol=1e-4
        )
    assert recording._graphs is not None and len(recording._graphs._recorded) > 3


def test_a_shape_is_recorded_once(checkpoint: Path) -> None:
    recorded: list[Step] = []

    class Counting:
        def record(self, step: Step) -> Step:
            recorded.append(step)
            return step

    engine = device_engine(checkpoint, PAGES, B, recorder=Counting())
    for start in range(3 * B):
        for works in (5, 6, 8):
            pages = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(works)]
            engine.forward([Work([7], start, own) for own in pages])
    assert len(recorded) == 3, "one shape of works; 1, 2 and 4 pages"


def test_whole_generations_have_the_same_tokens(checkpoint: Path) -> None:
    chance = random.Random(5)
    prompts = [chance.choices(range(320), k=1 + 9 * n) for n in range(9)]
    params = SamplingParams(max_tokens=40)
    plain = TorchEngine.load(checkpoint, PAGES, B)
    recording = device_engine(checkpoint, PAGES, B, recorder=Recorder())
    together = generate(recording, prompts, params, chunk_tokens=32, slots_max=6)
    assert together == generate(plain, prompts, params, chunk_tokens=32, slots_max=6)
    assert recording._graphs is not None and recording._graphs._recorded


def test_garbage_left_in_a_page_by_its_last_owner_is_not_seen(checkpoint: Path) -> None:
    engine = device_engine(checkpoint, PAGES, B, recorder=Recorder())
    prompt = list(range(5, 5 + B))
    [expected] = generate(engine, [prompt], SamplingParams(max_tokens=2 * B))
    engine._memory.pool.fill_(torch.nan)
    [output] = generate(engine, [prompt], SamplingParams(max_tokens=2 * B))
    assert output == expected


def test_padding_is_the_work_with_the_shortest_context_once_more() -> None:
    batch = [Work([9], 2 * B, [1, 2, 3]), Work([8], 5, [4]), Work([7], B, [5, 6])]
    inputs = padded_inputs(batch, 4, 4, B)
    assert inputs[:4].tolist() == [9, 8, 7, 8]
    assert inputs[4:8].tolist() == [2 * B, 5, B, 5]
    assert inputs[8:].reshape(4, 4).tolist() == [
        [1, 2, 3, 1],
        [4, 4, 4, 4],
        [5, 6, 5, 5],
        [4, 4, 4, 4],
    ]


def test_a_recording_that_fails_is_told_once_and_the_ragged_way_goes_on(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def record(self, step: Step) -> Step:
            step()
            raise RuntimeError("operation not permitted when stream is capturing")

    ragged, _ = engines(checkpoint, 3)
    failing = device_engine(checkpoint, PAGES, B, recorder=Failing())
    failing._memory.pool.copy_(ragged._memory.pool)
    batch = random_batch(random.Random(3), 5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_array_equal(failing.forward(batch), ragged.forward(batch))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "decode steps run without CUDA graphs, which is slower: operation not permitted when "
        "stream is capturing"
    ]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work([1], 1024, list(range(65))), "1024..1025 of a context of 1024"),
        (Work([320], 0, [0]), "token id 320"),
        (Work([1], 0, [PAGES]), f"page {PAGES}"),
        (Work([-1], 0, [0]), "token id -1"),
    ],
)
def test_an_impossible_work_is_our_mistake(checkpoint: Path, work: Work, words: str) -> None:
    engine = device_engine(checkpoint, PAGES, B, recorder=Recorder())
    with pytest.raises(AssertionError, match=words):
        engine.forward([work])


def test_larger_batches_and_prompts_take_the_ragged_way(checkpoint: Path) -> None:
    engine = device_engine(checkpoint, PAGES, B, recorder=Recorder())
    assert engine._graphs is not None
    assert not engine._graphs.serves([Work([1], 0, [0])] * (BATCHES[-1] + 1))
    assert not engine._graphs.serves([Work([1], 0, [0]), Work([1, 2], 0, [1])])
    assert engine._graphs.serves([Work([1], 0, [0])] * BATCHES[-1])
