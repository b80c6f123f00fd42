"""FlashInfer's attention kernels, for pages in its layout HND. Only this file imports FlashInfer.

The code follows the documentation of FlashInfer 0.7. A BatchDecodeWithPagedKVCacheWrapper or
BatchPrefillWithPagedKVCacheWrapper plans a step with host arrays, then runs once per layer. This
code has never run on a GPU, so paged_kernels.py tests it before use.

There is one wrapper for decode sequences and one for prefill sequences. A wrapper holds one plan at
a time, so `_attend` plans again if the wrapper holds the plan of other sequences. This happens in
layer-wise prefill, which alternates between several chunks.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from backends.engine.torch.gpu.paged_plan import Attend, Integers, PagedSequences, StaticAttend
from backends.engine.torch.gpu.staging import Staging
from mooncake_store.layout import KvLayout, blocks_touched

WORKSPACE_BYTES = 128 * 2**20  # recommended by FlashInfer's documentation
# Query heads per KV head from which FlashInfer's documentation recommends tensor cores.
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
        self._wrappers = {  # PagedSequences.is_decode -> wrapper
            True: self._package.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=self._has_tensor_cores
            ),
            False: self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND"),
        }
        # PagedSequences.is_decode -> sequences whose plan the wrapper holds; None: no valid plan.
        self._planned_for: dict[bool, PagedSequences | None] = {}

    def planned(self, sequences: PagedSequences, staging: Staging) -> Attend:
        return partial(self._attend, sequences, sequences.is_decode)

    def _attend(
        self, sequences: PagedSequences, is_decode: bool, pages: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        wrapper = self._wrappers[is_decode]
        if self._planned_for.get(is_decode) is not sequences:
            self._planned_for[is_decode] = None  # `plan` may raise
            self.plan(wrapper, sequences)
            self._planned_for[is_decode] = sequences
        return _run(wrapper, pages, queries)

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

    def static(self, sequences: int, width: int) -> StaticAttend:
        def integers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._has_tensor_cores,
            paged_kv_indptr_buffer=integers(sequences + 1),
            paged_kv_indices_buffer=integers(sequences * width),
            paged_kv_last_page_len_buffer=integers(sequences),
        )
        return _FlashInferStatic(self, wrapper)


@dataclass(frozen=True, slots=True)
class _FlashInferStatic:
    kernels: FlashInferKernels
    wrapper: Any  # FlashInfer's decode wrapper with static buffers

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        counts = np.ones(len(contexts), dtype=np.int64)
        self.kernels.plan(self.wrapper, PagedSequences(counts, contexts, list(tables)))

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> Attend:
        return partial(_run, self.wrapper)


def _run(wrapper: Any, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    seen: torch.Tensor = wrapper.run(queries, (pages[:, 0], pages[:, 1]))
    return seen


def _int32(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int32))
