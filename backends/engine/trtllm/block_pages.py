"""Where the pages of TensorRT-LLM lie inside a store block, and what is copied between the two.

A store block is the parts of the TP ranks, one after the other; a rank's part is its pages of
TensorRT-LLM, in order of tokens; a page holds all layers, as `tensor[block_id]` does.

    pool page of block b:  | rank 0: page 0, page 1, ... | rank 1: page 0, page 1, ... | ...

So with equal TP size, page size and layout (the fingerprint has them) any worker can read it, and
a prompt's last, partial block holds the pages that its tokens fill at the places where they would
be in a whole one. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """Pages [first_page, first_page + len(block_ids)) of one request, to be loaded or saved."""

    request_id: str  # the worker's
    llm_id: int  # TensorRT-LLM's
    first_page: int
    block_ids: list[int]  # TensorRT-LLM's pages
    pool_pages: list[int]  # of all blocks of the request
    is_aside: bool = False  # a load beside the passes: TensorRT-LLM leaves its request out of them


class Orders(NamedTuple):
    """What all ranks copy in one iteration; travels from rank 0 to the others as metadata."""

    loads: list[Move]
    saves: list[Move]
    fences: list[int]  # TensorRT-LLM's requests whose saves must be over before this pass
    error: str = ""  # rank 0 cannot go on, so nobody does: every rank raises it


class PageRun(NamedTuple):
    """One contiguous copy, in bytes from the start of the engine's pages and of the pool."""

    pages_offset: int
    pool_offset: int
    size_bytes: int


class BlockPages(NamedTuple):
    """One rank's geometry."""

    rank: int
    rank_bytes: int  # of a store block
    page_bytes: int
    block_bytes: int

    @classmethod
    def of(
        cls, rank: int, tp_size: int, page_bytes: int, tokens_per_block: int, block_tokens: int
    ) -> BlockPages:
        rank_bytes = page_bytes * (block_tokens // tokens_per_block)
        return cls(rank, rank_bytes, page_bytes, rank_bytes * tp_size)

    def runs(self, moves: Iterable[Move]) -> list[PageRun]:
        """Neighbouring pages that are neighbours in the pool too become one copy."""
        per_block = self.rank_bytes // self.page_bytes
        page_bytes, rank_offset = self.page_bytes, self.rank * self.rank_bytes
        found: list[PageRun] = []
        for move in moves:
            for page, block_id in enumerate(move.block_ids, move.first_page):
                block, part = divmod(page, per_block)
                pages_offset = block_id * page_bytes
                pool_offset = (
                    move.pool_pages[block] * self.block_bytes + rank_offset + part * page_bytes
                )
                if found:
                    last = found[-1]
                    size_bytes = last.size_bytes
                    if (
                        last.pages_offset + size_bytes == pages_offset
                        and last.pool_offset + size_bytes == pool_offset
                    ):
                        found[-1] = PageRun(
                            last.pages_offset, last.pool_offset, size_bytes + page_bytes
                        )
                        continue
                found.append(PageRun(pages_offset, pool_offset, page_bytes))
        return found


def size_problems(
    shape: Sequence[int], page_bytes: int, tokens_per_block: int, tp_size: int,
    block_tokens: int, block_bytes: int,
) -> list[str]:  # fmt: skip
    """Why pages of this tensor [blocks, layers, K and V, scalars] cannot make up store blocks."""
    if len(shape) != 4:
        return [f"KV has the shape {list(shape)}, not [blocks, layers, K and V, scalars]"]
    if block_tokens % tokens_per_block:
        return [
            f"block_tokens is {block_tokens}, which is no multiple of TensorRT-LLM's "
            f"tokens_per_block, {tokens_per_block}"
        ]
    ours = BlockPages.of(0, tp_size, page_bytes, tokens_per_block, block_tokens).block_bytes
    if ours != block_bytes:
        return [
            f"a block of {block_tokens} tokens has {ours} bytes in TensorRT-LLM ({tp_size} ranks, "
            f"{shape[1]} layers, pages of {page_bytes} bytes and {tokens_per_block} tokens), but "
            f"{block_bytes} in the worker's pool: do dtype, checkpoint and tp_size agree? "
            "And is KV kept in another dtype (kv_cache_config.dtype in llm_options)?"
        ]
    return []
