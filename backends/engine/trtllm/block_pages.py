"""Where the pages of TensorRT-LLM lie inside a store block, and what is copied between the two.

A store block is the parts of the TP ranks, one after the other; a rank's part is its pages of
TensorRT-LLM, in order of tokens; a page holds all layers, as `tensor[block_id]` does.

    store block b:  | rank 0: page 0, page 1, ... | rank 1: page 0, page 1, ... | ...

Where attention is latent (MLA) the ranks are alike: each has the rows of all heads, so a block is
the pages of one, rank 0 saves them and every rank loads them.

    store block b:  | page 0, page 1, ... |

So with equal TP size, page size and layout (the fingerprint has them) any worker can read it, and
a prompt's last, partial block holds the pages that its tokens fill at the places where they would
be in a whole one.

A block lies in a *region* of host memory that worker and ranks map: the staging pool, or a segment
of the worker's storage node. Its *place* is one number, so that neighbours are neighbours in it
too: the region in the upper bits, bytes from its start in the lower ones. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

REGION_SHIFT = 48
POOL = 0  # the region that is the staging pool; segments are 1 and up
REGIONS_MAX = 2**15  # places are signed 64 bits on their way through numpy


def place_of(region: int, offset_bytes: int) -> int:
    assert 0 <= region < REGIONS_MAX and 0 <= offset_bytes < 1 << REGION_SHIFT
    return region << REGION_SHIFT | offset_bytes


def region_of(place: int) -> int:
    return place >> REGION_SHIFT


def offset_of(place: int) -> int:
    return place & ((1 << REGION_SHIFT) - 1)


class SlotUse(NamedTuple):
    """What the headers of a slot say while its block is the one that a worker has verified there,
    or while it is the worker's to be filled.

    Whoever fills a slot anew changes them before a byte of the payload. So if they are the same
    after a copy out of the slot as before, then so is all that was copied.
    """

    block: int  # of the request
    place: int  # of the headers: of the block's first unit, then of its others
    length_bytes: int  # of them
    first: bytes  # how the first begins
    zeros_from: int  # where the others begin, which are zeros


class Move(NamedTuple):
    """Pages [first_page, first_page + len(block_ids)) of one request, to be loaded or saved."""

    request_id: str  # the worker's
    llm_id: int  # TensorRT-LLM's
    first_page: int
    block_ids: list[int]  # TensorRT-LLM's pages
    places: list[int]  # of all blocks of the request
    is_aside: bool = False  # a load beside the passes: TensorRT-LLM leaves its request out of them
    # Of the slots that it reads or fills: a load looks at them behind it, a save before.
    uses: tuple[SlotUse, ...] = ()


class Orders(NamedTuple):
    """What all ranks copy in one iteration; travels from rank 0 to the others as metadata."""

    loads: list[Move]
    saves: list[Move]
    fences: list[int]  # TensorRT-LLM's requests whose saves must be over before this pass
    error: str = ""  # rank 0 cannot go on, so nobody does: every rank raises it


class PageRun(NamedTuple):
    """One contiguous copy: bytes from the start of the engine's pages, and where on the host."""

    pages_offset: int
    place: int
    size_bytes: int


class BlockPages(NamedTuple):
    """One rank's geometry."""

    rank: int
    rank_bytes: int  # of a store block
    page_bytes: int
    block_bytes: int
    is_alike: bool = False  # the other ranks have the same pages, and a block has them once

    @classmethod
    def of(
        cls,
        rank: int,
        tp_size: int,
        page_bytes: int,
        tokens_per_block: int,
        block_tokens: int,
        is_alike: bool = False,
    ) -> BlockPages:
        rank_bytes = page_bytes * (block_tokens // tokens_per_block)
        parts = 1 if is_alike else tp_size
        return cls(rank, rank_bytes, page_bytes, rank_bytes * parts, is_alike)

    @property
    def is_saved(self) -> bool:
        """This rank's pages are what the store gets, or a part of it."""
        return self.rank == 0 or not self.is_alike

    def uses(self, part: Move) -> list[SlotUse]:
        """Of the slots of these pages only: what was saved before them may be complete by now."""
        per_block = self.rank_bytes // self.page_bytes
        stop = part.first_page + len(part.block_ids)
        low, high = part.first_page // per_block, -(-stop // per_block)
        return [use for use in part.uses if low <= use.block < high]

    def runs(self, moves: Iterable[Move]) -> list[PageRun]:
        """Neighbouring pages that are neighbours on the host too become one copy."""
        per_block = self.rank_bytes // self.page_bytes
        page_bytes = self.page_bytes
        rank_offset = 0 if self.is_alike else self.rank * self.rank_bytes
        found: list[PageRun] = []
        for move in moves:
            for page, block_id in enumerate(move.block_ids, move.first_page):
                block, part = divmod(page, per_block)
                pages_offset = block_id * page_bytes
                place = move.places[block] + rank_offset + part * page_bytes
                if found:
                    last = found[-1]
                    size_bytes = last.size_bytes
                    if (
                        last.pages_offset + size_bytes == pages_offset
                        and last.place + size_bytes == place
                    ):
                        found[-1] = PageRun(last.pages_offset, last.place, size_bytes + page_bytes)
                        continue
                found.append(PageRun(pages_offset, place, page_bytes))
        return found


def size_problems(
    shape: Sequence[int],
    page_bytes: int,
    tokens_per_block: int,
    tp_size: int,
    block_tokens: int,
    block_bytes: int,
    is_alike: bool = False,
) -> list[str]:
    """Why pages of this tensor [blocks, layers, K and V, scalars] cannot make up store blocks."""
    if len(shape) != 4:
        return [f"KV has the shape {list(shape)}, not [blocks, layers, K and V, scalars]"]
    if (shape[2] == 1) != is_alike:
        kind = "latent attention (kv_factor 1)" if is_alike else "K and V of heads (kv_factor 2)"
        return [f"KV has the shape {list(shape)}, but config.json says {kind}"]
    if block_tokens % tokens_per_block:
        return [
            f"block_tokens is {block_tokens}, which is no multiple of TensorRT-LLM's "
            f"tokens_per_block, {tokens_per_block}"
        ]
    pages = BlockPages.of(0, tp_size, page_bytes, tokens_per_block, block_tokens, is_alike)
    if (ours := pages.block_bytes) != block_bytes:
        return [
            f"a block of {block_tokens} tokens has {ours} bytes in TensorRT-LLM ({tp_size} ranks, "
            f"{shape[1]} layers, pages of {page_bytes} bytes and {tokens_per_block} tokens), but "
            f"{block_bytes} in the worker's pool: do dtype, checkpoint and tp_size agree? "
            "And is KV kept in another dtype (kv_dtype), or in pages of other sizes (page_tokens)?"
        ]
    return []
