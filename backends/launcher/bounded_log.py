"""The log file of a child process, kept below a size while the child goes on writing.

A child writes into the file that it was given at its start, so the file cannot be exchanged under
it. Instead its older part is copied to `NAME.1` and taken off its front. Linux does that in one
stroke where the file system can (FALLOC_FL_COLLAPSE_RANGE: ext4, xfs), so that no line is lost,
also of a child that crashes at that moment. Elsewhere the file is emptied right behind the copy,
and what is written in between, within microseconds, is lost.

Not here: who looks at the size, and when (processes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import BinaryIO

COLLAPSE_RANGE = 0x08  # FALLOC_FL_COLLAPSE_RANGE of linux/falloc.h
COPY_BYTES = 1 << 20
LOG_BYTES_MAX = 64 * 2**20  # of a log and of its older part, each
LOG_BYTES_MIN = 64 * 2**10  # so that the end of a start is still there


class BoundedLog:
    """Not thread-safe, but for the child, which may write at any time."""

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        """Begins the file anew; what another launch left is removed."""
        self.path = path
        self.older_path = path.with_name(f"{path.name}.1")
        self._bytes_max = bytes_max
        path.write_bytes(b"")
        self.older_path.unlink(missing_ok=True)

    def open_to_append(self) -> BinaryIO:
        """For a child. It must append, or it would write on where the front was taken away."""
        return self.path.open("ab")

    def shorten(self) -> int:
        """Call it now and then: the bytes that have gone from the front to the older part."""
        try:
            if self.path.stat().st_size <= self._bytes_max:
                return 0
            with self.path.open("r+b") as log:
                return self._shorten(log)
        except OSError:
            return 0  # the folder is gone, or its disk is full: the log grows, the child goes on

    def _shorten(self, log: BinaryIO) -> int:
        """What is collapsed must be whole blocks, and leave something."""
        stat = os.fstat(log.fileno())
        block_bytes = max(stat.st_blksize, os.fstatvfs(log.fileno()).f_bsize)
        if (whole_bytes := (stat.st_size - 1) // block_bytes * block_bytes) <= 0:
            return 0
        copy = self.older_path.with_suffix(".copying")
        try:
            with copy.open("wb") as older:
                copied = _copy(log, older, whole_bytes)
                older.flush()  # where the disk is full, before anything is taken away
                if not _collapse(log.fileno(), copied):
                    copied += _copy(log, older, None)
                    older.flush()
                    log.truncate(0)
            copy.replace(self.older_path)
        finally:
            copy.unlink(missing_ok=True)
        return copied

    def last_lines(self, lines: int) -> str:
        """Also those whose log was shortened a moment ago."""
        text = b""
        for path in (self.older_path, self.path):
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - COPY_BYTES))
                text += log.read()
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])


def _copy(source: BinaryIO, target: BinaryIO, bytes_max: int | None) -> int:
    """Up to so many bytes, or to the end as it is when it is reached."""
    copied = 0
    while bytes_max is None or copied < bytes_max:
        wanted = COPY_BYTES if bytes_max is None else min(COPY_BYTES, bytes_max - copied)
        if not (piece := source.read(wanted)):
            break
        target.write(piece)
        copied += len(piece)
    return copied


def _collapse(file: int, length_bytes: int) -> bool:
    """False where the file system cannot."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(fallocate(file, COLLAPSE_RANGE, ctypes.c_long(0), ctypes.c_long(length_bytes)) == 0)
