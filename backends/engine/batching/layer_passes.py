"""Layer-wise prefill of one prompt: all its new tokens go through layer 0, then layer 1, ... Pure.

A layer's KV has to be in GPU memory from its load or computation until it is computed and stored.
So a prompt needs at most three of its layers at a time: one in loading, one in computation, one in
storing. For each block it takes a *layer ring buffer* instead of a page: room for LAYERS_AT_ONCE
consecutive layers of the block. Layer l overwrites layer l - LAYERS_AT_ONCE. If several ring
buffers fit into a page, the prompt needs a fraction of the pages; else one page for each block.

A ring buffer is a page of the same memory, seen as pages of LAYERS_AT_ONCE layers. The engine
computes in ring buffers as it does in pages.

Not here: the order of prompts (batching.py), loading and storing (workers/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LAYERS_AT_ONCE = 3  # one layer is loaded, one is computed, one is stored


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Layer ring buffers in pages of `layers` layers, numbered through all pages of a pool."""

    layers: int  # of a page, >= 1

    @property
    def layers_at_once(self) -> int:
        """Layers in one ring buffer; all layers if a page has no room for two ring buffers."""
        return LAYERS_AT_ONCE if self._whole_rings >= 2 else self.layers

    @property
    def per_page(self) -> int:
        """Ring buffers that lie completely inside any page, for every alignment of the page."""
        return self._whole_rings if self.layers_at_once < self.layers else 1

    @property
    def _whole_rings(self) -> int:
        # Where ring buffers do not fill a page evenly, some lie across its borders.
        across = 0 if self.layers % LAYERS_AT_ONCE == 0 else LAYERS_AT_ONCE - 1
        return (self.layers - across) // LAYERS_AT_ONCE

    def pages_for(self, blocks: int) -> int:
        return -(-blocks // self.per_page)

    def in_pages(self, pages: Sequence[int], blocks: int) -> list[int]:
        """Numbers of the ring buffers of that many blocks, one each."""
        assert blocks <= len(pages) * self.per_page, (blocks, len(pages), self)
        size, found = self.layers_at_once, []
        for page in pages:
            first = -(-page * self.layers // size)
            found += range(first, first + self.per_page)
        return found[:blocks]


@dataclass(frozen=True, slots=True)
class LayerRings:
    """The layer ring buffers of one prompt."""

    shape: RingLayout
    layer_bytes: int  # bytes of one layer of a block
    numbers: Sequence[int]  # numbers[i] is the ring buffer of block i

    def page_offset_bytes(self, block: int, layer: int) -> int:
        """Where a whole page would begin whose `layer` is the one in the block's ring buffer.

        For callers that add the layer's offset in a page. It may be negative or inside a page.
        """
        size = self.shape.layers_at_once
        return (self.numbers[block] * size + layer % size - layer) * self.layer_bytes


@dataclass(slots=True)
class LayerPass:
    """Progress of one prompt through the layers."""

    start: int  # first token to compute; KV of the tokens before it is loaded
    end: int  # prompt tokens
    chunk_tokens: int
    layers: int
    layers_at_once: int
    loaded: int  # leading layers with their prefix in the ring buffers; layer <= loaded <= layers
    stored: int = 0  # leading layers that are in the store; 0 <= stored <= loaded
    layer: int = 0  # the layer in computation; == layers when all are computed
    position: int = 0  # next token to compute in `layer`; start <= position < end

    def __post_init__(self) -> None:
        self.position = self.start

    @property
    def is_computed(self) -> bool:
        return self.layer == self.layers

    @property
    def can_load(self) -> bool:
        """A layer is left to load, and its room is free: the layer there before is stored."""
        return self.loaded < self.layers and self.loaded < self.stored + self.layers_at_once

    @property
    def can_compute(self) -> bool:
        return self._can_compute(self.layer)

    def _can_compute(self, layer: int) -> bool:
        return layer < min(self.layers, self.loaded, self.stored + self.layers_at_once)

    @property
    def computed_tokens(self) -> int:
        """The computed (token, layer) pairs divided by the layers, rounded down."""
        parts = self.layer * (self.end - self.start) + self.position - self.start
        return parts // self.layers

    def next_parts(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """The (layer, start, tokens) of one step; chunks are the same in each layer.

        The step is at most as long as one of `tokens` tokens through all layers, except that a
        first chunk may exceed it. It ends before a layer that cannot be computed; may be empty.
        """
        left, layer, start = tokens * self.layers, self.layer, self.position
        is_first = True
        while self._can_compute(layer):
            chunk = min(self.chunk_tokens, self.end - start)
            left -= chunk
            if left < 0 and not is_first:
                return
            yield layer, start, chunk
            is_first, start = False, start + chunk
            if start == self.end:
                layer, start = layer + 1, self.start

    def computed(self, layer: int, start: int, tokens: int) -> None:
        assert (layer, start) == (self.layer, self.position), (layer, start, self)
        self.position += tokens
        if self.position == self.end:
            self.layer, self.position = layer + 1, self.start

    def check(self) -> None:
        assert 0 <= self.stored <= self.layers and self.stored <= self.loaded, self
        assert self.layer <= self.loaded <= self.layers, self
        assert self.start <= self.position < self.end, self
