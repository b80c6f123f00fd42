"""Where vLLM's pages lie, for each of its layouts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backends.engine.vllm.pages import PagesRefused, block_pages, bytes_of, layers_of

LAYERS, BLOCKS, HEADS, TOKENS, SCALARS = 3, 5, 2, 32, 16
PAGE = HEADS * TOKENS * SCALARS  # scalars of one layer of a page

Caches = dict[str, torch.Tensor]


def views(layer_stride: int, block_stride: int, offset: int = 0, blocks: int = BLOCKS) -> Caches:
    size = offset + (LAYERS - 1) * layer_stride + (blocks - 1) * block_stride + PAGE
    whole = torch.arange(size, dtype=torch.float32)
    shape, inner = (blocks, HEADS, TOKENS, SCALARS), (TOKENS * SCALARS, SCALARS, 1)
    return {
        f"layer.{i}": whole.as_strided(shape, (block_stride, *inner), offset + i * layer_stride)
        for i in range(LAYERS)
    }


LAYOUTS: dict[str, Callable[[], Caches]] = {
    "layer by layer": lambda: views(BLOCKS * PAGE, PAGE),
    "block by block": lambda: views(PAGE, LAYERS * PAGE),
    "with gaps": lambda: views(BLOCKS * PAGE + 7, PAGE, offset=13),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_runs_of_a_page_are_its_layers(layout: str) -> None:
    kv = LAYOUTS[layout]()
    layers = layers_of(kv, BLOCKS)
    pages = block_pages(layers, 0, 1, TOKENS, 64, is_alike=False)
    assert pages.page_bytes == LAYERS * PAGE * 4
    memory = bytes_of(kv).numpy()
    from backends.engine.connected.block_pages import Move

    for block in range(BLOCKS):
        got = b"".join(
            memory[run.pages_offset : run.pages_offset + run.size_bytes].tobytes()
            for run in pages.runs([Move("a", "a", 0, [block], [0])])
        )
        assert got == b"".join(each[block].contiguous().numpy().tobytes() for each in kv.values())


def test_a_page_may_be_several_blocks_of_the_attention_kernel() -> None:
    layers = layers_of(views(2 * BLOCKS * PAGE, PAGE, blocks=2 * BLOCKS), BLOCKS)
    assert layers.page_bytes == 2 * PAGE * 4
    assert layers.block_stride_bytes == 2 * PAGE * 4


def of_other_shape() -> Caches:
    kv = views(BLOCKS * PAGE, PAGE)
    kv["layer.1"] = kv["layer.1"][:, :1]
    return kv


def in_several_allocations() -> Caches:
    return {name: each.clone() for name, each in views(BLOCKS * PAGE, PAGE).items()}


def at_uneven_distances() -> Caches:
    kv = views(BLOCKS * PAGE, PAGE)
    kv["layer.2"] = kv["layer.0"]
    return kv


def with_holes() -> Caches:
    whole = torch.zeros(LAYERS * BLOCKS * PAGE * 4)
    shape, strides = (BLOCKS, HEADS, TOKENS, SCALARS), (4 * PAGE, 4 * TOKENS * SCALARS, SCALARS, 1)
    return {f"{i}": whole.as_strided(shape, strides, i * 16) for i in range(LAYERS)}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (dict, "no KV of attention"),
        (of_other_shape, "different shapes"),
        (in_several_allocations, "several allocations"),
        (at_uneven_distances, "different distances"),
        (with_holes, "not dense"),
    ],
)
def test_pages_that_are_no_whole_runs_are_refused_with_the_reason(
    made: Callable[[], Caches], said: str
) -> None:
    with pytest.raises(PagesRefused, match=said):
        layers_of(made(), BLOCKS)
