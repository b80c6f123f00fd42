"""Attention that reads K and V where they lie in the pages of a GPU: which kernels there are.

Three ways, the first that works here is used:

    flashinfer   where the package is installed (flashinfer_kernels.py)
    torch        torch's variable-length flash attention with a block table (2.13 and newer): half
                 precision, and where it is flash attention 2, pages of a multiple of 256 tokens
    none         the pages are gathered, layer by layer, and torch attends (layers/)

"Works" is tried once, on small pages of the engine's own shape, against torch's plain attention:
neither way promises its shapes, and neither has run on a GPU of ours. What fails later, in a step,
is told once; that step goes on with `plain`, and the next ones gather.

Not here: what a kernel is asked (paged_plan.py), recorded decode steps (decode_graph.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from backends.engine.torch.gpu.paged_plan import (
    Integers,
    PagedAttend,
    PagedKernels,
    PagedWorks,
    StaticAttend,
)
from backends.engine.torch.gpu.staging import Staging
from backends.engine.torch.kv_memory import KvMemory
from backends.engine.torch.layers import causal_attention
from mooncake_store.layout import blocks_touched

log = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = 3e-2  # of averages of numbers like 1, in bfloat16
TRIED_PAGES, TRIED_LAYERS = 4, 2
PROBLEM_MAX = 160  # characters of what torch says, which may be a page


Known = Iterable[tuple[str, Callable[[], PagedKernels]]]


def choose(memory: KvMemory, heads: int) -> PagedKernels | None:
    """For these pages; None where they are gathered, which on a GPU is said."""
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
    """Each that is right, or what is wrong with it."""
    for name, make in makers:
        try:
            kernels = make()
            problem = wrong(kernels, memory, heads)
        except Exception as error:  # edge: whatever a driver or a library says, the others remain
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:PROBLEM_MAX]
        yield (kernels, "") if problem is None else (None, f"{name}: {problem}")


def known(memory: KvMemory, heads: int) -> Known:
    """The best first."""
    from backends.engine.torch.gpu.flashinfer_kernels import FlashInferKernels

    layout, pool = memory.layout, memory.pool
    yield "flashinfer", lambda: FlashInferKernels(layout, heads, pool.dtype, pool.device)
    yield "torch", lambda: VarlenKernels(has_key_starts=False)
    yield "torch, with key starts", lambda: VarlenKernels(has_key_starts=True)


@torch.inference_mode()
def wrong(kernels: PagedKernels, memory: KvMemory, heads: int) -> str | None:
    """Prompts, last tokens and a recorded step over a few pages like those of `memory`, tried."""
    layout, device = memory.layout, memory.pool.device
    block_tokens = layout.block_tokens
    made = torch.Generator(device).manual_seed(1)
    shape = (TRIED_PAGES, min(TRIED_LAYERS, layout.layers), *memory.pool.shape[2:])
    pool = torch.randn(shape, generator=made, device=device).to(memory.pool.dtype)
    pages = pool[:, -1]
    tables = [np.array(table, dtype=np.int64) for table in ([2], [3, 0], [1, 2])]
    contexts = np.array([1, block_tokens + 1, 2 * block_tokens], dtype=np.int64)
    for counts in ([1, 1, 1], [1, min(3, block_tokens), 2 * block_tokens - 1]):
        works = PagedWorks(np.array(counts, dtype=np.int64), contexts, tables)
        all_heads = heads + 2 * layout.kv_heads  # queries lie in rows with K and V
        qkv = torch.randn(
            sum(counts), all_heads, layout.head_dim, generator=made, device=device
        ).to(pool.dtype)
        queries = qkv[:, :heads]
        expected = plain(pages, works, queries).float()
        staging = Staging(device)
        planned = kernels.planned(works, staging)
        staging.send()
        far = _distance(planned(pages, queries), expected)
        if works.is_decode and far < TOLERANCE:
            static = kernels.static(len(counts), 2)
            static.refresh(works.padded(), contexts)
            padded, ends = (torch.from_numpy(a).to(device) for a in (works.padded(), contexts))
            far = _distance(static.over(padded, ends)(pages, queries), expected)
        if not far < TOLERANCE:  # also where it is NaN
            return f"it is off by {far:.2g} for {counts} queries"
    return None


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other).abs().max())


def plain(pages: torch.Tensor, works: PagedWorks, queries: torch.Tensor) -> torch.Tensor:
    """What a PagedAttend does, work by work: the pages gathered, torch's attention."""
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _, _, kv_heads, block_tokens, head_dim = pages.shape
    first = 0
    for count, context, table in zip(
        works.counts.tolist(), works.contexts.tolist(), works.tables, strict=True
    ):
        own = table[: blocks_touched(context, block_tokens)]
        kv = pages.index_select(0, torch.from_numpy(own).to(pages.device))
        keys, values = kv.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim).unbind(0)
        rows, target = (
            tensor[first : first + count].unflatten(1, (kv_heads, -1)) for tensor in (queries, out)
        )
        causal_attention.by_torch(rows, keys, values, context - count, target)
        first += count
    return out


class VarlenKernels:
    """torch.nn.attention.varlen. What its C++ wants beside the documented is tried: key starts."""

    def __init__(self, has_key_starts: bool) -> None:
        from torch.nn.attention.varlen import varlen_attn  # ImportError: torch is older than 2.10

        self.name = "torch's variable-length attention"
        self._attend = varlen_attn
        self._has_key_starts = has_key_starts

    def planned(self, works: PagedWorks, staging: Staging) -> PagedAttend:
        starts = np.concatenate([[0], np.cumsum(works.counts)]).astype(np.int64)
        parts = [staging.put(array) for array in (works.padded(), works.contexts, starts)]
        return _VarlenAttend(
            self._attend,
            works,
            *parts,
            int(works.counts.max()),
            int(works.contexts.max()),
            self._has_key_starts,
        )

    def static(self, works: int, width: int) -> StaticAttend:
        return _VarlenStatic(self._attend, self._has_key_starts)


class _VarlenStatic:
    def __init__(self, attend: Callable[..., torch.Tensor], has_key_starts: bool) -> None:
        self._attend, self._has_key_starts = attend, has_key_starts

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        """The kernel reads the tensors themselves."""

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> PagedAttend:
        starts = torch.arange(len(tables) + 1, device=tables.device)
        # 0: the longest context that fits the tables, which only the pages' size can tell.
        return _VarlenAttend(
            self._attend, None, tables, contexts, starts, 1, 0, self._has_key_starts
        )


class _VarlenAttend:
    def __init__(
        self,
        attend: Callable[..., torch.Tensor],
        works: PagedWorks | None,
        tables: torch.Tensor,
        contexts: torch.Tensor,
        starts: torch.Tensor,
        queries_max: int,
        context_max: int,
        has_key_starts: bool,
    ) -> None:
        self.works = works
        self._attend = attend
        self._integers = (tables, contexts, starts)
        self._is_ready = False
        self._key_starts: torch.Tensor | None = None
        self._queries_max, self._context_max = queries_max, context_max
        self._has_key_starts = has_key_starts

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if not self._is_ready:  # by the first layer, for all
            self._prepare()
        tables, contexts, starts = self._integers
        keys, values = pages.transpose(2, 3).unbind(1)  # [pages, block_tokens, kv_heads, head_dim]
        return self._attend(
            queries,
            keys,
            values,
            starts,
            self._key_starts,
            self._queries_max,
            self._context_max or tables.shape[1] * keys.shape[1],
            # A causal mask ends at the last key of each work. A last token sees all, and said so
            # the kernel may share K and V among the queries of a head.
            window_size=(-1, -1) if self._queries_max == 1 else (-1, 0),
            enable_gqa=True,
            seqused_k=contexts,
            block_table=tables,
        )

    def _prepare(self) -> None:
        tables, contexts, starts = (tensor.to(torch.int32) for tensor in self._integers)
        self._integers = tables, contexts, starts
        if self._has_key_starts:
            ends = contexts.cumsum(0, dtype=torch.int32)
            self._key_starts = torch.cat([starts[:1], ends])
        self._is_ready = True
