"""Interface of all engines to a worker: pages of KV, steps, and the identity of the model.

A block is the KV of `block_tokens` tokens, and the unit of the store. A page is the engine's memory
for one block, or for consecutive layers of it (`PageLayout`). A page with all layers has exactly
the layout of a block, so one copy moves the block.

An `Engine` has no requests. The caller takes pages from the engine's `pages` and owns them. One
call of `forward` computes a step of prefill (many tokens of a sequence) and decode (one token).

Not here: the batch of a step (batching.py), sampling (sampling.py), an engine that batches by
itself (connected/generation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.layer_passes import RingLayout
from backends.engine.batching.pages import PagePool
from backends.token_logprobs import PromptScores
from mooncake_store.layout import KvLayout, LayerRange


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence of a batch, whose tokens [start, start + len(token_ids)) are to be computed."""

    token_ids: Sequence[int]  # the tokens to compute, at least one
    start: int  # number of leading tokens whose KV is already in the pages
    pages: Sequence[int]  # pages[i] holds the tokens [i * block_tokens, (i + 1) * block_tokens)
    # Receives the logprobs of the tokens start + 1 to `end`, if they are in the prompt; None: none.
    scores: PromptScores | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ServingEngine(Protocol):
    """One model on its devices. Engines of connected/ do the batching themselves."""

    layout: KvLayout  # layout of a block with all layers of the model
    layers: LayerRange  # layers in each page: all, or those of a pipeline stage
    context_tokens_max: int  # largest number of prompt and output tokens of a request
    vocabulary_tokens: int  # token ids are in [0, vocabulary_tokens)
    model_id: str  # family and shape of the model
    weights_id: str  # hash of the weights
    tp_shape: str  # how tensor-parallel ranks divide KV; equal in workers that share KV
    pages: PagePool
    # uint8; page p is kv_pool[p * page_bytes : (p + 1) * page_bytes], see layout.PageLayout.
    # On a GPU this is host memory: a pinned mirror of the pages, or a staging pool.
    kv_pool: NDArray[np.uint8]

    def import_pages(self, pages: Sequence[int]) -> None:
        """Copy these pages from `kv_pool` to the device. Steps that begin later wait for the copy.

        Any thread may call this. On a CPU nothing is copied: `kv_pool` is the engine's own memory.
        """

    def export_pages(self, pages: Sequence[int]) -> None:
        """Copy these pages from the device to `kv_pool`, so that the caller can read them there.

        Any thread may call this. The caller must not read KV that a running step computes. Layers
        that `on_layer` announced are in `kv_pool` without this call.
        """

    def close(self) -> None: ...


class Engine(ServingEngine, Protocol):
    """An engine whose caller decides each step. Only one thread at a time may compute a step."""

    eos_token_ids: tuple[int, ...]  # end-of-sequence token ids; may be empty
    rings: RingLayout | None  # layout of layer ring buffers; None: no layer-wise prefill

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """float32 logits [len(batch), vocabulary_tokens] of the last token of each sequence.

        `on_layer(l)` is called when the KV of layer l of *all* sequences is in `kv_pool`. All calls
        are made before `forward` returns, in order of layers.
        """


class LayerPassing(Protocol):
    """The layer-wise prefill of one prompt (batching/layer_passes.py)."""

    def compute(self, layer: int, start: int, tokens: int) -> NDArray[np.float32] | None:
        """Compute the tokens [start, start + tokens) in this layer.

        The layer's KV of all earlier tokens must be computed or loaded. Layers are computed in
        order, each in the same chunks. On return the KV is in the ring buffers and in `kv_pool`.
        The last layer returns logits [vocabulary_tokens] of the chunk's last token, others None.
        """


class LayerEngine(Engine, Protocol):
    """An engine that supports layer-wise prefill."""

    def begin_pass(
        self,
        token_ids: Sequence[int],
        start: int,
        rings: Sequence[int],
        scores: PromptScores | None = None,
    ) -> LayerPassing:
        """Begin the prefill of a prompt at token `start`. rings[i] is block i's ring buffer. The
        last layer fills `scores`, as `Work.scores`."""

    def import_layer(self, rings: Sequence[int], layer: int) -> None:
        """Like `import_pages`, for one layer of the model in these ring buffers."""
