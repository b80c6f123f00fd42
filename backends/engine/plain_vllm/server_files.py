"""Files that the processes of one vLLM server share: sockets, and the staging pool in /dev/shm.

The processes know each other by the id that vLLM gives to the engine. Each holds a lock on the
folder of sockets. A folder without a lock is of a server that was killed. The next server that
starts removes the folder and its pool.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from backends.engine.connected.host_memory import SHM, make_pool

PREFIX = "mooncake-vllm-"


class ServerFiles:
    def __init__(self, engine_id: str) -> None:
        """Removes the files of servers that were killed."""
        place = Path(tempfile.gettempdir())
        self._name = f"{PREFIX}{engine_id}"
        self.folder, self.pool = place / self._name, SHM / self._name
        self._lock = self._locked()
        for folder in place.glob(f"{PREFIX}*"):
            _remove_unused(folder)

    def _locked(self) -> IO[str]:
        while True:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            lock = (self.folder / "lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_SH)
            if (self.folder / "lock").exists():  # not removed before it was locked
                return lock
            lock.close()

    def make_pool(self, size_bytes: int) -> None:
        """Raises PoolProblem."""
        make_pool(self.pool, size_bytes)

    def remove(self) -> None:
        """Processes keep what they have mapped, and their connections."""
        self.pool.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _remove_unused(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a process has it
        (SHM / folder.name).unlink(missing_ok=True)
        for path in folder.iterdir():
            os.unlink(path)
        folder.rmdir()
