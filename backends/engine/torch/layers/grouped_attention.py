"""Grouped-query attention over paged KV: Llama, Mistral, Qwen2, Qwen3.

CPU kernels (native_layers.py) and GPU kernels (gpu/paged_kernels.py) read the pages in place. Where
neither works, the pages are gathered for torch. Query heads that share a KV head share its K and V:
as the rows of one matrix (query tokens), or by expanding K and V with stride 0 (prefill).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backends.engine.torch import mixed_products, native_layers
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.paged_plan import PagedAttend, PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers import causal_attention
from backends.engine.torch.layers.norm import RmsNorm
from backends.engine.torch.layers.paged_attention import LayerStep, PagedAttention
from backends.engine.torch.linear import Linear
from backends.engine.torch.rope import rotate_in_place
from backends.engine.torch.step_plan import PrefillSpan, QueryGroup, StepPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    qkv: Linear  # heads of q, then of k, then of v
    qk_norm: torch.Tensor | None = None  # [heads + kv_heads, head_dim] (Qwen3)


Step = LayerStep[GroupedWeights]


class GroupedAttention(PagedAttention[GroupedWeights]):
    def __init__(
        self,
        memory: KvMemory,
        heads: int,
        rope: torch.Tensor,
        norm: RmsNorm,
        kernels: PagedKernels | None,
        weights_dtype: torch.dtype,
    ) -> None:
        layout = memory.layout
        assert heads % layout.kv_heads == 0, (heads, layout.kv_heads)
        super().__init__(memory, heads, layout.head_dim, rope)
        self.kernels = kernels
        self.kv_heads = layout.kv_heads
        self.shared = heads // layout.kv_heads  # query heads per KV head
        self.head_dim = layout.head_dim
        self._norm = norm
        self._packed = torch.empty(0, dtype=torch.bfloat16)  # scratch of `attend_prefill`; grows
        self.reads_seen = native_layers.serves(rope) and self.head_dim <= native_layers.HEAD_DIM_MAX
        self.is_native_prefill = weights_dtype == torch.bfloat16 and native_layers.serves_prefill(
            rope, self.shared, self.head_dim
        )

    def angles(self, plan: StepPlan) -> torch.Tensor | None:
        # The CPU kernel reads the RoPE table itself.
        return None if self._norm.is_native else super().angles(plan)

    def project(self, step: Step, normed: torch.Tensor) -> torch.Tensor:
        """Queries [rows, q heads, head_dim]. Writes the normed and rotated K and V to the pages.

        Attention also reads the K and V of this step from the pages, where fp8 has rounded them.
        """
        layer, angles = step.weights, step.angles
        rotated_heads = self.heads + self.kv_heads
        qkv = layer.qkv(normed).view(-1, rotated_heads + self.kv_heads, self.head_dim)
        if angles is None:
            native_layers.rotate_rows(
                qkv,
                self.heads,
                self.rope,
                step.plan.positions,
                layer.qk_norm,
                self._norm.epsilon,
                self.memory.token_rows[step.page_layer],
                step.plan.token_rows,
            )
            return qkv[:, : self.heads]
        rotated = qkv[:, :rotated_heads]
        if layer.qk_norm is not None:
            rotated.copy_(self._norm(rotated)).mul_(layer.qk_norm)
        rotate_in_place(rotated, angles[:, :1], angles[:, 1:])
        self.write(step, qkv[:, self.heads :])
        return qkv[:, : self.heads]

    def query_tokens(self, step: Step, queries: torch.Tensor) -> torch.Tensor:
        plan, pages = step.plan, self.memory.pool[:, step.page_layer]
        if plan.paged is not None:
            return self._in_place(plan.paged.query_tokens, pages, queries).flatten(1)
        if self.reads_seen and plan.seen is not None:
            return native_layers.attend_query_tokens(
                queries, pages, plan.seen, self.memory.layout.block_tokens
            )
        return self.by_groups(step, queries)

    def all_tokens(self, step: Step, queries: torch.Tensor) -> torch.Tensor:
        plan, paged = step.plan, step.plan.paged
        if paged is None:
            return super().all_tokens(step, queries)
        pages = self.memory.pool[:, step.page_layer]
        if paged.decodes is None and paged.prefills is not None and len(queries) == plan.tokens:
            return self._in_place(paged.prefills, pages, queries).flatten(1)
        if paged.prefills is None and paged.decodes is not None:
            return self._in_place(paged.decodes, pages, queries).flatten(1)
        out = queries.new_zeros(len(queries), self.heads * self.head_dim)
        sequences = plan.decode_sequences
        parts = (
            (paged.decodes, slice(0, sequences)),
            (paged.prefills, slice(sequences, plan.tokens)),
        )
        for attend, rows in parts:
            if attend is not None:
                out[rows] = self._in_place(attend, pages, queries[rows]).flatten(1)
        return out

    def _in_place(
        self, paged: PagedAttend, pages: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        """queries [rows, heads, head_dim] -> the same shape."""
        if paged.sequences is None:  # a recorded step: `plain` cannot run without host arrays
            return paged.attend(pages, queries)
        if self.kernels is not None:
            try:
                return paged.attend(pages, queries)
            except Exception as error:  # Catch all: the test at the start does not try all shapes
                log.warning("%s failed, pages are gathered now: %s", self.kernels.name, error)
                self.kernels = None
        return paged_kernels.plain(pages, paged.sequences, queries)

    def query_group(self, step: Step, group: QueryGroup, queries: torch.Tensor) -> torch.Tensor:
        keys, values = self.gather(step, group.page_rows, group.sequences)
        keys, values = keys[:, :, : group.context_tokens], values[:, :, : group.context_tokens]
        rows = queries.reshape(group.sequences, self.kv_heads, self.shared, self.head_dim)
        mask = group.mask(rows.dtype)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        return out.reshape(group.sequences, -1)

    def prefill(
        self, step: Step, span: PrefillSpan, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        if self.is_native_prefill:
            need = native_layers.prefill_scratch(span.end, self.kv_heads, self.head_dim)
            if need > self._packed.numel():
                self._packed = self._packed.new_empty(2 * need)
            pages = self.memory.pool[:, step.page_layer]
            native_layers.attend_prefill(
                queries,
                pages,
                span.pages,
                span.start,
                out,
                self._packed,
                mixed_products.rounds(span.tokens),
            )
            return
        keys, values = self.gather(step, span.page_rows, 1)
        grouped = (span.tokens, self.kv_heads, self.shared, self.head_dim)
        rows, target = queries.view(grouped), out.view(grouped)
        causal_attention.attend(rows, keys[0], values[0], span.start, target)
