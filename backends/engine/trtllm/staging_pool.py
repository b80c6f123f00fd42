"""The staging pool: a file in /dev/shm that a worker and TensorRT-LLM's processes both map.

A page of it is one store block. The worker reads blocks of the store into its pages and puts its
pages into the store; the connector copies between them and the engine's own pages. The name begins
with that of the launcher's run, so that the launcher removes it whatever happens; it ends with the
process's id, so that the next life of a worker removes what a killed one has left.

Not here: who has which page (../pages.py), the connector's view of it (connector.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

SHM = Path("/dev/shm")


class PoolProblem(Exception):
    """There is no room for the pool; the message says how much and what to do."""


class StagingPool:
    def __init__(self, run: str, worker_id: str, pages: int, page_bytes: int) -> None:
        """`run` names the launcher's run (its socket folder), mooncake-<pid>-... ."""
        assert pages > 0 and page_bytes > 0, (pages, page_bytes)
        prefix = f"{run}-pool-{worker_id}-"
        _remove_dead(prefix)
        self.path = SHM / f"{prefix}{os.getpid()}"
        number = 0
        while self.path.exists():  # tests have several in one process
            number += 1
            self.path = SHM / f"{prefix}{os.getpid()}-{number}"
        size_bytes = pages * page_bytes
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Memory is taken now: later, a full /dev/shm would be a SIGBUS in the middle of a copy.
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
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)

    def close(self) -> None:
        """The file goes now, the memory with the last view of it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _remove_dead(prefix: str) -> None:
    """Pools of processes that were killed."""
    for path in SHM.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):
                path.unlink()
