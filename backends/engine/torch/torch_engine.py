"""The embedded engine: models of model_config.py in torch, on a CPU or any GPU of torch.

Not here: the model (transformer.py), its memory (kv_memory.py), its weights (weights.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.batching.layer_passes import RingLayout
from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.interface import Work
from backends.engine.model_config import CheckpointError, ModelConfig, read_model_config
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.decode_graph import CudaRecorder, DecodeGraphs, Recorder
from backends.engine.torch.gpu.page_copies import Done
from backends.engine.torch.gpu.staging import fetched
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.layer_pass import TorchLayerPass
from backends.engine.torch.rope import rope_table
from backends.engine.torch.step_plan import plan_step
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import load_weights
from mooncake_store.layout import KvLayout, LayerRange, blocks_touched

if TYPE_CHECKING:
    from mooncake_store.memory.buffers import ByteArray


class TorchEngine:
    """Implements interface.Engine. Create it with `load`."""

    tp_shape = "tp1"  # one device holds all heads of a page

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        memory: KvMemory,
        transformer: Transformer,
        weights_id: str,
        context_tokens_max: int,
        layers: LayerRange | None = None,  # None: all
        recorder: Recorder | None = None,  # records decode steps; None: no recording
    ) -> None:
        self.config = config
        self.layout = layout
        self.layers = layers or LayerRange(0, layout.layers)
        self.context_tokens_max = context_tokens_max
        self.vocabulary_tokens = config.vocabulary_tokens
        self.eos_token_ids = config.eos_token_ids
        self.model_id = config.model_id
        self.weights_id = weights_id
        self._page_layout = memory.layout  # only the layers of this stage
        self.pages = PagePool(len(memory.bytes) // memory.layout.block_bytes)
        self.kv_pool = memory.bytes
        self._memory = memory
        self._transformer = transformer
        self._device = memory.pool.device
        self._dtype = transformer.dtype
        if layout.dtype == "fp8":  # fp8 KV depends on the dtype that K and V were computed in
            self.tp_shape = f"tp1 in {str(self._dtype).removeprefix('torch.')}"
        # A pipeline stage computes chunk by chunk, so only a whole engine has ring buffers.
        is_whole = len(self.layers) == layout.layers
        self.rings = RingLayout(layout.layers) if is_whole else None
        self._folded = memory.folded(self.rings.layers_at_once if self.rings else 1)
        self._layer_transformer = transformer.over(self._folded)
        self._graphs = (
            DecodeGraphs(transformer, config.vocabulary_tokens, recorder)
            if recorder is not None and is_whole
            else None
        )

    @classmethod
    def load(
        cls,
        checkpoint_dir: str | Path,
        pages_max: int,
        block_tokens: int,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        stage: int = 0,
        stages: int = 1,
        kv_dtype: str = "auto",
    ) -> TorchEngine:
        """Read a Hugging Face folder, or raise a CheckpointError with all its problems.

        `threads` sets torch's CPU threads of the whole process. With several `stages`, only the
        weights and pages of this stage's layers are loaded. `kv_dtype`: "fp8", or "auto" for the
        checkpoint's KV dtype if it has one, else `dtype`.
        """
        torch.set_num_threads(threads)
        config, checkpoint = _open(checkpoint_dir, dtype)
        torch_device = torch.device(device)
        layout = config.layout(config.kv_dtype(kv_dtype, dtype), block_tokens)
        if layout.dtype == "fp8" and layout.kv_factor == 1:
            raise CheckpointError(
                checkpoint_dir, ["kv_dtype fp8 with latent attention is not supported; use auto"]
            )
        if stages > layout.layers:
            raise CheckpointError(
                checkpoint_dir,
                [f"it has {layout.layers} layers, too few for {stages} pipeline stages"],
            )
        layers = config.stage_layers(stage, stages)
        weights = load_weights(
            checkpoint, config, TORCH_DTYPES[dtype], torch_device, layers, layout.dtype == "fp8"
        )
        memory = KvMemory(replace(layout, layers=len(layers)), pages_max, torch_device)
        context_tokens_max = min(config.context_tokens_max, pages_max * block_tokens)
        rope = rope_table(
            config.rope, config.rotary_dim, context_tokens_max, TORCH_DTYPES[dtype], torch_device
        )
        kernels = paged_kernels.choose(memory, config.heads)
        transformer = Transformer(config, weights, memory, rope, kernels)
        weights_id = checkpoint.weights_id(config)
        # A step with experts cannot be recorded: the CPU selects the experts in the step.
        can_record = torch_device.type == "cuda" and config.experts is None
        recorder = CudaRecorder(torch_device) if can_record else None
        return cls(
            config, layout, memory, transformer, weights_id, context_tokens_max, layers, recorder
        )

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden states."""
        return self.config.hidden * self._dtype.itemsize

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        assert len(self.layers) == self.layout.layers, f"a stage: {self.layers} of {self.layout}"
        if on_layer is None and self._graphs is not None and self._graphs.serves(batch):
            for sequence in batch:
                self._check(sequence)
            self._arrive(batch)
            recorded = self._graphs.logits(batch)
            if recorded is not None:
                self._memory.step_is_begun()
                return fetched(recorded)
        return self.forward_last(batch, None, on_layer)

    def forward_last(
        self,
        batch: Sequence[Work],
        hidden: ByteArray | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """`forward` of the last pipeline stage; `hidden` is the previous stage's result."""
        logits, order = self._run(batch, hidden, on_layer)
        rows = fetched(logits.float())
        if order is None:
            return rows
        in_order = np.empty_like(rows)
        in_order[order] = rows
        return in_order

    def forward_stage(
        self,
        batch: Sequence[Work],
        hidden: ByteArray | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> ByteArray:
        """Hidden states of the batch after this pipeline stage, which is not the last one.

        `hidden`: the previous stage's result; None for the first stage. Both are bytes for other
        stages only, with padding rows and in the order of the plan.
        """
        states, _ = self._run(batch, hidden, on_layer)
        states_of_stage: ByteArray = fetched(states.contiguous().view(torch.uint8).view(-1))
        return states_of_stage

    @torch.inference_mode()
    def _run(
        self,
        batch: Sequence[Work],
        hidden: ByteArray | None,
        on_layer: Callable[[int], None] | None,
    ) -> tuple[torch.Tensor, list[int] | None]:
        """The transformer's result, and the order of its sequences if it differs from `batch`."""
        assert batch, "a step without sequences"
        for sequence in batch:
            self._check(sequence)
        attention = self._transformer.attention
        plan = plan_step(
            batch,
            self._page_layout,
            self._device,
            self.vocabulary_tokens,
            self.pages.pages_max,
            attention.kernels,
            attention.reads_seen,
        )
        self._arrive(batch)
        self._memory.clear_pages(plan.fresh_pages)
        announce = leaving = None
        if on_layer is not None:
            leaving = _LeavingLayers(self._memory, plan.pages, on_layer, self.layers.first)
            announce = leaving.computed
        states = None if hidden is None else self._states(hidden, len(plan.token_ids))
        made = self._transformer.forward(plan, announce, states)
        self._memory.step_is_begun()
        if leaving is not None:
            leaving.announce(0)
        return made, plan.order

    def _arrive(self, batch: Sequence[Work]) -> None:
        """Let the computing stream wait for pending copies into the batch's pages."""
        if not self._memory.is_mirrored:
            return
        block_tokens = self.layout.block_tokens
        self._memory.arrive(
            [
                page
                for sequence in batch
                for page in sequence.pages[: blocks_touched(sequence.end, block_tokens)]
            ]
        )

    def _states(self, hidden: ByteArray, rows: int) -> torch.Tensor:
        # A copy, because layers may compute in place.
        assert len(hidden) == rows * self.hidden_bytes, (len(hidden), rows, self.hidden_bytes)
        flat = torch.from_numpy(hidden.copy()).view(self._dtype)
        return flat.view(rows, self.config.hidden).to(self._device)

    def begin_pass(
        self, token_ids: Sequence[int], start: int, rings: Sequence[int]
    ) -> TorchLayerPass:
        assert self.rings is not None, f"a stage: {self.layers} of {self.layout}"
        self._check(Work(token_ids[start:], start, rings))
        return TorchLayerPass(
            self._layer_transformer, self._folded, self.vocabulary_tokens, token_ids, start, rings
        )

    def import_layer(self, rings: Sequence[int], layer: int) -> None:
        self._folded.import_layer(rings, layer % self._folded.layout.layers)

    def import_pages(self, pages: Sequence[int]) -> None:
        self._memory.import_pages(pages)

    def export_pages(self, pages: Sequence[int]) -> None:
        self._memory.export_pages(pages)

    def close(self) -> None:
        """Nothing to stop. The memory is freed with the last view of `kv_pool`."""

    def _check(self, sequence: Work) -> None:
        assert len(sequence.token_ids) > 0, "a sequence without tokens"
        assert sequence.start >= 0 and sequence.end <= self.context_tokens_max, (
            f"tokens {sequence.start}..{sequence.end} of a context of {self.context_tokens_max}"
        )
        assert sequence.end <= len(sequence.pages) * self.layout.block_tokens, (
            f"{sequence.end} tokens in {len(sequence.pages)} pages of {self.layout.block_tokens}"
        )


class _LeavingLayers:
    """Copies the layers of a step to `kv_pool` and announces each when it is there, in order.

    A copied layer is announced after the next layer's copy has started. So the GPU always has work
    while this thread waits.
    """

    def __init__(
        self,
        memory: KvMemory,
        pages: Sequence[int],
        on_layer: Callable[[int], None],
        first_layer: int,
    ) -> None:
        self._memory, self._pages = memory, pages
        self._on_layer, self._first = on_layer, first_layer
        self._under_way: deque[tuple[int, Done]] = deque()

    def computed(self, layer: int) -> None:
        done = self._memory.begin_export(self._pages, layer)
        if done is None:
            self._on_layer(self._first + layer)
            return
        self._under_way.append((layer, done))
        self.announce(1)

    def announce(self, left: int) -> None:
        """Announce all pending layers except the last `left` ones."""
        while len(self._under_way) > left:
            layer, done = self._under_way.popleft()
            done.synchronize()
            self._on_layer(self._first + layer)


def _open(checkpoint_dir: str | Path, dtype: str) -> tuple[ModelConfig, Checkpoint]:
    """Read the config and the headers. Raises CheckpointError with the problems of both."""
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
