"""Moves bytes between TensorRT-LLM's pages and the host memory where store blocks lie.

`HostCopier` serves KV in host memory (tests, and the stand-in for TensorRT-LLM). `CudaCopier` makes
the same calls asynchronous, without holding up the forward pass. Streams and events are those of
torch, or anything with their methods.

On a GPU the host memory is page-locked, so the GPU's copy engines read and write it themselves: the
staging pool, and the segment of the worker's storage node, where blocks are copied straight from
and to their slots. Loads and saves each have a stream of their own, tied to the forward pass by
events:

    load:  forward stream ──event──▶ load stream: copies ──event──▶ forward stream goes on
    load aside:   as a save, the other way: the forward stream does not wait for it
    save:  forward stream ──event──▶ save stream: copies ──event──▶ the thread that waits here

A load waits for what the forward stream still has to do, because the pages that it fills may just
have been taken from a request whose last step is under way. Copies are issued through the CUDA
driver (ctypes), all of one order in one call where the driver has it (cuMemcpyBatchAsync, CUDA 12.8
and later), else one by one: a page takes microseconds on the bus, so a call that costs as much as
one of torch may be the limit (an estimate; nobody has measured it). They are plain copies, not
kernels: no multiprocessor is taken from the forward pass.

Not here: which copies (rank_copies.py), what a place is (block_pages.py). torch is imported late: a
process without CUDA needs none.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.trtllm.block_pages import (
    POOL,
    REGION_SHIFT,
    REGIONS_MAX,
    PageRun,
    SlotUse,
    offset_of,
    region_of,
)

log = logging.getLogger(__name__)
HOST_REGISTER_PORTABLE = 1
ISSUED_MAX = 512  # copies in flight; where the driver's queue is full was guessed, not measured


Bytes = NDArray[np.uint8]


class RegionRefused(Exception):
    """This memory cannot be copied from and to at the bus's speed."""


def map_pool(path: str, block_bytes: int) -> Bytes:
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


class HostMemory:
    """The regions that a rank has mapped: the staging pool, a file that only its worker maps beside
    it, and segments of the worker's storage node, whose slots others fill and read too. What a rank
    may read or write there is what its worker leases. A mapping goes with the last view of it.
    """

    def __init__(self, pool: Bytes) -> None:
        self._regions = {POOL: pool}

    def add(self, region: int, memory: Bytes) -> None:
        assert region not in self._regions, f"region {region} is there already"
        self._regions[region] = memory

    def remove(self, region: int) -> None:
        del self._regions[region]

    def __contains__(self, region: int) -> bool:
        return region in self._regions

    def view(self, place: int, size_bytes: int) -> Bytes:
        offset = offset_of(place)
        return self._regions[region_of(place)][offset : offset + size_bytes]

    def is_still(self, use: SlotUse) -> bool:
        """Does that slot hold the block that was verified there? See SlotUse."""
        raw = self.view(use.place, use.length_bytes).tobytes()
        header, others = raw[: len(use.first)], raw[use.zeros_from :]
        return header == use.first and not any(others)


class Event(Protocol):
    def synchronize(self) -> None: ...


class Copier(Protocol):
    """One rank's. `load` and `record` come from the executor's thread, the others from another."""

    memory: HostMemory

    def add(self, region: int, memory: Bytes) -> None:
        """A further region of host memory. RegionRefused: copies there would be slow."""
        ...

    def remove(self, region: int) -> None:
        """No copy touches it any more."""
        ...

    def load(self, runs: Sequence[PageRun], stream: Any) -> Event | None:
        """Host -> pages, after what `stream` has to do so far and before what it gets next.

        The event is reached when the host is not read any more; None: already.
        """
        ...

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        """Host -> pages, once `after` is reached; returns when the bytes are there."""
        ...

    def record(self, stream: Any) -> Event | None:
        """Reached when `stream` has done what it has to do so far; None: already."""
        ...

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
        """Pages -> host, once `after` is reached; returns when the bytes are there."""
        ...

    def close(self) -> None: ...


def make_copier(kv: Any, pool: Bytes) -> Copier:
    """For a torch tensor wherever it lies."""
    if kv.is_cuda:
        from backends.engine.trtllm.copier import CudaCopier

        return CudaCopier(kv, pool)
    return HostCopier(kv, pool)


class HostCopier:
    def __init__(self, kv: Any, pool: Bytes) -> None:
        import torch

        assert kv.is_contiguous(), "pages must be contiguous"
        self._pages: Bytes = kv.view(torch.uint8).reshape(-1).numpy()
        self.memory = HostMemory(pool)

    def add(self, region: int, memory: Bytes) -> None:
        self.memory.add(region, memory)

    def remove(self, region: int) -> None:
        self.memory.remove(region)

    def load(self, runs: Sequence[PageRun], stream: Any) -> None:
        self.load_aside(runs, self.record(stream))

    def load_aside(self, runs: Sequence[PageRun], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, place, size_bytes in runs:
            self._pages[pages_at : pages_at + size_bytes] = self.memory.view(place, size_bytes)

    def record(self, stream: Any) -> Event | None:
        return None if stream is None else stream.record_event()

    def save(self, runs: Sequence[PageRun], after: Event | None) -> None:
        if after is not None:
            after.synchronize()
        for pages_at, place, size_bytes in runs:
            self.memory.view(place, size_bytes)[:] = self._pages[pages_at : pages_at + size_bytes]

    def close(self) -> None:
        del self._pages, self.memory  # a mapping goes with its last view


Addresses = NDArray[np.uint64]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes, for all copies of a batch; the hints are for memory that CUDA manages."""

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
    """The calls of libcuda that are needed; addresses are unified, so they copy either way."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: given up for so short a call, it costs a switch interval to get back.
        self._quick = _copy_function(cuda_library(ctypes.PyDLL))
        patient = cuda_library(ctypes.CDLL)
        self._patient = _copy_function(patient)
        self._batch = _batch_function(patient)

    def copy_all(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, issued: int = 0
    ) -> None:
        """`issued` copies may be in flight already: beyond some, single calls wait for them."""
        batch = self._batch  # of any thread: another one may find that it fails
        if batch is not None and len(sizes) > 1:
            error = self._issue_batch(batch, targets, sources, sizes, stream)
            if not error:
                return
            log.warning("cuMemcpyBatchAsync failed with CUDA error %d: copies one by one", error)
            self._batch = None  # copying what it may have begun once more does no harm
        copies = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for number, (target, source, size_bytes) in enumerate(copies, issued):
            call = self._quick if number < ISSUED_MAX else self._patient
            if error := call(target, source, size_bytes, stream):
                raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {error}")

    def _issue_batch(
        self, batch: Any, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> int:
        attributes = CopyAttributes(IN_STREAM_ORDER, flags=BESIDE_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        return int(
            batch(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                ctypes.byref(failed),
                stream,
            )
        )

    def forget_error(self, cuda_version: str) -> None:
        """What failed was handled; left behind, torch's next check of a launch would raise it.

        torch does not offer this call; by its name the runtime is the one that torch has loaded.
        """
        try:
            ctypes.CDLL(f"libcudart.so.{cuda_version.split('.')[0]}").cudaGetLastError()
        except (OSError, AttributeError) as error:
            log.warning("an error of CUDA that was handled may be reported once more: %s", error)


def _copy_function(library: Any) -> Any:
    function = library.cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def _batch_function(library: Any) -> Any:
    """By this name it has its arguments of CUDA 12.8, in later drivers too; None: it is older."""
    function = getattr(library, "cuMemcpyBatchAsync", None)
    if function is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = [
            pointer,
            pointer,
            pointer,
            size,
            pointer,
            pointer,
            size,
            pointer,
            pointer,
        ]
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
        self._bases = np.zeros(REGIONS_MAX, np.int64)  # address of place 0 of each region
        self._locked: dict[int, int] = {}  # region -> its address
        self._set_base(POOL, pool)
        try:
            self._lock_pages(POOL, pool)
        except RegionRefused as error:
            log.warning("the staging pool: %s; copies will be slow and hold up the pass", error)
        with self._torch.cuda.device(self._device):
            self._load_stream = self._torch.cuda.Stream()
            self._aside_stream = (
                self._torch.cuda.Stream()
            )  # on `_load_stream` it would hold up loads
            self._save_stream = self._torch.cuda.Stream()

    def add(self, region: int, memory: Bytes) -> None:
        """Takes long for a large one (each page is locked), while copies elsewhere go on."""
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
        """(in the engine's pages, on the host, sizes) of each run."""
        table = np.array(runs, np.int64).reshape(-1, 3)
        host = table[:, 1] + self._bases[table[:, 1] >> REGION_SHIFT]
        columns = (table[:, 0] + self._pages_at, host, table[:, 2])
        pages, host, sizes = (np.ascontiguousarray(each).view(np.uint64) for each in columns)
        return pages, host, sizes

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
            pages, host, sizes = self._addresses(runs)
            targets, sources = (pages, host) if is_load else (host, pages)
            for start in range(0, len(runs), ISSUED_MAX):
                part = slice(start, start + ISSUED_MAX)
                self._driver.copy_all(targets[part], sources[part], sizes[part], stream.cuda_stream)
                self.record(stream).synchronize()

    def close(self) -> None:
        """Page locks end here; later copies would be an error of ours."""
        if self._locked:
            with self._torch.cuda.device(self._device):
                self._load_stream.synchronize()
            for region in list(self._locked):
                self._unlock_pages(region)
