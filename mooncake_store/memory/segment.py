"""A segment: pre-faulted memory in /dev/shm that a storage node owns and workers map.

A segment is one file or several (`path` joins their names with ":", in order), mapped side by side
into one address range. With several files, each can be in a filesystem or on a NUMA node of its
own. For all users the segment is one linear memory: an offset identifies a block, and one NIXL
registration covers the segment. The address range is reserved first, aligned to HUGE_BYTES. Then
each file is mapped over its part.

All pages are allocated before use. The advice about huge pages and the NUMA policy are set before
that, because both apply only to pages that do not exist yet. The kernel follows the advice on a
tmpfs that is mounted with huge=advise. On a hugetlbfs all pages are huge.

Not here: lock and size of one file (segment_file.py), content of the segment (layout.py,
slot_memory.py), the choice of slots (directory/), transfers to other processes (transport.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment_file import (
    SegmentRefused,
    create_locked,
    is_hugetlbfs,
    prove_memory,
    refuse_without_room,
    try_lock,
    unlink_if_same,
)

SEPARATOR = ":"  # between the files of one segment
IDENTITY_VARIABLE = "MOONCAKE_HOST_IDENTITY"  # environment variable, read by host_id()
HUGE_BYTES = 2 * 2**20
PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call number of mbind, which libc does not wrap
_NUMA_NODES_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class SegmentPart(NamedTuple):
    descriptor: int  # of the open file
    size_bytes: int
    numa_node: int | None = None  # None: chosen by the kernel


class Mapping:
    """The address range of a segment, mapped while `view` or a part of it is referenced."""

    def __init__(self, parts: Sequence[SegmentPart]) -> None:
        size_bytes = sum(part.size_bytes for part in parts)
        reserved_bytes = size_bytes + HUGE_BYTES
        start = _mmap(0, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
        self.size_bytes = size_bytes
        owner = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        # Reading unmapped memory would crash the process, so unmap when the last view is gone.
        weakref.finalize(owner, _libc.munmap, start, reserved_bytes).atexit = False
        self.view: ByteArray = np.ctypeslib.as_array(owner)
        offset = 0
        for part in parts:
            _map_part(self.address + offset, part)
            offset += part.size_bytes

    def huge_bytes(self) -> int:
        """Bytes of the address range that are in huge pages now."""
        found, is_ours = 0, False
        for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
            head = line.split(None, 1)[0]
            if not head.endswith(":"):
                low = int(head.split("-")[0], 16)
                is_ours = self.address <= low < self.address + self.size_bytes
            elif is_ours and head in ("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:"):
                found += int(line.split()[1]) * 1024
        return found


def _mmap(address: int, size_bytes: int, protection: int, flags: int, descriptor: int = -1) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size_bytes} bytes: {os.strerror(code)}")
    return int(found)


def _map_part(address: int, part: SegmentPart) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    _mmap(address, part.size_bytes, protection, flags, part.descriptor)
    # if the kernel rejects this advice, the pages are small
    _libc.madvise(address, part.size_bytes, _MADV_HUGEPAGE)
    if part.numa_node is not None:
        _bind(address, part.size_bytes, part.numa_node)
    if _libc.madvise(address, part.size_bytes, _MADV_POPULATE_WRITE) != 0:
        # Linux before 5.14 does not have this advice. MAP_POPULATE does not report a lack of
        # memory, but prove_memory() does.
        _mmap(address, part.size_bytes, protection, flags | _MAP_POPULATE, part.descriptor)


def numa_nodes() -> list[int]:
    """The NUMA nodes of this host that have memory."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for span in (
            Path("/sys/devices/system/node/has_memory").read_text("utf-8").strip().split(",")
        ):
            first, _, last = span.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def _bind(address: int, size_bytes: int, numa_node: int) -> None:
    """Allocate this range's memory on one NUMA node. OSError: the kernel rejects this."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"NUMA binding is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * (_NUMA_NODES_MAX // 64))()
    mask[numa_node // 64] = 1 << (numa_node % 64)
    refused = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(_NUMA_NODES_MAX),
        ctypes.c_uint(0),
    )
    if refused:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to NUMA node {numa_node}: {os.strerror(code)}")


class Segment:
    """A mapped segment. Its owner creates, locks and unlinks the files; readers only map them."""

    def __init__(self, path: str, parts: Sequence[SegmentPart], is_owner: bool) -> None:
        self.path = path
        self.is_owner = is_owner
        self._lock = threading.Lock()
        self._mapping: Mapping | None = Mapping(parts)
        self._descriptors = [part.descriptor for part in parts]
        self.address, self.size_bytes = self._mapping.address, self._mapping.size_bytes

    @classmethod
    def create(cls, path: str, size_bytes: int, numa_nodes: Sequence[int | None] = ()) -> Segment:
        """Create a zeroed segment. It replaces existing files, unless a living process owns them.
        Several files share the size; `numa_nodes` has one NUMA node per file, or is empty."""
        assert size_bytes > 0, f"a segment of {size_bytes} bytes"
        paths = path.split(SEPARATOR)
        assert len(numa_nodes) in (0, len(paths)), (numa_nodes, paths)
        parts: list[SegmentPart] = []
        try:
            for at, one in enumerate(paths):
                part_bytes = _share_bytes(size_bytes, len(paths), at)
                descriptor = create_locked(one)
                parts.append(
                    SegmentPart(descriptor, part_bytes, numa_nodes[at] if numa_nodes else None)
                )
            refuse_without_room(
                [(one, part.size_bytes) for one, part in zip(paths, parts, strict=True)]
            )
            for part in parts:
                os.ftruncate(part.descriptor, part.size_bytes)
            segment = cls(path, parts, is_owner=True)
            for one, part in zip(paths, parts, strict=True):
                prove_memory(one, part.descriptor, part.size_bytes)
            return segment
        except BaseException as error:
            for one, part in zip(paths, parts, strict=False):
                os.unlink(one)
                os.close(part.descriptor)
            if isinstance(error, OSError):
                raise SegmentRefused(
                    f"cannot create segment {path} of {size_bytes} bytes: "
                    f"{error.strerror or error} (a hugetlbfs needs whole, reserved huge pages)"
                ) from error
            raise

    @classmethod
    def open(cls, path: str, size_bytes: int | None = None) -> Segment:
        """Map a segment that a living process owns. `size_bytes`: the size that the owner
        announced; None: any size. SegmentRefused: no such file, no owner, or another size."""
        parts: list[SegmentPart] = []
        try:
            for one in path.split(SEPARATOR):
                descriptor = _open_foreign(one)
                parts.append(SegmentPart(descriptor, os.fstat(descriptor).st_size))
                if try_lock(descriptor, fcntl.LOCK_SH, keep=False):
                    # a mapping would keep memory that the node's next incarnation needs
                    raise SegmentRefused(f"no process owns segment {one}: its node has exited")
            found_bytes = sum(part.size_bytes for part in parts)
            if not all(part.size_bytes for part in parts) or size_bytes not in (None, found_bytes):
                raise SegmentRefused(
                    f"segment {path} has {found_bytes} bytes, its node announced "
                    f"{size_bytes or 'another size'}: the node is restarting, try again"
                )
            return cls(path, parts, is_owner=False)
        except BaseException:
            for part in parts:
                os.close(part.descriptor)
            raise

    @property
    def view(self) -> ByteArray:
        """The whole segment as uint8. Do not keep the view beyond close()."""
        assert self._mapping is not None, f"segment {self.path} is closed"
        return self._mapping.view

    def view_if_open(self) -> ByteArray | None:
        """Like `view`, but None if the segment is closed (perhaps by another thread)."""
        mapping = self._mapping
        return None if mapping is None else mapping.view

    @property
    def pages(self) -> str:
        """The sizes of the segment's memory pages, as text."""
        assert self._mapping is not None, f"segment {self.path} is closed"
        folders = {os.path.dirname(one) or "." for one in self.path.split(SEPARATOR)}
        if all(is_hugetlbfs(folder) for folder in folders):
            return "hugetlbfs"
        percent = 100 * self._mapping.huge_bytes() // self.size_bytes
        small, huge = f"{PAGE_BYTES // 1024} KiB", f"{HUGE_BYTES // 1024} KiB"
        return {0: small, 100: huge}.get(percent, f"{percent} % of {huge}, else {small}")

    def is_owner_alive(self) -> bool:
        """True if a living process owns the first file. False after `close`. Takes about 1 us."""
        with self._lock:
            if self.is_owner or not self._descriptors:
                return bool(self._descriptors)
            return not try_lock(self._descriptors[0], fcntl.LOCK_SH, keep=False)

    def close(self) -> None:
        """Unmap; the owner also unlinks the files. A second call has no effect. The kernel frees
        the memory when the last process has unmapped it. A view that is still referenced keeps the
        memory mapped in this process, but keeps neither the file name nor the lock."""
        with self._lock:
            if not self._descriptors:
                return
            for one, descriptor in zip(self.path.split(SEPARATOR), self._descriptors, strict=True):
                if self.is_owner:
                    unlink_if_same(one, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children may have it open
                os.close(descriptor)
            self._descriptors = []
            self._mapping = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_id(path: str) -> str:
    """An identifier that is equal in all processes that can map a segment at `path`. It names host,
    boot and tmpfs. Two containers of one host have the same boot but usually different /dev/shm.
    If hosts of a deployment share boot and /dev/shm (for example as network namespaces), an
    operator distinguishes them by MOONCAKE_HOST_IDENTITY."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    device = os.stat(os.path.dirname(path.split(SEPARATOR)[0]) or ".").st_dev
    name = os.environ.get(IDENTITY_VARIABLE) or os.uname().nodename
    return f"{name}/{boot[:13]}/{device}"


def _share_bytes(size_bytes: int, files: int, at: int) -> int:
    """The size of file number `at`: an equal share in whole huge pages, or in whole small pages if
    a share is less than a huge page. The last file also gets the remainder."""
    share_bytes = size_bytes // files // HUGE_BYTES * HUGE_BYTES
    share_bytes = share_bytes or size_bytes // files // PAGE_BYTES * PAGE_BYTES
    if share_bytes == 0:
        raise SegmentRefused(f"{size_bytes} bytes are too few for {files} files of whole pages")
    return share_bytes if at + 1 < files else size_bytes - share_bytes * (files - 1)


def _open_foreign(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentRefused(
            f"cannot open segment {path}: {error.strerror}; is its storage node running on "
            "this host, and does this process see the same /dev/shm (containers: share it)?"
        ) from error
