"""The embedded engine: Llama, Qwen2 and Qwen3 in torch, on CPU or any GPU that torch drives.

Not here: the model (transformer.py), its memory (kv_memory.py), its weights (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.interface import Work
from backends.engine.model_config import CheckpointError, ModelConfig, read_model_config
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.rope import rope_table
from backends.engine.torch.step_plan import plan_step
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import load_weights
from mooncake_store.layout import KvLayout


class TorchEngine:
    """Implements interface.Engine. `load` is the way to make one."""

    tp_shape = "tp1"  # one device holds all heads of a page

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        memory: KvMemory,
        transformer: Transformer,
        weights_id: str,
        context_tokens_max: int,
    ) -> None:
        self.config = config
        self.layout = layout
        self.context_tokens_max = context_tokens_max
        self.vocabulary_tokens = config.vocabulary_tokens
        self.eos_token_ids = config.eos_token_ids
        self.model_id = config.model_id
        self.weights_id = weights_id
        self.pages = PagePool(len(memory.bytes) // layout.block_bytes)
        self.kv_pool = memory.bytes
        self._memory = memory
        self._transformer = transformer
        self._device = memory.pool.device

    @classmethod
    def load(
        cls,
        checkpoint_dir: str | Path,
        pages_max: int,
        block_tokens: int,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
    ) -> TorchEngine:
        """Read a Hugging Face folder, or raise a CheckpointError with all its problems.

        `threads` is the number of CPU threads of torch in this process, not of this engine.
        """
        torch.set_num_threads(threads)
        config, checkpoint = _open(checkpoint_dir, dtype)
        place = torch.device(device)
        weights = load_weights(checkpoint, config, TORCH_DTYPES[dtype], place)
        layout = config.layout(dtype, block_tokens)
        memory = KvMemory(layout, pages_max, place)
        context_tokens_max = min(config.context_tokens_max, pages_max * block_tokens)
        rope = rope_table(
            config.rope, config.head_dim, context_tokens_max, TORCH_DTYPES[dtype], place
        )
        transformer = Transformer(config, weights, memory, rope)
        weights_id = checkpoint.weights_id(config)
        return cls(config, layout, memory, transformer, weights_id, context_tokens_max)

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        assert batch, "a step without work"
        for work in batch:
            self._check(work)
        plan = plan_step(
            batch, self.layout, self._device, self.vocabulary_tokens, self.pages.pages_max
        )
        self._memory.clear_pages(plan.fresh_pages)
        announce = on_layer
        if on_layer is not None and self._memory.is_mirrored:

            def announce(layer: int) -> None:
                self._memory.export_layer(plan.pages, layer)
                on_layer(layer)

        logits = self._transformer.forward(plan, announce).float().cpu().numpy()
        if plan.order is None:
            return logits
        in_order = np.empty_like(logits)
        in_order[plan.order] = logits
        return in_order

    def import_pages(self, pages: Sequence[int]) -> None:
        self._memory.import_pages(pages)

    def export_pages(self, pages: Sequence[int]) -> None:
        self._memory.export_pages(pages)

    def close(self) -> None:
        """Nothing to stop; the memory goes when the last view of `kv_pool` does."""

    def _check(self, work: Work) -> None:
        assert len(work.token_ids) > 0, "a work without tokens"
        assert work.start >= 0 and work.end <= self.context_tokens_max, (
            f"tokens {work.start}..{work.end} of a context of {self.context_tokens_max}"
        )
        assert work.end <= len(work.pages) * self.layout.block_tokens, (
            f"{work.end} tokens in {len(work.pages)} pages of {self.layout.block_tokens}"
        )


def _open(checkpoint_dir: str | Path, dtype: str) -> tuple[ModelConfig, Checkpoint]:
    """Config and headers, or the problems of both together."""
    found: list[str] = []
    if dtype not in TORCH_DTYPES:
        found.append(f"dtype {dtype!r} is not supported; use {', '.join(TORCH_DTYPES)}")
    config = checkpoint = None
    try:
        config = read_model_config(checkpoint_dir)
    except CheckpointError as error:
        found += error.problems
    try:
        checkpoint = Checkpoint.open(checkpoint_dir)
    except CheckpointError as error:
        found += error.problems
    if found or config is None or checkpoint is None:
        raise CheckpointError(checkpoint_dir, found)
    return config, checkpoint
