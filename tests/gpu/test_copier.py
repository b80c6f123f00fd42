"""The CUDA copier on a real GPU: the right bytes, in order with a stream, and fast beside products.

Skipped without a GPU. It needs no tensorrt_llm:  python -m pytest tests/gpu/test_copier.py
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU on this machine", allow_module_level=True)

from backends.engine.connected.block_pages import POOL, BlockPages, Move, place_of  # noqa: E402
from backends.engine.connected.copier import CudaCopier, make_copier  # noqa: E402
from backends.engine.connected.host_memory import map_pool  # noqa: E402
from bench.connector import measure_copies  # noqa: E402
from mooncake_store.memory.segment import Segment  # noqa: E402

PAGES, PER_BLOCK, LAYERS, FLAT = 64, 4, 4, 2048
PAGE_BYTES = LAYERS * 2 * FLAT * 2


@pytest.fixture(params=["pool", "segment", "one by one"])
def memory(request: pytest.FixtureRequest) -> Any:
    # In /dev/shm, as the real pool: files of another kind cannot always be page-locked.
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="mooncake-test-") as file:
        file.write(bytes(PAGES * PAGE_BYTES))
        file.flush()
        pool = map_pool(file.name, PAGE_BYTES * PER_BLOCK)
    kv = torch.zeros((PAGES, LAYERS, 2, FLAT), dtype=torch.bfloat16, device="cuda")
    copier = make_copier(kv, pool)
    assert isinstance(copier, CudaCopier) and POOL in copier._locked
    if request.param == "pool":
        yield kv, pool, copier, POOL
        copier.close()
        return
    path = f"/dev/shm/mooncake-test-{os.getpid()}-segment"
    with Segment.create(path, PAGES * PAGE_BYTES) as segment:
        guest = Segment.open(path)  # as a rank maps it
        copier.add(7, guest.view)
        if request.param == "one by one":
            copier._driver._batch = None
        elif copier._driver._batch is None:
            pytest.skip("this driver is older than CUDA 12.8: it has no batches")
        yield kv, segment.view, copier, 7
        assert (copier._driver._batch is None) == (request.param == "one by one"), "refused"
        copier.remove(7)
        guest.close()
        copier.close()


def a_move(seed: int, region: int) -> tuple[Move, list[tuple[int, int]]]:
    """Pages in no order, and (page of the engine, page in the pool) of each."""
    chance = random.Random(seed)
    block_ids = chance.sample(range(PAGES), 30)
    pool_pages = chance.sample(range(PAGES // PER_BLOCK), 10)
    pairs = [
        (block_id, pool_pages[page // PER_BLOCK] * PER_BLOCK + page % PER_BLOCK)
        for page, block_id in enumerate(block_ids, 3)
    ]
    places = [place_of(region, page * PER_BLOCK * PAGE_BYTES) for page in pool_pages]
    return Move("a", 1, 3, block_ids, places), pairs


def test_what_was_saved_is_what_is_loaded(memory: Any) -> None:
    kv, pool, copier, region = memory
    stream = torch.cuda.current_stream()
    pages = BlockPages(0, 1, PAGE_BYTES, 32, 32 * PER_BLOCK)
    shaped = pool.reshape(PAGES, PAGE_BYTES)
    for seed in range(20):
        move, pairs = a_move(seed, region)
        kv.view(torch.uint8).random_(0, 256)
        before = kv.view(torch.uint8).reshape(PAGES, -1).cpu().numpy()
        copier.save(pages.runs([move]), copier.record(stream))
        for block_id, place in pairs:
            assert (shaped[place] == before[block_id]).all()
        kv.zero_()
        copier.load(pages.runs([move]), stream)
        after = kv.view(torch.uint8).reshape(PAGES, -1).cpu().numpy()
        for block_id, _ in pairs:
            assert (after[block_id] == before[block_id]).all()


def test_copies_keep_their_place_among_the_work_of_a_stream(memory: Any) -> None:
    """Long work before a load and before a save, and a reader right behind the load."""
    kv, pool, copier, region = memory
    stream = torch.cuda.current_stream()
    pages = BlockPages(0, 1, PAGE_BYTES, 32, 32 * PER_BLOCK)
    move, pairs = a_move(1, region)
    pool[:] = np.random.default_rng(3).integers(0, 256, pool.nbytes, np.uint8)
    shaped = pool.reshape(PAGES, PAGE_BYTES)
    wanted = {block_id: shaped[place].copy() for block_id, place in pairs}
    torch.cuda._sleep(200_000_000)  # cycles of the GPU
    kv.zero_()  # the last step of the pages' former owner
    event = copier.load(pages.runs([move]), stream)
    seen = kv.clone()  # the forward pass
    event.synchronize()
    raw = seen.view(torch.uint8).reshape(PAGES, -1).cpu().numpy()
    assert all((raw[block_id] == bytes_).all() for block_id, bytes_ in wanted.items())

    torch.cuda._sleep(200_000_000)
    kv.view(torch.uint8).fill_(7)
    copier.save(pages.runs([move]), copier.record(stream))
    assert all((shaped[place] == 7).all() for _, place in pairs)


def test_copies_reach_the_link_s_rate_and_hardly_slow_a_product() -> None:
    """The numbers themselves: python -m bench.connector. Here: nothing is far off."""
    measured = measure_copies()
    assert len(measured.targets) == 4
    for target in measured.targets:
        assert target.value is not None and target.value >= 0.5 * target.goal, target
