"""Host memory that a worker and the processes of its engine map, and copy KV from and to.

The *staging pool* is a file in /dev/shm; a page of it is one store block. The worker moves blocks
between the store and the pool, and the ranks copy between the pool and the engine's own pages.

A *segment* of the worker's storage node has the slots of the store; other processes read and
write it too. A rank reads and writes only the slots that its worker has leased or allocated.

Not here: which request has a page (../batching/pages.py), what a place is (block_pages.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from backends.engine.connected.block_pages import POOL, SlotUse, offset_of, region_of

SHM = Path("/dev/shm")
Bytes = NDArray[np.uint8]


class PoolProblem(Exception):
    """The pool does not fit; the message has its size and the remedy."""


class StagingPool:
    """The worker's side. The launcher removes all files whose names begin with its run's name."""

    def __init__(self, run: str, worker_id: str, pages: int, page_bytes: int) -> None:
        """`run` is the name of the launcher's socket folder, mooncake-<pid>-... ."""
        assert pages > 0 and page_bytes > 0, (pages, page_bytes)
        prefix = f"{run}-pool-{worker_id}-"
        _remove_dead(prefix)
        # After a reload a process has two pools.
        file, path = tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-", dir=SHM)
        self.path = Path(path)
        size_bytes = pages * page_bytes
        try:
            # Allocate all memory now. A full /dev/shm would be a SIGBUS during a later copy.
            os.posix_fallocate(file, 0, size_bytes)
            self._memory = mmap.mmap(file, size_bytes)
        except OSError as error:
            self.path.unlink()
            raise PoolProblem(
                f"the staging pool of {pages} pages needs {size_bytes / 2**20:,.0f} MiB in {SHM}: "
                f"{error.strerror}. Lower kv_bytes, or enlarge it (docker: --shm-size)"
            ) from error
        finally:
            os.close(file)
        self.bytes: Bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def close(self) -> None:
        """Remove the file. The memory is freed with the last view of it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def make_pool(path: Path, size_bytes: int) -> None:
    """Make a pool of this name; nothing if there is one. Processes may call this at once. Raises
    PoolProblem."""
    if path.exists():
        return
    file, unnamed = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    try:
        os.posix_fallocate(file, 0, size_bytes)
        with contextlib.suppress(FileExistsError):
            os.link(unnamed, path)  # at once, and only if there is none
    except OSError as error:
        raise PoolProblem(
            f"the staging pool needs {size_bytes / 2**20:,.0f} MiB in {path.parent}: "
            f"{error.strerror}. Lower pool_bytes, or enlarge it (docker: --shm-size)"
        ) from error
    finally:
        os.unlink(unnamed)
        os.close(file)


def _remove_dead(prefix: str) -> None:
    """Remove the pools of killed processes; `prefix` and the process id begin a file's name."""
    for path in SHM.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                path.unlink()


def map_pool(path: str, block_bytes: int) -> Bytes:
    """A rank's view of the staging pool."""
    size_bytes = os.path.getsize(path)
    if not size_bytes or size_bytes % block_bytes:
        raise ValueError(
            f"the staging pool {path} has {size_bytes} bytes, which are no whole pages of "
            f"{block_bytes}"
        )
    return np.memmap(path, np.uint8, "r+").view(np.ndarray)


class HostMemory:
    """The regions that a rank has mapped. A mapping ends with the last view of it."""

    def __init__(self, pool: Bytes) -> None:
        self._regions = {POOL: pool}

    def add(self, region: int, memory: Bytes) -> None:
        assert region not in self._regions, f"region {region} is already mapped"
        self._regions[region] = memory

    def remove(self, region: int) -> None:
        del self._regions[region]

    def __contains__(self, region: int) -> bool:
        return region in self._regions

    def view(self, place: int, size_bytes: int) -> Bytes:
        offset = offset_of(place)
        return self._regions[region_of(place)][offset : offset + size_bytes]

    def is_still(self, use: SlotUse) -> bool:
        """True if the slot still holds the expected block."""
        raw = self.view(use.place, use.length_bytes).tobytes()
        header, others = raw[: len(use.first)], raw[use.zeros_from :]
        return header == use.first and not any(others)
