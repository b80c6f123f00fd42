"""The forward pass: one step of a ragged batch through all layers of a decoder.

A layer is attention over paged KV, of the model's kind, and a feed-forward of the layer's own kind.
Linear layers see all tokens of all works as one matrix. In the model's last layer only the last
token of each work goes on after its KV is written, because nothing reads the others.

A stage of a pipeline runs a range of the layers: it takes the hidden states of the stage before,
and gives them on unless it has the last layer.

Not here: attention and feed-forward (layers/), the layout of the step (step_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from backends.engine.model_config import ModelConfig
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers.grouped_attention import GroupedAttention
from backends.engine.torch.layers.latent_attention import LatentAttention
from backends.engine.torch.layers.norm import RmsNorm
from backends.engine.torch.layers.paged_attention import PagedAttention
from backends.engine.torch.step_plan import StepPlan
from backends.engine.torch.weights import Weights


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        memory: KvMemory,
        rope: torch.Tensor,
        kernels: PagedKernels | None = None,  # that read the pages in place
    ) -> None:
        """`rope` [positions, 2, rotated scalars of a head]."""
        self.weights = weights
        self._config = config
        self._rope = rope
        self._norm = RmsNorm(config.norm_epsilon, rope)
        self.attention: PagedAttention[Any]
        if config.latent is not None:
            self.attention = LatentAttention(memory, config.heads, config.latent, rope)
        else:
            self.attention = GroupedAttention(memory, config.heads, rope, self._norm, kernels)
        self.dtype = rope.dtype  # of hidden states
        self._places = memory.layout.layers  # in a page; fewer than layers where it is folded

    def over(self, memory: KvMemory) -> Transformer:
        """The same model over other pages."""
        return Transformer(self._config, self.weights, memory, self._rope, self.attention.kernels)

    def forward(
        self,
        plan: StepPlan,
        on_layer: Callable[[int], None] | None,
        hidden: torch.Tensor | None = None,
        layers: range | None = None,
    ) -> torch.Tensor:
        """Logits [works of the plan, vocabulary] of the last token of each work.

        Of a range of layers that does not begin with the first: `hidden` [rows of the plan, hidden]
        is what the layers before made. Of one that does not end with the last: what these make of
        it, of all rows. `on_layer` and `layers`, those that this call runs (None: all), count from
        the first layer here.
        """
        weights = self.weights
        if hidden is None:
            assert weights.embedding is not None, "the layers before this range have not computed"
            hidden = F.embedding(plan.token_ids, weights.embedding)
        attention, angles = self.attention, self.attention.angles(plan)
        last = len(weights.layers) - 1 if weights.logits is not None else -1
        layers = range(len(weights.layers)) if layers is None else layers
        for index in layers:
            layer, place = weights.layers[index], index % self._places
            queries = attention.project(place, layer.attention, self._norm(hidden), plan, angles)
            if on_layer is not None:
                on_layer(index)
            if index != last:
                seen = attention.all_tokens(place, layer.attention, plan, queries)
            else:
                if plan.last_rows is not None:
                    hidden = hidden.index_select(0, plan.last_rows)
                    queries = queries.index_select(0, plan.last_rows)
                seen = attention.last_tokens(place, layer.attention, plan, queries)
            hidden = layer.output.add_to(hidden, seen)
            hidden = layer.feed_forward.add_to(hidden, self._norm(hidden))
        is_over = layers.stop == len(weights.layers)
        if weights.logits is None or weights.last_norm is None or not is_over:
            return hidden
        return weights.logits(self._norm(hidden, weights.last_norm))
