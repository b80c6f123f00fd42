"""Moves bytes between TensorRT-LLM's pages and the staging pool.

`HostCopier` serves KV in host memory (tests, and the stand-in for TensorRT-LLM). `CudaCopier` makes
the same calls asynchronous, without holding up the forward pass. Streams and events are those of
torch, or anything with their methods.

On a GPU the pool is page-locked, so the GPU's copy engines read and write it themselves. Loads and
saves each have a stream of their own, tied to the forward pass by events:

    load:  forward stream ──event──▶ load stream: copies ──event──▶ forward stream goes on
    load aside:   as a save, the other way: the forward stream does not wait for it
    save:  forward stream ──event──▶ save stream: copies ──event──▶ the thread that waits here

A load waits for what the forward stream still has to do, because the pages that it fills may just
have been taken from a request whose last step is under way. Copies are issued through the CUDA
driver (ctypes): a page takes microseconds on the bus, so a call that costs as much as one of torch
may be the limit (an estimate; nobody has measured it). They are plain copies, not kernels: no
multiprocessor is taken from the forward pass.

Not here: which copies (rank_copies.py). torch is imported late: a process without CUDA needs none.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.trtllm.block_pages import PageRun


class Event(Protocol):
    def synchronize(self) -> None: ...


class Copier(Protocol):
    """One rank's. `load` and `record` come from the executor's thread, the others from another."""

    def load(self, runs: Sequence[PageRun], stream: Any) -> Event | None:
        """Pool -> pages, after what `stream` has to do so far and before what it gets next.

        The event is reached when the pool is not read any more; None: already.
        """
        ...

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        """Pool -> pages, once `after` is reached; returns when the bytes are there."""
        ...

    def record(self, stream: Any) -> Event | None:
        """Reached when `stream` has done what it has to do so far; None: already."""
        ...

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
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
        from backends.engine.trtllm.copier import CudaCopier

        return CudaCopier(kv, pool)
    return HostCopier(kv, pool)


class HostCopier:
    def __init__(self, kv: Any, pool: NDArray[np.uint8]) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._pages: NDArray[np.uint8] = kv.view(torch.uint8).reshape(-1).numpy()
        self._pool = pool

    def load(self, runs: Sequence[PageRun], stream: Any) -> None:
        self.load_aside(runs, self.record(stream))

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, pool_at, size_bytes in runs:
            self._pages[pages_at : pages_at + size_bytes] = self._pool[
                pool_at : pool_at + size_bytes
            ]

    def record(self, stream: Any) -> Event | None:
        return None if stream is None else stream.record_event()

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, pool_at, size_bytes in runs:
            self._pool[pool_at : pool_at + size_bytes] = self._pages[
                pages_at : pages_at + size_bytes
            ]

    def close(self) -> None:
        del self._pages, self._pool  # the mapping goes with its last view


log = logging.getLogger(__name__)
HOST_REGISTER_PORTABLE = 1
ISSUED_MAX = 512  # copies in flight; where the driver's queue is full was guessed, not measured


class CudaDriver:
    """The one call of libcuda that is needed; addresses are unified, so it copies either way."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: given up for so short a call, it costs a switch interval to get back.
        self._quick = _copy_function(ctypes.PyDLL("libcuda.so.1"))
        self._patient = _copy_function(ctypes.CDLL("libcuda.so.1"))

    def copy(self, target: int, source: int, size_bytes: int, stream: int, issued: int) -> None:
        """`issued` copies may be in flight already: beyond some, this call waits for them."""
        call = self._quick if issued < ISSUED_MAX else self._patient
        if error := call(target, source, size_bytes, stream):
            raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {error}")

    def forget_error(self, cuda_version: str) -> None:
        """What failed was handled; left behind, torch's next check of a launch would raise it.

        torch does not offer this call; by its name the runtime is the one that torch has loaded.
        """
        try:
            ctypes.CDLL(f"libcudart.so.{cuda_version.split('.')[0]}").cudaGetLastError()
        except (OSError, AttributeError) as error:
            log.warning("an error of CUDA that was handled may be reported once more: %s", error)


def _copy_function(library: ctypes.CDLL) -> Any:
    function = library.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


class CudaCopier:
    def __init__(self, kv: Any, pool: NDArray[np.uint8]) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._torch: Any = torch
        self._device = kv.device
        self._driver = CudaDriver()
        self._pages_at = kv.data_ptr()
        self._kv, self._pool = kv, pool  # kept alive
        self._pool_at = pool.ctypes.data
        with self._torch.cuda.device(self._device):
            error = self._torch.cuda.cudart().cudaHostRegister(
                self._pool_at, pool.nbytes, HOST_REGISTER_PORTABLE
            )
            self._is_locked = int(error) == 0
            if not self._is_locked:
                log.warning(
                    "the staging pool cannot be page-locked (CUDA error %s): copies will be slow "
                    "and hold up the forward pass; raise the limit of locked memory (ulimit -l)",
                    int(error),
                )
                self._driver.forget_error(self._torch.version.cuda)
            self._load_stream = self._torch.cuda.Stream()
            self._aside_stream = (
                self._torch.cuda.Stream()
            )  # on `_load_stream` it would hold up loads
            self._save_stream = self._torch.cuda.Stream()

    def load(self, runs: Sequence[PageRun], stream: Any) -> Event | None:
        with self._torch.cuda.device(self._device):
            self._load_stream.wait_event(self.record(stream))
            pages, pool, copy = self._pages_at, self._pool_at, self._driver.copy
            queue = self._load_stream.cuda_stream
            for issued, (pages_offset, pool_offset, size_bytes) in enumerate(runs):
                copy(pages + pages_offset, pool + pool_offset, size_bytes, queue, issued)
            done: Event = self.record(self._load_stream)
            stream.wait_event(done)
        return done

    def record(self, stream: Any) -> Any:
        # Blocking: a thread that waits for it sleeps instead of spinning.
        event = self._torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        self._copy_and_wait(self._aside_stream, runs, after, is_load=True)

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
        self._copy_and_wait(self._save_stream, runs, after, is_load=False)

    def _copy_and_wait(
        self, stream: Any, runs: Sequence[PageRun], after: Event | None, is_load: bool
    ) -> None:
        with self._torch.cuda.device(self._device):
            # Always an event: a thread's first call must be one of the runtime, which gives it the
            # context that the driver's call needs.
            stream.wait_event(after or self.record(stream))
            pages, pool, copy = self._pages_at, self._pool_at, self._driver.copy
            queue = stream.cuda_stream
            for start in range(0, len(runs), ISSUED_MAX):
                for pages_offset, pool_offset, size_bytes in runs[start : start + ISSUED_MAX]:
                    ends = (pages + pages_offset, pool + pool_offset)
                    target, source = ends if is_load else (ends[1], ends[0])
                    copy(target, source, size_bytes, queue, 0)
                self.record(stream).synchronize()

    def close(self) -> None:
        """Page locks end here; later copies would be an error of ours."""
        if self._is_locked:
            with self._torch.cuda.device(self._device):
                self._load_stream.synchronize()
                self._torch.cuda.cudart().cudaHostUnregister(self._pool_at)
            self._is_locked = False
