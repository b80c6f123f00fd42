"""Geometry of copies: where the pages of an engine lie in memory and inside a store block.

A store block holds one part for each tensor-parallel rank. A part holds the rank's pages in order
of tokens. A page holds all layers of its tokens, one after the other.

    store block b:  | rank 0: page 0, page 1, ... | rank 1: page 0, page 1, ... | ...

With latent attention (MLA) the ranks are alike: each has the KV of all heads. Then a block holds
the pages of one rank. Rank 0 saves these pages, and every rank loads them.

In the memory of an engine a page is one run of all layers, or one run for each layer. A partial
block has its pages where a whole block has them.

A block lies in a *region* of host memory that the worker and the ranks map: the staging pool, or a
segment of the worker's storage node. Its *place* is one number: the region in the upper bits, the
offset in bytes in the lower ones. So neighbours in memory have neighbouring places. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

REGION_SHIFT = 48
POOL = 0  # region of the staging pool; segments have the regions from 1 on
REGIONS_MAX = 2**15  # a place must fit a signed 64-bit integer of numpy

LlmId = int | str  # the engine's name of a request; all names of an engine have one type


def place_of(region: int, offset_bytes: int) -> int:
    assert 0 <= region < REGIONS_MAX and 0 <= offset_bytes < 1 << REGION_SHIFT
    return region << REGION_SHIFT | offset_bytes


def region_of(place: int) -> int:
    return place >> REGION_SHIFT


def offset_of(place: int) -> int:
    return place & ((1 << REGION_SHIFT) - 1)


class SlotUse(NamedTuple):
    """The headers of a slot, as they are while the slot holds the block that the worker expects.

    A writer that fills the slot again changes the headers before any byte of the payload. So equal
    headers after a copy mean that the copied bytes are those of the expected block.
    """

    block: int  # index of the block in the request
    place: int  # of the headers: that of the block's first unit, then those of its other units
    length_bytes: int  # of all these headers
    first: bytes  # the expected first bytes of the first header
    zeros_from: int  # offset of the other headers, which must be zero


class Move(NamedTuple):
    """Load or save the pages [first_page, first_page + len(block_ids)) of one request."""

    request_id: str  # the worker's
    llm_id: LlmId
    first_page: int
    block_ids: list[int]  # the engine's numbers of these pages
    places: list[int]  # of all blocks of the request
    is_aside: bool = False  # a load beside the passes; the engine leaves the request out of them
    # Slots that the move reads or fills. A load checks them after the copy, a save before it.
    uses: tuple[SlotUse, ...] = ()

    def part(self, start: int, stop: int) -> Move:
        """The same for block_ids[start:stop]."""
        block_ids = self.block_ids[start:stop]
        return self._replace(first_page=self.first_page + start, block_ids=block_ids)


class Orders(NamedTuple):
    """The copies of all ranks in one step. The scheduler's process sends it to all ranks."""

    loads: list[Move]
    saves: list[Move]
    fences: list[LlmId]  # requests whose saves must be finished before this pass
    error: str = ""  # why the scheduler failed; every rank raises it


class PageRun(NamedTuple):
    """One contiguous copy."""

    pages_offset: int  # bytes from the start of the engine's pages
    place: int  # on the host
    size_bytes: int


class BlockPages(NamedTuple):
    """Geometry of one rank."""

    rank: int
    tp_size: int
    page_bytes: int  # of all layers in one page
    tokens_per_block: int  # of one page
    block_tokens: int  # of a store block
    is_alike: bool = False  # all ranks have the same pages, and a block has them once
    layers: int = 1
    layer_stride_bytes: int = 0  # from a layer of a page to its next layer; 0: no gap
    block_stride_bytes: int = 0  # from a page of the engine to its next page; 0: no gap

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.tokens_per_block

    @property
    def rank_bytes(self) -> int:
        """Size of this rank's part of a store block."""
        return self.page_bytes * self.pages_per_block

    @property
    def block_bytes(self) -> int:
        return self.rank_bytes * (1 if self.is_alike else self.tp_size)

    @property
    def is_saved(self) -> bool:
        """True if the store gets this rank's pages."""
        return self.rank == 0 or not self.is_alike

    def check(self, block_bytes: int) -> None:
        """Raises ValueError if these pages cannot make up store blocks of `block_bytes`."""
        assert self.page_bytes % self.layers == 0, (self.page_bytes, self.layers)
        if self.block_tokens % self.tokens_per_block:
            raise ValueError(
                f"block_tokens is {self.block_tokens}, which is no multiple of the engine's "
                f"tokens_per_block, {self.tokens_per_block}"
            )
        if self.block_bytes != block_bytes:
            raise ValueError(
                f"a block of {self.block_tokens} tokens has {self.block_bytes} bytes in the engine "
                f"({self.tp_size} ranks, {self.layers} layers, pages of {self.page_bytes} bytes "
                f"and {self.tokens_per_block} tokens), but {block_bytes} in the worker's pool: do "
                "dtype, checkpoint and tp_size agree? And is KV kept in another dtype (kv_dtype), "
                "or in pages of other sizes (page_tokens)?"
            )

    def uses(self, part: Move) -> list[SlotUse]:
        """Slots of these pages only: the worker may already have completed earlier ones."""
        per_block = self.pages_per_block
        stop = part.first_page + len(part.block_ids)
        low, high = part.first_page // per_block, -(-stop // per_block)
        return [use for use in part.uses if low <= use.block < high]

    def runs(self, moves: Iterable[Move]) -> list[PageRun]:
        """The copies of these moves. Runs that are neighbours on both sides become one copy."""
        per_block, page_bytes = self.block_tokens // self.tokens_per_block, self.page_bytes
        block_stride_bytes = self.block_stride_bytes or page_bytes
        rank_offset = 0 if self.is_alike else self.rank * per_block * page_bytes
        pieces, piece_bytes = [(0, 0)], page_bytes  # offsets inside a page: engine, host
        stride_bytes = self.layer_stride_bytes
        if stride_bytes and stride_bytes * self.layers != page_bytes:
            piece_bytes = page_bytes // self.layers
            pieces = [(i * stride_bytes, i * piece_bytes) for i in range(self.layers)]
        found: list[PageRun] = []
        run_at = run_place = -1
        run_bytes = 0  # of the run that may still grow
        for move in moves:
            for page, block_id in enumerate(move.block_ids, move.first_page):
                block, part = divmod(page, per_block)
                page_place = move.places[block] + rank_offset + part * page_bytes
                for at, place in pieces:
                    at += block_id * block_stride_bytes
                    place += page_place
                    if at == run_at + run_bytes and place == run_place + run_bytes:
                        run_bytes += piece_bytes
                        continue
                    if run_bytes:
                        found.append(PageRun(run_at, run_place, run_bytes))
                    run_at, run_place, run_bytes = at, place, piece_bytes
        if run_bytes:
            found.append(PageRun(run_at, run_place, run_bytes))
        return found
