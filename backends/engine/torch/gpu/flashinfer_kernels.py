"""FlashInfer's kernels over our pages, which have its layout HND: the one file that imports it.

Written against the documented interface of 0.7 (BatchDecodeWithPagedKVCacheWrapper and
BatchPrefillWithPagedKVCacheWrapper: plan with host arrays, then run once per layer). It has never
run: there was no GPU. So paged_kernels.py tries it before it is used.

A wrapper holds one plan at a time. Those of one step (its prompts, its works of one token) have a
wrapper each; a plan that finds its wrapper with another one's plan makes its own again, so that
several prompts may pass layer by layer in turns.

Not here: which kernels are used (paged_kernels.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from backends.engine.torch.gpu.paged_plan import (
    Integers,
    PagedAttend,
    PagedWorks,
    StaticAttend,
)
from backends.engine.torch.gpu.staging import Staging
from mooncake_store.layout import KvLayout, blocks_touched

WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
# Query heads to a KV head from which its tensor cores are worth using, by its documentation.
SHARED_FOR_TENSOR_CORES = 4


class FlashInferKernels:
    def __init__(
        self, layout: KvLayout, heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._package: Any = importlib.import_module("flashinfer")
        self.name = f"flashinfer {getattr(self._package, '__version__', '')}".strip()
        self._layout, self._heads, self._dtype, self._device = layout, heads, dtype, device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._has_tensor_cores = heads // layout.kv_heads >= SHARED_FOR_TENSOR_CORES
        self._of_decodes = _Wrapper(
            self._package.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=self._has_tensor_cores
            )
        )
        self._of_prefills = _Wrapper(
            self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        )

    def planned(self, works: PagedWorks, staging: Staging) -> PagedAttend:
        wrapper = self._of_decodes if works.is_decode else self._of_prefills
        return _FlashInferAttend(self, wrapper, works)

    def static(self, works: int, width: int) -> StaticAttend:
        return _FlashInferStatic(self, works, width)

    def plan(self, wrapper: Any, works: PagedWorks) -> None:
        """Host arrays: its planning reads them there."""
        block_tokens = self._layout.block_tokens
        tables = [
            table[: blocks_touched(int(context), block_tokens)]
            for table, context in zip(works.tables, works.contexts, strict=True)
        ]
        page_starts = np.cumsum([0, *(len(table) for table in tables)])
        in_last_page = (works.contexts - 1) % block_tokens + 1
        paged = [_int32(a) for a in (page_starts, np.concatenate(tables), in_last_page)]
        shape = (self._heads, self._layout.kv_heads, self._layout.head_dim, block_tokens)
        if works.is_decode:
            wrapper.plan(*paged, *shape, q_data_type=self._dtype, kv_data_type=self._dtype)
            return
        starts = _int32(np.cumsum([0, *works.counts]))
        wrapper.plan(
            starts, *paged, *shape, causal=True, q_data_type=self._dtype, kv_data_type=self._dtype
        )

    def static_wrapper(self, works: int, width: int) -> Any:
        def integers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._has_tensor_cores,
            paged_kv_indptr_buffer=integers(works + 1),
            paged_kv_indices_buffer=integers(works * width),
            paged_kv_last_page_len_buffer=integers(works),
        )


class _Wrapper:
    """One of FlashInfer's, and whose plan it holds."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.planned_for: object | None = None


class _FlashInferAttend:
    def __init__(self, kernels: FlashInferKernels, wrapper: _Wrapper, works: PagedWorks) -> None:
        self.works: PagedWorks | None = works
        self._kernels, self._wrapper, self._planned = kernels, wrapper, works

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if self._wrapper.planned_for is not self:
            self._wrapper.planned_for = None
            self._kernels.plan(self._wrapper.theirs, self._planned)
            self._wrapper.planned_for = self
        seen: torch.Tensor = self._wrapper.theirs.run(queries, (pages[:, 0], pages[:, 1]))
        return seen


class _FlashInferStatic:
    def __init__(self, kernels: FlashInferKernels, works: int, width: int) -> None:
        self._kernels = kernels
        self._wrapper = kernels.static_wrapper(works, width)

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        counts = np.ones(len(contexts), dtype=np.int64)
        self._kernels.plan(self._wrapper, PagedWorks(counts, contexts, list(tables)))

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> PagedAttend:
        return _FlashInferReplayed(self._wrapper)


class _FlashInferReplayed:
    works: PagedWorks | None = None

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self._wrapper.run(queries, (pages[:, 0], pages[:, 1]))
        return seen


def _int32(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int32))
