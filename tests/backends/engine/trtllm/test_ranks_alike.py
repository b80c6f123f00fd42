"""Latent attention: each rank has the same rows, the store has them once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.engine.connected import messages as m
from backends.engine.trtllm.connector import aside_pages_min, pages_of
from tests.backends.engine.connected.connected import Make, expected, filled, prompt_of

pytestmark = pytest.mark.usefixtures("trtllm")
LATENT = {"kv_factor": 1, "kv_heads": 1, "head_dim": 36, "dtype": "bfloat16"}  # 32 + 4
PROMPT = prompt_of(75)
WHOLE = 72  # tokens of its whole pages


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("block_tokens", [8, 32])
def test_every_rank_loads_the_one_block_that_the_first_has_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch, tp_size: int, block_tokens: int
) -> None:
    """At prefill the other ranks have nothing in their pages: none of it may reach the store."""
    options: dict[str, Any] = {"tensor_parallel_size": tp_size, "block_tokens": block_tokens}
    prefill, decode = make(LATENT, **options), make(LATENT, **options)
    assert prefill.block_bytes == 3 * block_tokens * 36 * 2
    for rank in prefill.executor.ranks[1:]:
        monkeypatch.setattr(rank, "write", lambda *rest: None)
    store = filled(prefill, PROMPT)
    assert all(not rank.kv.any() for rank in prefill.executor.ranks[1:])

    pages = decode.stage("d", PROMPT, store, loaded_tokens=WHOLE, more_tokens=10)
    request = decode.generate(1, PROMPT, 10)
    assert decode.output(request) == expected(decode, PROMPT, 10)
    assert request.matched_tokens == WHOLE and request.local_tokens == 0
    loaded = request.block_ids[:18]  # as bytes: among any bits are such that are no number
    first, *others = (rank.kv[loaded].view(torch.uint8) for rank in decode.executor.ranks)
    assert first.any() and all(torch.equal(first, each) for each in others)
    decode.unstage("d", pages)


@pytest.mark.parametrize("aside_bytes_min", [0, 1])
def test_slots_are_read_by_all_ranks_and_filled_by_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, aside_bytes_min: int
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "aside_bytes_min": aside_bytes_min}
    store = filled(make(LATENT, **options), PROMPT)
    engine = make(LATENT, **options)
    engine.start_node()
    pages = engine.stage("read", PROMPT, store, loaded_tokens=64, in_slots=True)
    request = engine.generate(1, PROMPT, 3)
    assert request.matched_tokens == 64
    assert engine.output(request) == expected(engine, PROMPT, 3)
    engine.heard.wait_for("loaded", "read")
    engine.unstage("read", pages)

    engine = make(LATENT, **options)
    engine.start_node()
    monkeypatch.setattr(engine.executor.ranks[1], "write", lambda *rest: None)
    pages = engine.stage("fill", PROMPT, in_slots=True)
    engine.generate(2, PROMPT, 1)
    engine.heard.wait_for("saved", "fill", WHOLE)
    for block in range(64 // 16):
        node, slot = engine.filling["fill"][block]
        assert node.payload(slot).tobytes() in store.values(), f"block {block} is another one"
    engine.unstage("fill", pages)


def problem_of(
    shape: tuple[int, ...],
    page_bytes: int,
    tokens_per_block: int,
    tp_size: int,
    *block: int,
    is_alike: bool = False,
) -> str:
    """`block`: tokens and bytes of a store block."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[page_bytes // math.prod(shape[1:])]
    site = m.Site("", "", *block, is_alike=is_alike)
    try:
        kv = torch.empty(shape, dtype=dtype)
        pages_of(kv, 0, tp_size, tokens_per_block, site).check(site.block_bytes)
    except ValueError as error:
        return str(error)
    return ""


def test_pages_that_are_not_what_config_json_says_end_the_start() -> None:
    latent, heads = (8, 3, 1, 64), (8, 3, 2, 64)
    assert not problem_of(latent, 384, 16, 2, 64, 4 * 384, is_alike=True)
    assert "kv_factor 1" in problem_of(heads, 768, 16, 2, 64, 4 * 768, is_alike=True)
    assert "kv_factor 2" in problem_of(latent, 384, 16, 2, 64, 8 * 384)
    said = problem_of(latent, 768, 32, 2, 64, 4 * 384, is_alike=True)
    assert said == "", "the same bytes in longer pages"
    said_of_64 = problem_of(latent, 768, 16, 2, 64, 4 * 384, is_alike=True)
    assert "page_tokens" in said_of_64, "the engine has taken longer pages than it was told to"


def test_how_long_a_load_is_counts_what_each_rank_reads() -> None:
    site = m.Site("ipc://none", "none", 64, 4 * 1000, aside_bytes_min=10_000, is_alike=True)
    args = SimpleNamespace(
        tensor_parallel_size=4, kv_cache_config=SimpleNamespace(tokens_per_block=16)
    )
    assert aside_pages_min(site, args) == 10


def test_sizes_are_compared_before_anything_is_copied() -> None:
    good = ((8, 3, 2, 64), 768, 16, 2, 64, 2 * 4 * 768)
    assert not problem_of(*good)
    assert "no multiple" in problem_of((8, 3, 2, 64), 768, 24, 2, 64, 6144)
    assert "tp_size agree" in problem_of((8, 3, 2, 64), 768, 16, 1, 64, 6144)
    assert "shape" in problem_of((8, 64), 128, 16, 2, 64, 6144)


def test_the_limit_is_what_goes_over_one_gpu_s_bus() -> None:
    class Args:
        tensor_parallel_size = 2

        class kv_cache_config:
            tokens_per_block = 32

    def pages(aside_bytes_min: int) -> int:
        return aside_pages_min(m.Site("", "", 256, 32 * 2**20, aside_bytes_min), Args())

    assert pages(0) == 0
    assert pages(256 * 2**20) == 128, "2 MiB a page and rank"
    assert pages(1) == 1
