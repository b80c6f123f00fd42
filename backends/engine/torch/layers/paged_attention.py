"""Base class of attention over paged KV: splits a step into its parts, and gathers pages.

A subclass (grouped_attention.py, latent_attention.py) computes queries and KV from hidden states,
attention of a prompt's chunk, and attention of *query tokens* (the last token of each sequence).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from backends.engine.torch import fp8
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.step_plan import PrefillSpan, QueryGroup, StepPlan

LayerWeights = TypeVar("LayerWeights")  # weights of attention without the output projection


@dataclass(frozen=True, slots=True)
class LayerStep(Generic[LayerWeights]):
    """One layer of a step."""

    page_layer: int  # index of the layer in a page or ring buffer
    weights: LayerWeights
    plan: StepPlan
    angles: torch.Tensor | None  # result of `PagedAttention.angles`


class PagedAttention(ABC, Generic[LayerWeights]):
    def __init__(self, memory: KvMemory, heads: int, value_dim: int, rope: torch.Tensor) -> None:
        """`value_dim`: scalars of a head's result; `rope` [positions, 2, rotated scalars]."""
        self.memory = memory
        self.heads = heads
        self.value_dim = value_dim
        self.rope = rope  # in the dtype of queries: of activations
        self.is_fp8 = memory.layout.dtype == "fp8"
        self.kernels: PagedKernels | None = None  # kernels for which steps have to be planned
        self.reads_seen = False  # `query_tokens` reads the pages from the plan's `seen`
        # Buffer of `gather`. It is reused, because new memory of this size costs page faults.
        self._gathered = memory.page_rows[0].new_empty((0, memory.page_rows[0].shape[1]))

    @abstractmethod
    def project(self, step: LayerStep[LayerWeights], normed: torch.Tensor) -> torch.Tensor:
        """normed [rows of the plan, hidden] -> queries [rows, heads, any]. Writes KV to pages."""

    @abstractmethod
    def query_tokens(self, step: LayerStep[LayerWeights], queries: torch.Tensor) -> torch.Tensor:
        """queries [sequences, heads, any] of query tokens -> [sequences, heads * value_dim].

        The sequences are all sequences of the plan, or only its decode sequences, which come first.
        """

    @abstractmethod
    def prefill(
        self,
        step: LayerStep[LayerWeights],
        span: PrefillSpan,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """queries [tokens of the span, heads, any] -> out [tokens, heads * value_dim]."""

    def angles(self, plan: StepPlan) -> torch.Tensor | None:
        """Cosines and sines [rows of the plan, 2, rotated scalars]; None: `project` needs none."""
        return self.rope.index_select(0, plan.positions)

    def all_tokens(self, step: LayerStep[LayerWeights], queries: torch.Tensor) -> torch.Tensor:
        """queries [rows of the plan, heads, any] -> [rows, heads * value_dim]; padding rows: 0."""
        plan = step.plan
        if not plan.prefills:
            return self.query_tokens(step, queries)
        out = queries.new_empty(len(queries), self.heads * self.value_dim)
        if sequences := plan.decode_sequences:
            out[:sequences] = self.query_tokens(step, queries[:sequences])
        for span in plan.prefills:
            rows = slice(span.first, span.first + span.tokens)
            self.prefill(step, span, queries[rows], out[rows])
        out[plan.tokens :].zero_()
        return out

    def by_groups(self, step: LayerStep[LayerWeights], rows: torch.Tensor) -> torch.Tensor:
        """`query_tokens` by calling `query_group` for each group of the plan."""
        plan = step.plan
        groups = plan.query_tokens if len(rows) > plan.decode_sequences else plan.decodes
        parts = [
            self.query_group(step, group, rows[group.first : group.first + group.sequences])
            for group in groups
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def query_group(
        self, step: LayerStep[LayerWeights], group: QueryGroup, rows: torch.Tensor
    ) -> torch.Tensor:
        """rows [sequences of the group, heads, any] -> [sequences, any], over gathered pages."""

    def write(self, step: LayerStep[LayerWeights], kv: torch.Tensor) -> None:
        """Write kv [rows of the plan, heads of K then V (or 1 latent), head_dim] to the pages."""
        kv = kv[: step.plan.tokens]
        target = self.memory.token_rows[step.page_layer]
        rows = fp8.rounded(kv) if self.is_fp8 else kv.to(target.dtype)
        target.index_put_((step.plan.token_rows,), rows)

    def gather(
        self, step: LayerStep[LayerWeights], page_rows: torch.Tensor, sequences: int
    ) -> torch.Tensor:
        """KV [kv_factor, sequences, kv_heads, tokens of the pages, head_dim], dtype of queries.

        The result is valid until the next call.
        """
        rows = self.memory.page_rows[step.page_layer]
        if rows.is_cuda:
            # No shared buffer: a larger step would replace and free it, but a recorded step still
            # uses it in a replay. torch's allocator caches this memory, so allocation is cheap.
            gathered = rows.index_select(0, page_rows)
        else:
            if len(page_rows) > len(self._gathered):
                self._gathered = rows.new_empty((2 * len(page_rows), rows.shape[1]))
            gathered = self._gathered[: len(page_rows)]
            torch.index_select(rows, 0, page_rows, out=gathered)
        if self.is_fp8:
            gathered = fp8.widened(gathered, self.rope.dtype)
        gathered = gathered.to(self.rope.dtype)
        layout = self.memory.layout
        return gathered.view(layout.kv_factor, sequences, layout.kv_heads, -1, layout.head_dim)
