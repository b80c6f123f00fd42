"""Attention over paged KV: write the new K and V, gather the pages, attend.

No gathering is needed where native code reads the pages (native_layers.py), or a GPU's kernel
(gpu/paged_kernels.py).

Grouped-query attention needs no repeated K and V here: the query heads that share a KV head are
laid beside each other, as rows (last token) or as heads with stride 0 (prefill).

Not here: which tokens see what (step_plan.py), projections and RoPE (transformer.py).
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from backends.engine.torch import causal_attention, fp8, native_layers
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.paged_plan import PagedAttend, PagedKernels, PagedPlan
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.step_plan import LastGroup, PrefillSpan, StepPlan

log = logging.getLogger(__name__)


class PagedAttention:
    def __init__(
        self,
        memory: KvMemory,
        heads: int,
        dtype: torch.dtype,  # of queries, and of K and V when they are seen
        kernels: PagedKernels | None = None,
    ) -> None:
        layout = memory.layout
        assert heads % layout.kv_heads == 0, (heads, layout.kv_heads)
        self.memory = memory
        self.heads = heads
        self.kernels = kernels  # steps are to be planned for these
        self.kv_heads = layout.kv_heads
        self.shared = heads // layout.kv_heads  # query heads per KV head
        self.head_dim = layout.head_dim
        self.is_fp8 = layout.dtype == "fp8"
        self._packed = memory.pool.new_empty(0, dtype=dtype)  # K and V of a chunk's context
        self.is_native = (
            native_layers.serves(self._packed) and self.head_dim <= native_layers.HEAD_DIM_MAX
        )
        self.is_native_prefill = native_layers.serves_prefill(
            self._packed, self.shared, self.head_dim
        )
        # Reused by every layer and step: fresh memory of this size costs page faults each time.
        self._gathered = memory.page_rows[0].new_empty((0, memory.page_rows[0].shape[1]))

    def write(self, layer: int, token_rows: torch.Tensor, kv: torch.Tensor) -> None:
        """kv [tokens, 2 * kv_heads, head_dim]: K heads, then V heads."""
        rows = fp8.rounded(kv) if self.is_fp8 else kv
        self.memory.token_rows[layer].index_put_((token_rows,), rows)

    def all_tokens(self, layer: int, plan: StepPlan, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows of the plan, heads, head_dim] -> [rows, heads * head_dim]."""
        if plan.paged is not None:
            return self._all_in_place(layer, plan, plan.paged, queries)
        if not plan.prefills:
            return self.last_tokens(layer, plan, queries)
        out = queries.new_empty(len(queries), self.heads * self.head_dim)
        if plan.decodes:
            works = plan.prefills[0].first
            out[:works] = self.last_tokens(layer, plan, queries[:works])
        for span in plan.prefills:
            rows = slice(span.first, span.first + span.tokens)
            self._prefill(layer, span, queries[rows], out[rows])
        out[plan.tokens :].zero_()
        return out

    def last_tokens(self, layer: int, plan: StepPlan, queries: torch.Tensor) -> torch.Tensor:
        """queries [works, heads, head_dim] of last tokens -> [works, heads * head_dim].

        The works are all of the plan, or its works of one token, which are its first.
        """
        if plan.paged is not None:
            return self._in_place(plan.paged.lasts, layer, queries).flatten(1)
        if self.is_native and plan.seen is not None:
            pages = self.memory.pool[:, layer]
            return native_layers.attend_last_tokens(
                queries, pages, plan.seen, self.memory.layout.block_tokens
            )
        parts = [
            self._last(layer, group, queries[group.first : group.first + group.works])
            for group in (plan.lasts if len(queries) > plan.decode_works else plan.decodes)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _all_in_place(
        self, layer: int, plan: StepPlan, paged: PagedPlan, queries: torch.Tensor
    ) -> torch.Tensor:
        if paged.decodes is None and paged.prefills is not None and len(queries) == plan.tokens:
            return self._in_place(paged.prefills, layer, queries).flatten(1)
        if paged.prefills is None and paged.decodes is not None:
            return self._in_place(paged.decodes, layer, queries).flatten(1)
        out = queries.new_zeros(len(queries), self.heads * self.head_dim)
        works = plan.decode_works
        parts = ((paged.decodes, slice(0, works)), (paged.prefills, slice(works, plan.tokens)))
        for attend, rows in parts:
            if attend is not None:
                out[rows] = self._in_place(attend, layer, queries[rows]).flatten(1)
        return out

    def _in_place(self, attend: PagedAttend, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] -> the same shape."""
        pages = self.memory.pool[:, layer]
        if attend.works is None:  # a recorded step: nothing else can take its place
            return attend(pages, queries)
        if self.kernels is not None:
            try:
                return attend(pages, queries)
            except Exception as error:  # edge: tried before, but not with every shape
                log.warning("%s failed, pages are gathered now: %s", self.kernels.name, error)
                self.kernels = None
        return paged_kernels.plain(pages, attend.works, queries)

    def _last(self, layer: int, group: LastGroup, queries: torch.Tensor) -> torch.Tensor:
        keys, values = self._gather(layer, group.page_rows, group.works)
        keys, values = keys[:, :, : group.context_tokens], values[:, :, : group.context_tokens]
        rows = queries.reshape(group.works, self.kv_heads, self.shared, self.head_dim)
        mask = group.mask(rows.dtype)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        return out.reshape(group.works, -1)

    def _prefill(
        self, layer: int, span: PrefillSpan, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attention of a span into its rows of `out`."""
        if self.is_native_prefill:
            need = native_layers.prefill_scratch(span.end, self.kv_heads, self.head_dim)
            if need > self._packed.numel():
                self._packed = queries.new_empty(2 * need)
            native_layers.attend_prefill(
                queries, self.memory.pool[:, layer], span.pages, span.start, out, self._packed
            )
            return
        keys, values = self._gather(layer, span.page_rows, 1)
        grouped = (span.tokens, self.kv_heads, self.shared, self.head_dim)
        rows, target = queries.view(grouped), out.view(grouped)
        if causal_attention.serves(queries, span.end):
            causal_attention.causal_attention(rows, keys[0], values[0], span.start, target)
            return
        causal_attention.by_torch(rows, keys[0], values[0], span.start, target)

    def _gather(
        self, layer: int, page_rows: torch.Tensor, works: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [works, kv_heads, tokens of the pages, head_dim]; valid until the next call."""
        if len(page_rows) > len(self._gathered):
            self._gathered = self.memory.page_rows[0].new_empty(
                (2 * len(page_rows), self.memory.page_rows[0].shape[1])
            )
        gathered = self._gathered[: len(page_rows)]
        torch.index_select(self.memory.page_rows[layer], 0, page_rows, out=gathered)
        if self.is_fp8:
            gathered = fp8.widened(gathered, self._packed.dtype)
        keys, values = gathered.view(2, works, self.kv_heads, -1, self.head_dim).unbind(0)
        return keys, values
