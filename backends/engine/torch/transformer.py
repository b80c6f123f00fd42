"""The forward pass of Llama, Qwen2 and Qwen3: one step of a ragged batch through all layers.

Linear layers see all tokens of all works as one matrix. In the model's last layer only the last
token of each work goes on after its K and V are written, because nothing reads the others.

A stage of a pipeline runs a range of the layers: it takes the hidden states of the stage before,
and gives them on unless it has the last layer.

Not here: attention (attention.py), the layout of the step (step_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from backends.engine.model_config import ModelConfig
from backends.engine.torch.attention import PagedAttention
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.rope import rotate_in_place
from backends.engine.torch.step_plan import StepPlan
from backends.engine.torch.weights import LayerWeights, Weights


class Transformer:
    def __init__(
        self, config: ModelConfig, weights: Weights, memory: KvMemory, rope: torch.Tensor
    ) -> None:
        self.weights = weights
        self.attention = PagedAttention(memory, config.heads)
        self._rope = rope  # [positions, 2, head_dim]
        self._epsilon = config.norm_epsilon
        self._heads = config.heads
        self._rotated = config.heads + config.kv_heads  # heads of q and k
        self._all_heads = self._rotated + config.kv_heads
        self._head_dim = config.head_dim

    def forward(
        self,
        plan: StepPlan,
        on_layer: Callable[[int], None] | None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [works of the plan, vocabulary] of the last token of each work.

        Of a range of layers that does not begin with the first: `hidden` [rows of the plan, hidden]
        is what the layers before made. Of one that does not end with the last: what these make of
        it, of all rows. `on_layer` counts from the first layer here.
        """
        weights = self.weights
        if hidden is None:
            assert weights.embedding is not None, "the layers before this range have not computed"
            hidden = F.embedding(plan.token_ids, weights.embedding)
        table = self._rope.index_select(0, plan.positions)
        cosines, sines = table[:, :1], table[:, 1:]
        last = len(weights.layers) - 1 if weights.logits is not None else -1
        for index, layer in enumerate(weights.layers):
            qkv = self._qkv(layer, hidden, cosines, sines)
            self.attention.write(index, plan.token_rows, qkv[: plan.tokens, self._heads :])
            if on_layer is not None:
                on_layer(index)
            queries = qkv[:, : self._heads]
            if index != last:
                seen = self.attention.all_tokens(index, plan, queries)
            else:
                if plan.last_rows is not None:
                    hidden = hidden.index_select(0, plan.last_rows)
                    queries = queries.index_select(0, plan.last_rows)
                seen = self.attention.last_tokens(index, plan.lasts, queries)
            hidden = layer.output.add_to(hidden, seen)
            hidden = layer.down.add_to(hidden, layer.gate_up(self._normed(hidden)))
        if weights.logits is None or weights.last_norm is None:
            return hidden
        return weights.logits(self._normed(hidden).mul_(weights.last_norm))

    def _qkv(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> torch.Tensor:
        """[tokens, q heads + k heads + v heads, head_dim], q and k rotated."""
        qkv = layer.qkv(self._normed(hidden)).view(-1, self._all_heads, self._head_dim)
        rotated = qkv[:, : self._rotated]
        if layer.qk_norm is not None:
            rotated.copy_(self._normed(rotated)).mul_(layer.qk_norm)
        rotate_in_place(rotated, cosines, sines)
        return qkv

    def _normed(self, values: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, without weights: they are folded (weights.py)."""
        return F.rms_norm(values, (values.shape[-1],), None, self._epsilon)
