"""The forward pass: one step of a ragged batch through the layers of a decoder.

A layer consists of attention over paged KV and a feed-forward. All layers of a model have the same
kind of attention. Some may have a dense feed-forward and others experts. Matrix products compute
the tokens of all sequences together. The last layer writes the KV of all tokens. It computes the
rest only for the last token of each sequence (*query token*), because only its logits are needed.
It computes the rest for the scored rows of a step, too (step_plan.py).

A pipeline stage computes a range of the layers. Its input is the hidden states of the previous
stage. Its output is hidden states, or logits if it has the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from backends.engine.interface import Work
from backends.engine.model_config import ModelConfig
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers.grouped_attention import GroupedAttention
from backends.engine.torch.layers.latent_attention import LatentAttention
from backends.engine.torch.layers.norm import RmsNorm
from backends.engine.torch.layers.paged_attention import LayerStep, PagedAttention
from backends.engine.torch.scoring import score
from backends.engine.torch.step_plan import StepPlan, plan_step
from backends.engine.torch.weights import Weights


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        memory: KvMemory,
        rope: torch.Tensor,
        kernels: PagedKernels | None = None,  # attention kernels that read pages in place
    ) -> None:
        """`rope` [positions, 2, rotated scalars of a head]."""
        self.config = config
        self.weights = weights
        self.rope = rope
        self._norm = RmsNorm(config.norm_epsilon, rope)
        self.attention: PagedAttention[Any]
        if config.latent is not None:
            self.attention = LatentAttention(memory, config.heads, config.latent, rope)
        else:
            self.attention = GroupedAttention(
                memory, config.heads, rope, self._norm, kernels, weights.dtype
            )
        self.dtype = rope.dtype  # of hidden states: `activations_dtype` of the weights
        self._page_layers = memory.layout.layers  # layers in a page or ring buffer

    def over(self, memory: KvMemory) -> Transformer:
        """The same model, with its KV in the pages of `memory`."""
        return Transformer(self.config, self.weights, memory, self.rope, self.attention.kernels)

    def plan(self, batch: Sequence[Work], layer: int | None = None) -> StepPlan:
        """Plan a step, and make it wait for copies into its pages. Clears the plan's fresh pages.

        `layer`: wait only for copies into this layer of the pages; None: into all layers.
        """
        memory = self.attention.memory
        plan = plan_step(
            batch,
            memory.layout,
            memory.pool.device,
            self.config.vocabulary_tokens,
            len(memory.pool),
            self.attention.kernels,
            self.attention.reads_seen,
        )
        self.arrive(plan, layer)
        memory.clear_pages(plan.fresh_pages)
        return plan

    def arrive(self, plan: StepPlan, layer: int | None) -> None:
        """Make the computing stream wait for copies into the plan's pages, as `plan` does."""
        assert plan.seen is not None, "the plan of a recorded step has no pages"
        self.attention.memory.arrive(plan.seen.pages, layer)

    def forward(
        self,
        plan: StepPlan,
        on_layer: Callable[[int], None] | None,
        hidden: torch.Tensor | None = None,
        layers: range | None = None,
    ) -> torch.Tensor:
        """Logits [sequences of the plan, vocabulary] of the query tokens.

        `layers`: the layers to compute, counted from this stage's first layer; None: all. If they
        do not include the model's first layer, `hidden` [rows of the plan, hidden] is the result of
        the earlier layers. If they do not include its last layer, the result is the hidden states
        of all rows. `on_layer(l)` is called when layer l's KV is in the pages (on a GPU: queued).
        The last layer fills the `scores` of the plan's scored rows.
        """
        weights = self.weights
        if hidden is None:
            assert weights.embedding is not None, "a later stage needs hidden states"
            hidden = F.embedding(plan.token_ids, weights.embedding).to(self.dtype)
        attention, angles = self.attention, self.attention.angles(plan)
        last = len(weights.layers) - 1 if weights.logits is not None else -1
        layers = range(len(weights.layers)) if layers is None else layers
        for index in layers:
            layer = weights.layers[index]
            step = LayerStep(index % self._page_layers, layer.attention, plan, angles)
            queries = attention.project(step, self._norm(hidden, layer.input_norm))
            if on_layer is not None:
                on_layer(index)
            if index != last:
                seen = attention.all_tokens(step, queries)
            elif plan.scored:
                assert plan.last_rows is not None, "scored rows are among the last rows"
                hidden = hidden.index_select(0, plan.last_rows)
                seen = attention.all_tokens(step, queries).index_select(0, plan.last_rows)
            else:
                if plan.last_rows is not None:
                    hidden = hidden.index_select(0, plan.last_rows)
                    queries = queries.index_select(0, plan.last_rows)
                seen = attention.query_tokens(step, queries)
            hidden = layer.output.add_to(hidden, seen)
            hidden = layer.feed_forward.add_to(hidden, self._norm(hidden, layer.inner_norm))
        is_over = layers.stop == len(weights.layers)
        if weights.logits is None or weights.last_norm is None or not is_over:
            return hidden
        normed = self._norm(hidden, weights.last_norm)
        for span in plan.scored:
            score(span, normed, weights.logits, self.config.vocabulary_tokens)
        return weights.logits(normed[: plan.scored[0].first] if plan.scored else normed)
