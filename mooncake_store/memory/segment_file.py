"""One file of a segment: created, locked, given its memory, recognised as stale, unlinked.

The owner holds an exclusive flock on the file for as long as it lives; the kernel drops it when
the process dies, however it dies. So a lock that can be taken means "nobody owns this": that is
how a stale file is recognised at start, and how a reader notices that a mapped node is dead.

Memory is promised before it is used: statvfs and MemAvailable say whether there is room, then the
file is populated and posix_fallocate proves that all of it is there. A sparse file would be
accepted at once and kill the process with SIGBUS at the first write that finds /dev/shm full.

Not here: mapping it, and segments of several files (segment.py).
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

ATTEMPTS_MAX = 20
ATTEMPT_S = 0.01  # a reader's liveness probe holds the lock for a microsecond, or one time slice
MEMORY_SPARE_BYTES = 256 * 1024**2  # left to everyone else when a segment is created


class SegmentRefused(StoreError):
    """This segment cannot be created or opened; the message says what to change."""


class NoRoom(SegmentRefused):
    """There is too little memory now, and enough in all: somebody may give some back."""


def create_locked(path: str) -> int:
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
        if try_lock(descriptor, fcntl.LOCK_EX, keep=True) and _is_same(path, descriptor):
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
    """NoRoom or SegmentRefused when (path, bytes) cannot be had together: what to do."""
    needed_bytes: dict[int, int] = {}  # by filesystem
    set_aside: set[int] = set()  # hugetlbfs: its pages are not part of the memory that is available
    for path, size_bytes in files:
        where = os.path.dirname(path) or "."
        device = os.stat(where).st_dev
        needed_bytes[device] = needed_bytes.get(device, 0) + size_bytes
        free_bytes = _free_bytes(where)
        if needed_bytes[device] > free_bytes:
            could_be = needed_bytes[device] <= _all_bytes(where)
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
            f"{_mib(available_bytes)} can be had: choose a smaller segment or stop something"
        )


def _free_bytes(folder: str) -> int:
    room = os.statvfs(folder)
    if not is_hugetlbfs(folder):
        return room.f_bavail * room.f_frsize
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{room.f_bsize // 1024}kB/free_hugepages")
    return int(pool.read_text("utf-8")) * room.f_bsize


def _all_bytes(folder: str) -> int:
    """What is free there when nobody has anything."""
    room = os.statvfs(folder)
    return room.f_blocks * room.f_frsize


def prove_memory(path: str, descriptor: int, size_bytes: int) -> None:
    """All pages of the file exist now; what is not there yet is taken, or NoRoom."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        where = os.path.dirname(path) or "."
        raise NoRoom(
            f"segment {path} needs {_mib(size_bytes)}, {where} ran full ({error.strerror}): "
            + _advice(where)
        ) from error


def _advice(where: str) -> str:
    return (
        f"choose a smaller segment, free something in {where} (ls -la {where}), or enlarge it "
        f"(mount -o remount,size=... {where}; containers: --shm-size)"
    )


def is_hugetlbfs(folder: str) -> bool:
    """Are the pages of files in this folder the huge pages that an administrator set aside?"""
    points = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    kinds = {os.stat(point[1]).st_dev: point[2] for point in points if point[2] == "hugetlbfs"}
    return os.stat(folder).st_dev in kinds


def try_lock(descriptor: int, kind: int, keep: bool) -> bool:
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


def unlink_if_same(path: str, descriptor: int) -> None:
    if _is_same(path, descriptor):
        os.unlink(path)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:.0f} MiB"
