"""Paged attention kernels of a GPU: selects kernels that read K and V in place.

`choose` tests the implementations in this order, and takes the first that passes:

    flashinfer   if the package is installed (flashinfer_kernels.py)
    torch        torch's variable-length attention with a block table (torch 2.13 and newer), tested
                 first without and then with *key starts*, its argument cu_seq_k. If torch runs
                 Flash Attention 2, the tokens per page must be a multiple of 256
    none         the fallback: each layer gathers the pages for torch's attention (layers/)

A test compares results on a few pages of the engine's shape with torch's plain attention, because
no library guarantees which shapes it supports. All kernels need K and V in float16 or bfloat16. If
kernels raise in a later step, the caller uses `plain` in that step, and the fallback from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from backends.engine.torch.gpu.paged_plan import (
    Attend,
    Integers,
    PagedKernels,
    PagedSequences,
    StaticAttend,
)
from backends.engine.torch.gpu.staging import Staging
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers import causal_attention
from mooncake_store.layout import blocks_touched

log = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = 3e-2  # largest absolute error in the test, whose inputs are standard normal
TRIED_PAGES, TRIED_LAYERS = 4, 2  # size of the KV memory that a test allocates
PROBLEM_MAX = 160  # characters of a library's error text that are logged


Known = Iterable[tuple[str, Callable[[], PagedKernels]]]  # (name, maker) of implementations


def choose(memory: KvMemory, heads: int) -> PagedKernels | None:
    """The best kernels that work here; None: gather the pages. On a GPU, the choice is logged."""
    if memory.pool.device.type != "cuda":
        return None
    if memory.layout.kv_factor != 2 or memory.pool.dtype not in DTYPES:
        log.info("attention gathers the pages: no kernel reads KV of %s", memory.layout)
        return None
    problems = []
    for found, problem in tried(known(memory, heads), memory, heads):
        if found is not None:
            log.info("attention reads the pages in place by %s", found.name)
            return found
        problems.append(problem)
    log.warning("attention gathers the pages, which is slower: %s", "; ".join(problems))
    return None


def tried(makers: Known, memory: KvMemory, heads: int) -> Iterator[tuple[PagedKernels | None, str]]:
    """Make and test each implementation. Yields (kernels, "") or (None, problem)."""
    for name, make in makers:
        try:
            kernels = make()
            problem = wrong(kernels, memory, heads)
        except Exception as error:  # Catch all: after any driver error, try the next kernels
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:PROBLEM_MAX]
        yield (kernels, "") if problem is None else (None, f"{name}: {problem}")


def known(memory: KvMemory, heads: int) -> Known:
    """All implementations, the best first."""
    from backends.engine.torch.gpu.flashinfer_kernels import FlashInferKernels

    layout, pool = memory.layout, memory.pool
    yield "flashinfer", lambda: FlashInferKernels(layout, heads, pool.dtype, pool.device)
    yield "torch", lambda: VarlenKernels(has_key_starts=False)
    yield "torch, with key starts", lambda: VarlenKernels(has_key_starts=True)


@torch.inference_mode()
def wrong(kernels: PagedKernels, memory: KvMemory, heads: int) -> str | None:
    """Test decode steps, prefill steps, and decode steps in the form that a CUDA graph records
    (*static*). Returns the problem; None: the results are right."""
    layout, device = memory.layout, memory.pool.device
    block_tokens = layout.block_tokens
    made = torch.Generator(device).manual_seed(1)
    shape = (TRIED_PAGES, min(TRIED_LAYERS, layout.layers), *memory.pool.shape[2:])
    pool = torch.randn(shape, generator=made, device=device).to(memory.pool.dtype)
    pages = pool[:, -1]
    tables = [np.array(table, dtype=np.int64) for table in ([2], [3, 0], [1, 2])]
    contexts = np.array([1, block_tokens + 1, 2 * block_tokens], dtype=np.int64)
    for counts in ([1, 1, 1], [1, min(3, block_tokens), 2 * block_tokens - 1]):
        sequences = PagedSequences(np.array(counts, dtype=np.int64), contexts, tables)
        all_heads = heads + 2 * layout.kv_heads  # as in a step, a row has queries, K and V
        qkv = torch.randn(
            sum(counts), all_heads, layout.head_dim, generator=made, device=device
        ).to(pool.dtype)
        queries = qkv[:, :heads]
        expected = plain(pages, sequences, queries).float()
        staging = Staging(device)
        planned = kernels.planned(sequences, staging)
        staging.send()
        far = _distance(planned(pages, queries), expected)
        if sequences.is_decode and far < TOLERANCE:
            static = kernels.static(len(counts), 2)
            static.refresh(sequences.padded(), contexts)
            padded, ends = (torch.from_numpy(a).to(device) for a in (sequences.padded(), contexts))
            far = _distance(static.over(padded, ends)(pages, queries), expected)
        if not far < TOLERANCE:  # also true if `far` is NaN
            return f"it is off by {far:.2g} for {counts} queries of three sequences"
    return None


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other).abs().max())


def plain(pages: torch.Tensor, sequences: PagedSequences, queries: torch.Tensor) -> torch.Tensor:
    """The result of an `Attend` (paged_plan.py), by torch's attention over gathered pages."""
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _, _, kv_heads, block_tokens, head_dim = pages.shape
    first = 0
    for count, context, table in zip(
        sequences.counts.tolist(), sequences.contexts.tolist(), sequences.tables, strict=True
    ):
        own = table[: blocks_touched(context, block_tokens)]
        kv = pages.index_select(0, torch.from_numpy(own).to(pages.device)).to(queries.dtype)
        keys, values = kv.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim).unbind(0)
        rows, target = (
            tensor[first : first + count].unflatten(1, (kv_heads, -1)) for tensor in (queries, out)
        )
        causal_attention.by_torch(rows, keys, values, context - count, target)
        first += count
    return out


class VarlenKernels:
    """torch.nn.attention.varlen. `has_key_starts`: also pass the key starts (cu_seq_k). The object
    has no state, so `static` returns the object itself for every CUDA graph."""

    def __init__(self, has_key_starts: bool) -> None:
        # torch 2.10 to 2.12 fails in the test (no block_table), older ones raise ImportError here.
        from torch.nn.attention.varlen import varlen_attn

        self.name = "torch's variable-length attention"
        self._attend = varlen_attn
        self._has_key_starts = has_key_starts

    def planned(self, sequences: PagedSequences, staging: Staging) -> Attend:
        starts = np.concatenate([[0], np.cumsum(sequences.counts)]).astype(np.int64)
        return _VarlenAttend(
            self._attend,
            self._has_key_starts,
            staging.put(sequences.padded()),
            staging.put(sequences.contexts),
            staging.put(starts),
            queries_max=int(sequences.counts.max()),
            context_max=int(sequences.contexts.max()),
        )

    def static(self, sequences: int, width: int) -> StaticAttend:
        return self

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        """Does nothing, because each replay converts the tensors given to `over` again."""

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> Attend:
        starts = torch.arange(len(tables) + 1, device=tables.device)
        return _VarlenAttend(self._attend, self._has_key_starts, tables, contexts, starts)


@dataclass(slots=True)
class _VarlenAttend:
    attend: Callable[..., torch.Tensor]
    has_key_starts: bool
    tables: torch.Tensor  # [sequences, pages] page numbers
    contexts: torch.Tensor  # [sequences] tokens of each context
    starts: torch.Tensor  # [sequences + 1] index of each sequence's first query; number of queries
    queries_max: int = 1  # largest number of queries of a sequence
    # Tokens of the longest context; 0: the tokens for which `tables` has room.
    context_max: int = 0
    # `tables`, `contexts` and `starts` as int32, and the key starts. Set at the first call, because
    # `Staging.send` fills the tensors after `planned` has made this object.
    _arguments: tuple[torch.Tensor | None, ...] | None = None

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if self._arguments is None:  # the first layer converts the arguments for all layers
            self._arguments = self._converted()
        tables, contexts, starts, key_starts = self._arguments
        keys, values = pages.transpose(2, 3).unbind(1)  # [pages, block_tokens, kv_heads, head_dim]
        return self.attend(
            queries,
            keys,
            values,
            starts,
            key_starts,
            self.queries_max,
            self.context_max or self.tables.shape[1] * keys.shape[1],
            # (-1, 0) is a causal mask, aligned to each sequence's last key. (-1, -1) is no mask. A
            # single query needs no mask, and without a mask heads can share the reads of K and V.
            window_size=(-1, -1) if self.queries_max == 1 else (-1, 0),
            enable_gqa=True,
            seqused_k=contexts,
            block_table=tables,
        )

    def _converted(self) -> tuple[torch.Tensor | None, ...]:
        integers = (self.tables, self.contexts, self.starts)
        tables, contexts, starts = (tensor.to(torch.int32) for tensor in integers)
        key_starts = None
        if self.has_key_starts:
            key_starts = torch.cat([starts[:1], contexts.cumsum(0, dtype=torch.int32)])
        return tables, contexts, starts, key_starts
