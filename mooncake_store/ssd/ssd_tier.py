"""A node's SSD tier: writes blocks of the segment to a file, and loads and verifies them.

    write: free the slots in the manifest -> O_DIRECT write -> the caller checks that the segment's
           block is unchanged -> keep() records the block in the manifest
    load:  find the block in the manifest -> O_DIRECT read into the segment -> verify the checksum

Only blocks in the manifest are loaded. The tier drops a block with a wrong checksum from the
manifest, and the caller drops it from the directory.

When the disk fails or is full, the tier accepts no writes for RETRY_S (`is_writable`). Reads
continue, and the node serves from DRAM.

Not here: the choice of blocks (the directory), the node's loops (spiller.py, control.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray, checksum
from mooncake_store.memory.digests import block_checksum, layer_digests
from mooncake_store.ssd.block_file import (
    IO_ALIGN_BYTES,
    BlockFile,
    DiskLane,
    Lanes,
    Row,
    move,
    unfinished,
)
from mooncake_store.ssd.entries import SsdEntry, SsdShape
from mooncake_store.ssd.manifest import Manifest

log = logging.getLogger("mooncake_store.ssd")
PART_BYTES = 2 * 2**20  # a call moves parts of this size; one is verified while others are read
PARTS_AHEAD = 4  # maximum number of parts of one call in flight
PART_ROWS_MAX = 128  # maximum number of blocks in a part
GRACE_S = 0.5  # time after the deadline in which a working disk ends all requests in flight
RETRY_S = 60.0  # seconds from a failure of the disk to the next attempt to write or to open
WRITE_S_MAX = 60.0  # deadline of one write(); a slower disk is treated as broken


class BlockJob(NamedTuple):
    """A block to load or to write: its entry on the SSD, and its position in the segment."""

    entry: SsdEntry
    memory_bytes: int  # offset in the segment, page-aligned


class LoadOutcome(Enum):
    """The result of loading one block."""

    WHOLE = "whole"  # in the segment and verified
    MISSING = "missing"  # no longer in the manifest
    CORRUPT = "corrupt"  # its checksum is wrong; dropped from the manifest
    UNREADABLE = "unreadable"  # the disk reported an error
    LATE = "late"  # not started before the deadline


@dataclass
class SsdCounters:
    """Totals since this process started."""

    restored_blocks: int = 0
    restored_bytes: int = 0
    checksum_failures: int = 0
    disk_errors: int = 0  # blocks that could not be read, and failures of writes


class SsdTier:
    """Blocks in a file. One thread may call write() and keep(); any thread may call load()."""

    def __init__(
        self,
        folder: str,
        name: str,
        shape: SsdShape,
        memory: ByteArray,
        must_reset: bool = False,
        io: str = "nixl",
    ) -> None:
        """SsdRefused: change the options. OSError: no room, or the disk failed; retry later."""
        self.shape = shape
        self.counters = SsdCounters()
        self._memory = memory
        self._closed_until_s = 0.0  # time.monotonic() until which the tier accepts no writes
        self.path = os.path.join(folder, f"{name}.blocks")
        self._file = BlockFile(self.path, shape.capacity_bytes)
        try:
            path = os.path.join(folder, f"{name}.manifest")
            self.manifest = Manifest(path, shape, must_reset)
            self._lanes = Lanes(self._file.descriptor, memory, shape.capacity_bytes, io)
        except BaseException:
            self._file.close()
            raise

    @property
    def is_writable(self) -> bool:
        return time.monotonic() >= self._closed_until_s

    @property
    def state(self) -> str:
        """As text: I/O of the file ("direct" or "buffered"), kind of lane ("nixl" or "threads"),
        and "closed for writing" if `is_writable` is False."""
        how = "direct" if self._file.is_direct else "buffered"
        return f"{how}, {self._lanes.kind}" + ("" if self.is_writable else ", closed for writing")

    def write(self, jobs: Sequence[BlockJob]) -> list[bool]:
        """Write blocks to the file. True: the block is written, and keep() can make it loadable."""
        written = [False] * len(jobs)
        if not self.is_writable:
            return written
        try:
            room = self.manifest.make_room(
                (entry.slot, entry.generation, entry.size_bytes) for entry, _ in jobs
            )
        except OSError as error:
            self._close_for_writing(error)
            return written
        indices = [index for index, has_room in enumerate(room) if has_room]
        try:
            for index, failure in self._move(True, jobs, indices, time.monotonic() + WRITE_S_MAX):
                written[index] = failure is None
                if failure is not None:
                    self._close_for_writing(failure)
        except TransferFailed as error:  # the disk hangs, or all lanes were busy
            self._close_for_writing(error)
        return written

    def keep(self, entries: Sequence[SsdEntry]) -> bool:
        """Make these blocks loadable, also after a restart. False: the disk failed."""
        try:
            self.manifest.put(entries)
        except OSError as error:
            self._close_for_writing(error)
            return False
        return True

    def _close_for_writing(self, error: OSError | TransferFailed) -> None:
        self.counters.disk_errors += 1
        if self.is_writable:
            log.warning(
                "SSD %s accepts no blocks for %g s, the node continues with DRAM: %s",
                self.path,
                RETRY_S,
                error,
            )
        self._closed_until_s = time.monotonic() + RETRY_S

    def load(
        self,
        jobs: Sequence[BlockJob],
        until_s: float,
        on_digests: Callable[[BlockJob, bytes], None] = lambda job, digests: None,
    ) -> list[LoadOutcome]:
        """Load blocks into the segment, until `until_s` (monotonic). `on_digests` receives the
        packed layer digests of each verified block, or b"" if the block has no layers.
        TransferTimeout: the disk hangs; bytes may still arrive. TransferFailed: no free lane."""
        known = [self.manifest.table.find(job.entry.slot) == job.entry for job in jobs]
        outcomes = [LoadOutcome.LATE if is_known else LoadOutcome.MISSING for is_known in known]
        indices = [index for index, is_known in enumerate(known) if is_known]
        for index, failure in self._move(False, jobs, indices, until_s):
            entry, start = jobs[index]
            if failure is not None:
                outcomes[index] = LoadOutcome.UNREADABLE
                self.counters.disk_errors += 1
                log.warning("SSD %s: slot %d cannot be read: %s", self.path, entry.slot, failure)
                continue
            digests, found = self._verified(start, entry)
            if found != entry.checksum:
                outcomes[index] = LoadOutcome.CORRUPT
                self._drop_corrupt(entry)
            else:
                on_digests(jobs[index], digests)
                outcomes[index] = LoadOutcome.WHOLE
                self.counters.restored_blocks += 1
                self.counters.restored_bytes += entry.size_bytes
        return outcomes

    def _verified(self, memory_bytes: int, entry: SsdEntry) -> tuple[bytes, int]:
        """The packed layer digests of a block in the segment, and the block's checksum."""
        if not entry.layers:
            return b"", self.checksum(memory_bytes, entry.size_bytes)
        view = self._memory[memory_bytes : memory_bytes + entry.size_bytes]
        digests = layer_digests(view, entry.layers)
        return digests, block_checksum(digests)

    def checksum(self, memory_bytes: int, size_bytes: int) -> int:
        """The checksum of a block without layers that starts at this offset of the segment."""
        return checksum(self._memory[memory_bytes : memory_bytes + size_bytes])

    def _drop_corrupt(self, entry: SsdEntry) -> None:
        self.counters.checksum_failures += 1
        log.warning(
            "SSD %s: block %s in slot %d is corrupt and was dropped",
            self.path,
            entry.key.hex(),
            entry.slot,
        )
        try:
            self.manifest.drop(entry.slot, entry.generation)
        except OSError as error:  # the file still lists the block; its checksum will fail again
            self._close_for_writing(error)

    def _move(
        self, is_write: bool, jobs: Sequence[BlockJob], indices: Sequence[int], until_s: float
    ) -> Iterator[tuple[int, OSError | None]]:
        """Move these jobs; yields (index, error or None) for each, part by part. While the caller
        handles one part, the next parts are in flight. After `until_s` no part is started, and the
        remaining jobs are not yielded. TransferTimeout: a part takes beyond `until_s` + GRACE_S."""
        parts = [
            (part, [self._row(jobs[index]) for index in part]) for part in _parts(jobs, indices)
        ]
        if not parts:
            return
        with self._lanes.lane(until_s) as lane:
            posted: deque[object] = deque()
            try:
                for number, (part, rows) in enumerate(parts):
                    is_late = time.monotonic() > until_s
                    ahead = min(number + PARTS_AHEAD, len(parts))
                    while not is_late and len(posted) + number < ahead:
                        posted.append(self._post(lane, is_write, parts[number + len(posted)][1]))
                    if not posted:
                        return
                    error = self._wait(lane, posted[0], until_s + GRACE_S)
                    posted.popleft()
                    for index, row in zip(part, rows, strict=True):
                        yield index, self._again(is_write, row) if error else None
            finally:  # if the disk hangs or the caller stopped, parts may be in flight
                unfinished.keep(lane, [each for each in posted if not isinstance(each, Exception)])

    def _row(self, job: BlockJob) -> Row:
        size_bytes = job.entry.size_bytes
        length_bytes = -(-size_bytes // IO_ALIGN_BYTES) * IO_ALIGN_BYTES
        assert job.memory_bytes % IO_ALIGN_BYTES == 0, job
        assert job.memory_bytes + length_bytes <= self._memory.nbytes, job
        return Row(job.memory_bytes, job.entry.slot * self.shape.unit_bytes, length_bytes)

    def _post(self, lane: DiskLane, is_write: bool, rows: Sequence[Row]) -> object:
        try:
            return lane.post(is_write, rows)
        except TransferFailed as error:
            return error

    def _wait(self, lane: DiskLane, posted: object, until_s: float) -> Exception | None:
        """The error of the part, or None. TransferTimeout: its bytes may still be in flight."""
        if isinstance(posted, TransferFailed):
            return posted
        try:
            lane.wait(posted, until_s)
        except TransferTimeout:
            raise
        except (OSError, TransferFailed) as error:
            return error
        return None

    def _again(self, is_write: bool, row: Row) -> OSError | None:
        """Repeat one row of a failed part by plain calls, to find out whether this row fails."""
        try:
            move(self._file.descriptor, self._memory, is_write, row)
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the files, which remain on the disk. A second call has no effect."""
        self._lanes.close()
        self.manifest.close()
        self._file.close()


def _parts(jobs: Sequence[BlockJob], indices: Sequence[int]) -> list[list[int]]:
    """Divide the indices into parts of at most PART_BYTES; a larger block is a part of its own."""
    parts: list[list[int]] = []
    part_bytes = PART_BYTES
    for index in indices:
        size_bytes = jobs[index].entry.size_bytes
        if part_bytes + size_bytes > PART_BYTES or len(parts[-1]) == PART_ROWS_MAX:
            parts.append([])
            part_bytes = 0
        parts[-1].append(index)
        part_bytes += size_bytes
    return parts
