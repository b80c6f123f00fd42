"""Interface of all engines to a worker: pages of KV, and the identity of the model.

A page holds consecutive layers of a block (`PageLayout`). If it holds all layers, it has exactly
the layout of a block, and one copy stores or fills it.

An `Engine` computes step by step and has no requests. The caller takes pages from `pages` and owns
them. A `Work` is one sequence of the batch: its tokens to compute and its pages. The same call
computes prefill (many tokens) and decode (one token).

Not here: the batch of a step (batching.py), sampling (sampling.py), an engine that batches by
itself (trtllm/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.layer_passes import RingLayout
from backends.engine.batching.pages import PagePool
from mooncake_store.layout import KvLayout, LayerRange


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence of a batch: compute its tokens [start, start + len(token_ids))."""

    token_ids: Sequence[int]  # at least one
    start: int  # tokens whose KV is already in the pages
    pages: Sequence[int]  # pages[i] holds the tokens [i * block_tokens, (i + 1) * block_tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ServingEngine(Protocol):
    """One model on its devices, with any batching."""

    layout: KvLayout  # layout of a block with all layers of the model
    layers: LayerRange  # layers that the pages hold
    context_tokens_max: int  # largest number of prompt and output tokens
    vocabulary_tokens: int
    model_id: str
    weights_id: str
    tp_shape: str  # distribution of KV over ranks and pages, for the fingerprint
    pages: PagePool
    # uint8; page p is kv_pool[p * page_bytes : (p + 1) * page_bytes], see layout.PageLayout.
    # On a GPU this is host memory: a pinned mirror of the pages, or TrtllmEngine's staging pool.
    kv_pool: NDArray[np.uint8]

    def import_pages(self, pages: Sequence[int]) -> None:
        """Copy these pages from `kv_pool` to the device, before a step reads them. From any thread.

        Does nothing on a CPU, whose pool is the engine's memory, and in TrtllmEngine.
        """
        ...

    def export_pages(self, pages: Sequence[int]) -> None:
        """Update these pages of `kv_pool` before the caller reads them. From any thread.

        No step may compute in the parts of the pages that are read. Not needed for layers that
        `on_layer` announced. Does nothing where `import_pages` does nothing.
        """
        ...

    def close(self) -> None: ...


class Engine(ServingEngine, Protocol):
    """An engine that computes step by step. Only one thread at a time calls its steps."""

    eos_token_ids: tuple[int, ...]
    rings: RingLayout | None  # layer ring buffers; None: the engine is no LayerEngine

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """float32 logits [len(batch), vocabulary] of the last token of each sequence.

        `on_layer(l)` is called, in order of layers, when the KV of layer l of *all* sequences is in
        `kv_pool`: before `forward` returns, while later layers may still be in computation.
        """
        ...


class LayerPassing(Protocol):
    """The layer-wise prefill of one prompt."""

    def compute(self, layer: int, start: int, tokens: int) -> NDArray[np.float32] | None:
        """Compute these tokens in this layer. Then their KV is in the ring buffers and `kv_pool`.

        The KV of the tokens before them in this layer is computed or loaded. Layers are computed in
        order, with the same chunks in each. In the last layer it returns logits [vocabulary] of the
        last of these tokens, else None.
        """
        ...


class LayerEngine(Engine, Protocol):
    """An engine that supports layer-wise prefill."""

    def begin_pass(
        self, token_ids: Sequence[int], start: int, rings: Sequence[int]
    ) -> LayerPassing:
        """Begin with token `start` of a prompt. rings[i] is the ring buffer of block i."""
        ...

    def import_layer(self, rings: Sequence[int], layer: int) -> None:
        """As `import_pages`, for one layer of the model in these ring buffers."""
        ...
