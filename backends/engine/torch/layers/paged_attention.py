"""What all kinds of attention over paged KV share: who of a step attends how, and gathering.

A kind (grouped_attention.py) says how a layer's hidden states become queries
and KV, and how queries meet the pages: the last token of each of many works, or a chunk of one
prompt. Not here: which tokens see what (step_plan.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from backends.engine.torch import fp8
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.step_plan import PrefillSpan, QueryGroup, StepPlan

LayerWeights = TypeVar("LayerWeights")  # of attention, without its output projection


class PagedAttention(ABC, Generic[LayerWeights]):
    def __init__(self, memory: KvMemory, heads: int, value_dim: int, rope: torch.Tensor) -> None:
        """`value_dim`: scalars of a head's result; `rope` [positions, 2, rotated scalars]."""
        self.memory = memory
        self.heads = heads
        self.value_dim = value_dim
        self.rope = rope  # of the dtype of queries, and of KV when it is seen
        self.is_fp8 = memory.layout.dtype == "fp8"
        self.kernels: PagedKernels | None = None  # steps are to be planned for these
        self.reads_seen = False  # `last_tokens` takes the pages of works from the plan's `seen`
        # Reused by every layer and step: fresh memory of this size costs page faults each time.
        self._gathered = memory.page_rows[0].new_empty((0, memory.page_rows[0].shape[1]))

    @abstractmethod
    def project(
        self,
        place: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        plan: StepPlan,
        angles: torch.Tensor | None,
    ) -> torch.Tensor:
        """normed [rows of the plan, hidden] -> queries [rows, heads, any]; KV is in its pages.

        `place` is the layer's in a page, `angles` what the method of this name gave.
        """

    @abstractmethod
    def last_tokens(
        self, place: int, layer: LayerWeights, plan: StepPlan, queries: torch.Tensor
    ) -> torch.Tensor:
        """queries [works, heads, any] of last tokens -> [works, heads * value_dim].

        The works are all of the plan, or its works of one token, which are its first.
        """

    @abstractmethod
    def prefill(
        self,
        place: int,
        layer: LayerWeights,
        span: PrefillSpan,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """queries [tokens of the span, heads, any] -> out [tokens, heads * value_dim]."""

    def angles(self, plan: StepPlan) -> torch.Tensor | None:
        """[rows of the plan, 2, rotated scalars] for all layers."""
        return self.rope.index_select(0, plan.positions)

    def all_tokens(
        self, place: int, layer: LayerWeights, plan: StepPlan, queries: torch.Tensor
    ) -> torch.Tensor:
        """queries [rows of the plan, heads, any] -> [rows, heads * value_dim]."""
        if not plan.prefills:
            return self.last_tokens(place, layer, plan, queries)
        out = queries.new_empty(len(queries), self.heads * self.value_dim)
        if works := plan.decode_works:
            out[:works] = self.last_tokens(place, layer, plan, queries[:works])
        for span in plan.prefills:
            rows = slice(span.first, span.first + span.tokens)
            self.prefill(place, layer, span, queries[rows], out[rows])
        out[plan.tokens :].zero_()
        return out

    def groups(self, plan: StepPlan, works: int) -> list[QueryGroup]:
        """Of so many works: all of the plan, or its works of one token."""
        return plan.query_tokens if works > plan.decode_works else plan.decodes

    def write(self, place: int, token_rows: torch.Tensor, kv: torch.Tensor) -> None:
        """kv [tokens, rows of the layout, head_dim]: K heads, then V heads; or the latent."""
        rows = fp8.rounded(kv) if self.is_fp8 else kv
        self.memory.token_rows[place].index_put_((token_rows,), rows)

    def gather(self, place: int, page_rows: torch.Tensor, works: int) -> torch.Tensor:
        """KV [kv_factor, works, kv_heads, tokens of the pages, head_dim], until the next call."""
        gathered = self._gathered_rows(self.memory.page_rows[place], page_rows)
        if self.is_fp8:
            gathered = fp8.widened(gathered, self.rope.dtype)
        layout = self.memory.layout
        return gathered.view(layout.kv_factor, works, layout.kv_heads, -1, layout.head_dim)

    def _gathered_rows(self, rows: torch.Tensor, page_rows: torch.Tensor) -> torch.Tensor:
        if rows.is_cuda:
            # torch keeps such memory at hand, and a recorded step must have its own for ever: a
            # buffer that a larger step replaces would be somebody else's when it is replayed.
            return rows.index_select(0, page_rows)
        if len(page_rows) > len(self._gathered):
            self._gathered = rows.new_empty((2 * len(page_rows), rows.shape[1]))
        gathered = self._gathered[: len(page_rows)]
        torch.index_select(rows, 0, page_rows, out=gathered)
        return gathered
