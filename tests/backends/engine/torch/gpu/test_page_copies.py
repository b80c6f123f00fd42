"""Pages come and go beside the steps: whoever reads or writes them waits, and nobody else.

`LateQueue` does each copy at the last moment that the events of a GPU's streams allow, so what does
not wait where it must gets other numbers here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.engine.interface import Work
from backends.engine.torch.gpu.decode_graph import Recorder
from backends.engine.torch.gpu.page_copies import CopyQueue, Done, PageCopy, PagesArriving, runs
from backends.engine.torch.torch_engine import TorchEngine
from tests.backends.engine.checkpoints import make_checkpoint
from tests.backends.engine.torch.gpu.device_engines import device_engine

B, PAGES, LAYERS = 16, 30, 8
IDS = list(range(3, 3 + 5 * B + 4))


class LateQueue(CopyQueue):
    def __init__(self) -> None:
        self.coming: deque[_Late] = deque()
        self.held = 0
        self.begun = 0

    def bring(self, copies: Sequence[PageCopy]) -> Done:
        self.coming.append(_Late(self, copies))
        return self.coming[-1]

    def fetch(self, copies: Sequence[PageCopy]) -> Done:
        return _Late(self, copies)

    def step_is_begun(self) -> None:
        self.begun += 1

    def finish(self) -> None:
        while self.coming:
            self.coming.popleft().carry_out()


class _Late(Done):
    def __init__(self, queue: LateQueue, copies: Sequence[PageCopy]) -> None:
        self._queue, self._copies, self._is_over = queue, copies, False

    def synchronize(self) -> None:
        if self in self._queue.coming:
            while not self._is_over:  # a stream does one copy after the other
                self._queue.coming.popleft().carry_out()
        elif not self._is_over:
            self.carry_out()

    def hold(self) -> None:
        self._queue.held += 1
        self.synchronize()

    def is_over(self) -> bool:
        return self._is_over

    def carry_out(self) -> None:
        for target, source in self._copies:
            target.copy_(source)
        self._is_over = True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.fixture
def queue() -> LateQueue:
    return LateQueue()


@pytest.fixture
def late(checkpoint: Path, queue: LateQueue) -> TorchEngine:
    return device_engine(checkpoint, PAGES, B, recorder=Recorder(), queue=queue)


@pytest.fixture
def plain(checkpoint: Path) -> TorchEngine:
    """With the KV of IDS in its pages 0 to 5."""
    engine = device_engine(checkpoint, PAGES, B, is_mirrored=False)
    engine.forward([Work(IDS, 0, range(6))])
    return engine


def take_over(late: TorchEngine, plain: TorchEngine, pages: Sequence[int]) -> None:
    """What another worker computed, as the store brings it: into the mirror."""
    size = late.layout.block_bytes
    for index, page in enumerate(pages):
        late.kv_pool[page * size :][:size] = plain.kv_pool[index * size :][:size]


def last_token(plain: TorchEngine) -> np.ndarray:
    return plain.forward([Work(IDS[-1:], len(IDS) - 1, range(6))])


@pytest.mark.parametrize("works", [1, 2])  # 2: with a prompt, which is no recorded step
def test_a_step_has_what_was_brought_into_its_pages(
    works: int, late: TorchEngine, plain: TorchEngine, queue: LateQueue
) -> None:
    pages = [11, 12, 13, 7, 20, 21]
    take_over(late, plain, pages)
    late.import_pages(pages)
    batch = [Work(IDS[-1:], len(IDS) - 1, pages), Work([5, 6], 0, [1])][:works]
    ours = late.forward(batch)[0]
    np.testing.assert_allclose(ours, last_token(plain)[0], atol=1e-4)
    assert queue.held == 1 and queue.begun == 1


def test_a_step_does_not_wait_for_the_pages_of_others(
    late: TorchEngine, plain: TorchEngine, queue: LateQueue
) -> None:
    pages = [11, 12, 13, 7, 20, 21]
    take_over(late, plain, pages)
    late.import_pages(pages)
    late.forward([Work([5, 6, 7], 0, [3])])
    late.forward([Work([8], 3, [3])])
    assert len(queue.coming) == 1 and queue.held == 0
    late.forward([Work(IDS[-1:], len(IDS) - 1, pages)])
    late.forward([Work(IDS[-1:], len(IDS) - 1, pages)])
    assert not queue.coming and queue.held == 1, "it waits once"


def test_what_was_brought_for_a_request_that_left_does_not_disturb_the_next(
    late: TorchEngine, plain: TorchEngine, queue: LateQueue
) -> None:
    expected = plain.forward([Work(IDS[:20], 0, [10, 11])])
    late.kv_pool[:] = 0xFF
    late.import_pages([10, 11])
    late.import_layer([10, 11], 3)  # rings, which lie in other pages
    np.testing.assert_allclose(late.forward([Work(IDS[:20], 0, [10, 11])]), expected, atol=1e-4)
    queue.finish()
    step = Work([9], 20, [10, 11])
    np.testing.assert_allclose(late.forward([step]), plain.forward([step]), atol=1e-4)


def test_rings_and_pages_are_the_same_memory(late: TorchEngine, queue: LateQueue) -> None:
    """A layer brought into a ring is waited for by whoever has the page around it later."""
    size = late._folded.layout.layers
    assert size == 3
    ring = 2 * LAYERS // size + 1  # begins in page 2
    late.import_layer([ring], 4)
    unit = ring * size + 4 % size
    late.forward([Work([5], 0, [unit // LAYERS + 1])])
    assert queue.held == 0
    late.forward([Work([5], 0, [unit // LAYERS])])
    assert queue.held == 1


def test_a_prompt_passes_layer_by_layer_while_its_prefix_comes(
    late: TorchEngine, plain: TorchEngine, queue: LateQueue
) -> None:
    assert late.rings is not None
    expected = plain.forward([Work(IDS[3 * B :], 3 * B, range(6))])[0]
    size, layer_bytes = late.rings.layers_at_once, late.layout.layer_bytes
    rings = late.rings.in_pages([4, 5, 6], 6)
    passing = late.begin_pass(IDS, 3 * B, rings)
    cells = late.kv_pool.reshape(-1, layer_bytes)
    blocks = plain.kv_pool.reshape(PAGES, LAYERS, layer_bytes)
    chunks = [(start, min(B, len(IDS) - start)) for start in range(3 * B, len(IDS), B)]

    def bring(layer: int) -> None:
        for block in range(3):
            cells[rings[block] * size + layer % size] = blocks[block, layer]
        late.import_layer(rings[:3], layer)

    bring(0)
    logits = None
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            bring(layer + 1)  # beside the computing of this one
        for start, tokens in chunks:
            assert len(queue.coming) <= 2
            logits = passing.compute(layer, start, tokens)
            page = rings[start // B]
            here = cells[page * size + layer % size]
            assert here.any(), "its KV is in the mirror when it is computed"
        if layer + 1 < LAYERS:
            assert len(queue.coming) == 1, "the next layer's KV was not waited for"
    assert logits is not None
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_layer_is_in_the_mirror_when_it_is_announced(
    late: TorchEngine, plain: TorchEngine
) -> None:
    shape = (PAGES, LAYERS, late.layout.layer_bytes)
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        ours, theirs = (engine.kv_pool.reshape(shape)[:5, layer] for engine in (late, plain))
        np.testing.assert_allclose(ours.view(np.float32), theirs.view(np.float32), atol=1e-4)
        seen.append(layer)

    late.forward([Work(IDS, 0, range(6))], on_layer)
    assert seen == list(range(LAYERS))
    late.kv_pool[:] = 0
    late.export_pages([2, 3, 0])
    np.testing.assert_array_equal(
        late.kv_pool.reshape(PAGES, -1)[[0, 2, 3]],
        late._memory.pool.view(PAGES, -1).view(torch.uint8)[[0, 2, 3]].numpy(),
    )


def test_pages_in_a_row_are_one_copy(seed: int) -> None:
    assert list(runs([])) == []
    assert list(runs([4])) == [slice(4, 5)]
    found = [slice(4, 7), slice(2, 4), slice(9, 10), slice(8, 9)]
    assert list(runs([4, 5, 6, 2, 3, 9, 8])) == found
    chance = np.random.default_rng(seed)
    for _ in range(50):
        pages = chance.integers(0, 20, chance.integers(0, 30)).tolist()
        assert [page for run in runs(pages) for page in range(run.start, run.stop)] == pages


def test_arrivals_forget_what_is_over() -> None:
    queue, target, source = LateQueue(), torch.zeros(2), torch.ones(2)
    arrivals = PagesArriving(100)
    for index in range(50):
        arrivals.sent(np.array([2 * index, 2 * index + 1]), queue.bring([(target, source)]))
        queue.finish()
    assert len(arrivals._under_way) == 1
    arrivals.hold(np.arange(100))
    assert queue.held <= 1 and not arrivals.tickets.any()


def test_what_goes_out_again_before_any_step_is_what_was_brought(
    late: TorchEngine, plain: TorchEngine
) -> None:
    """A request that is preempted as soon as it has come."""
    take_over(late, plain, [7])
    late.import_pages([7])
    late.export_pages([7])
    size = late.layout.block_bytes
    assert (late.kv_pool[7 * size :][:size] == plain.kv_pool[:size]).all()
