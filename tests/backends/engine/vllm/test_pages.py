"""Where pages lie in memory, from the views of layers that vLLM registers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.connected.block_pages import Move
from backends.engine.connected.copier import HostCopier
from backends.engine.vllm.pages import PagesRefused, block_pages, bytes_of, layers_of

BLOCKS, HEADS, TOKENS, SCALARS = 5, 2, 4, 6  # pages; and of a layer of a page
SHAPE = (HEADS, TOKENS, SCALARS)
LAYER_BYTES = HEADS * TOKENS * SCALARS * 4


def views(tensor: torch.Tensor, layer_axis: int) -> dict[str, torch.Tensor]:
    layers = tensor.shape[layer_axis]
    return {f"layer.{i}": tensor.select(layer_axis, i) for i in range(layers)}


def layer_major(layers: int = 3, gap_blocks: int = 0) -> dict[str, torch.Tensor]:
    """As on a CPU."""
    memory = torch.randn(layers, BLOCKS + gap_blocks, *SHAPE)
    return {name: view[:BLOCKS] for name, view in views(memory, 0).items()}


def block_major(layers: int = 3, gap_layers: int = 0) -> dict[str, torch.Tensor]:
    """As a GPU is asked for it."""
    memory = torch.randn(BLOCKS, layers + gap_layers, *SHAPE)
    return dict(list(views(memory, 1).items())[:layers])


def tokens_first(layers: int = 3) -> dict[str, torch.Tensor]:
    """The bytes of a page are in another order than its dimensions."""
    memory = torch.randn(layers, BLOCKS, TOKENS, HEADS, SCALARS)
    return {name: view.transpose(1, 2) for name, view in views(memory, 0).items()}


def kernel_blocks(layers: int = 3, parts: int = 2) -> dict[str, torch.Tensor]:
    """An attention kernel has `parts` blocks for each page of the scheduler."""
    memory = torch.randn(layers, BLOCKS * parts, HEADS, TOKENS // parts, SCALARS)
    return views(memory, 0)


def behind_other_bytes(layers: int = 3) -> dict[str, torch.Tensor]:
    """The first layer does not begin with the allocation."""
    memory = torch.randn(layers + 1, BLOCKS, *SHAPE)
    return dict(list(views(memory, 0).items())[1:])


LAYOUTS = {
    "layer-major": layer_major,
    "layer-major with gaps": lambda: layer_major(gap_blocks=2),
    "block-major": block_major,
    "block-major with gaps": lambda: block_major(gap_layers=1),
    "one layer": lambda: layer_major(layers=1),
    "tokens before heads": tokens_first,
    "kernel blocks": kernel_blocks,
    "behind other bytes": behind_other_bytes,
}


def page_of(kv_caches: dict[str, torch.Tensor], page: int) -> np.ndarray:
    """All layers of a page, as bytes in the order of memory."""
    found = []
    for view in kv_caches.values():
        parts = view.shape[0] // BLOCKS
        whole = view[page * parts : (page + 1) * parts]
        order = sorted(range(whole.dim()), key=lambda axis: -whole.stride(axis))
        found.append(whole.permute(order).contiguous().view(torch.uint8).reshape(-1).numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_each_layout_become_blocks_and_come_back(layout: str, seed: int) -> None:
    rng = random.Random(f"{seed} {layout}")
    kv_caches = LAYOUTS[layout]()
    layers = layers_of(kv_caches, BLOCKS)
    assert (layers.count, layers.page_bytes) == (len(kv_caches), LAYER_BYTES)
    pages = block_pages(layers, 0, 1, TOKENS, 2 * TOKENS, is_alike=False)
    pages.check(2 * len(kv_caches) * LAYER_BYTES)
    pool = np.zeros(2 * pages.block_bytes, np.uint8)
    copier = HostCopier(bytes_of(kv_caches), pool)
    ids = rng.sample(range(BLOCKS), 3)
    move = Move("a", "a", 0, ids, [0, pages.block_bytes])
    copier.save(pages.runs([move]), None)
    wanted = [page_of(kv_caches, page) for page in ids]
    assert (pool[: 3 * pages.page_bytes] == np.concatenate(wanted)).all()
    others = {page: page_of(kv_caches, page) for page in range(BLOCKS)}
    targets = rng.sample(range(BLOCKS), 3)
    copier.load_aside(pages.runs([move._replace(block_ids=targets)]), None)
    others.update(zip(targets, wanted, strict=True))
    for page in range(BLOCKS):
        assert (page_of(kv_caches, page) == others[page]).all(), page


def test_a_page_of_all_layers_in_one_run_is_one_copy() -> None:
    pages = block_pages(layers_of(block_major(), BLOCKS), 0, 1, TOKENS, TOKENS, is_alike=False)
    assert len(pages.runs([Move("a", "a", 0, [2], [0])])) == 1
    pages = block_pages(layers_of(layer_major(), BLOCKS), 0, 1, TOKENS, TOKENS, is_alike=False)
    assert len(pages.runs([Move("a", "a", 0, [2], [0])])) == 3


def different_shapes() -> dict[str, torch.Tensor]:
    found = layer_major()
    return {**found, "layer.2": found["layer.2"][..., :3]}


def different_dtypes() -> dict[str, torch.Tensor]:
    found = layer_major()
    return {**found, "layer.2": found["layer.2"].to(torch.float16)}


def several_allocations() -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in layer_major().items()}


def different_distances() -> dict[str, torch.Tensor]:
    found = layer_major(layers=4)
    del found["layer.1"]
    return found


def shared_by_two_layers() -> dict[str, torch.Tensor]:
    (first, *_) = layer_major().values()
    return {"layer.0": first, "layer.1": first}


def from_the_last_layer() -> dict[str, torch.Tensor]:
    return dict(reversed(layer_major().items()))


def with_holes_in_a_page() -> dict[str, torch.Tensor]:
    return {name: view[..., :3] for name, view in layer_major().items()}


def kernel_blocks_apart() -> dict[str, torch.Tensor]:
    memory = torch.randn(BLOCKS * 2, 3, HEADS, TOKENS // 2, SCALARS)
    return views(memory, 1)


def of_another_number_of_pages() -> dict[str, torch.Tensor]:
    return {name: view[: BLOCKS - 1] for name, view in layer_major().items()}


REFUSED: list[tuple[Any, str]] = [
    (dict, "no KV of attention"),
    (lambda: {"layer.0": [torch.zeros(1), torch.zeros(1)]}, "state of another kind"),
    (different_shapes, "different shapes"),
    (different_dtypes, "different shapes"),
    (several_allocations, "several allocations"),
    (different_distances, "different distances"),
    (shared_by_two_layers, "layers overlap"),
    (from_the_last_layer, "layers overlap"),
    (with_holes_in_a_page, "not dense"),
    (kernel_blocks_apart, "not dense"),
    (of_another_number_of_pages, "5 pages in the scheduler"),
]


@pytest.mark.parametrize(("made", "reason"), REFUSED)
def test_memory_whose_pages_are_no_whole_runs_is_refused(made: Any, reason: str) -> None:
    with pytest.raises(PagesRefused, match=reason):
        layers_of(made(), BLOCKS)


def test_pages_that_do_not_make_up_the_blocks_are_refused() -> None:
    layers = layers_of(layer_major(), BLOCKS)
    pages = block_pages(layers, 0, 1, TOKENS, 2 * TOKENS, is_alike=False)
    with pytest.raises(ValueError, match="do dtype, checkpoint and tp_size agree"):
        pages.check(2 * 3 * LAYER_BYTES + 4)
    pages = block_pages(layers, 0, 1, TOKENS, 2 * TOKENS + 1, is_alike=False)
    with pytest.raises(ValueError, match="no multiple"):
        pages.check(2 * 3 * LAYER_BYTES)


def test_ranks_have_their_parts_of_a_block_unless_they_are_alike() -> None:
    layers = layers_of(layer_major(), BLOCKS)
    apart = block_pages(layers, 1, 2, TOKENS, TOKENS, is_alike=False)
    alike = block_pages(layers, 1, 2, TOKENS, TOKENS, is_alike=True)
    assert (apart.block_bytes, alike.block_bytes) == (6 * LAYER_BYTES, 3 * LAYER_BYTES)
    first = [pages.runs([Move("a", "a", 0, [0], [0])])[0].place for pages in (apart, alike)]
    assert first == [3 * LAYER_BYTES, 0]
