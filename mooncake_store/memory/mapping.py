"""Several files mapped side by side into one range of addresses, with large pages where allowed.

One range keeps a segment linear, whatever it is made of: an offset is enough to find a block, and
one NIXL registration covers it. The range is reserved first, aligned to HUGE_BYTES, and each file
is then mapped over its part.

Memory is populated here, before anybody uses it. The order matters: advice about huge pages and the
NUMA policy count only for pages that do not exist yet.

Not here: who owns the files and whether there is room (segment_file.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]

HUGE_BYTES = 2 * 2**20
PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}  # not in libc; libnuma would be one more package
_NUMA_NODES_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Part(NamedTuple):
    """One file of the range."""

    descriptor: int
    size_bytes: int
    numa_node: int | None = None  # None: wherever the kernel puts it


class Mapping:
    """The range, for as long as somebody holds `view` or an array made from it."""

    def __init__(self, parts: Sequence[Part]) -> None:
        size_bytes = sum(part.size_bytes for part in parts)
        reserved_bytes = size_bytes + HUGE_BYTES
        start = _mmap(0, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
        self.size_bytes = size_bytes
        owner = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        # Unmapping under a live view would be a crash instead of a leak: the last view does it.
        weakref.finalize(owner, _libc.munmap, start, reserved_bytes).atexit = False
        self.view: ByteArray = np.ctypeslib.as_array(owner)
        offset = 0
        for part in parts:
            _map_part(self.address + offset, part)
            offset += part.size_bytes

    def huge_bytes(self) -> int:
        """How much of it lies in huge pages now."""
        found, is_ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
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


def _map_part(address: int, part: Part) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    _mmap(address, part.size_bytes, protection, flags, part.descriptor)
    _libc.madvise(address, part.size_bytes, _MADV_HUGEPAGE)  # refused or ignored: small pages then
    if part.numa_node is not None:
        _bind(address, part.size_bytes, part.numa_node)
    if _libc.madvise(address, part.size_bytes, _MADV_POPULATE_WRITE) != 0:
        # Linux before 5.14; or memory ran out, which mmap ignores and posix_fallocate then says.
        _mmap(address, part.size_bytes, protection, flags | _MAP_POPULATE, part.descriptor)


def numa_nodes() -> list[int]:
    """The NUMA nodes of this host that have memory."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for span in Path("/sys/devices/system/node/has_memory").read_text().strip().split(","):
            first, _, last = span.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def _bind(address: int, size_bytes: int, numa_node: int) -> None:
    """Take this range's memory from one NUMA node. OSError when the kernel refuses."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"NUMA binding is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * (_NUMA_NODES_MAX // 64))()
    mask[numa_node // 64] = 1 << (numa_node % 64)
    refused = _libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_BIND), mask, ctypes.c_ulong(_NUMA_NODES_MAX), ctypes.c_uint(0),
    )  # fmt: skip
    if refused:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to NUMA node {numa_node}: {os.strerror(code)}")
