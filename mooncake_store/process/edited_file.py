"""Files with several editors: exclusive edits, each of them atomic."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def sole_writer(folder: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Exclude other writers of this folder, so that a read and a later write lose no other edit.
    `on_wait` is called when another process holds the lock. OSError without access."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
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
    """Replace a file atomically, also in case of a power failure. `give_rights` gets the descriptor
    of the new file while the file is empty and private. `beside` is another folder of the same file
    system for the temporary file."""
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
