"""Plan of one forward step: index arrays that all layers share.

The new tokens of all sequences are the rows of one ragged batch. Decode sequences (one new token)
come first, then prefill sequences (several new tokens). Both kinds are sorted by number of pages.

A *query token* is the last token of a sequence. A decode sequence has no other new token, and the
last layer computes attention of query tokens only. Where no kernel reads the pages in place,
attention gathers K and V. For this, query tokens are divided into groups of similar context length.

A *scored row* is a row whose next token is known and whose logits are wanted, because the request
asks for the logprobs of its prompt. The last layer computes the scored rows, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.torch.gpu.paged_plan import (
    PagedAttend,
    PagedKernels,
    PagedPlan,
    PagedSequences,
)
from backends.engine.torch.gpu.staging import Staging
from backends.engine.torch.scoring import ScoredSpan
from mooncake_store.layout import KvLayout, blocks_touched

Integers = NDArray[np.int64]
Array = TypeVar("Array", Integers, torch.Tensor)

# Largest padding of a group: KV of one layer that is gathered and not used. Gathering so much takes
# about 40 us on a CPU, as long as the calls of one more group in each layer.
PADDING_BYTES_MAX = 512 * 1024
# Prefill gathers its context up to a multiple of this. Reason: see `rounded_rows`.
CONTEXT_STEP_TOKENS = 64


@dataclass(slots=True)
class QueryGroup:
    """The query tokens of consecutive sequences, with contexts padded to the same pages."""

    first: int  # index of the group's first sequence in the plan
    sequences: int  # number of sequences in the group
    page_rows: torch.Tensor  # [layout.rows * sequences * pages] row indices of KvMemory.page_rows
    context_tokens: int  # of the longest context; rounded up to whole pages if `ends` is not None
    ends: torch.Tensor | None  # [sequences] tokens of each context; None: all have the same length
    _mask: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[sequences, 1, 1, context_tokens] with 0 or -inf, cached after the first call. None: all
        contexts have the same length."""
        if self._mask is None and self.ends is not None:
            positions = torch.arange(self.context_tokens, device=self.ends.device)
            is_beyond = (positions >= self.ends[:, None])[:, None, None, :]
            mask = torch.zeros(is_beyond.shape, dtype=dtype, device=self.ends.device)
            self._mask = mask.masked_fill_(is_beyond, -torch.inf)
        return self._mask


@dataclass(frozen=True, slots=True)
class PagesSeen:
    """The pages of all sequences in host memory: for native code and Transformer.arrive."""

    pages: Integers  # page numbers of all sequences, concatenated without padding
    starts: Integers  # [sequences] index of each sequence's first page in `pages`
    contexts: Integers  # [sequences] tokens of each context
    tokens: int  # sum of `contexts`


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """The new tokens of one prefill sequence. The token at position p attends to tokens 0..p."""

    first: int  # row of the first new token in the batch
    tokens: int  # number of new tokens; >= 2
    start: int  # position of the first new token in its sequence
    page_rows: torch.Tensor  # row indices for `end` tokens, rounded up to CONTEXT_STEP_TOKENS
    pages: Integers  # page numbers of the tokens before `end`

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The defaults are the values of a step that a CUDA graph records (gpu/decode_graph.py)."""

    tokens: int  # new tokens of all sequences
    token_ids: torch.Tensor  # [tokens, rounded up]; the rows beyond `tokens` are padding
    positions: torch.Tensor  # of the tokens in their sequences; the shape of `token_ids`
    token_rows: torch.Tensor  # [tokens, layout.rows] row indices of KvMemory.token_rows
    decode_sequences: int  # number of decode sequences
    # Groups of the decode sequences, and groups of all sequences. Both are empty if attention uses
    # `seen` or `paged`. In `decodes`, the row of a token is the index of its sequence.
    decodes: list[QueryGroup]
    query_tokens: list[QueryGroup]
    prefills: Sequence[PrefillSpan] = ()
    seen: PagesSeen | None = None  # pages of all sequences; None in a recorded step
    # Row of each query token, then the scored rows, then padding; None: all rows are query tokens.
    last_rows: torch.Tensor | None = None
    scored: Sequence[ScoredSpan] = ()  # their rows are indices in `last_rows`
    order: list[int] | None = None  # sequence i is batch[order[i]]; None: same order
    pages: Sequence[int] = ()  # numbers of the pages that this step writes
    fresh_pages: Sequence[int] = ()  # part of `pages`: begun by this step and not filled by it
    # The plan for GPU kernels that read pages in place. With it, groups and `prefills` are empty.
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
    """Plan a step. `reads_seen`: attention of query tokens uses `seen` instead of groups."""
    block_tokens = layout.block_tokens
    order = sorted(
        range(len(batch)),
        key=lambda index: (
            len(batch[index].token_ids) > 1,
            blocks_touched(batch[index].end, block_tokens),
        ),
    )
    sequences = [batch[index] for index in order]
    counts = [len(sequence.token_ids) for sequence in sequences]
    decode_sequences = counts.count(1)
    tables = [
        np.asarray(sequence.pages[: blocks_touched(sequence.end, block_tokens)], dtype=np.int64)
        for sequence in sequences
    ]
    token_ids = np.concatenate(
        [np.asarray(sequence.token_ids, dtype=np.int64) for sequence in sequences]
    )
    check_range("token id", token_ids, vocabulary_tokens)
    seen = _seen(sequences, tables)
    check_range("page", seen.pages, pages_max)
    positions = _positions(sequences, counts)
    staging = Staging(device)
    paged, decodes, rest, spans = None, [], [], []
    if kernels is not None:
        paged = _paged(kernels, counts, seen.contexts, tables, decode_sequences, staging)
    else:
        if not reads_seen:
            decodes, rest = (
                _groups(sequences[part], tables[part], part.start, layout, staging)
                for part in (slice(0, decode_sequences), slice(decode_sequences, None))
            )
        spans = _spans(sequences, tables, decode_sequences, layout, staging)
    pages, fresh_pages = _written(sequences, tables, block_tokens)
    is_decode_only = decode_sequences == len(sequences)
    tokens = len(token_ids)
    token_pages = seen.pages[np.repeat(seen.starts, counts) + positions // block_tokens]
    rows = staging.put(token_rows(token_pages, positions, np.arange(layout.rows), layout))
    if not is_decode_only:
        extra_rows = (0, rounded_rows(tokens) - tokens)
        token_ids, positions = np.pad(token_ids, extra_rows), np.pad(positions, extra_rows)
    last_rows, scored = None, []
    if not is_decode_only or any(sequence.scores is not None for sequence in sequences):
        last_rows, scored = _last_rows(sequences, counts)
    plan = StepPlan(
        tokens=tokens,
        token_ids=staging.put(token_ids),
        positions=staging.put(positions),
        token_rows=rows,
        decode_sequences=decode_sequences,
        decodes=decodes,
        prefills=spans,
        query_tokens=decodes + rest,
        seen=seen,
        last_rows=None if last_rows is None else staging.put(last_rows),
        scored=scored,
        order=None if order == list(range(len(batch))) else order,
        pages=pages,
        fresh_pages=fresh_pages,
        paged=paged,
    )
    staging.send()
    return plan


def rounded_rows(rows: int) -> int:
    """Round up a number of rows, so that few different shapes occur.

    oneDNN compiles a kernel for each new shape, in 0.3 ms. Without rounding, nearly every new
    prompt length would cost a millisecond per step.
    """
    return rounded_up(rows, 8 if rows <= 64 else 16 if rows <= 256 else 32)


def check_range(name: str, values: Integers, limit: int) -> None:
    """Assert that all values are in [0, limit)."""
    # One comparison is enough, because a negative number is a huge unsigned number.
    if int(values.view(np.uint64).max()) >= limit:
        wrong = [int(value) for value in values if not 0 <= value < limit]
        raise AssertionError(f"{name} {wrong[0]} is outside 0..{limit - 1}")


def _last_rows(sequences: list[Work], counts: list[int]) -> tuple[Integers, list[ScoredSpan]]:
    """The values of StepPlan.last_rows and StepPlan.scored."""
    ends = np.cumsum(counts)
    rows, spans, first = [ends - 1], [], len(counts)
    for sequence, count, end in zip(sequences, counts, ends.tolist(), strict=True):
        if (scores := sequence.scores) is None:
            continue
        known = min(count, len(scores.token_ids) - 1 - sequence.start)
        if known > 0:
            spans.append(ScoredSpan(scores, sequence.start, first, known))
            rows.append(np.arange(end - count, end - count + known))
            first += known
    if spans:
        rows.append(np.zeros(rounded_rows(first) - first, dtype=np.int64))
    return np.concatenate(rows), spans


def _positions(sequences: list[Work], counts: list[int]) -> Integers:
    if len(counts) == sum(counts):
        return np.array([sequence.start for sequence in sequences], dtype=np.int64)
    return np.concatenate([np.arange(sequence.start, sequence.end) for sequence in sequences])


def rounded_up(tokens: int, step: int) -> int:
    return (tokens + step - 1) // step * step


def token_rows(pages: Array, positions: Array, heads: Array, layout: KvLayout) -> Array:
    """Row indices of each token's K and V, or latent, in KvMemory.token_rows.

    pages and positions [tokens] -> [tokens, layout.rows]. `heads`: 0 .. layout.rows - 1.
    """
    page_rows = layout.layers * layout.rows * layout.block_tokens
    first_rows = pages * page_rows + positions % layout.block_tokens
    return first_rows[:, None] + heads * layout.block_tokens


def page_rows(pages: Array, heads: Array, layout: KvLayout) -> Array:
    """Row indices of KvMemory.page_rows for pages [sequences, n], as in `token_rows`.

    The flat result has the order [kv_factor, sequences, kv_heads, n].
    """
    offsets = heads.reshape(layout.kv_factor, 1, layout.kv_heads, 1)
    return (pages[None, :, None, :] * (layout.layers * layout.rows) + offsets).reshape(-1)


def _groups(
    sequences: list[Work], tables: list[Integers], first: int, layout: KvLayout, staging: Staging
) -> list[QueryGroup]:
    """Divide sequences, sorted by pages, into groups of at most PADDING_BYTES_MAX of padding."""
    padding_tokens_max = PADDING_BYTES_MAX // (layout.token_bytes // layout.layers)
    groups, begin, padding = [], 0, 0
    for index in range(1, len(sequences) + 1):
        if index < len(sequences):
            growth = len(tables[index]) - len(tables[index - 1])
            padding += growth * layout.block_tokens * (index - begin)
            if padding <= padding_tokens_max:
                continue
        groups.append(
            _group(sequences[begin:index], tables[begin:index], first + begin, layout, staging)
        )
        begin, padding = index, 0
    return groups


def _group(
    sequences: list[Work], tables: list[Integers], first: int, layout: KvLayout, staging: Staging
) -> QueryGroup:
    width = len(tables[-1])
    pages = np.empty((len(sequences), width), dtype=np.int64)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]  # masked, but must be finite: repeat a page of the sequence
    ends = np.array([sequence.end for sequence in sequences], dtype=np.int64)
    rows = staging.put(page_rows(pages, np.arange(layout.rows), layout))
    if (ends == ends[0]).all():
        return QueryGroup(first, len(sequences), rows, int(ends[0]), None)
    context_tokens = width * layout.block_tokens
    return QueryGroup(first, len(sequences), rows, context_tokens, staging.put(ends))


def _paged(
    kernels: PagedKernels,
    counts: list[int],
    contexts: Integers,
    tables: list[Integers],
    decode_sequences: int,
    staging: Staging,
) -> PagedPlan:
    def planned(part: slice, counts: list[int]) -> PagedAttend | None:
        if not counts[part]:
            return None
        queries = np.array(counts[part], dtype=np.int64)
        sequences = PagedSequences(queries, contexts[part], tables[part])
        return PagedAttend(kernels.planned(sequences, staging), sequences)

    decodes = planned(slice(0, decode_sequences), counts)
    prefills = planned(slice(decode_sequences, None), counts)
    query_tokens = planned(slice(0, None), [1] * len(counts)) if prefills is not None else decodes
    assert query_tokens is not None
    return PagedPlan(decodes, prefills, query_tokens)


def _seen(sequences: list[Work], tables: list[Integers]) -> PagesSeen:
    widths = np.array([len(table) for table in tables], dtype=np.int64)
    contexts = np.array([sequence.end for sequence in sequences], dtype=np.int64)
    return PagesSeen(
        np.concatenate(tables), np.cumsum(widths) - widths, contexts, int(contexts.sum())
    )


def _spans(
    sequences: list[Work],
    tables: list[Integers],
    decode_sequences: int,
    layout: KvLayout,
    staging: Staging,
) -> list[PrefillSpan]:
    spans, first = [], decode_sequences
    for sequence, table in zip(
        sequences[decode_sequences:], tables[decode_sequences:], strict=True
    ):
        # The context is padded beyond its end. Padding is masked but must be finite: repeat a page.
        width = blocks_touched(rounded_up(sequence.end, CONTEXT_STEP_TOKENS), layout.block_tokens)
        pages = np.pad(table, (0, width - len(table)), mode="edge")
        rows = staging.put(page_rows(pages[None], np.arange(layout.rows), layout))
        spans.append(PrefillSpan(first, len(sequence.token_ids), sequence.start, rows, table))
        first += len(sequence.token_ids)
    return spans


def _written(
    sequences: list[Work], tables: list[Integers], block_tokens: int
) -> tuple[list[int], list[int]]:
    pages: list[int] = []
    fresh: list[int] = []
    for sequence, table in zip(sequences, tables, strict=True):
        first = sequence.start // block_tokens
        pages += table[first:].tolist()
        last_start = (len(table) - 1) * block_tokens
        if sequence.start <= last_start and sequence.end < last_start + block_tokens:
            fresh.append(int(table[-1]))
    return pages, fresh
