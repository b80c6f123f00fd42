"""Interface of GPU attention kernels that read pages in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.torch.gpu.staging import Staging

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """Sequences whose queries are concatenated. The queries of a sequence are its last tokens."""

    counts: Integers  # [sequences] number of queries of each sequence; >= 1
    contexts: Integers  # [sequences] tokens of each sequence, including its queries
    tables: Sequence[Integers]  # page numbers of each sequence's context

    @property
    def is_decode(self) -> bool:
        return int(self.counts.max()) == 1

    def padded(self) -> Integers:
        """`tables` as one array [sequences, largest number of pages], padded with 0."""
        width = max(len(table) for table in self.tables)
        found = np.zeros((len(self.tables), width), dtype=np.int64)
        for row, table in zip(found, self.tables, strict=True):
            row[: len(table)] = table
        return found


# Attention of planned sequences in one layer. Arguments: the layer's KV [pages, 2, kv_heads,
# block_tokens, head_dim] and the queries of all sequences [queries, heads, head_dim]. The result
# has the shape of the queries.
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The attention of some sequences, for every layer."""

    attend: Attend
    sequences: PagedSequences | None  # None: a CUDA graph, whose sequences are on the device


class StaticAttend(Protocol):
    """Attention in a CUDA graph of a decode step (decode_graph.py), over static tensors."""

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        """Plan the next replay, for page tables [sequences, width] and contexts [sequences]."""
        ...

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> Attend:
        """The attention that the graph records, over these static tensors on the device."""
        ...


class PagedKernels(Protocol):
    name: str

    def planned(self, sequences: PagedSequences, staging: Staging) -> Attend:
        """The attention of these sequences. Call the result only after `staging.send`."""
        ...

    def static(self, sequences: int, width: int) -> StaticAttend: ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The attention of a step."""

    decodes: PagedAttend | None  # of sequences with one new token; None: there are none
    prefills: PagedAttend | None  # of sequences with several new tokens; None: there are none
    query_tokens: PagedAttend  # of the last token of every sequence
