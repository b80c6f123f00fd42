"""What a kernel that reads pages in place is asked, and what it answers: one attention per layer.

Not here: the kernels (paged_kernels.py, flashinfer_kernels.py), the rest of a step (step_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.torch.gpu.staging import Staging

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedWorks:
    """Works whose queries lie one after the other; each work's are its last tokens."""

    counts: Integers  # [works] queries
    contexts: Integers  # [works] tokens, up to the last query
    tables: Sequence[Integers]  # of each work, the pages of its context

    @property
    def is_decode(self) -> bool:
        return int(self.counts.max()) == 1

    def padded(self) -> Integers:
        """[works, pages of the longest]; what pads is read by nobody."""
        width = max(len(table) for table in self.tables)
        found = np.zeros((len(self.tables), width), dtype=np.int64)
        for row, table in zip(found, self.tables, strict=True):
            row[: len(table)] = table
        return found


class PagedAttend(Protocol):
    """The attention of planned works in one layer."""

    works: PagedWorks | None  # None: only the device knows them

    def __call__(self, pages: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """queries [all of the works, heads, head_dim] -> the same shape.

        pages [pages, 2, kv_heads, block_tokens, head_dim], of one layer.
        """
        ...


class StaticAttend(Protocol):
    """That of a recorded decode step, whose tables and contexts lie in tensors that stay."""

    def refresh(self, tables: Integers, contexts: Integers) -> None:
        """On the host, before each replay: tables [works, width], contexts [works]."""
        ...

    def over(self, tables: torch.Tensor, contexts: torch.Tensor) -> PagedAttend:
        """Part of what is recorded: the same on the device."""
        ...


class PagedKernels(Protocol):
    name: str

    def planned(self, works: PagedWorks, staging: Staging) -> PagedAttend:
        """May be called once `staging` has been sent."""
        ...

    def static(self, works: int, width: int) -> StaticAttend: ...


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """How a step attends: the works of one token, the others, and the last token of all."""

    decodes: PagedAttend | None
    prefills: PagedAttend | None
    query_tokens: PagedAttend
