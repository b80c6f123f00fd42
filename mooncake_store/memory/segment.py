"""A segment: pre-faulted memory in /dev/shm that a storage node owns and workers map.

It is one file or several (`path` then joins them with ":", in order), mapped side by side into one
range of addresses. Several files let each lie in its own filesystem or on its own NUMA node; to all
users the segment stays one linear memory.

Huge pages are asked for, and used where the host allows them (`pages` says what was had): on a
tmpfs mounted with huge=advise (mount -o remount,huge=advise /dev/shm), on a hugetlbfs always.

Not here: locks and room of one file (segment_file.py), addresses (mapping.py), what lies in the
segment (layout.py, slot_header.py), who may write where (directory.py), how bytes get to another
process (transport.py).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mooncake_store.memory.mapping import HUGE_BYTES, PAGE_BYTES, ByteArray, Mapping, Part
from mooncake_store.memory.segment_file import (
    NoRoom,
    SegmentRefused,
    create_locked,
    is_hugetlbfs,
    prove_memory,
    refuse_without_room,
    try_lock,
    unlink_if_same,
)

__all__ = ["ByteArray", "NoRoom", "Segment", "SegmentRefused", "host_id"]

SEPARATOR = ":"


class Segment:
    """A mapped segment. Create it (owner: locks, unlinks) or open it (guest: only maps)."""

    def __init__(self, path: str, parts: Sequence[Part], is_owner: bool) -> None:
        self.path = path
        self.is_owner = is_owner
        self._lock = threading.Lock()
        self._mapping: Mapping | None = Mapping(parts)
        self._descriptors = [part.descriptor for part in parts]
        self.address, self.size_bytes = self._mapping.address, self._mapping.size_bytes

    @classmethod
    def create(cls, path: str, size_bytes: int, numa_nodes: Sequence[int | None] = ()) -> Segment:
        """A new zeroed segment; replaces stale files of that name, never a living owner's.

        Several files share the size equally; `numa_nodes` says for each where its memory lies.
        """
        assert size_bytes > 0, f"a segment of {size_bytes} bytes"
        paths = path.split(SEPARATOR)
        assert len(numa_nodes) in (0, len(paths)), (numa_nodes, paths)
        parts: list[Part] = []
        try:
            for at, one in enumerate(paths):
                part_bytes = _share_bytes(size_bytes, len(paths), at)
                descriptor = create_locked(one)
                parts.append(Part(descriptor, part_bytes, numa_nodes[at] if numa_nodes else None))
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
                    f"cannot create segment {path} of {size_bytes} bytes: {error.strerror} (files "
                    "on a hugetlbfs have whole huge pages, and no more than were set aside)"
                ) from error
            raise

    @classmethod
    def open(cls, path: str, size_bytes: int | None = None) -> Segment:
        """Map a segment that a living process owns. `size_bytes`: what its owner announced."""
        parts: list[Part] = []
        try:
            for one in path.split(SEPARATOR):
                descriptor = _open_foreign(one)
                parts.append(Part(descriptor, os.fstat(descriptor).st_size))
                if try_lock(descriptor, fcntl.LOCK_SH, keep=False):
                    # To map it would keep its memory from whoever comes after its owner.
                    raise SegmentRefused(f"nobody owns segment {one}: its storage node died")
            found_bytes = sum(part.size_bytes for part in parts)
            if not all(part.size_bytes for part in parts) or size_bytes not in (None, found_bytes):
                raise SegmentRefused(
                    f"segment {path} has {found_bytes} bytes, its node announced {size_bytes}: "
                    "the node is restarting, try again"
                )
            return cls(path, parts, is_owner=False)
        except BaseException:
            for part in parts:
                os.close(part.descriptor)
            raise

    @property
    def view(self) -> ByteArray:
        """The whole segment as uint8. Do not keep it beyond close()."""
        assert self._mapping is not None, f"segment {self.path} is closed"
        return self._mapping.view

    def view_if_open(self) -> ByteArray | None:
        """The same, for whoever may come when another thread has closed it."""
        mapping = self._mapping
        return None if mapping is None else mapping.view

    @property
    def pages(self) -> str:
        """What pages the memory has, for people."""
        assert self._mapping is not None, f"segment {self.path} is closed"
        folders = {os.path.dirname(one) or "." for one in self.path.split(SEPARATOR)}
        if all(is_hugetlbfs(folder) for folder in folders):
            return "hugetlbfs"
        percent = 100 * self._mapping.huge_bytes() // self.size_bytes
        small, huge = f"{PAGE_BYTES // 1024} KiB", f"{HUGE_BYTES // 1024} KiB"
        return {0: small, 100: huge}.get(percent, f"{percent} % of {huge}, else {small}")

    def is_owner_alive(self) -> bool:
        """Does a living process own the very file that is mapped here? About 1 us."""
        with self._lock:
            if self.is_owner or not self._descriptors:
                return bool(self._descriptors)
            return not try_lock(self._descriptors[0], fcntl.LOCK_SH, keep=False)

    def close(self) -> None:
        """Unmap; the owner unlinks too. Twice is harmless.

        The kernel frees the memory when the last process unmaps. A view that someone still holds
        keeps this process's mapping (not the file name, not the lock) until it is dropped.
        """
        with self._lock:
            if not self._descriptors:
                return
            for one, descriptor in zip(self.path.split(SEPARATOR), self._descriptors, strict=True):
                if self.is_owner:
                    unlink_if_same(one, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it too
                os.close(descriptor)
            self._descriptors = []
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
    device = os.stat(os.path.dirname(path.split(SEPARATOR)[0]) or ".").st_dev
    return f"{os.uname().nodename}/{boot[:13]}/{device}"


def _share_bytes(size_bytes: int, files: int, at: int) -> int:
    """The size of file number `at`: equal shares of whole huge pages, the rest to the last."""
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
