"""The bytes of vLLM's pages."""

from __future__ import annotations

import numpy as np

from tests.vllm.inside.real_engine import RealVllm


def kv_pages(engine: RealVllm, block_ids: list[int]) -> list[np.ndarray]:
    """The bytes of these pages, of all layers."""
    (copies,) = engine.copies
    pages, memory = copies._pages, copies._copier._pages
    size = pages.page_bytes // pages.layers
    found = []
    for block_id in block_ids:
        start = block_id * pages.block_stride_bytes
        starts = [start + layer * pages.layer_stride_bytes for layer in range(pages.layers)]
        found.append(np.concatenate([memory[at : at + size] for at in starts]))
    return found
