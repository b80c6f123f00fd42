"""The log file of a child process, kept below a size limit while the child writes.

After a rename, a child would continue to write to the renamed file. Therefore the older part of the
log is copied to `NAME.1` and removed from the front of the file. On ext4 and xfs, Linux removes the
front atomically (FALLOC_FL_COLLAPSE_RANGE), so no line is lost. On other file systems the file is
truncated right after the copy. Lines that the child writes in the microseconds between copy and
truncation are lost there. The previous `NAME.1` is replaced.

Not here: when the size is checked (child_processes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import BinaryIO

COLLAPSE_RANGE = 0x08  # FALLOC_FL_COLLAPSE_RANGE of linux/falloc.h
COPY_BYTES = 1 << 20  # bytes per read
LOG_BYTES_MAX = 64 * 2**20  # default limit of a log; `NAME.1` is about as large
LOG_BYTES_MIN = 64 * 2**10  # smallest allowed limit; has room for the last lines of a start


class BoundedLog:
    """The log of one child, which may write at any time. Only one thread may use this object."""

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        """Truncate the file, and remove the `NAME.1` of an earlier launch."""
        self.path = path
        self.older_path = path.with_name(f"{path.name}.1")
        self._bytes_max = bytes_max
        path.write_bytes(b"")
        self.older_path.unlink(missing_ok=True)

    def open_to_append(self) -> BinaryIO:
        """The file for a child. Append mode makes the child write at the end after shorten()."""
        return self.path.open("ab")

    def shorten(self) -> int:
        """If the log is too long, move its front to `NAME.1`; returns the number of moved bytes."""
        try:
            if self.path.stat().st_size <= self._bytes_max:
                return 0
            with self.path.open("r+b") as log:
                return self._shorten(log)
        except OSError:
            return 0  # without a folder or disk space, the log grows until a later call succeeds

    def _shorten(self, log: BinaryIO) -> int:
        """Move all complete blocks of the file system, but not the last byte. If the file system
        cannot remove blocks from the front of a file, move all bytes."""
        stat = os.fstat(log.fileno())
        block_bytes = max(stat.st_blksize, os.fstatvfs(log.fileno()).f_bsize)
        if (whole_bytes := (stat.st_size - 1) // block_bytes * block_bytes) <= 0:
            return 0
        copy = self.older_path.with_suffix(".copying")
        try:
            with copy.open("wb") as older:
                copied = _copy(log, older, whole_bytes)
                older.flush()  # fails on a full disk, before anything is removed
                if not _collapse(log.fileno(), copied):
                    copied += _copy(log, older, None)
                    older.flush()
                    log.truncate(0)
            copy.replace(self.older_path)
        finally:
            copy.unlink(missing_ok=True)
        return copied

    def last_lines(self, lines: int) -> str:
        """The last lines of `NAME.1` and the log together."""
        text = b""
        for path in (self.older_path, self.path):
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - COPY_BYTES))
                text += log.read()
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])


def _copy(source: BinaryIO, target: BinaryIO, bytes_max: int | None) -> int:
    """Copy `bytes_max` bytes, or up to the current end; returns the number of copied bytes."""
    copied = 0
    while bytes_max is None or copied < bytes_max:
        wanted = COPY_BYTES if bytes_max is None else min(COPY_BYTES, bytes_max - copied)
        if not (piece := source.read(wanted)):
            break
        target.write(piece)
        copied += len(piece)
    return copied


def _collapse(file: int, length_bytes: int) -> bool:
    """Remove bytes from the file's front; False if the file system does not support this."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    return bool(fallocate(file, COLLAPSE_RANGE, ctypes.c_long(0), ctypes.c_long(length_bytes)) == 0)
