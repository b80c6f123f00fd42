"""Layer-wise prefill of one prompt: all its new tokens go through layer 0, then layer 1, ... Pure.

The KV of a layer must be in the engine's memory only while that layer is loaded, computed or
stored. So a prompt needs at most three layers at a time: one is loaded, one is computed, and one is
stored. A page holds all layers of one block of KV. A *layer ring buffer* holds LAYERS_AT_ONCE
consecutive layers of one block, and layer l overwrites layer l - LAYERS_AT_ONCE. Usually a page has
room for several ring buffers, so a layer-wise prompt takes fewer pages. If a page has no room for
two ring buffers, each block takes a whole page.

Not here: the order of prompts (batching.py), loading and storing (workers/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LAYERS_AT_ONCE = 3  # one layer is loaded, one is computed, one is stored


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Places of ring buffers in the pages. All pages together are one sequence of layers. Ring
    buffer n has the layers [n * layers_at_once, (n + 1) * layers_at_once) of this sequence."""

    layers: int  # layers in a page, >= 1

    @property
    def layers_at_once(self) -> int:
        """Layers in one ring buffer: LAYERS_AT_ONCE, or all if a page has no room for two."""
        return LAYERS_AT_ONCE if self._whole_rings >= 2 else self.layers

    @property
    def per_page(self) -> int:
        """Number of ring buffers that any page of the pool completely contains."""
        return self._whole_rings if self.layers_at_once < self.layers else 1

    @property
    def _whole_rings(self) -> int:
        # At most this many first layers of a page belong to a ring buffer of an earlier page.
        across = 0 if self.layers % LAYERS_AT_ONCE == 0 else LAYERS_AT_ONCE - 1
        return (self.layers - across) // LAYERS_AT_ONCE

    def pages_for(self, blocks: int) -> int:
        return -(-blocks // self.per_page)

    def in_pages(self, pages: Sequence[int], blocks: int) -> list[int]:
        """Numbers of `blocks` ring buffers inside these pages, one for each block."""
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
        """The offset of `layer` in the block's ring buffer, minus layer * layer_bytes.

        Code for pages adds layer * layer_bytes to a page's offset. The result may be negative."""
        size = self.shape.layers_at_once
        return (self.numbers[block] * size + layer % size - layer) * self.layer_bytes


@dataclass(slots=True)
class LayerPass:
    """Progress of one prompt through the layers."""

    start: int  # first token to compute; the KV of all tokens before it is cached
    end: int  # number of prompt tokens; > start
    chunk_tokens: int  # largest chunk
    layers: int  # layers of the model
    layers_at_once: int  # layers in a ring buffer
    loaded: int  # number of layers whose prefix has been loaded; layer <= loaded <= layers
    stored: int = 0  # number of layers whose KV is in the store; 0 <= stored <= loaded
    layer: int = 0  # the layer to compute next; == layers when all are computed
    position: int = 0  # next token to compute in `layer`; start <= position < end

    def __post_init__(self) -> None:
        self.position = self.start

    @property
    def is_computed(self) -> bool:
        return self.layer == self.layers

    @property
    def can_load(self) -> bool:
        """Whether a layer is left to load, and the layer that it overwrites is stored."""
        return self.loaded < self.layers and self.loaded < self.stored + self.layers_at_once

    @property
    def can_compute(self) -> bool:
        return self._can_compute(self.layer)

    def _can_compute(self, layer: int) -> bool:
        return layer < min(self.layers, self.loaded, self.stored + self.layers_at_once)

    @property
    def computed_tokens(self) -> int:
        """Progress in tokens: computed (token, layer) pairs divided by `layers`, rounded down."""
        parts = self.layer * (self.end - self.start) + self.position - self.start
        return parts // self.layers

    def next_parts(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Each (layer, start, tokens) of the next step; none if no layer can be computed.

        The step's work is at most that of `tokens` tokens in all layers. A first chunk with more
        work is computed alone. All layers are cut into the same chunks.
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
