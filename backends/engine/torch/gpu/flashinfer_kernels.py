"""FlashInfer's attention kernels over the pages, which have its layout HND. Only this file imports
it.

Written for the documented interface of 0.7 (BatchDecodeWithPagedKVCacheWrapper and
BatchPrefillWithPagedKVCacheWrapper: plan with host arrays, then run once per layer). It has never
run on a GPU, so paged_kernels.py tests it before use.

A wrapper holds one plan at a time. Decode and prefill sequences of a step have a wrapper each. A
plan plans again if its wrapper holds another plan, so several layer-wise prompts may alternate.

Not here: the choice of kernels (paged_kernels.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from backends.engine.torch.gpu.paged_plan import Integers, PagedAttend, PagedSequences, StaticAttend
from backends.engine.torch.gpu.staging import Staging
from mooncake_store.layout import KvLayout, blocks_touched

WORKSPACE_BYTES = 128 * 2**20  # recommended by FlashInfer's documentation
# Query heads per KV head from which tensor cores pay, according to its documentation.
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

    def planned(self, sequences: PagedSequences, staging: Staging) -> PagedAttend:
        wrapper = self._of_decodes if sequences.is_decode else self._of_prefills
        return _FlashInferAttend(self, wrapper, sequences)

    def static(self, sequences: int, width: int) -> StaticAttend:
        return _FlashInferStatic(self, sequences, width)

    def plan(self, wrapper: Any, sequences: PagedSequences) -> None:
        block_tokens = self._layout.block_tokens
        tables = [
            table[: blocks_touched(int(context), block_tokens)]
            for table, context in zip(sequences.tables, sequences.contexts, strict=True)
        ]
        page_starts = np.cumsum([0, *(len(table) for table in tables)])
        in_last_page = (sequences.contexts - 1) % block_tokens + 1
        paged = [_int32(a) for a in (page_starts, np.concatenate(tables), in_last_page)]
        shape = (self._heads, self._layout.kv_heads, self._layout.head_dim, block_tokens)
        if sequences.is_decode:
            wrapper.plan(*paged, *shape, q_data_type=self._dtype, kv_data_type=self._dtype)
            return
        starts = _int32(np.cumsum([0, *sequences.counts]))
        wrapper.plan(
            starts, *paged, *shape, causal=True, q_data_type=self._dtype, kv_data_type=self._dtype
        )

    def static_wrapper(self, sequences: int, width: int) -> Any:
        def integers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._has_tensor_cores,
            paged_kv_indptr_buffer=integers(sequences + 1),
            paged_kv_indices_buffer=integers(sequences * width),
            paged_kv_last_page_len_buffer=integers(sequences),
        )


class _Wrapper:
    """A FlashInfer wrapper and the owner of its current plan."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.planned_for: object | None = None


class _FlashInferAttend:
    def __init__(
        self, kernels: FlashInferKernels, wrapper: _Wrapper, sequences: PagedSequences
    ) -> None:
        self.sequences: PagedSequences | None = sequences
        self._kernels, self._wrapper, self._planned = kernels, wrapper, sequences

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if self._wrapper.planned_for is not self:
            self._wrapper.planned_for = None
            self._kernels.plan(self._wrapper.theirs, self._planned)
            self._wrapper.planned_for = self
        seen: torch.Tensor = self._wrapper.theirs.run(queries, (pages[:, 0], pages[:, 1]))
        return seen


class _FlashInferStatic:
    def __init__(self, kernels: FlashInferKernels, sequences: int, width: int) -> None:
        self._kernels = kernels
        self._wrapper = kernels.static_wrapper(sequences, width)

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        counts = np.ones(len(contexts), dtype=np.int64)
        self._kernels.plan(self._wrapper, PagedSequences(counts, contexts, list(tables)))

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> PagedAttend:
        return _FlashInferReplayed(self._wrapper)


class _FlashInferReplayed:
    sequences: PagedSequences | None = None

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self._wrapper.run(queries, (pages[:, 0], pages[:, 1]))
        return seen


def _int32(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int32))
