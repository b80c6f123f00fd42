"""The files of one launcher in shared memory and in /tmp, and the files of dead launchers.

The name of each file begins with NAME, the launcher's own name. The launcher holds an exclusive
flock on NAME.lock during its life, and the kernel releases the flock however the launcher ends. So
the files of a launcher are in use while its lock is held. Process ids cannot replace the lock.
Containers may share /dev/shm without sharing pids, so the pid of a live launcher may be unknown
here, and the pid of a dead launcher may belong to another process.

Only files of this user are removed. Files without a lock stay, as their launcher may be alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from backends.launcher.environment import EnvironmentProblem
from mooncake_store.cli.arguments import SHORT_PLACE, holds_sockets
from mooncake_store.memory.segment_file import create_locked, try_lock, unlink_if_same

SHM = Path("/dev/shm")
LOCK_SUFFIX = ".lock"
STOPPING = "stopping"  # a file of this name in the socket folder means that the launch stops
_LOCK_NAME = re.compile(r"(mooncake-\d+-[0-9a-f]{8})\.lock")


class LaunchFiles:
    """The name of one launcher, its lock, and its folder of sockets."""

    def __init__(self, shm: Path = SHM) -> None:
        self._shm = shm
        self.name = f"mooncake-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock_path = str(shm / f"{self.name}{LOCK_SUFFIX}")
        self._lock = create_locked(self._lock_path)  # created before the files that it protects
        try:
            self.socket_dir = self._make_socket_dir()
        except BaseException:
            self.remove()
            raise

    def _make_socket_dir(self) -> Path:
        """Make the socket folder in $TMPDIR, or in /tmp if $TMPDIR is too long or not ASCII. Socket
        paths must be short, and Triton's stubs accept only ASCII paths."""
        parent = Path(tempfile.gettempdir())
        parent = parent if holds_sockets(parent) else SHORT_PLACE
        try:
            return Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=parent))
        except OSError as error:
            raise EnvironmentProblem(
                f"the launch's socket folder cannot be made in {parent} ({error.strerror}): "
                "set TMPDIR to a writable folder with a short path of ASCII letters"
            ) from None

    def path(self, name: str) -> Path:
        return self._shm / f"{self.name}-{name}"

    def remove_part(self, name: str) -> None:
        """Remove the files whose names begin with NAME-`name`. Their processes must have ended."""
        _remove_all(f"{self.name}-{name}", self._shm, "*")

    def mark_stopping(self) -> None:
        """Make the file STOPPING, so that starting processes stop waiting."""
        with contextlib.suppress(OSError):
            (self.socket_dir / STOPPING).touch()

    def remove(self) -> None:
        """Remove all files of the launcher. Its processes must have ended. Idempotent."""
        if self._lock < 0:
            return
        _remove_all(self.name, self._shm)
        unlink_if_same(self._lock_path, self._lock)
        os.close(self._lock)
        self._lock = -1


def remove_leftovers(shm: Path = SHM) -> list[str]:
    """Remove the files of launchers that were killed. Return the names of these launchers."""
    removed = []
    for path in sorted(shm.glob(f"mooncake-*{LOCK_SUFFIX}")):
        match = _LOCK_NAME.fullmatch(path.name)
        if match is None:
            continue
        with (
            contextlib.suppress(OSError),
            open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b", 0) as file,
        ):
            lock = file.fileno()
            is_ours = os.fstat(lock).st_uid == os.getuid()
            if is_ours and try_lock(lock, fcntl.LOCK_EX, keep=True):
                _remove_all(match[1], shm)
                unlink_if_same(str(path), lock)  # last, because the lock file names the others
                removed.append(match[1])
    return removed


def _remove_all(name: str, shm: Path, pattern: str = "-*") -> None:
    for folder in (shm, *{Path(tempfile.gettempdir()), SHORT_PLACE}):
        for path in folder.glob(f"{name}{pattern}"):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid != os.getuid():
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
