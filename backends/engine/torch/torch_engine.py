"""The embedded engine: runs the models of model_config.py in torch, on a CPU or GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.batching.layer_passes import RingLayout
from backends.engine.batching.pages import PagePool
from backends.engine.checkpoint import Checkpoint
from backends.engine.interface import Work
from backends.engine.model_config import (
    CheckpointError,
    ModelConfig,
    read_model_config,
    read_or_problems,
)
from backends.engine.torch.gpu import paged_kernels
from backends.engine.torch.gpu.decode_graph import CudaRecorder, DecodeGraphs, Recorder
from backends.engine.torch.gpu.page_copies import Done
from backends.engine.torch.gpu.staging import fetched
from backends.engine.torch.kv_memory import TORCH_DTYPES, KvMemory
from backends.engine.torch.rope import rope_table
from backends.engine.torch.step_plan import StepPlan
from backends.engine.torch.transformer import Transformer
from backends.engine.torch.weights import load_weights
from backends.token_logprobs import PromptScores
from mooncake_store.layout import LayerRange

if TYPE_CHECKING:
    from mooncake_store.memory.buffers import ByteArray


class TorchEngine:
    """Implements interface.LayerEngine. A pipeline stage uses `forward_stage` or `forward_last`."""

    tp_shape = "tp1"  # tensor parallelism 1: one device holds all heads of a page

    def __init__(
        self,
        transformer: Transformer,
        weights_id: str,
        layers: LayerRange | None = None,  # None: all
        recorder: Recorder | None = None,  # records decode steps as CUDA graphs; None: no recording
    ) -> None:
        self.config = config = transformer.config
        memory = transformer.attention.memory
        self.layout = layout = replace(memory.layout, layers=config.layers)
        self.layers = layers or LayerRange(0, layout.layers)
        self.context_tokens_max = len(transformer.rope)
        self.vocabulary_tokens = config.vocabulary_tokens
        self.eos_token_ids = config.eos_token_ids
        self.model_id = config.model_id
        self.weights_id = weights_id
        self.pages = PagePool(len(memory.pool))
        self.kv_pool = memory.bytes
        self._memory = memory
        self._transformer = transformer
        self._dtype = transformer.dtype
        # The bytes of K and V differ with the dtype of weights and of activations.
        dtypes = dict.fromkeys((transformer.weights.dtype, self._dtype))
        if layout.dtype == "fp8" or len(dtypes) > 1:
            names = "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.tp_shape = f"tp1 in {names}"
        # A pipeline stage has no layer-wise prefill and no recorded decode steps.
        is_whole = len(self.layers) == layout.layers
        self.rings = RingLayout(layout.layers) if is_whole else None
        self._folded = memory.folded(self.rings.layers_at_once if self.rings else 1)
        self._layer_transformer = transformer.over(self._folded)
        self._graphs = (
            DecodeGraphs(transformer, recorder) if recorder is not None and is_whole else None
        )

    @classmethod
    def load(
        cls,
        checkpoint_dir: str | Path,
        pages_max: int | Callable[[int], int],
        block_tokens: int,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        stage: int = 0,
        stages: int = 1,
        kv_dtype: str = "auto",
    ) -> TorchEngine:
        """Read a Hugging Face folder. Raises CheckpointError; MemoryError if the pages do not fit.

        `pages_max`: number of pages, or a function from the bytes of a page to it. Each pipeline
        stage passes the bytes of the stage with the most layers, so all have as many pages.
        `threads`: torch's CPU threads, set for the whole process. With several pipeline `stages`
        the engine has only the weights and pages of this stage's layers. `kv_dtype`: "fp8" or
        "auto", which is fp8 if the checkpoint requests it, else `dtype`.
        """
        torch.set_num_threads(threads)
        config, checkpoint = _open(Path(checkpoint_dir), dtype)
        torch_device = torch.device(device)
        layout = config.layout(config.kv_dtype(kv_dtype, dtype), block_tokens)
        found = []
        if layout.dtype == "fp8" and layout.kv_factor == 1:
            found.append("kv_dtype fp8 with latent attention is not supported; use auto")
        if stages > layout.layers:
            found.append(f"it has {layout.layers} layers, too few for {stages} pipeline stages")
        if found:
            raise CheckpointError(checkpoint_dir, found)
        layers = config.stage_layers(stage, stages)
        if not isinstance(pages_max, int):  # the first stage has the most layers
            most = len(config.stage_layers(0, stages))
            pages_max = pages_max(replace(layout, layers=most).block_bytes)
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
        # A CUDA graph cannot record experts: the CPU reads how many tokens each expert has.
        can_record = torch_device.type == "cuda" and config.experts is None
        recorder = CudaRecorder(torch_device) if can_record else None
        return cls(transformer, checkpoint.weights_id(config), layers, recorder)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.config.hidden * self._dtype.itemsize

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        assert len(self.layers) == self.layout.layers, f"a stage: {self.layers} of {self.layout}"
        if on_layer is None and self._graphs is not None and self._graphs.serves(batch):
            self._check(batch)
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
        """`forward` of the last stage. `hidden`: the previous stage's `forward_stage`; None: the
        engine has all layers."""
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
        """Hidden states after this pipeline stage, which is not the last stage, as bytes.

        `hidden`: the previous stage's result; None: this is the first stage. The bytes are input
        for `hidden` only: they have padding rows and the order of the step's plan."""
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
        """The transformer's result, and StepPlan.order of its sequences."""
        assert batch, "a step without sequences"
        self._check(batch)
        plan = self._transformer.plan(batch)
        announce = leaving = None
        if on_layer is not None:
            leaving = _LeavingLayers(self._memory, plan.pages, on_layer, self.layers.first)
            announce = leaving.computed
        states, rows = None, len(plan.token_ids)
        if hidden is not None:
            assert len(hidden) == rows * self.hidden_bytes, (len(hidden), rows, self.hidden_bytes)
            # Copy `hidden`, because layers may compute in place.
            flat = torch.from_numpy(hidden.copy()).view(self._dtype)
            states = flat.view(rows, self.config.hidden).to(self._memory.pool.device)
        made = self._transformer.forward(plan, announce, states)
        self._memory.step_is_begun()
        if leaving is not None:
            leaving.announce(0)
        return made, plan.order

    def begin_pass(
        self,
        token_ids: Sequence[int],
        start: int,
        rings: Sequence[int],
        scores: PromptScores | None = None,
    ) -> TorchLayerPass:
        assert self.rings is not None, f"a stage: {self.layers} of {self.layout}"
        self._check([Work(token_ids[start:], start, rings)])
        return TorchLayerPass(self._layer_transformer, token_ids, rings, scores)

    def import_layer(self, rings: Sequence[int], layer: int) -> None:
        self._folded.import_pages(rings, layer % self._folded.layout.layers)

    def import_pages(self, pages: Sequence[int]) -> None:
        self._memory.import_pages(pages)

    def export_pages(self, pages: Sequence[int]) -> None:
        self._memory.export_pages(pages)

    def close(self) -> None:
        """Does nothing. The memory is freed with the last view of `kv_pool`."""

    def _check(self, batch: Sequence[Work]) -> None:
        for sequence in batch:
            assert len(sequence.token_ids) > 0, "a sequence without tokens"
            start, end = sequence.start, sequence.end
            assert start >= 0 and end <= self.context_tokens_max, (
                f"tokens {start}..{end} of a context of {self.context_tokens_max}"
            )
            pages, block_tokens = len(sequence.pages), self.layout.block_tokens
            assert end <= pages * block_tokens, f"{end} tokens in {pages} pages of {block_tokens}"


@dataclass(slots=True)
class _LeavingLayers:
    """Copies each computed layer of a step to `kv_pool`, then calls `on_layer`, in layer order.

    A copy that is finished at once is announced at once. Any other copy is announced after the next
    layer's copy has started. So the GPU has work while this thread waits.
    """

    memory: KvMemory
    pages: Sequence[int]  # pages that the step writes
    on_layer: Callable[[int], None]
    first_layer: int  # index in the model of layer 0 of the pages
    _under_way: deque[tuple[int, Done]] = field(default_factory=deque)

    def computed(self, layer: int) -> None:
        done = self.memory.begin_export(self.pages, layer)
        self._under_way.append((layer, done))
        self.announce(0 if done.is_over() else 1)

    def announce(self, left: int) -> None:
        """Announce all pending layers except the last `left` ones."""
        while len(self._under_way) > left:
            layer, done = self._under_way.popleft()
            done.synchronize()
            self.on_layer(self.first_layer + layer)


@dataclass(slots=True)
class _Chunk:
    plan: StepPlan
    hidden: torch.Tensor | None = None  # hidden states after the layers computed so far


class TorchLayerPass:
    """Implements interface.LayerPassing. Keeps the hidden states of all chunks between layers.

    A chunk is planned once for all layers. Each layer computes the chunk like a step of this chunk
    alone, so results are bit-identical to prefill in the same chunks. Only the order differs: a
    layer computes all chunks before the next layer computes the first chunk.
    """

    def __init__(
        self,
        transformer: Transformer,
        token_ids: Sequence[int],
        rings: Sequence[int],
        scores: PromptScores | None = None,
    ) -> None:
        """`transformer`: its memory is that of `KvMemory.folded`, whose pages are ring buffers."""
        self._transformer = transformer
        self._memory = transformer.attention.memory
        self._token_ids = token_ids
        self._rings = rings
        self._scores = scores
        self._layers = len(transformer.weights.layers)
        self._chunks: dict[int, _Chunk] = {}  # first token -> chunk

    @torch.inference_mode()
    def compute(self, layer: int, start: int, tokens: int) -> NDArray[np.float32] | None:
        if layer == 0:
            token_ids = self._token_ids[start : start + tokens]
            sequence = Work(token_ids, start, self._rings, self._scores)
            self._chunks[start] = _Chunk(self._transformer.plan([sequence], layer))
        chunk, memory = self._chunks[start], self._memory
        page_layer = layer % memory.layout.layers
        out: list[Done] = []
        self._transformer.arrive(chunk.plan, page_layer)
        computed = self._transformer.forward(
            chunk.plan,
            lambda layer: out.append(memory.begin_export(chunk.plan.pages, page_layer)),
            chunk.hidden,
            range(layer, layer + 1),
        )
        memory.step_is_begun()
        for done in out:  # during this wait a GPU computes the layer's attention and feed-forward
            done.synchronize()
        if layer < self._layers - 1:
            chunk.hidden = computed
            return None
        del self._chunks[start]
        logits: NDArray[np.float32] = fetched(computed[0].float())
        return logits


def _open(folder: Path, dtype: str) -> tuple[ModelConfig, Checkpoint]:
    """Read config.json and the tensors' headers. Raises CheckpointError with all problems."""
    config, of_config = read_or_problems(read_model_config, folder)
    checkpoint, of_files = read_or_problems(Checkpoint.open, folder)
    found = of_config + of_files
    if dtype not in TORCH_DTYPES:
        found.insert(0, f"dtype {dtype!r} is not supported; use {', '.join(TORCH_DTYPES)}")
    if found or config is None or checkpoint is None:
        raise CheckpointError(folder, found)
    return config, checkpoint
