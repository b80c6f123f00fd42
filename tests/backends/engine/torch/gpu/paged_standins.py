"""The kernels of a GPU, in plain torch: with the signatures of the real ones, which need CUDA.

Not here: what the adapters make of them (backends/engine/torch/gpu/paged_kernels.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """queries [n, heads, D], the last of keys and values [context, kv_heads, D]; float32."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (kv.float().repeat_interleave(shared, 1) for kv in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * queries.shape[2] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(scores.shape[2] - len(queries) + 1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn over pages, as its documentation says."""
    assert seqused_k is not None and block_table is not None and enable_gqa
    for integers in (cu_seq_q, seqused_k, block_table):
        assert integers.dtype == torch.int32 and integers.is_contiguous()
    works, page_tokens = len(block_table), key.shape[1]
    assert key.dim() == 4 and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert len(cu_seq_q) == works + 1 and len(seqused_k) == works
    assert int(cu_seq_q[-1]) == len(query) and int(cu_seq_q.diff().max()) <= max_q
    assert int(seqused_k.max()) <= max_k <= block_table.shape[1] * page_tokens
    if cu_seq_k is not None:
        assert cu_seq_k.diff().tolist() == seqused_k.tolist() and cu_seq_k.dtype == torch.int32
    assert window_size == ((-1, -1) if max_q == 1 else (-1, 0))
    parts = []
    for work, used in enumerate(seqused_k.tolist()):
        table = block_table[work, : -(-used // page_tokens)].long()
        keys, values = (kv[table].flatten(0, 1)[:used] for kv in (key, value))
        parts.append(attention(query[cu_seq_q[work] : cu_seq_q[work + 1]], keys, values))
    return torch.cat(parts)


class _Wrapper:
    """What both wrappers of FlashInfer share: CSR page tables, HND pages, plan before run."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8 and not workspace.any()
        self.plans = 0

    def _planned(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        for integers in (starts, indptr, indices, last_page_len):
            assert integers.dtype == torch.int32
        assert len(starts) == len(indptr) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        assert int(last_page_len.min()) >= 1 and int(last_page_len.max()) <= page_size
        self.starts, self.indptr, self.indices = starts.clone(), indptr.clone(), indices.clone()
        self.last_page_len = last_page_len.clone()
        self.shape = (heads, kv_heads, head_dim, page_size)
        self.plans += 1

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *args: Any
    ) -> torch.Tensor:
        heads, kv_heads, head_dim, page_size = self.shape
        keys, values = paged_kv_cache
        assert q.shape == (int(self.starts[-1]), heads, head_dim), (q.shape, self.starts)
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page_size, head_dim)
        assert keys.stride() == values.stride(), "the kernels take one stride for both"
        parts = []
        for work, last in enumerate(self.last_page_len.tolist()):
            table = self.indices[self.indptr[work] : self.indptr[work + 1]].long()
            used = (len(table) - 1) * page_size + last
            own = [kv[table].transpose(1, 2).flatten(0, 1)[:used] for kv in (keys, values)]
            parts.append(attention(q[self.starts[work] : self.starts[work + 1]], *own))
        return torch.cat(parts)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.fixed = (
            (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            if use_cuda_graph
            else None
        )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        if self.fixed is not None:
            starts, room, last_page_tokens = self.fixed
            assert starts is not None and room is not None and last_page_tokens is not None
            assert starts.dtype == room.dtype == last_page_tokens.dtype == torch.int32
            assert len(starts) == len(indptr) == len(last_page_tokens) + 1 and len(indices) <= len(
                room
            )
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._planned(
            rows, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        self._planned(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
        )


FLASHINFER = SimpleNamespace(
    __version__="stand-in",
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
)
