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
from backends.engine.torch import native_layers
from backends.engine.torch.attention import PagedAttention
from backends.engine.torch.gpu.paged_plan import PagedKernels
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.rope import rotate_in_place
from backends.engine.torch.step_plan import StepPlan
from backends.engine.torch.weights import LayerWeights, Weights


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        memory: KvMemory,
        rope: torch.Tensor,
        kernels: PagedKernels | None = None,  # that read the pages in place
    ) -> None:
        self.weights = weights
        self._config = config
        self.attention = PagedAttention(memory, config.heads, rope.dtype, kernels)
        self._rope = rope  # [positions, 2, head_dim]
        self._is_native = native_layers.serves(rope)
        self._epsilon = config.norm_epsilon
        self._heads = config.heads
        self._rotated = config.heads + config.kv_heads  # heads of q and k
        self._all_heads = self._rotated + config.kv_heads
        self._head_dim = config.head_dim
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
        angles = None if self._is_native else self._rope.index_select(0, plan.positions)
        last = len(weights.layers) - 1 if weights.logits is not None else -1
        layers = range(len(weights.layers)) if layers is None else layers
        for index in layers:
            layer, place = weights.layers[index], index % self._places
            qkv = self._qkv(place, layer, hidden, plan, angles)
            if on_layer is not None:
                on_layer(index)
            queries = qkv[:, : self._heads]
            if index != last:
                seen = self.attention.all_tokens(place, plan, queries)
            else:
                if plan.last_rows is not None:
                    hidden = hidden.index_select(0, plan.last_rows)
                    queries = queries.index_select(0, plan.last_rows)
                seen = self.attention.last_tokens(place, plan, queries)
            hidden = layer.output.add_to(hidden, seen)
            hidden = layer.down.add_to(hidden, layer.gate_up(self._normed(hidden)))
        is_over = layers.stop == len(weights.layers)
        if weights.logits is None or weights.last_norm is None or not is_over:
            return hidden
        return weights.logits(self._normed(hidden, weights.last_norm))

    def _qkv(
        self,
        place: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        plan: StepPlan,
        angles: torch.Tensor | None,  # [tokens, 2, head_dim]; None: native code reads the table
    ) -> torch.Tensor:
        """[tokens, q heads + k heads + v heads, head_dim], q and k rotated; K and V in their pages.

        Attention takes K and V from the pages, those of this step too: fp8 has rounded them there.
        """
        qkv = layer.qkv(self._normed(hidden)).view(-1, self._all_heads, self._head_dim)
        if angles is None:
            native_layers.rotate_rows(
                qkv, self._heads, self._rope, plan.positions, layer.qk_norm, self._epsilon,
                self.attention.memory.token_rows[place], plan.token_rows,
            )  # fmt: skip
            return qkv
        rotated = qkv[:, : self._rotated]
        if layer.qk_norm is not None:
            rotated.copy_(self._normed(rotated)).mul_(layer.qk_norm)
        rotate_in_place(rotated, angles[:, :1], angles[:, 1:])
        self.attention.write(place, plan.token_rows, qkv[: plan.tokens, self._heads :])
        return qkv

    def _normed(self, values: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """RMS norm over the last dimension; most weights are folded (weights.py)."""
        if self._is_native and values.dim() == 2:
            return native_layers.norm_rows(values, self._epsilon, weight)
        normed = F.rms_norm(values, (values.shape[-1],), None, self._epsilon)
        return normed if weight is None else normed.mul_(weight)
