"""What one launcher leaves in shared memory and in /tmp, and what dead launchers left there.

The name of each such file begins with the launcher's own name. Beside them lies NAME.lock, on which
the launcher holds an exclusive flock as long as it lives; the kernel drops it however the launcher
ends. That one lock decides for all that it made. Process ids cannot: containers may share /dev/shm
and not their pids, so a launcher that lives next door looks dead, and a dead one's pid may be in
use here.

Only files of this user are looked at. Files without a lock beside them stay: nobody can say whose
they are.

Not here: what the files hold, and in which order things end (launch.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backends.launcher.environment import EnvironmentProblem
from mooncake_store.cli.arguments import SHORT_PLACE, holds_sockets
from mooncake_store.memory.segment_file import create_locked, try_lock, unlink_if_same

SHM = Path("/dev/shm")
LOCK_SUFFIX = ".lock"
STOPPING = "stopping"  # there in the folder of sockets: this launch is ending
_LOCK_NAME = re.compile(r"(mooncake-\d+-[0-9a-f]{8})\.lock")


class LaunchFiles:
    """The name of one launcher, its lock, and its folder of sockets."""

    def __init__(self, shm: Path = SHM) -> None:
        self._shm = shm
        self.name = f"mooncake-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock_path = str(shm / f"{self.name}{LOCK_SUFFIX}")
        self._lock = create_locked(self._lock_path)  # before anything that it decides about
        try:
            self.socket_dir = self._make_socket_dir()
        except BaseException:
            self.remove()
            raise

    def _make_socket_dir(self) -> Path:
        """Not under the state folder, because paths of sockets are short. /tmp takes the place of
        a $TMPDIR that is too long, or that has letters which Triton's stubs cannot read."""
        place = Path(tempfile.gettempdir())
        place = place if holds_sockets(place) else SHORT_PLACE
        try:
            return Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=place))
        except OSError as error:
            raise EnvironmentProblem(
                f"no folder can be made in {place} ({error.strerror}) for the launch's sockets: "
                "set TMPDIR to a folder that can be written, of a short path of ASCII letters"
            ) from None

    def path(self, name: str) -> Path:
        """A file of this launcher's in shared memory."""
        return self._shm / f"{self.name}-{name}"

    def remove_part(self, name: str) -> None:
        """Those whose names go on with `name`; nobody uses them any more."""
        _remove_all(f"{self.name}-{name}", self._shm, "*")

    def say_stopping(self) -> None:
        """For processes that wait for something while they start."""
        with contextlib.suppress(OSError):
            (self.socket_dir / STOPPING).touch()

    def remove(self) -> None:
        """All of them, once nobody uses them any more. Twice is harmless."""
        if self._lock < 0:
            return
        _remove_all(self.name, self._shm)
        unlink_if_same(self._lock_path, self._lock)
        os.close(self._lock)
        self._lock = -1


def remove_leftovers(shm: Path = SHM) -> list[str]:
    """Remove what launchers left that ended without cleaning up (kill -9); their names."""
    removed = []
    for path in sorted(shm.glob(f"mooncake-*{LOCK_SUFFIX}")):
        match = _LOCK_NAME.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError), _opened(path) as lock:
            is_ours = os.fstat(lock).st_uid == os.getuid()
            if is_ours and try_lock(lock, fcntl.LOCK_EX, keep=True):
                _remove_all(match[1], shm)
                unlink_if_same(str(path), lock)  # last: without it nobody could judge the others
                removed.append(match[1])
    return removed


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
