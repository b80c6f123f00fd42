"""The memory of the KV pages: a byte array for the store, a tensor for the model.

Page-major layout: page p is one span of bytes in the layout of a block, [layers, kv_factor,
kv_heads, block_tokens, head_dim]. So moving a block is one copy, and each layer is one span.

On a CPU the array and the tensor are the same memory. On a GPU the array is a pinned mirror of the
tensor in host memory. `import_pages` copies pages to the GPU, and `export_pages` and `begin_export`
copy them back, concurrently with steps. `arrive` makes later steps wait for copies into pages.

All memory is touched at construction. So the first request causes no page faults, and a machine
with too little memory fails at the start.

Not here: the allocation of pages (pages.py).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.torch import fp8
from backends.engine.torch.gpu.page_copies import CopyQueue, Done, PagesArriving, StreamQueue, runs
from mooncake_store.layout import KvLayout
from mooncake_store.process.available_memory import memory_available_bytes

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # dtypes of computation
Pages = Sequence[int] | NDArray[np.int64]
KV_DTYPES = {**TORCH_DTYPES, "fp8": fp8.DTYPE}


class KvMemory:
    def __init__(
        self,
        layout: KvLayout,
        pages_max: int,
        device: torch.device,
        is_mirrored: bool | None = None,  # has a mirror in host memory; None: if not on the CPU
        queue: CopyQueue | None = None,  # makes the copies of a mirror; None: the device's queue
    ) -> None:
        assert pages_max > 0, pages_max
        self.layout = layout
        self.is_mirrored = device.type != "cpu" if is_mirrored is None else is_mirrored
        size_bytes = pages_max * layout.block_bytes
        if size_bytes > (available_bytes := memory_available_bytes()):
            raise MemoryError(
                f"{pages_max} KV pages need {size_bytes / 2**20:,.0f} MiB, "
                f"{available_bytes / 2**20:,.0f} MiB are left; lower kv_bytes"
            )
        self.bytes = _faulted(size_bytes, device.type == "cuda")
        host = torch.from_numpy(self.bytes).view(KV_DTYPES[layout.dtype])
        self._host = host.view(pages_max, *_page_shape(layout))
        self.pool = torch.zeros_like(self._host, device=device) if self.is_mirrored else self._host
        own = StreamQueue(device) if device.type == "cuda" else CopyQueue()
        self._queue = own if queue is None else queue
        self._arrivals = PagesArriving(pages_max * layout.layers if self.is_mirrored else 0)
        self._see_rows()

    def folded(self, layers: int) -> KvMemory:
        """This memory as pages of `layers` layers: layer ring buffers (layer_passes.py)."""
        layout = replace(self.layout, layers=layers)
        shape = _page_shape(layout)
        rings = len(self.bytes) // layout.block_bytes
        seen = copy(self)
        seen.layout = layout
        seen._host = self._host.view(-1, *shape[1:])[: rings * layers].view(rings, *shape)
        seen.pool = self.pool.view(-1, *shape[1:])[: rings * layers].view(rings, *shape)
        seen._see_rows()
        return seen

    def _see_rows(self) -> None:
        layout, pool = self.layout, self.pool
        if layout.dtype == "fp8":  # torch gathers and scatters bytes, not fp8
            pool = pool.view(torch.uint8)
        # Two views of the memory as rows for each layer, which begin at the layer's first row. So
        # row indices that are computed for layer 0 are valid for all layers.
        heads_rows = pool.view(-1, layout.block_tokens * layout.head_dim)
        token_rows = pool.view(-1, layout.head_dim)
        step = layout.rows
        self.page_rows = [heads_rows[layer * step :] for layer in range(layout.layers)]
        self.token_rows = [
            token_rows[layer * step * layout.block_tokens :] for layer in range(layout.layers)
        ]

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros. Attention reads masked values too, and 0 x NaN would be NaN."""
        for page in pages:
            self.pool[page].zero_()

    def import_pages(self, pages: Sequence[int], layer: int | None = None) -> None:
        """Copy pages, or one layer of them, from the mirror, if there is one. No running step may
        use these pages. Any thread."""
        if self.is_mirrored:
            parts = _parts(pages, layer)
            done = self._queue.bring([(self.pool[part], self._host[part]) for part in parts])
            self._arrivals.sent(self._units(pages, layer), done)

    def arrive(self, pages: Pages, layer: int | None = None) -> None:
        """Make the computing stream wait for copies into these pages, or one layer of them."""
        if self.is_mirrored:
            self._arrivals.hold(self._units(pages, layer))

    def step_is_begun(self) -> None:
        if self.is_mirrored:
            self._queue.step_is_begun()

    def export_pages(self, pages: Sequence[int]) -> None:
        if self.is_mirrored:
            self.arrive(pages)  # else the export would overwrite pages that are being imported
            self._fetch(pages).synchronize()

    def begin_export(self, pages: Sequence[int], layer: int) -> Done:
        """Start to copy a computed layer of these pages to `bytes`."""
        return self._fetch(pages, layer) if self.is_mirrored else Done()

    def _fetch(self, pages: Sequence[int], layer: int | None = None) -> Done:
        parts = _parts(pages, layer)
        return self._queue.fetch([(self._host[part], self.pool[part]) for part in parts])

    def _units(self, pages: Pages, layer: int | None = None) -> NDArray[np.int64]:
        """Unit numbers of these pages, or of one layer of them, in `PagesArriving`."""
        layers = self.layout.layers
        first = np.asarray(pages, dtype=np.int64) * layers
        if layer is not None:
            return first + layer
        return (first[:, None] + np.arange(layers)).ravel()


def _parts(pages: Sequence[int], layer: int | None) -> list[slice] | list[tuple[int, int]]:
    """Index of each part to copy: a slice for each run of pages, or (page, layer) of each page."""
    return list(runs(pages)) if layer is None else [(page, layer) for page in pages]


def _page_shape(layout: KvLayout) -> tuple[int, ...]:
    heads = (layout.kv_factor, layout.kv_heads)
    return (layout.layers, *heads, layout.block_tokens, layout.head_dim)


def _faulted(size_bytes: int, is_pinned: bool) -> NDArray[np.uint8]:
    """Zeroed bytes, aligned to memory pages of the OS, which are all allocated."""
    if is_pinned:  # a GPU copies to and from pinned memory faster, and asynchronously
        pinned: NDArray[np.uint8] = torch.zeros(
            size_bytes, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pinned
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without huge pages the engine is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses in gathers
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:: mmap.PAGESIZE] = 0
    return array
