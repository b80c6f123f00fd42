"""Geometry: pages of any strides, and blocks of the store."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from backends.engine.connected.block_pages import BlockPages, Move, place_of

PAGE_BYTES = 768


def test_a_block_has_the_pages_of_one_rank() -> None:
    first, second = (BlockPages(rank, 2, 96, 16, 64, is_alike=True) for rank in range(2))
    assert first.block_bytes == first.rank_bytes == 4 * 96
    move = [Move("a", 1, 3, [5, 9], [0, 4096])]
    assert first.runs(move) == second.runs(move) == [(5 * 96, 3 * 96, 96), (9 * 96, 4096, 96)]
    assert first.is_saved and not second.is_saved
    assert all(BlockPages(rank, 2, 96, 16, 64).is_saved for rank in range(2))


def test_neighbours_become_one_copy() -> None:
    pages = BlockPages(0, 1, PAGE_BYTES, 16, 64)
    block = 4 * PAGE_BYTES
    whole = pages.runs([Move("a", 1, 0, [5, 6, 7, 8], [2 * block])])
    assert whole == [(5 * PAGE_BYTES, 2 * block, block)]
    assert len(pages.runs([Move("a", 1, 0, [5, 6, 8, 7], [2 * block])])) == 3
    across = pages.runs([Move("a", 1, 3, [0, 1], [0, block])])
    assert len(across) == 1, "blocks that are neighbours on the host, too"
    assert len(pages.runs([Move("a", 1, 3, [0, 1], [block, 0])])) == 2
    elsewhere = [place_of(1, 0), place_of(2, block)]
    assert len(pages.runs([Move("a", 1, 3, [0, 1], elsewhere)])) == 2
    two_ranks = BlockPages(0, 2, PAGE_BYTES, 16, 64)
    assert len(two_ranks.runs([Move("a", 1, 3, [0, 1], [0, 2 * block])])) == 2


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC", "LBHNC with gaps"])
def test_pages_of_any_strides_become_blocks_and_come_back(order: str, seed: int) -> None:
    rng = random.Random(f"{seed} {order}")
    for _ in range(50):
        layers, layer_bytes = rng.randrange(1, 5), 8 * rng.randrange(1, 5)
        per_block, tp_size, pages = rng.randrange(1, 5), rng.randrange(1, 4), rng.randrange(2, 12)
        rank, is_alike = rng.randrange(tp_size), rng.random() < 0.3
        gap = rng.randrange(1, 4) if order == "LBHNC with gaps" else 0
        outer = (pages, layers) if order == "BLHNC" else (layers, pages + gap)
        memory = np.frombuffer(rng.randbytes(layer_bytes * outer[0] * outer[1]), np.uint8).copy()
        kv = memory.reshape(*outer, layer_bytes)
        kv = kv if order == "BLHNC" else kv.swapaxes(0, 1)[:pages]  # [pages, layers, bytes]
        geometry = BlockPages(
            rank,
            tp_size,
            layers * layer_bytes,
            4,
            4 * per_block,
            is_alike,
            layers=layers,
            layer_stride_bytes=kv.strides[1],
            block_stride_bytes=kv.strides[0],
        )
        first, block_ids = rng.randrange(per_block), rng.sample(range(pages), rng.randint(1, pages))
        if rng.random() < 0.5:
            block_ids.sort()
        blocks = -(-(first + len(block_ids)) // per_block)
        slots = rng.sample(range(blocks + 2), blocks)
        places = [slot * geometry.block_bytes for slot in slots]
        runs = geometry.runs([Move("a", 1, first, block_ids, places)])
        for run, after in itertools.pairwise(runs):
            ends = run.pages_offset + run.size_bytes, run.place + run.size_bytes
            assert ends != (after.pages_offset, after.place), "neighbours are two copies"

        host = np.zeros((blocks + 2) * geometry.block_bytes, np.uint8)
        for at, place, size_bytes in runs:
            host[place : place + size_bytes] = memory[at : at + size_bytes]
        parts = 1 if is_alike else tp_size
        gathered = np.zeros((blocks + 2, parts, per_block, layers, layer_bytes), np.uint8)
        for page, block_id in enumerate(block_ids, first):
            block, part = divmod(page, per_block)
            gathered[slots[block], 0 if is_alike else rank, part] = kv[block_id]
        assert (host == gathered.reshape(-1)).all()

        before = np.zeros_like(kv)
        before[block_ids] = kv[block_ids]
        memory[:] = 0
        for at, place, size_bytes in runs:
            memory[at : at + size_bytes] = host[place : place + size_bytes]
        assert (kv == before).all(), "only these pages are written"
