"""Files that several people and programs edit: one edit after the other, each of them whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def _say_nothing() -> None:
    pass


@contextlib.contextmanager
def sole_writer(folder: Path, on_wait: Callable[[], None] = _say_nothing) -> Iterator[None]:
    """Who reads a file of this folder in here, and writes it, loses no other edit. `on_wait` is
    called when somebody else is at it. OSError when the folder cannot be opened.
    """
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
    """Readers find the old file or the new one, also after a power cut. `give_rights` gets the
    descriptor of the new file while that is empty and readable for this user alone; `beside`: the
    folder in which it is written, on the same file system, where not the file's own.
    """
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
