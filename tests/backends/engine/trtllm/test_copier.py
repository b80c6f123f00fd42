"""Copies between pages and pool: the right bytes, in the right order with the forward pass.

The CUDA copier runs here on a CUDA that is made of host memory and threads; that it is fast, and
that the real CUDA agrees, is measured on a GPU (tests/gpu/test_copier.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.trtllm.block_pages import BlockPages, Move, size_problems
from backends.engine.trtllm.copier import Copier, CudaCopier, HostCopier, make_copier, map_pool
from tests.backends.engine.trtllm.conftest import FAKES, forget_modules
from tests.backends.engine.trtllm.listening import WAIT_S

sys.path.insert(0, str(FAKES))
from tensorrt_llm._fake.stream import FakeEvent, FakeStream

sys.path.remove(str(FAKES))
forget_modules()

PAGES, LAYERS, FLAT = 12, 3, 64
PAGE_BYTES = LAYERS * 2 * FLAT * 2  # bfloat16
VERSION = SimpleNamespace(cuda="12.8")
Make = Callable[[Any, Any], Copier]


class HostCuda:
    """torch.cuda as far as the copier uses it."""

    def __init__(self) -> None:
        self.streams: dict[int, CudaStream] = {}
        self.locked: list[int] = []
        self.last_error = 0

    def forget_error(self, cuda_version: str) -> None:
        assert cuda_version == "12.8"
        self.last_error = 0

    def fail_to_lock(self, at: int, size: int, flags: int) -> int:
        self.last_error = 2
        return 2

    def launch(self) -> None:
        """A kernel of torch: it looks for an error that somebody left behind."""
        assert not self.last_error, "torch raises it here"

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda at, size, flags: self.locked.append(at) or 0,
            cudaHostUnregister=self.locked.remove,
        )

    def Stream(self) -> CudaStream:
        stream = CudaStream()
        stream.cuda_stream = len(self.streams) + 1
        self.streams[stream.cuda_stream] = stream
        return stream

    def Event(self, blocking: bool) -> Any:
        assert blocking, "a thread that waits for it would spin"
        return CudaEvent()

    def copy(self, target: int, source: int, size_bytes: int, stream: int, issued: int) -> None:
        self.streams[stream].run(lambda: ctypes.memmove(target, source, size_bytes))


class CudaStream(FakeStream):
    cuda_stream = 0

    def wait_event(self, event: Any) -> None:
        reached = event.reached
        self.run(lambda: reached.synchronize())


class CudaEvent:
    reached: FakeEvent

    def record(self, stream: FakeStream) -> None:
        self.reached = stream.record_event()

    def synchronize(self) -> None:
        self.reached.synchronize()


@pytest.fixture(params=["host", "cuda"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    cuda = HostCuda()

    def make_one(kv: Any, pool: Any) -> Copier:
        if request.param == "host":
            return make_copier(kv, pool)
        with monkeypatch.context() as patch:
            patch.setattr(f"{CudaCopier.__module__}.CudaDriver", lambda: cuda)
            patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=VERSION))
            return CudaCopier(kv, pool)

    yield make_one
    for stream in cuda.streams.values():
        stream.close()
    assert not cuda.locked, "memory stays page-locked"


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    stream = CudaStream()
    yield stream
    stream.close()


def memory(per_block: int, tp_size: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """KV of one rank as a tensor and as bytes, and a pool; all with random bytes."""
    chance = np.random.default_rng(4)
    kv = torch.zeros((PAGES, LAYERS, 2, FLAT), dtype=torch.bfloat16)
    raw = kv.view(torch.uint8).numpy().reshape(PAGES, PAGE_BYTES)
    raw[:] = chance.integers(0, 256, raw.shape)
    pool = chance.integers(0, 256, PAGES * per_block * tp_size * PAGE_BYTES, dtype=np.uint8)
    return kv, raw, pool


@pytest.mark.parametrize(("rank", "tp_size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("per_block", [1, 4])
def test_pages_go_where_their_tokens_are_in_the_block(
    make: Make, stream: FakeStream, rank: int, tp_size: int, per_block: int
) -> None:
    kv, raw, pool = memory(per_block, tp_size)
    pages = BlockPages.of(rank, tp_size, PAGE_BYTES, 16, 16 * per_block)
    copier = make(kv, pool)
    chance = random.Random(2)
    for _ in range(10):
        count = chance.randrange(1, PAGES)
        first = chance.randrange(0, PAGES - count + 1)
        block_ids = chance.sample(range(PAGES), count)
        if chance.random() < 0.5:
            block_ids.sort()
        pool_pages = chance.sample(range(PAGES), -(-(first + count) // per_block))
        move = Move("a", 1, first, block_ids, pool_pages)
        shaped = pool.reshape(PAGES, tp_size, per_block, PAGE_BYTES)
        places = [divmod(first + i, per_block) for i in range(count)]

        before, was = raw.copy(), shaped.copy()
        copier.save(pages.runs([move]), copier.record(stream))
        for block_id, (block, part) in zip(block_ids, places, strict=True):
            was[pool_pages[block], rank, part] = before[block_id]
        assert (shaped == was).all() and (raw == before).all()

        raw[block_ids] = 0
        stream_was_told = copier.load(pages.runs([move]), stream)
        stream.synchronize()
        assert stream_was_told is None or stream_was_told.synchronize() is None
        assert (raw == before).all() and (shaped == was).all()
    copier.close()


def test_neighbours_become_one_copy() -> None:
    pages = BlockPages.of(0, 1, PAGE_BYTES, 16, 64)
    whole = pages.runs([Move("a", 1, 0, [5, 6, 7, 8], [2])])
    assert whole == [(5 * PAGE_BYTES, 8 * PAGE_BYTES, 4 * PAGE_BYTES)]
    assert len(pages.runs([Move("a", 1, 0, [5, 6, 8, 7], [2])])) == 3
    across = pages.runs([Move("a", 1, 3, [0, 1], [0, 1])])
    assert len(across) == 1, "blocks that are neighbours in the pool, too"
    assert len(pages.runs([Move("a", 1, 3, [0, 1], [1, 0])])) == 2
    two_ranks = BlockPages.of(0, 2, PAGE_BYTES, 16, 64)
    assert len(two_ranks.runs([Move("a", 1, 3, [0, 1], [0, 1])])) == 2


def test_a_load_comes_after_what_the_forward_pass_still_writes(
    make: Make, stream: FakeStream
) -> None:
    """The page was another request's, whose last step is under way."""
    kv, raw, pool = memory(1, 1)
    copier = make(kv, pool)
    may_write, seen = threading.Event(), []

    def write_late() -> None:
        assert may_write.wait(WAIT_S)
        raw[3] = 7

    stream.run(write_late)
    runs = BlockPages.of(0, 1, PAGE_BYTES, 16, 16).runs([Move("a", 1, 0, [3], [4])])
    loader = threading.Thread(target=lambda: copier.load(runs, stream))
    before = raw[3].copy()
    loader.start()
    assert (raw[3] == before).all()
    may_write.set()
    loader.join(WAIT_S)
    stream.run(lambda: seen.append(raw[3].copy()))  # the forward pass that needs it
    stream.synchronize()
    assert (seen[0] == pool.reshape(PAGES, PAGE_BYTES)[4]).all()
    copier.close()


def test_a_save_comes_after_what_was_recorded(make: Make, stream: FakeStream) -> None:
    kv, raw, pool = memory(1, 1)
    copier = make(kv, pool)
    may_write = threading.Event()

    def write_late() -> None:
        assert may_write.wait(WAIT_S)
        raw[3] = 7

    stream.run(write_late)
    after = copier.record(stream)
    runs = BlockPages.of(0, 1, PAGE_BYTES, 16, 16).runs([Move("a", 1, 0, [3], [4])])
    saver = threading.Thread(target=lambda: copier.save(runs, after))
    saver.start()
    may_write.set()
    saver.join(WAIT_S)
    assert (pool.reshape(PAGES, PAGE_BYTES)[4] == 7).all()
    copier.close()


def test_a_page_lock_that_fails_is_told_and_copies_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = HostCuda()
    monkeypatch.setattr(f"{CudaCopier.__module__}.CudaDriver", lambda: cuda)
    cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=cuda.fail_to_lock)  # type: ignore[method-assign]
    kv, _, pool = memory(1, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=VERSION))
        copier = CudaCopier(kv, pool)
    assert "ulimit -l" in caplog.text
    cuda.launch()
    copier.close()
    for stream in cuda.streams.values():
        stream.close()


def test_a_pool_is_mapped_for_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(8192))
    ours, theirs = map_pool(str(path), 4096), map_pool(str(path), 4096)
    ours[5000] = 9
    assert theirs[5000] == 9
    for wrong in (b"", bytes(5000)):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="no whole pages"):
            map_pool(str(path), 4096)


def test_sizes_are_compared_before_anything_is_copied() -> None:
    good = ((8, 3, 2, 64), 768, 16, 2, 64, 2 * 4 * 768)
    assert size_problems(*good) == []
    assert "no multiple" in size_problems((8, 3, 2, 64), 768, 24, 2, 64, 6144)[0]
    assert "tp_size agree" in size_problems((8, 3, 2, 64), 768, 16, 1, 64, 6144)[0]
    assert "shape" in size_problems((8, 64), 768, 16, 2, 64, 6144)[0]


def test_host_memory_gets_the_plain_copier() -> None:
    kv, _, pool = memory(1, 1)
    assert isinstance(make_copier(kv, pool), HostCopier)
