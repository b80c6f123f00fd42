"""The SSD tier's block file, and batched I/O between the file and the segment.

The file is opened with O_DIRECT, which bypasses the page cache, because cached blocks would take
memory that the segment needs. If the filesystem rejects O_DIRECT, buffered I/O is used. All space
is allocated at start (posix_fallocate), so writes do not fail later when other processes fill the
disk. An existing file keeps its blocks and is extended or truncated. The owner holds an exclusive
flock, so two nodes never write one file.

A lane moves batches of blocks. `NixlLane` posts a batch to NIXL's POSIX plugin, which keeps many
requests in the disk's queue. `ThreadLane` calls preadv and pwritev in a few threads.
bench/RESULTS.md compares their speed. Both kinds start a batch with post() and await it with
wait(), so that the caller can verify one batch while the next one is in flight. `Lanes` gives each
lane to one thread at a time.

If the disk hangs, the caller abandons the batch. `Unfinished` keeps the batch and its lane until
the batch ends, because NIXL's destructor aborts the process if a batch in flight is freed.

Not here: which blocks are moved and verified (ssd_tier.py), where blocks are (manifest.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from mooncake_store.errors import SsdRefused, StoreError, TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray

log = logging.getLogger("mooncake_store.ssd")
# alignment of addresses, offsets and lengths for O_DIRECT; enough for every current disk
IO_ALIGN_BYTES = 4096
# errors of a disk that is full, over quota, over a file size limit, broken, or read-only
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
LANES_MAX = 4  # maximum number of lanes in use; each may have several batches in flight
THREADS = 8  # number of threads that all ThreadLanes of a file share
SPIN_S = 0.0002  # at first, a wait polls without sleep for this time; a sleep takes about 0.1 ms
# later, each sleep is this fraction of the time waited so far, so the wait is at most 6 % too long
WAIT_STEP = 1 / 16


class BlockFile:
    """One open block file. `is_direct`: whether `descriptor` uses O_DIRECT."""

    def __init__(self, path: str, capacity_bytes: int) -> None:
        """SsdRefused: the options must change. OSError: the disk failed or is full; retry later."""
        self.path = path
        self.is_direct = True
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self.descriptor = self._open_direct(path)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise SsdRefused(
                f"cannot open SSD file {path}: {error.strerror}; choose another --ssd-path"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._allocate(capacity_bytes)
        except BlockingIOError as error:
            os.close(self.descriptor)
            raise SsdRefused(
                f"SSD file {path} belongs to a living process: stop that node, or choose another "
                "--ssd-path"
            ) from error
        except BaseException:
            os.close(self.descriptor)
            raise

    def _open_direct(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.is_direct = False
        log.warning(
            "%s: its filesystem rejects O_DIRECT, so blocks go through the page cache", path
        )
        return os.open(path, flags, 0o600)

    def _allocate(self, capacity_bytes: int) -> None:
        had_bytes = os.fstat(self.descriptor).st_size
        if had_bytes > capacity_bytes:
            os.ftruncate(self.descriptor, capacity_bytes)
        try:
            os.posix_fallocate(self.descriptor, 0, capacity_bytes)
        except OSError:
            # free the space that was allocated before the disk was full
            os.ftruncate(self.descriptor, had_bytes)
            raise

    def close(self) -> None:
        """Unlock and close the file, which keeps its blocks. A second call has no effect."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Row(NamedTuple):
    """One contiguous span to move. All three numbers are multiples of IO_ALIGN_BYTES."""

    memory_bytes: int  # offset in the memory
    file_bytes: int  # offset in the file
    length_bytes: int


class DiskLane(Protocol):
    """Moves rows between memory and file. Only one thread may use it at a time."""

    name: str

    def post(self, is_write: bool, rows: Sequence[Row]) -> Any:
        """Start a batch. TransferFailed: it cannot be started."""

    def wait(self, batch: Any, until_s: float) -> None:
        """Wait until the batch has ended. OSError, TransferFailed: it failed. TransferTimeout: it
        is still in flight at `until_s` (monotonic)."""

    def has_ended(self, batch: Any) -> bool:
        """True if this abandoned batch has ended, successfully or not."""

    def close(self) -> None: ...


def move(descriptor: int, memory: ByteArray, is_write: bool, row: Row) -> None:
    """Move one row by preadv or pwritev. OSError has the disk's errno."""
    view = memory[row.memory_bytes : row.memory_bytes + row.length_bytes].data
    call = os.pwritev if is_write else os.preadv
    done_bytes = 0
    while done_bytes < row.length_bytes:
        step_bytes = call(descriptor, [view[done_bytes:]], row.file_bytes + done_bytes)
        if step_bytes == 0:
            raise OSError(errno.EIO, f"the file ends at {row.file_bytes + done_bytes}")
        done_bytes += step_bytes


class ThreadLane:
    """Moves batches by preadv and pwritev in a few threads, which all lanes of a file share."""

    name = "threads"

    def __init__(self, descriptor: int, memory: ByteArray, pool: ThreadPoolExecutor) -> None:
        self._descriptor, self._memory, self._pool = descriptor, memory, pool

    def post(self, is_write: bool, rows: Sequence[Row]) -> list[Future[None]]:
        return [self._pool.submit(self._move, is_write, rows[i::THREADS]) for i in range(THREADS)]

    def _move(self, is_write: bool, rows: Sequence[Row]) -> None:
        for row in rows:
            move(self._descriptor, self._memory, is_write, row)

    def wait(self, batch: list[Future[None]], until_s: float) -> None:
        for future in batch:
            try:
                future.result(max(0.0, until_s - time.monotonic()))
            except TimeoutError as error:
                raise TransferTimeout("the SSD did not answer in time") from error

    def has_ended(self, batch: list[Future[None]]) -> bool:
        return all(future.done() for future in batch)

    def close(self) -> None:
        pass


class NixlLane:
    """Moves batches by NIXL's POSIX plugin."""

    name = "nixl"

    def __init__(self, descriptor: int, memory: ByteArray, file_bytes: int) -> None:
        from mooncake_store.transports.nixl_agent import FileAgent

        self._memory = memory  # keeps the memory alive while the plugin may write to it
        self._agent = FileAgent(int(memory.ctypes.data), memory.nbytes, descriptor, file_bytes)

    def post(self, is_write: bool, rows: Sequence[Row]) -> Any:
        return self._agent.post("WRITE" if is_write else "READ", np.array(rows, np.uint64))

    def wait(self, batch: Any, until_s: float) -> None:
        start_s = time.monotonic()
        while not self._agent.is_done(batch):
            now_s = time.monotonic()
            if now_s > until_s:
                raise TransferTimeout("the SSD did not answer in time")
            if (waited_s := now_s - start_s) > SPIN_S:
                time.sleep(waited_s * WAIT_STEP)

    def has_ended(self, batch: Any) -> bool:
        return self._agent.has_ended(batch)

    def close(self) -> None:
        self._agent.close()


class Unfinished:
    """Abandoned batches and their lanes, kept until the batches end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[DiskLane, Any]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, lane: DiskLane, batches: Iterable[Any]) -> None:
        """Keep the batches; the lane must not be used again."""
        with self._lock:
            for batch in batches:
                pair = (lane, batch)
                # one more reference, so that Python does not free the batch at exit
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair))
                self._kept.append(pair)

    def drop_ended(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
            for pair in kept:
                lane, batch = pair
                if lane.has_ended(batch):
                    ctypes.pythonapi.Py_DecRef(ctypes.py_object(pair))
                else:
                    self._kept.append(pair)


unfinished = Unfinished()


class Lanes:
    """The lanes of one file and one memory. If NIXL's plugin does not work, lanes use threads."""

    def __init__(
        self, descriptor: int, memory: ByteArray, file_bytes: int, wished: str = "nixl"
    ) -> None:
        assert wished in ("nixl", "threads"), wished
        self._descriptor, self._memory, self._file_bytes = descriptor, memory, file_bytes
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ssd")
        self._permits = threading.BoundedSemaphore(LANES_MAX)
        self._lock = threading.Lock()
        self._free: list[DiskLane] = []
        self.kind = wished  # kind of the lanes that are made from now on
        self._free.append(self._make())

    def _make(self) -> DiskLane:
        if self.kind == "nixl":
            try:
                return NixlLane(self._descriptor, self._memory, self._file_bytes)
            except StoreError as error:
                log.warning("the SSD tier uses threads instead of NIXL: %s", error)
                self.kind = "threads"
        return ThreadLane(self._descriptor, self._memory, self._pool)

    @contextlib.contextmanager
    def lane(self, until_s: float) -> Iterator[DiskLane]:
        """A lane for this thread. After an exception in the context, the lane is never used again.
        TransferFailed: all lanes are busy until `until_s` (monotonic)."""
        unfinished.drop_ended()
        if not self._permits.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise TransferFailed(f"all {LANES_MAX} lanes to the SSD were busy until the deadline")
        try:
            with self._lock:
                lane = self._free.pop() if self._free else None
            if lane is None:
                lane = self._make()
            yield lane
            with self._lock:
                self._free.append(lane)
        finally:
            self._permits.release()

    def close(self) -> None:
        """Close unused lanes and cancel calls that have not begun, without waiting for the disk."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for lane in self._free:
            lane.close()
        self._free.clear()
