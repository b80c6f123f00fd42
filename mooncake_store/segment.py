"""A segment: one pre-faulted file in /dev/shm that a storage node owns and workers map.

The owner holds an exclusive flock on the file for as long as it lives; the kernel drops it when
the process dies, however it dies. So a lock that can be taken means "nobody owns this": that is
how a stale file is recognised at start, and how a reader notices that a mapped node is dead.

Memory is promised before it is used: statvfs and MemAvailable say whether there is room,
posix_fallocate takes it, MAP_POPULATE builds the page tables. A sparse file would be accepted at
once and kill the process with SIGBUS at the first write that finds /dev/shm full.

Not here: what lies in the segment (the directory's Geometry, slot_header.py), who may write where
(directory.py), how bytes get to another process (transport.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake_store.errors import StoreError

ByteArray = npt.NDArray[np.uint8]

ATTEMPTS_MAX = 20
ATTEMPT_S = 0.01  # a reader's liveness probe holds the lock for a microsecond, or one time slice
MEMORY_SPARE_BYTES = 256 * 1024**2  # left to everyone else when a segment is created


class SegmentRefused(StoreError):
    """This segment cannot be created or opened; the message says what to change."""


class Segment:
    """A mapped segment file. Create it (owner: locks, unlinks) or open it (guest: only maps)."""

    def __init__(self, path: str, descriptor: int, size_bytes: int, is_owner: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.is_owner = is_owner
        self._lock = threading.Lock()
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = mmap.mmap(
            descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        self._view: ByteArray | None = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self._view.ctypes.data)

    @classmethod
    def create(cls, path: str, size_bytes: int) -> Segment:
        """A new zeroed segment; replaces a stale file of that name, never a living owner's."""
        assert size_bytes > 0, f"a segment of {size_bytes} bytes"
        descriptor = _create_locked(path)
        try:
            _reserve(path, descriptor, size_bytes)
            return cls(path, descriptor, size_bytes, is_owner=True)
        except BaseException:
            os.unlink(path)
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str, size_bytes: int | None = None) -> Segment:
        """Map a segment that another process owns. `size_bytes`: what its owner announced."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentRefused(
                f"cannot open segment {path}: {error.strerror}; is its storage node running on "
                "this host, and does this process see the same /dev/shm (containers: share it)?"
            ) from error
        try:
            found_bytes = os.fstat(descriptor).st_size
            if found_bytes == 0 or size_bytes not in (None, found_bytes):
                raise SegmentRefused(
                    f"segment {path} has {found_bytes} bytes, its node announced {size_bytes}: "
                    "the node is restarting, try again"
                )
            return cls(path, descriptor, found_bytes, is_owner=False)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def view(self) -> ByteArray:
        """The whole segment as uint8. Do not keep it beyond close()."""
        assert self._view is not None, f"segment {self.path} is closed"
        return self._view

    def is_owner_alive(self) -> bool:
        """Does a living process own the very file that is mapped here? About 1 us."""
        with self._lock:
            if self.is_owner or self._descriptor < 0:
                return self._descriptor >= 0
            return not _try_lock(self._descriptor, fcntl.LOCK_SH, keep=False)

    def close(self) -> None:
        """Unmap; the owner unlinks too. Twice is harmless.

        The kernel frees the memory when the last process unmaps. A view that someone still holds
        keeps this process's mapping (not the file name, not the lock) until it is dropped:
        unmapping under a live view would be a crash instead of a leak.
        """
        with self._lock:
            if self._descriptor < 0:
                return
            if self.is_owner:
                _unlink_if_same(self.path, self._descriptor)
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # mmap keeps a dup of the descriptor
            os.close(self._descriptor)
            self._descriptor = -1
            self._view = None
            assert self._mapping is not None
            with contextlib.suppress(BufferError):  # then it goes when the last view does
                self._mapping.close()
            self._mapping = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_id(path: str) -> str:
    """Names what can map a segment at `path`: this boot of this host, and this very tmpfs.

    Two containers of one host have the same boot but usually two different /dev/shm.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    device = os.stat(os.path.dirname(path) or ".").st_dev
    return f"{os.uname().nodename}/{boot[:13]}/{device}"


def _create_locked(path: str) -> int:
    """A descriptor of a fresh, empty, exclusively locked file at `path`."""
    for _ in range(ATTEMPTS_MAX):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            _remove_stale(path)
            continue
        except OSError as error:
            raise SegmentRefused(
                f"cannot create segment {path}: {error.strerror}; choose a writable folder on "
                "tmpfs, usually /dev/shm"
            ) from error
        if _try_lock(descriptor, fcntl.LOCK_EX, keep=True) and _is_same(path, descriptor):
            return descriptor
        os.close(descriptor)  # another starter took our fresh file for a stale one
    raise SegmentRefused(f"segment {path} is being created by someone else; use another path")


def _remove_stale(path: str) -> None:
    """Unlink a file nobody owns; refuse when somebody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SegmentRefused(f"cannot open the old segment {path}: {error.strerror}") from error
    try:
        for _ in range(ATTEMPTS_MAX):
            if _try_lock(descriptor, fcntl.LOCK_EX, keep=True):
                _unlink_if_same(path, descriptor)
                return
            time.sleep(ATTEMPT_S)
        raise SegmentRefused(
            f"segment {path} belongs to a living process: stop that storage node or give this one "
            "another --segment-path"
        )
    finally:
        os.close(descriptor)


def _reserve(path: str, descriptor: int, size_bytes: int) -> None:
    """Take the memory now, or say what is free, what is needed and what to do."""
    room = os.fstatvfs(descriptor)
    free_bytes = room.f_bavail * room.f_frsize
    available_bytes = _memory_available_bytes() - MEMORY_SPARE_BYTES
    where = os.path.dirname(path) or "."
    advice = (
        f"choose a smaller segment, free something in {where} (ls -la {where}), or enlarge it "
        f"(mount -o remount,size=... {where}; containers: --shm-size)"
    )
    if size_bytes > free_bytes:
        raise SegmentRefused(
            f"segment {path} needs {_mib(size_bytes)}, {where} has {_mib(free_bytes)} free: "
            + advice
        )
    if size_bytes > available_bytes:
        raise SegmentRefused(
            f"segment {path} needs {_mib(size_bytes)} of memory, {_mib(available_bytes)} can be "
            "had: choose a smaller segment or stop something"
        )
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise SegmentRefused(
            f"segment {path} needs {_mib(size_bytes)}, {where} ran full ({error.strerror}): "
            + advice
        ) from error


def _memory_available_bytes() -> int:
    """What can be had without swapping: tmpfs may promise more than the machine or the cgroup."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return available_kib * 1024  # no cgroup of version 2 around this process
    if limit == "max":
        return available_kib * 1024
    return min(available_kib * 1024, int(limit) - int(used))


def _try_lock(descriptor: int, kind: int, keep: bool) -> bool:
    """Can the lock be had right now? With keep=False it is given back at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not keep:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _is_same(path: str, descriptor: int) -> bool:
    """Is `path` still the name of this very file?"""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unlink_if_same(path: str, descriptor: int) -> None:
    if _is_same(path, descriptor):
        os.unlink(path)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:.0f} MiB"
