"""Copies between the engine's pages and host memory.

`HostCopier` copies pages in host memory: those of tests and of engines on CPUs. `CudaCopier` copies
those on a GPU, beside the forward pass, by streams of its own that events tie to the pass:

    load:        forward stream -event-> load stream: copies -event-> forward stream continues
    load aside:  forward stream -event-> aside stream: copies -> a thread waits
    save:        forward stream -event-> save stream: copies -> a thread waits

A load waits for the present work of the forward stream: its pages may just have been freed by a
request whose last step still runs. Host memory is page-locked, so copy engines of the GPU move the
bytes. ctypes calls the CUDA driver, because a call of torch may cost more than the copy of a page
(not measured).

Not here: which pages are copied (rank_copies.py), what a place is (block_pages.py).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.connected.block_pages import POOL, REGION_SHIFT, REGIONS_MAX, PageRun
from backends.engine.connected.host_memory import Bytes, HostMemory

log = logging.getLogger(__name__)
HOST_REGISTER_PORTABLE = 1
ISSUED_MAX = 512  # copies in flight; a guess, the capacity of the driver's queue is unknown


class RegionRefused(Exception):
    """Copies from and to this memory would be slow."""


class Event(Protocol):
    def synchronize(self) -> None: ...


class HostCopier:
    """The copies of one rank. The engine's thread calls `load` and `record`, another the rest."""

    def __init__(self, kv: Any, pool: Bytes) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._pages: Bytes = kv.view(torch.uint8).reshape(-1).numpy()
        self.memory = HostMemory(pool)

    def add(self, region: int, memory: Bytes) -> None:
        """Map a further region of host memory. Raises RegionRefused."""
        self.memory.add(region, memory)

    def remove(self, region: int) -> None:
        """Unmap a region. No copy uses it."""
        self.memory.remove(region)

    def load(self, runs: Sequence[PageRun], stream: Any) -> Event | None:
        """Host to pages, after the present work of `stream` and before its next work.

        The event is reached when the copy has read the host memory; None: it already has.
        """
        self.load_aside(runs, self.record(stream))
        return None

    def record(self, stream: Any) -> Event | None:
        """Reached when `stream` has done its present work; None: it already has."""
        return None if stream is None else stream.record_event()

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        """Wait for `after`, then copy host to pages. Returns after the copy."""
        for pages, host in self._pairs(runs, after):
            pages[:] = host

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
        """Wait for `after`, then copy pages to host. Returns after the copy."""
        for pages, host in self._pairs(runs, after):
            host[:] = pages

    def _pairs(self, runs: Sequence[PageRun], after: Event | None) -> Iterator[tuple[Bytes, Bytes]]:
        if after is not None:
            after.synchronize()
        for at, place, size_bytes in runs:
            yield self._pages[at : at + size_bytes], self.memory.view(place, size_bytes)

    def close(self) -> None:
        del self._pages, self.memory  # unmaps the regions


Addresses = NDArray[np.uint64]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of all copies of a batch. The hints concern managed memory only."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


def cuda_library(kind: Callable[[str], Any]) -> Any:
    return kind("libcuda.so.1")


class CudaDriver:
    """Copies by libcuda. Addresses are unified, so the same call copies in both directions."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL. A short call that gives it up waits a switch interval to get it back.
        self._quick = _copy_function(cuda_library(ctypes.PyDLL))
        patient = cuda_library(ctypes.CDLL)
        self._patient = _copy_function(patient)
        self._batch = _batch_function(patient)

    def copy_all(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> None:
        batch = self._batch  # another thread may reset it
        if batch is not None and len(sizes) > 1:
            error = self._issue_batch(batch, targets, sources, sizes, stream)
            if not error:
                return
            log.warning("cuMemcpyBatchAsync failed with CUDA error %d: copies one by one", error)
            self._batch = None  # a copy that the batch has begun may safely run twice
        copies = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for number, (target, source, size_bytes) in enumerate(copies):
            call = self._quick if number < ISSUED_MAX else self._patient  # which may block
            if error := call(target, source, size_bytes, stream):
                raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {error}")

    def _issue_batch(
        self, batch: Any, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> int:
        attributes = CopyAttributes(IN_STREAM_ORDER, flags=BESIDE_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        addresses = [each.ctypes.data for each in (targets, sources, sizes)]
        by_reference = [ctypes.byref(attributes), ctypes.byref(first)]
        return int(batch(*addresses, len(sizes), *by_reference, 1, ctypes.byref(failed), stream))

    def forget_error(self, cuda_version: str) -> None:
        """Clear CUDA's last error, which was handled. Otherwise torch raises it at its next launch.

        torch has no such call. The name selects the runtime that torch has loaded.
        """
        try:
            ctypes.CDLL(f"libcudart.so.{cuda_version.split('.')[0]}").cudaGetLastError()
        except (OSError, AttributeError) as error:
            log.warning("a handled CUDA error may be reported again: %s", error)


def _copy_function(library: Any) -> Any:
    function = library.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def _batch_function(library: Any) -> Any:
    """None in a driver before CUDA 12.8. Later drivers keep these arguments under this name."""
    function = getattr(library, "cuMemcpyBatchAsync", None)
    if function is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = [*[pointer] * 3, size, *[pointer] * 2, size, *[pointer] * 2]
        function.restype = ctypes.c_int
    return function


class CudaCopier:
    def __init__(self, kv: Any, pool: Bytes) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._torch: Any = torch
        self._device = kv.device
        self._driver = CudaDriver()
        self._pages_at = kv.data_ptr()
        self._kv = kv  # kept alive
        self.memory = HostMemory(pool)
        self._bases = np.zeros(REGIONS_MAX, np.int64)  # address of a place - place, by region
        self._locked: dict[int, int] = {}  # region -> its address
        self._set_base(POOL, pool)
        try:
            self._lock_pages(POOL, pool)
        except RegionRefused as error:
            log.warning("the staging pool: %s; copies will be slow and hold up the pass", error)
        with self._torch.cuda.device(self._device):
            self._load_stream = self._torch.cuda.Stream()
            self._aside_stream = self._torch.cuda.Stream()  # so that it does not delay `load`
            self._save_stream = self._torch.cuda.Stream()

    def add(self, region: int, memory: Bytes) -> None:
        """Slow for a large region, as each page is locked. Other copies continue."""
        self._lock_pages(region, memory)
        self._set_base(region, memory)
        self.memory.add(region, memory)

    def _set_base(self, region: int, memory: Bytes) -> None:
        self._bases[region] = memory.ctypes.data - (region << REGION_SHIFT)

    def _lock_pages(self, region: int, memory: Bytes) -> None:
        address = memory.ctypes.data
        with self._torch.cuda.device(self._device):
            error = self._torch.cuda.cudart().cudaHostRegister(
                address, memory.nbytes, HOST_REGISTER_PORTABLE
            )
        if int(error):
            self._driver.forget_error(self._torch.version.cuda)
            raise RegionRefused(
                f"{memory.nbytes} bytes cannot be page-locked (CUDA error {int(error)}); raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._locked[region] = address

    def remove(self, region: int) -> None:
        self._unlock_pages(region)
        self.memory.remove(region)

    def _unlock_pages(self, region: int) -> None:
        address = self._locked.pop(region, None)
        if address is not None:
            with self._torch.cuda.device(self._device):
                self._torch.cuda.cudart().cudaHostUnregister(address)

    def load(self, runs: Sequence[PageRun], stream: Any) -> Event | None:
        with self._torch.cuda.device(self._device):
            self._load_stream.wait_event(self.record(stream))
            pages, host, sizes = self._addresses(runs)
            self._driver.copy_all(pages, host, sizes, self._load_stream.cuda_stream)
            done: Event = self.record(self._load_stream)
            stream.wait_event(done)
        return done

    def _addresses(self, runs: Sequence[PageRun]) -> tuple[Addresses, Addresses, Addresses]:
        """(addresses in the engine's pages, addresses on the host, sizes) of these runs."""
        table = np.array(runs, np.int64).reshape(-1, 3)
        host = table[:, 1] + self._bases[table[:, 1] >> REGION_SHIFT]
        columns = (table[:, 0] + self._pages_at, host, table[:, 2])
        pages, host, sizes = (np.ascontiguousarray(each).view(np.uint64) for each in columns)
        return pages, host, sizes

    def record(self, stream: Any) -> Any:
        # Blocking: a waiting thread sleeps instead of spinning.
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
            # Always wait for an event: the first call of a thread must be one of the runtime, which
            # sets the context that the driver's call needs.
            stream.wait_event(after or self.record(stream))
            pages, host, sizes = self._addresses(runs)
            targets, sources = (pages, host) if is_load else (host, pages)
            for start in range(0, len(runs), ISSUED_MAX):
                part = slice(start, start + ISSUED_MAX)
                self._driver.copy_all(targets[part], sources[part], sizes[part], stream.cuda_stream)
                self.record(stream).synchronize()

    def close(self) -> None:
        """Unlock all pages. No copy may follow."""
        if self._locked:
            with self._torch.cuda.device(self._device):
                self._load_stream.synchronize()
            for region in list(self._locked):
                self._unlock_pages(region)


Copier = HostCopier | CudaCopier


def make_copier(kv: Any, pool: Bytes) -> Copier:
    """`kv`: the engine's pages, a contiguous torch tensor on a CPU or a GPU."""
    return CudaCopier(kv, pool) if kv.is_cuda else HostCopier(kv, pool)
