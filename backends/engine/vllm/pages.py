"""Where vLLM's pages lie in the memory of a rank, from what it registers.

vLLM registers a view of each layer, [blocks, heads, tokens, scalars]. All layers lie in one
allocation, at equal distances. A page of ours is one of its blocks with all layers. An attention
kernel may have smaller blocks than the scheduler: then a view has several for each page, one after
the other.

The bytes of a layer of a page are dense, in whatever order vLLM has its dimensions. The order is in
the fingerprint (description.py), so workers that exchange blocks have the same. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from backends.engine.connected.block_pages import BlockPages


class PagesRefused(ValueError):
    """These pages cannot be copied as whole blocks."""


class Layers(NamedTuple):
    count: int
    page_bytes: int  # of one layer
    layer_stride_bytes: int
    block_stride_bytes: int


def layers_of(kv_caches: Mapping[str, Any], blocks: int) -> Layers:
    """`blocks`: pages of the scheduler. Raises PagesRefused."""
    tensors = list(kv_caches.values())
    if not tensors or not all(hasattr(each, "stride") for each in tensors):
        raise PagesRefused("vLLM has registered no KV of attention, or state of another kind")
    shapes = {(tuple(each.shape), tuple(each.stride()), str(each.dtype)) for each in tensors}
    if len(shapes) > 1:
        raise PagesRefused(f"layers have KV of different shapes: {sorted(shapes)}")
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    if any(each.untyped_storage().data_ptr() != storage for each in tensors):
        raise PagesRefused("layers have KV in several allocations")
    parts, rest = divmod(first.shape[0], blocks)
    dense = 1 + sum(
        (size - 1) * step for size, step in zip(first.shape[1:], first.stride()[1:], strict=True)
    )
    scalars = first[0].numel()
    if rest or dense != scalars or (parts > 1 and first.stride(0) != scalars):
        raise PagesRefused(
            f"a block of {tuple(first.shape)} with strides {tuple(first.stride())} is not dense, "
            f"with {blocks} pages in the scheduler"
        )
    item = first.element_size()
    starts = [each.data_ptr() for each in tensors]
    strides = {after - before for before, after in itertools.pairwise(starts)}
    if len(strides) > 1:
        raise PagesRefused(f"layers lie at different distances: {sorted(strides)} bytes")
    page_bytes = parts * scalars * item
    layer_stride = strides.pop() if strides else page_bytes
    if layer_stride < page_bytes:
        raise PagesRefused(f"layers overlap: {page_bytes} bytes, {layer_stride} apart")
    return Layers(len(tensors), page_bytes, layer_stride, parts * first.stride(0) * item)


def block_pages(
    layers: Layers, rank: int, tp_size: int, page_tokens: int, block_tokens: int, is_alike: bool
) -> BlockPages:
    return BlockPages(
        rank,
        tp_size,
        layers.count * layers.page_bytes,
        page_tokens,
        block_tokens,
        is_alike,
        layers=layers.count,
        layer_stride_bytes=layers.layer_stride_bytes,
        block_stride_bytes=layers.block_stride_bytes,
    )


def bytes_of(kv_caches: Mapping[str, Any]) -> Any:
    """The memory of all layers, from the first one on, as a contiguous tensor of bytes."""
    import torch

    first = next(iter(kv_caches.values()))
    storage = first.untyped_storage()
    start = first.data_ptr() - storage.data_ptr()
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    return whole[start:]
