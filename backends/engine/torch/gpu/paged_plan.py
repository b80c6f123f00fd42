"""Interface of attention kernels that read pages in place."""

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
    """Sequences with concatenated queries. The queries of a sequence are its last tokens."""

    counts: Integers  # [sequences] queries of each
    contexts: Integers  # [sequences] tokens of each context, up to the last query
    tables: Sequence[Integers]  # pages of each sequence's context

    @property
    def is_decode(self) -> bool:
        return int(self.counts.max()) == 1

    def padded(self) -> Integers:
        """[sequences, pages of the longest]; padding is not read."""
        width = max(len(table) for table in self.tables)
        found = np.zeros((len(self.tables), width), dtype=np.int64)
        for row, table in zip(found, self.tables, strict=True):
            row[: len(table)] = table
        return found


# Attention of planned sequences in one layer. Arguments: pages [pages, 2, kv_heads, block_tokens,
# head_dim] of the layer, and queries [all of the sequences, heads, head_dim]. Result: the shape of
# the queries.
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Sequences and their attention in any layer."""

    attend: Attend
    sequences: PagedSequences | None  # None: they are only in device memory


class StaticAttend(Protocol):
    """The attention of a recorded decode step, with static tables and contexts."""

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        """Set tables [sequences, width] and contexts [sequences], before each replay."""
        ...

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> Attend:
        """The attention over these static device tensors, for the recording."""
        ...


class PagedKernels(Protocol):
    name: str

    def planned(self, sequences: PagedSequences, staging: Staging) -> Attend:
        """The attention of these sequences. Call it only after `staging` has been sent."""
        ...

    def static(self, sequences: int, width: int) -> StaticAttend: ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The attention of a step."""

    decodes: PagedAttend | None  # of decode sequences
    prefills: PagedAttend | None  # of prefill sequences
    query_tokens: PagedAttend  # of the query tokens of all sequences
