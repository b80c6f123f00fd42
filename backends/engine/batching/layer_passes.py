"""One prompt on its way through the layers: all of its new tokens pass one, then the next. Pure.

A prompt that passes layer by layer needs a layer's KV in the pages from when it is loaded or
computed until it is computed with and in the store: of its own layers never more than three at a
time, one that is loaded, one that is computed, one that is stored. So it takes no page for a block
but a *window*: room for `LAYERS_AT_ONCE` consecutive layers of a block, in which layer l lies where
layer l - LAYERS_AT_ONCE lay before. A page has room for several windows, and a prompt takes a
fraction of the pages.

A window is a page of the same memory seen as pages of so few layers, so an engine computes in it
as it does in pages.

Not here: which prompt is next (batching.py), who loads and stores (workers/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LAYERS_AT_ONCE = 3  # loaded, computed, stored


@dataclass(frozen=True, slots=True)
class LayerWindows:
    """Windows in pages of `layers` layers, numbered through all pages of a pool."""

    layers: int

    @property
    def layers_at_once(self) -> int:
        """Of a block in its window; all of them where a page has no room for two windows."""
        return LAYERS_AT_ONCE if self._whole_windows >= 2 else self.layers

    @property
    def per_page(self) -> int:
        """So many lie inside any page, wherever it begins."""
        return self._whole_windows if self.layers_at_once < self.layers else 1

    @property
    def _whole_windows(self) -> int:
        """Where windows do not fill a page evenly, some lie across its borders."""
        across = 0 if self.layers % LAYERS_AT_ONCE == 0 else LAYERS_AT_ONCE - 1
        return (self.layers - across) // LAYERS_AT_ONCE

    def pages_for(self, blocks: int) -> int:
        return -(-blocks // self.per_page)

    def in_pages(self, pages: Sequence[int], blocks: int) -> list[int]:
        """A window for each of so many blocks."""
        assert blocks <= len(pages) * self.per_page, (blocks, len(pages), self)
        size, found = self.layers_at_once, []
        for page in pages:
            first = -(-page * self.layers // size)
            found += range(first, first + self.per_page)
        return found[:blocks]


@dataclass(frozen=True, slots=True)
class Windows:
    """Those of one prompt; `numbers[i]` is for its block i."""

    shape: LayerWindows
    layer_bytes: int  # of one layer of a block
    numbers: Sequence[int]

    def page_offset_bytes(self, block: int, layer: int) -> int:
        """Where a page would begin that had this layer where the window has it: for who reaches
        single layers of whole pages. Not a place in the pool, and perhaps below 0."""
        size = self.shape.layers_at_once
        return (self.numbers[block] * size + layer % size - layer) * self.layer_bytes


@dataclass(slots=True)
class LayerPass:
    """How far a prompt has come. `loaded`, `stored`: so many leading layers are."""

    start: int  # tokens before it are not computed: their KV is loaded
    end: int
    chunk_tokens: int
    layers: int
    layers_at_once: int
    loaded: int
    stored: int = 0
    layer: int = 0  # that is computed
    position: int = 0  # the tokens before it are, in that layer

    def __post_init__(self) -> None:
        self.position = self.start

    @property
    def is_computed(self) -> bool:
        return self.layer == self.layers

    @property
    def can_load(self) -> bool:
        """The place of the next layer is free: what was there is in the store, and is not read."""
        return self.loaded < self.layers and self.loaded < self.stored + self.layers_at_once

    @property
    def can_compute(self) -> bool:
        return self._can_compute(self.layer)

    def _can_compute(self, layer: int) -> bool:
        return layer < min(self.layers, self.loaded, self.stored + self.layers_at_once)

    @property
    def computed_tokens(self) -> int:
        """As many whole tokens as what was computed is worth."""
        parts = self.layer * (self.end - self.start) + self.position - self.start
        return parts // self.layers

    def next_parts(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(layer, start, tokens) of what a step computes that takes as long as one of `tokens`
        tokens through all layers; at least one chunk of a layer. Chunks are the same in each."""
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
