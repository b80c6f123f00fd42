"""One file of a segment: created, locked, allocated, checked for a living owner, unlinked.

The owner holds an exclusive flock on the file until it exits. The kernel releases the lock when the
process dies, for any reason. A file whose lock is free therefore has no owner. A starting node
recognises stale files by their free lock, and a reader detects that the owner has died.

All memory is allocated before use. First, statvfs and MemAvailable show whether there is room.
After segment.py has touched all pages, posix_fallocate proves that they exist. Without these
checks, a later write to a full /dev/shm would kill the process with SIGBUS.

Not here: mapping the file, and segments of several files (segment.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from mooncake_store.errors import StoreError
from mooncake_store.process.available_memory import memory_available_bytes

# attempts to lock a file; a reader that checks whether the owner lives may hold the lock briefly
ATTEMPTS_MAX = 20
ATTEMPT_S = 0.01  # seconds between two attempts
MEMORY_SPARE_BYTES = 256 * 1024**2  # left for other processes when a segment is created


class SegmentRefused(StoreError):
    """The segment cannot be created or opened."""


class NoRoom(SegmentRefused):
    """Too little memory is free now, but other processes may release enough."""


def create_locked(path: str) -> int:
    """Create a locked file, which replaces a file without an owner; returns its descriptor."""
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
        if try_lock(descriptor, fcntl.LOCK_EX, keep=True) and _is_same(path, descriptor):
            return descriptor
        os.close(descriptor)  # another process locked or replaced the new file first
    raise SegmentRefused(f"segment {path} is being created by another process; use another path")


def _remove_stale(path: str) -> None:
    """Unlink a file without an owner. SegmentRefused: a living process owns it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SegmentRefused(f"cannot open the old segment {path}: {error.strerror}") from error
    try:
        for _ in range(ATTEMPTS_MAX):
            if try_lock(descriptor, fcntl.LOCK_EX, keep=True):
                unlink_if_same(path, descriptor)
                return
            time.sleep(ATTEMPT_S)
        raise SegmentRefused(
            f"segment {path} belongs to a living process: stop that storage node or give this one "
            "another --segment-path"
        )
    finally:
        os.close(descriptor)


def refuse_without_room(files: Sequence[tuple[str, int]]) -> None:
    """NoRoom: too little memory is free. SegmentRefused: the files exceed a filesystem's size."""
    needed_bytes: dict[int, int] = {}  # by device number of the filesystem
    set_aside: set[int] = set()  # device numbers of hugetlbfs; MemAvailable excludes their pages
    for path, size_bytes in files:
        where = os.path.dirname(path) or "."
        device = os.stat(where).st_dev
        needed_bytes[device] = needed_bytes.get(device, 0) + size_bytes
        free_bytes = _free_bytes(where)
        if needed_bytes[device] > free_bytes:
            room = os.statvfs(where)
            could_be = needed_bytes[device] <= room.f_blocks * room.f_frsize
            raise (NoRoom if could_be else SegmentRefused)(
                f"segment {path} needs {_mib(needed_bytes[device])}, {where} has "
                f"{_mib(free_bytes)} free: {_advice(where)}"
            )
        if is_hugetlbfs(where):
            set_aside.add(device)
    available_bytes = memory_available_bytes() - MEMORY_SPARE_BYTES
    memory_bytes = sum(n for device, n in needed_bytes.items() if device not in set_aside)
    if memory_bytes > available_bytes:
        raise NoRoom(
            f"segment {files[0][0]} needs {_mib(memory_bytes)} of memory, "
            f"{_mib(available_bytes)} are available: choose a smaller segment or free memory"
        )


def _free_bytes(folder: str) -> int:
    room = os.statvfs(folder)
    if not is_hugetlbfs(folder):
        return room.f_bavail * room.f_frsize
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{room.f_bsize // 1024}kB/free_hugepages")
    return int(pool.read_text("utf-8")) * room.f_bsize


def prove_memory(path: str, descriptor: int, size_bytes: int) -> None:
    """Allocate all pages of the file. NoRoom: too few pages are free."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        where = os.path.dirname(path) or "."
        raise NoRoom(
            f"segment {path} needs {_mib(size_bytes)}, {where} has no room ({error.strerror}): "
            + _advice(where)
        ) from error


def _advice(where: str) -> str:
    return (
        f"choose a smaller segment, free something in {where} (ls -la {where}), or enlarge it "
        f"(mount -o remount,size=... {where}; containers: --shm-size)"
    )


def is_hugetlbfs(folder: str) -> bool:
    """True if files in this folder use the huge pages that an administrator reserved."""
    points = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    kinds = {os.stat(point[1]).st_dev: point[2] for point in points if point[2] == "hugetlbfs"}
    return os.stat(folder).st_dev in kinds


def try_lock(descriptor: int, kind: int, keep: bool) -> bool:
    """Take the lock; False: a process holds it. keep=False: release the lock at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not keep:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _is_same(path: str, descriptor: int) -> bool:
    """True if `path` still names this very file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def unlink_if_same(path: str, descriptor: int) -> None:
    if _is_same(path, descriptor):
        os.unlink(path)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:.0f} MiB"
