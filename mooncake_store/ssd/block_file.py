"""The file that holds the blocks of the SSD tier: allocated whole, locked, opened past the cache.

O_DIRECT keeps blocks out of the page cache: they are in the segment already, and a cache of them
would take the memory that the segment needs. Where a filesystem refuses it, buffered I/O is used.
All its space is taken at start (posix_fallocate), so a disk that others fill later does not fail
writes halfway; an existing file keeps its blocks and is made longer or shorter.

The owner holds an exclusive flock, so two nodes never write one file.

Not here: reading and writing it (block_io.py), what lies where (manifest.py).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os

from mooncake_store.errors import SsdRefused

log = logging.getLogger("mooncake_store.ssd")
IO_ALIGN_BYTES = 4096  # O_DIRECT: addresses, offsets and lengths; enough for every disk in use
# What a disk says that is full, over quota, over a file size limit, broken, or read-only by now.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class BlockFile:
    """One open block file. `descriptor` is for I/O; `is_direct` says whether O_DIRECT was had."""

    def __init__(self, path: str, capacity_bytes: int) -> None:
        """SsdRefused: change the options. OSError: the disk fails or is full, try again later."""
        self.path = path
        self.is_direct = True
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self.descriptor = self._open_direct(path)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise SsdRefused(
                f"cannot open SSD file {path}: {error.strerror}; choose another --ssd-path"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._allocate(capacity_bytes)
        except BlockingIOError as error:
            os.close(self.descriptor)
            raise SsdRefused(
                f"SSD file {path} belongs to a living process: stop that node, or choose another "
                "--ssd-path"
            ) from error
        except BaseException:
            os.close(self.descriptor)
            raise

    def _open_direct(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.is_direct = False
        log.warning(
            "%s: its filesystem refuses O_DIRECT, so blocks go through the page cache", path
        )
        return os.open(path, flags, 0o600)

    def _allocate(self, capacity_bytes: int) -> None:
        had_bytes = os.fstat(self.descriptor).st_size
        if had_bytes > capacity_bytes:
            os.ftruncate(self.descriptor, capacity_bytes)
        try:
            os.posix_fallocate(self.descriptor, 0, capacity_bytes)
        except OSError:
            os.ftruncate(self.descriptor, had_bytes)  # what others need more than a half file
            raise

    def close(self) -> None:
        """Unlock. The file stays: its blocks outlive the process. Twice is harmless."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
