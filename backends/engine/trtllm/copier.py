"""Moves bytes between TensorRT-LLM's pages and the staging pool: here on plain memory.

`HostCopier` serves KV in host memory (tests, and the stand-in for TensorRT-LLM); on a GPU the same
calls become asynchronous (cuda_copier.py). Streams and events are those of torch, or anything
with their methods.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.trtllm.block_pages import Run


class Event(Protocol):
    def synchronize(self) -> None: ...


class Copier(Protocol):
    """One rank's. `load` and `record` come from the executor's thread, the others from another."""

    def load(self, runs: Sequence[Run], stream: Any) -> Event | None:
        """Pool -> pages, after what `stream` has to do so far and before what it gets next.

        The event is reached when the pool is not read any more; None: already.
        """
        ...

    def load_aside(self, runs: Sequence[Run], after: Event | None) -> None:
        """Pool -> pages, once `after` is reached; returns when the bytes are there."""
        ...

    def record(self, stream: Any) -> Event | None:
        """Reached when `stream` has done what it has to do so far; None: already."""
        ...

    def save(self, runs: Sequence[Run], after: Event | None) -> None:
        """Pages -> pool, once `after` is reached; returns when the bytes are there."""
        ...

    def close(self) -> None: ...


def map_pool(path: str, block_bytes: int) -> NDArray[np.uint8]:
    """The worker's staging pool, [pages, block_bytes] in one piece."""
    file = os.open(path, os.O_RDWR)
    try:
        size_bytes = os.fstat(file).st_size
        if not size_bytes or size_bytes % block_bytes:
            raise ValueError(
                f"the staging pool {path} has {size_bytes} bytes, which are no whole pages of "
                f"{block_bytes}"
            )
        return np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
    finally:
        os.close(file)


def make_copier(kv: Any, pool: NDArray[np.uint8]) -> Copier:
    """For a torch tensor wherever it lies."""
    if kv.is_cuda:
        from backends.engine.trtllm.cuda_copier import CudaCopier

        return CudaCopier(kv, pool)
    return HostCopier(kv, pool)


class HostCopier:
    def __init__(self, kv: Any, pool: NDArray[np.uint8]) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._pages: NDArray[np.uint8] = kv.view(torch.uint8).reshape(-1).numpy()
        self._pool = pool

    def load(self, runs: Sequence[Run], stream: Any) -> None:
        self.load_aside(runs, self.record(stream))

    def load_aside(self, runs: Sequence[Run], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, pool_at, size_bytes in runs:
            self._pages[pages_at : pages_at + size_bytes] = self._pool[
                pool_at : pool_at + size_bytes
            ]

    def record(self, stream: Any) -> Event | None:
        return None if stream is None else stream.record_event()

    def save(self, runs: Sequence[Run], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, pool_at, size_bytes in runs:
            self._pool[pool_at : pool_at + size_bytes] = self._pages[
                pages_at : pages_at + size_bytes
            ]

    def close(self) -> None:
        del self._pages, self._pool  # the mapping goes with its last view
