"""One forward step, prepared once for all layers: which token goes where, who sees what.

Tokens of all works lie in one ragged row: first the works with one token (decode), sorted by
context and, unless attention reads their pages itself, cut into groups of similar length, then the
longer ones (prefill). Everything that layers share is computed here, so that a layer is only tensor
operations.

Not here: the tensor operations (grouped_attention.py, transformer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.torch.gpu.paged_plan import PagedAttend, PagedKernels, PagedPlan, PagedWorks
from backends.engine.torch.gpu.staging import Staging
from mooncake_store.layout import KvLayout, blocks_touched

Integers = NDArray[np.int64]

# Works of unlike context in one padded group waste memory traffic, another group costs a few
# calls per layer: about 40 us, or the time to gather this much KV of one layer (measured on CPU).
PADDING_BYTES_MAX = 512 * 1024
# Prefill gathers its context up to a multiple of this, for the same reason as rounded_rows.
CONTEXT_STEP_TOKENS = 64


@dataclass(slots=True)
class QueryGroup:
    """One query per work (its last token) against its whole context, padded to a rectangle."""

    first: int  # index of the group's first work among the works of the step
    works: int
    page_rows: torch.Tensor  # [rows of the layout * works * pages] rows of KvMemory.page_rows
    context_tokens: int  # of the longest; with `ends`, rounded up to whole pages
    ends: torch.Tensor | None  # [works] tokens of each one's context; None: all see all
    _mask: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[works, 1, 1, context_tokens], 0 or -inf; made by the first layer that asks."""
        if self._mask is None and self.ends is not None:
            positions = torch.arange(self.context_tokens, device=self.ends.device)
            is_beyond = (positions >= self.ends[:, None])[:, None, None, :]
            mask = torch.zeros(is_beyond.shape, dtype=dtype, device=self.ends.device)
            self._mask = mask.masked_fill_(is_beyond, -torch.inf)
        return self._mask


@dataclass(frozen=True, slots=True)
class PagesSeen:
    """The pages of all works as native code reads them: without padding, and on the CPU."""

    pages: Integers  # of all works, one work after the other
    starts: Integers  # [works] a work's first in `pages`
    contexts: Integers  # [works] tokens
    tokens: int  # their sum


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Several queries of one work: the token at `start + i` sees the tokens up to itself."""

    first: int  # row of its first token
    tokens: int
    start: int
    page_rows: torch.Tensor  # [rows of the layout * pages], the pages rounded up to whole tiles
    pages: Integers

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    tokens: int
    token_ids: torch.Tensor  # [tokens, rounded up: what is beyond them is computed for nothing]
    positions: torch.Tensor  # the same shape
    token_rows: torch.Tensor  # [tokens, rows of the layout] rows of KvMemory.token_rows
    decode_works: int
    # Works of one token: row of a token == index of its work. These and `query_tokens`, all
    # works, are empty where attention reads `seen` instead.
    decodes: list[QueryGroup]
    prefills: list[PrefillSpan]
    query_tokens: list[QueryGroup]
    seen: PagesSeen | None  # by all works; None: only tensors are known (gpu/decode_graph.py)
    last_rows: torch.Tensor | None  # [works] row of each work's last token; None: all rows
    order: list[int] | None  # work i of the plan is batch[order[i]]; None: same order
    pages: list[int]  # written by this step
    fresh_pages: list[int]  # of those, entered by this step and not filled by it
    # None: by `decodes` and `query_tokens`, or `seen`, and `prefills`; else these are empty.
    paged: PagedPlan | None = None


def plan_step(
    batch: Sequence[Work],
    layout: KvLayout,
    device: torch.device,
    vocabulary_tokens: int,
    pages_max: int,
    kernels: PagedKernels | None = None,
    reads_seen: bool = False,
) -> StepPlan:
    """`reads_seen`: attention of last tokens takes their pages from the plan's `seen`."""
    block_tokens = layout.block_tokens
    order = sorted(
        range(len(batch)),
        key=lambda index: (
            len(batch[index].token_ids) > 1,
            blocks_touched(batch[index].end, block_tokens),
        ),
    )
    works = [batch[index] for index in order]
    decode_works = sum(len(work.token_ids) == 1 for work in works)
    counts = [len(work.token_ids) for work in works]
    tables = [
        np.asarray(work.pages[: blocks_touched(work.end, block_tokens)], dtype=np.int64)
        for work in works
    ]
    token_ids = np.concatenate([np.asarray(work.token_ids, dtype=np.int64) for work in works])
    check_range("token id", token_ids, vocabulary_tokens)
    seen = _seen(works, tables)
    check_range("page", seen.pages, pages_max)
    positions = _positions(works, counts)
    staging = Staging(device)
    paged, decodes, rest, spans = None, [], [], []
    if kernels is not None:
        paged = _paged(kernels, works, tables, decode_works, staging)
    else:
        if not reads_seen:
            decodes = _groups(works[:decode_works], tables[:decode_works], 0, layout, staging)
            rest = _groups(
                works[decode_works:], tables[decode_works:], decode_works, layout, staging
            )
        spans = _spans(works, tables, decode_works, layout, staging)
    pages, fresh_pages = _written(works, tables, block_tokens)
    is_decode_only = decode_works == len(works)
    tokens = len(token_ids)
    token_rows = staging.put(_token_rows(positions, counts, tables, layout))
    if not is_decode_only:
        extra_rows = (0, rounded_rows(tokens) - tokens)
        token_ids, positions = np.pad(token_ids, extra_rows), np.pad(positions, extra_rows)
    plan = StepPlan(
        tokens=tokens,
        token_ids=staging.put(token_ids),
        positions=staging.put(positions),
        token_rows=token_rows,
        decode_works=decode_works,
        decodes=decodes,
        prefills=spans,
        query_tokens=decodes + rest,
        seen=seen,
        last_rows=None if is_decode_only else staging.put(np.cumsum(counts) - 1),
        order=None if order == list(range(len(batch))) else order,
        pages=pages,
        fresh_pages=fresh_pages,
        paged=paged,
    )
    staging.send()
    return plan


def rounded_rows(rows: int) -> int:
    """A few numbers of rows instead of any.

    A library that compiles a kernel for each new shape (oneDNN: 0.3 ms each, a millisecond per
    step) would otherwise do so for nearly every prompt length.
    """
    return rounded_up(rows, 8 if rows <= 64 else 16 if rows <= 256 else 32)


def check_range(name: str, values: Integers, limit: int) -> None:
    """One pass: a negative number is a huge unsigned one."""
    if int(values.view(np.uint64).max()) >= limit:
        wrong = [int(value) for value in values if not 0 <= value < limit]
        raise AssertionError(f"{name} {wrong[0]} is outside 0..{limit - 1}")


def _positions(works: list[Work], counts: list[int]) -> Integers:
    if len(works) == len(counts) == sum(counts):
        return np.array([work.start for work in works], dtype=np.int64)
    return np.concatenate([np.arange(work.start, work.end) for work in works])


def rounded_up(tokens: int, step: int) -> int:
    return (tokens + step - 1) // step * step


def _token_rows(
    positions: Integers, counts: list[int], tables: list[Integers], layout: KvLayout
) -> Integers:
    """Where each token's K and V, or its latent, go, as rows of head_dim scalars in layer 0."""
    block_tokens, kv_rows = layout.block_tokens, layout.rows
    if len(counts) == len(positions):
        pages = np.array([table[-1] for table in tables], dtype=np.int64)
    else:
        widths = np.array([len(table) for table in tables])
        table_starts = np.repeat(np.cumsum(widths) - widths, counts)
        pages = np.concatenate(tables)[table_starts + positions // block_tokens]
    page_rows = layout.layers * kv_rows * block_tokens
    first_rows = pages * page_rows + positions % block_tokens
    rows: Integers = first_rows[:, None] + np.arange(kv_rows) * block_tokens
    return rows


def _page_rows(pages: Integers, layout: KvLayout) -> Integers:
    """pages [works, n] -> rows [kv_factor, works, kv_heads, n] of block_tokens x head_dim, flat."""
    kv_rows = layout.rows
    offsets = np.arange(kv_rows).reshape(layout.kv_factor, 1, layout.kv_heads, 1)
    return (pages[None, :, None, :] * (layout.layers * kv_rows) + offsets).reshape(-1)


def _groups(
    works: list[Work],
    tables: list[Integers],
    first: int,
    layout: KvLayout,
    staging: Staging,
) -> list[QueryGroup]:
    """Cut works, sorted by context, where padding would cost more than another group."""
    padding_tokens_max = PADDING_BYTES_MAX // (layout.token_bytes // layout.layers)
    groups, begin, padding = [], 0, 0
    for index in range(1, len(works) + 1):
        if index < len(works):
            growth = len(tables[index]) - len(tables[index - 1])
            padding += growth * layout.block_tokens * (index - begin)
            if padding <= padding_tokens_max:
                continue
        groups.append(
            _group(works[begin:index], tables[begin:index], first + begin, layout, staging)
        )
        begin, padding = index, 0
    return groups


def _group(
    works: list[Work],
    tables: list[Integers],
    first: int,
    layout: KvLayout,
    staging: Staging,
) -> QueryGroup:
    width = len(tables[-1])
    pages = np.empty((len(works), width), dtype=np.int64)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]  # any page of its own: finite, and masked
    ends = np.array([work.end for work in works], dtype=np.int64)
    rows = staging.put(_page_rows(pages, layout))
    if (ends == ends[0]).all():
        return QueryGroup(first, len(works), rows, int(ends[0]), None)
    context_tokens = width * layout.block_tokens
    return QueryGroup(first, len(works), rows, context_tokens, staging.put(ends))


def _paged(
    kernels: PagedKernels,
    works: list[Work],
    tables: list[Integers],
    decode_works: int,
    staging: Staging,
) -> PagedPlan:
    counts = np.array([len(work.token_ids) for work in works], dtype=np.int64)
    contexts = np.array([work.end for work in works], dtype=np.int64)

    def planned(part: slice, counts: Integers) -> PagedAttend | None:
        if not len(contexts[part]):
            return None
        return kernels.planned(PagedWorks(counts[part], contexts[part], tables[part]), staging)

    decodes = planned(slice(0, decode_works), counts)
    prefills = planned(slice(decode_works, None), counts)
    query_tokens = (
        planned(slice(0, None), np.ones_like(counts)) if prefills is not None else decodes
    )
    assert query_tokens is not None
    return PagedPlan(decodes, prefills, query_tokens)


def _seen(works: list[Work], tables: list[Integers]) -> PagesSeen:
    widths = np.array([len(table) for table in tables], dtype=np.int64)
    contexts = np.array([work.end for work in works], dtype=np.int64)
    return PagesSeen(
        np.concatenate(tables), np.cumsum(widths) - widths, contexts, int(contexts.sum())
    )


def _spans(
    works: list[Work],
    tables: list[Integers],
    decode_works: int,
    layout: KvLayout,
    staging: Staging,
) -> list[PrefillSpan]:
    spans, first = [], decode_works
    for work, table in zip(works[decode_works:], tables[decode_works:], strict=True):
        # What is beyond the end is masked; any page of its own will do, it only must be finite.
        width = blocks_touched(rounded_up(work.end, CONTEXT_STEP_TOKENS), layout.block_tokens)
        pages = np.pad(table, (0, width - len(table)), mode="edge")
        rows = staging.put(_page_rows(pages[None], layout))
        spans.append(PrefillSpan(first, len(work.token_ids), work.start, rows, table))
        first += len(work.token_ids)
    return spans


def _written(
    works: list[Work], tables: list[Integers], block_tokens: int
) -> tuple[list[int], list[int]]:
    pages: list[int] = []
    fresh: list[int] = []
    for work, table in zip(works, tables, strict=True):
        first = work.start // block_tokens
        pages += table[first:].tolist()
        last_start = (len(table) - 1) * block_tokens
        if work.start <= last_start and work.end < last_start + block_tokens:
            fresh.append(int(table[-1]))
    return pages, fresh
