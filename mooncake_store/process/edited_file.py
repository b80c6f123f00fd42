"""Files that several processes edit: exclusive and atomic edits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def sole_writer(folder: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lock a folder against other callers of this function, so that no other edit comes between a
    read and a write. `on_wait` is called before a wait. OSError: `folder` cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(
    path: Path, raw: bytes, give_rights: Callable[[int], None], beside: Path | None = None
) -> None:
    """Replace a file atomically, also in case of a power failure. `give_rights` sets owner and mode
    of the new file by its descriptor, while the file is empty and private. `beside`: a folder of
    the same file system for the temporary file; None: the folder of `path`."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=beside or path.parent)
    try:
        with open(descriptor, "wb") as opened:
            give_rights(opened.fileno())
            opened.write(raw)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
