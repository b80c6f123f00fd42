"""What every engine is to a worker: pages of KV, and the names of what computes it.

A page holds consecutive layers of a block (`PageLayout`), usually all of them: then it has exactly
the layout of a block, and is stored or filled with one copy.
An `Engine` computes step by step: it knows no requests, pages belong to whoever took them from
`pages`, and a `Work` says which pages hold which tokens. The same call does prefill (many tokens)
and decode (one token).

Not here: which work a step should do (batching.py), what a token means (sampling.py), an engine
that batches by itself (trtllm/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.layer_passes import LayerWindows
from backends.engine.batching.pages import PagePool
from mooncake_store.layout import KvLayout, LayerRange


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `token_ids`, the tokens [start, start + len(token_ids)) of one request."""

    token_ids: Sequence[int]  # at least one
    start: int  # tokens of the request whose KV is already in its pages
    pages: Sequence[int]  # pages[i] holds the tokens [i * block_tokens, (i + 1) * block_tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ServingEngine(Protocol):
    """One model on its devices, whoever decides what a step computes."""

    layout: KvLayout  # of a block: all layers of the model, whichever are here
    layers: LayerRange  # that its pages hold
    context_tokens_max: int  # of prompt and output together
    vocabulary_tokens: int
    model_id: str
    weights_id: str
    tp_shape: str  # how KV is spread over ranks and pages, for the fingerprint
    pages: PagePool
    # uint8; page p is kv_pool[p * page_bytes : (p + 1) * page_bytes], see layout.PageLayout.
    # On a GPU this is the pinned host mirror of the pages, see import_pages and export_pages.
    kv_pool: NDArray[np.uint8]

    def import_pages(self, pages: Sequence[int]) -> None:
        """The caller wrote these pages of `kv_pool`; call it before a work reads them.

        Free where the pool is the engine's own memory (CPU), a copy to the device elsewhere.
        """
        ...

    def export_pages(self, pages: Sequence[int]) -> None:
        """Bring these pages of `kv_pool` up to date before the caller reads them. From any thread;
        no step computes in what is read of them.

        Not needed for the layers that `on_layer` announced. Free on CPU.
        """
        ...

    def close(self) -> None: ...


class Engine(ServingEngine, Protocol):
    """One that computes step by step. Calls come from one thread at a time."""

    eos_token_ids: tuple[int, ...]
    windows: LayerWindows | None  # None: it is no LayerEngine

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """float32 logits [len(batch), vocabulary] of the last token of each work.

        `on_layer(l)` is called as soon as the KV of layer l of the model of *all* works is in
        `kv_pool`, in order of layers, while the rest is still to be computed.
        """
        ...


class LayerPassing(Protocol):
    """The new tokens of one prompt on their way through the layers."""

    def compute(self, layer: int, start: int, tokens: int) -> NDArray[np.float32] | None:
        """These tokens in this layer, whose KV is in its windows then, and in `kv_pool`.

        The tokens before them are there in this layer: computed, or loaded. Chunks are the same in
        each layer, which pass in order. Logits of the last of the tokens, behind the last layer.
        """
        ...


class LayerEngine(Engine, Protocol):
    """One that can compute a prompt layer by layer, in windows of its pages."""

    def begin_pass(
        self, token_ids: Sequence[int], start: int, windows: Sequence[int]
    ) -> LayerPassing:
        """Of a prompt whose first `start` tokens are not computed; windows[i] is for block i."""
        ...

    def import_layer(self, windows: Sequence[int], layer: int) -> None:
        """As `import_pages`, of one layer in these windows."""
        ...
