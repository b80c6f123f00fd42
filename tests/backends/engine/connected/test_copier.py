"""Copies between pages and host memory: the right bytes, in the right order with the forward pass.

The CUDA copier runs here on a CUDA that is made of host memory and threads: with a libcuda that has
batches, one that refuses them, and one that is too old for them. That it is fast, and that the real
CUDA agrees, is measured on a GPU (tests/gpu/test_copier.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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

from backends.engine.connected.block_pages import BlockPages, Move, SlotUse, place_of
from backends.engine.connected.copier import (
    Copier,
    CopyAttributes,
    CudaCopier,
    CudaDriver,
    HostCopier,
    RegionRefused,
    make_copier,
)
from backends.engine.connected.host_memory import map_pool
from tests.backends.engine.connected.listening import WAIT_S
from tests.backends.engine.trtllm.stand_in import FAKES, forget_modules

sys.path.insert(0, str(FAKES))
from tensorrt_llm._fake.stream import FakeEvent, FakeStream

sys.path.remove(str(FAKES))
forget_modules()

PAGES, LAYERS, FLAT = 12, 3, 64
PAGE_BYTES = LAYERS * 2 * FLAT * 2  # bfloat16
VERSION = SimpleNamespace(cuda="12.8")
Make = Callable[[Any, Any], Copier]


WORD, POINTER = ctypes.c_uint64, ctypes.c_void_p
SINGLE = ctypes.CFUNCTYPE(ctypes.c_int, WORD, WORD, WORD, POINTER)
BATCH = ctypes.CFUNCTYPE(ctypes.c_int, *[POINTER] * 3, WORD, *[POINTER] * 2, WORD, *[POINTER] * 2)
NOT_SUPPORTED = 801


class HostCuda:
    """torch.cuda and libcuda as far as the copier uses them.

    `batches`: "taken", "refused" by the driver, or "unknown" to it.
    """

    def __init__(self, batches: str = "taken") -> None:
        self.streams: dict[int, CudaStream] = {}
        self.locked: list[int] = []
        self.last_error = 0
        self.batches: list[int] = []  # copies of each
        self.singles = 0
        self.cuMemcpyAsync = SINGLE(self._copy)
        if batches != "unknown":
            self.cuMemcpyBatchAsync = BATCH(self._copy_batch)
        self._takes_batches = batches == "taken"

    def _copy(self, target: int, source: int, size_bytes: int, stream: int) -> int:
        self.singles += 1
        self.streams[stream].run(lambda: ctypes.memmove(target, source, size_bytes))
        return 0

    def _copy_batch(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        attribute_count: int,
        failed: int,
        stream: int,
    ) -> int:
        if not self._takes_batches:
            return NOT_SUPPORTED
        how = CopyAttributes.from_address(attributes)
        assert (how.source_access_order, attribute_count) == (1, 1), "not in the stream's order"
        assert ctypes.c_size_t.from_address(firsts).value == 0
        table = [list((WORD * count).from_address(each)) for each in (targets, sources, sizes)]
        self.batches.append(count)

        def copy() -> None:
            order = list(zip(*table, strict=True))
            random.Random(count).shuffle(order)  # nobody promises one
            for target, source, size_bytes in order:
                ctypes.memmove(target, source, size_bytes)

        self.streams[stream].run(copy)
        return 0

    def forget_error(self, driver: CudaDriver, cuda_version: str) -> None:
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


def on(cuda: HostCuda, monkeypatch: pytest.MonkeyPatch, kv: Any, pool: Any) -> CudaCopier:
    monkeypatch.setattr(CudaDriver, "forget_error", functools.partialmethod(_forget, cuda))
    with monkeypatch.context() as patch:
        patch.setattr(f"{CudaCopier.__module__}.cuda_library", lambda kind: cuda)
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=VERSION))
        return CudaCopier(kv, pool)


def _forget(driver: CudaDriver, cuda: HostCuda, cuda_version: str) -> None:
    cuda.forget_error(driver, cuda_version)


@pytest.fixture(params=["host", "taken", "refused", "unknown"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    cuda = HostCuda(request.param)

    def make_one(kv: Any, pool: Any) -> Copier:
        if request.param == "host":
            return make_copier(kv, pool)
        return on(cuda, monkeypatch, kv, pool)

    yield make_one
    for stream in cuda.streams.values():
        stream.close()
    assert not cuda.locked, "memory stays page-locked"
    if request.param != "taken":
        assert not cuda.batches


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
    pages = BlockPages(rank, tp_size, PAGE_BYTES, 16, 16 * per_block)
    copier = make(kv, pool)
    chance = random.Random(2)
    for _ in range(10):
        count = chance.randrange(1, PAGES)
        first = chance.randrange(0, PAGES - count + 1)
        block_ids = chance.sample(range(PAGES), count)
        if chance.random() < 0.5:
            block_ids.sort()
        pool_pages = chance.sample(range(PAGES), -(-(first + count) // per_block))
        block_bytes = per_block * tp_size * PAGE_BYTES
        move = Move("a", 1, first, block_ids, [page * block_bytes for page in pool_pages])
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
    runs = BlockPages(0, 1, PAGE_BYTES, 16, 16).runs([Move("a", 1, 0, [3], [4 * PAGE_BYTES])])
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
    runs = BlockPages(0, 1, PAGE_BYTES, 16, 16).runs([Move("a", 1, 0, [3], [4 * PAGE_BYTES])])
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
    cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=cuda.fail_to_lock)  # type: ignore[method-assign]
    kv, _, pool = memory(1, 1)
    copier = on(cuda, monkeypatch, kv, pool)
    assert "ulimit -l" in caplog.text
    cuda.launch()
    with pytest.raises(RegionRefused, match="ulimit -l"):  # and a region is not used at all
        copier.add(1, pool.copy())
    assert 1 not in copier.memory
    cuda.launch()
    copier.close()
    for stream in cuda.streams.values():
        stream.close()


@pytest.mark.parametrize("is_aside", [False, True])
def test_pages_go_to_and_from_each_region_of_the_host(
    make: Make, stream: FakeStream, is_aside: bool
) -> None:
    kv, raw, pool = memory(1, 1)
    segments = {region: np.zeros(9 * PAGE_BYTES, np.uint8) for region in (1, 2, 700)}
    copier = make(kv, pool)
    for region, segment in segments.items():
        segment[:] = region % 251
        copier.add(region, segment)
    places = [place_of(1, PAGE_BYTES), 0, place_of(700, 4 * PAGE_BYTES), place_of(2, 0)]
    runs = BlockPages(0, 1, PAGE_BYTES, 16, 16).runs([Move("a", 1, 0, [3, 0, 7, 5], places)])
    was = pool[:PAGE_BYTES].copy()
    if is_aside:
        copier.load_aside(runs, copier.record(stream))
    elif (over := copier.load(runs, stream)) is not None:
        over.synchronize()
    assert [set(raw[page]) for page in (3, 7, 5)] == [{1}, {700 % 251}, {2}]
    assert (raw[0] == was).all()

    raw[:] = 9
    copier.save(runs, copier.record(stream))
    assert (pool[:PAGE_BYTES] == 9).all()
    for place in places[:1] + places[2:]:
        assert (copier.memory.view(place, PAGE_BYTES) == 9).all()
    assert sum(int((segment == 9).sum()) for segment in segments.values()) == 3 * PAGE_BYTES
    copier.remove(700)
    assert 700 not in copier.memory and 2 in copier.memory
    copier.close()


def test_an_order_is_one_call_where_the_driver_has_batches(
    monkeypatch: pytest.MonkeyPatch, stream: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    pages = BlockPages(0, 1, PAGE_BYTES, 16, 16)
    runs = pages.runs([Move("a", 1, 0, [1, 3, 5], [0, 4 * PAGE_BYTES, 2 * PAGE_BYTES])])
    for batches, calls in (("taken", ([3, 3], 0)), ("refused", ([], 6)), ("unknown", ([], 6))):
        cuda = HostCuda(batches)
        kv, raw, pool = memory(1, 1)
        copier = on(cuda, monkeypatch, kv, pool)
        for _ in range(2):
            raw[:] = 0
            copier.load_aside(runs, copier.record(stream))
            assert (raw[3] == pool.reshape(PAGES, -1)[4]).all()
        assert (cuda.batches, cuda.singles) == calls, batches
        copier.close()
        for each in cuda.streams.values():
            each.close()
    assert caplog.text.count("one by one") == 1, "refused once, it is not asked again"


def test_a_slot_that_was_begun_anew_is_not_what_was_verified(make: Make) -> None:
    kv, _, pool = memory(1, 1)
    copier = make(kv, pool)
    segment = np.zeros(4096, np.uint8)
    segment[128:160] = 5
    copier.add(3, segment)
    use = SlotUse(0, place_of(3, 128), 3 * 64, bytes([5] * 32), 64)
    assert copier.memory.is_still(use)
    for at in (128, 159, 192, 319):
        segment[at] ^= 1
        assert not copier.memory.is_still(use), at
        segment[at] ^= 1
    segment[160:192] = 7  # the checksum of the block, say
    assert copier.memory.is_still(use)
    copier.remove(3)
    copier.close()


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


def test_host_memory_gets_the_plain_copier() -> None:
    kv, _, pool = memory(1, 1)
    assert isinstance(make_copier(kv, pool), HostCopier)


def test_a_pool_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    from backends.engine.connected.host_memory import map_pool

    with pytest.raises(FileNotFoundError):
        map_pool(str(tmp_path / "none"), 4096)
