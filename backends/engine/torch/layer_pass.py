"""Layer-wise prefill of one prompt in the torch engine; keeps the hidden states between layers.

A chunk of the prompt is planned once for all layers. Each layer computes it like a step of this
chunk alone, so the results are bit-identical to chunked prefill. Only the order differs: all chunks
go through a layer before the first chunk goes through the next layer.

Not here: which chunk is next (batching/layer_passes.py), the layers themselves (transformer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.torch.gpu.page_copies import Done
from backends.engine.torch.gpu.staging import fetched
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.step_plan import StepPlan, plan_step
from backends.engine.torch.transformer import Transformer
from mooncake_store.layout import blocks_touched


@dataclass(slots=True)
class _Chunk:
    plan: StepPlan
    hidden: torch.Tensor | None  # hidden states after the layers computed so far
    blocks: int  # blocks of the prompt up to the chunk's end


class TorchLayerPass:
    """Implements interface.LayerPassing."""

    def __init__(
        self,
        transformer: Transformer,
        memory: KvMemory,
        vocabulary_tokens: int,
        token_ids: Sequence[int],
        start: int,
        rings: Sequence[int],
    ) -> None:
        """`memory`: folded, so its pages are ring buffers; `transformer` uses this memory."""
        self._transformer = transformer
        self._memory = memory
        self._vocabulary_tokens = vocabulary_tokens
        self._token_ids = token_ids
        self._rings = rings
        self._layers = len(transformer.weights.layers)
        self._chunks: dict[int, _Chunk] = {}  # first token -> chunk

    @torch.inference_mode()
    def compute(self, layer: int, start: int, tokens: int) -> NDArray[np.float32] | None:
        if layer == 0:
            self._chunks[start] = self._begun(start, tokens)
        chunk, memory = self._chunks[start], self._memory
        page_layer = layer % memory.layout.layers
        out: list[Done | None] = []
        memory.arrive(self._rings[: chunk.blocks], page_layer)
        computed = self._transformer.forward(
            chunk.plan,
            lambda layer: out.append(memory.begin_export(chunk.plan.pages, page_layer)),
            chunk.hidden,
            range(layer, layer + 1),
        )
        memory.step_is_begun()
        for done in out:  # a GPU computes the remaining part of the layer during this wait
            if done is not None:
                done.synchronize()
        if layer < self._layers - 1:
            chunk.hidden = computed
            return None
        del self._chunks[start]
        logits: NDArray[np.float32] = fetched(computed[0].float())
        return logits

    def _begun(self, start: int, tokens: int) -> _Chunk:
        memory = self._memory
        sequence = Work(self._token_ids[start : start + tokens], start, self._rings)
        attention = self._transformer.attention
        plan = plan_step(
            [sequence],
            memory.layout,
            memory.pool.device,
            self._vocabulary_tokens,
            len(memory.pool),
            attention.kernels,
            attention.reads_seen,
        )
        blocks = blocks_touched(sequence.end, memory.layout.block_tokens)
        memory.arrive(self._rings[:blocks], 0)
        memory.clear_pages(plan.fresh_pages)
        return _Chunk(plan, None, blocks)
