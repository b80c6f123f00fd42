"""The SSD tier's manifest file: an append-only log, so that blocks survive a restart of the node.

Records are written without fsync. They survive the death of the process, even by kill -9, because
they are in the kernel's page cache. After a power cut, records or bytes of blocks may be missing.
Lost records are harmless (entries.py), and a block's checksum detects lost bytes. When most records
are obsolete, a new file is written and renamed over the old one.

A manifest with an invalid header, or for another unit size, is renamed to `.damaged`, and the tier
starts empty. A manifest of another release stops a starting node instead, because the operator may
want to return to that release. After a change of capacity, blocks that still fit are kept.

Not here: the bytes of records, and the table of blocks that they describe (entries.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Sequence

from mooncake_store.errors import ManifestDamaged
from mooncake_store.ssd.entries import (
    RECORD_BYTES,
    EntryTable,
    SsdEntry,
    SsdShape,
    pack_drop,
    pack_header,
    pack_put,
    replay,
    unpack_header,
)

log = logging.getLogger("mooncake_store.ssd")
DEAD_RECORDS_MIN = 4096  # fewer obsolete records do not justify a rewrite
DEAD_FRACTION_MAX = 0.75  # obsolete records / all records, above which the file is rewritten


class Manifest:
    """Owns `table` and writes its changes to the file. Thread-safe."""

    def __init__(self, path: str, shape: SsdShape, must_reset: bool = False) -> None:
        """ManifestVersion: another release wrote the file. OSError: the disk failed."""
        self.path = path
        self.table = EntryTable(shape)
        self._lock = threading.Lock()
        self._records = 0  # number of records in the file, without its header
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".new")  # left by an interrupted compaction
        if must_reset:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._descriptor = self._open(shape)

    def _open(self, shape: SsdShape) -> int:
        try:
            found = self._load(shape)
        except FileNotFoundError:
            return self._write_anew()
        except ManifestDamaged as error:
            aside = self.path + ".damaged"
            os.replace(self.path, aside)
            log.error(
                "manifest %s cannot be used: %s; moved to %s, the SSD tier starts empty",
                self.path,
                error,
                aside,
            )
            return self._write_anew()
        if found != shape or self._is_mostly_dead():
            return self._write_anew()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _load(self, shape: SsdShape) -> SsdShape:
        """Fill the table from the file; returns the shape in its header."""
        with open(self.path, "rb") as file:
            raw = file.read()
        found = unpack_header(raw)
        if found.unit_bytes != shape.unit_bytes:
            raise ManifestDamaged(
                f"it is for --unit-bytes {found.unit_bytes}, but this node has --unit-bytes "
                f"{shape.unit_bytes}"
            )
        replayed = replay(raw)
        self.table.play(replayed.records)
        self._records = (replayed.whole_bytes - RECORD_BYTES) // RECORD_BYTES
        if replayed.damaged:
            log.warning("manifest %s: %d damaged records skipped", self.path, replayed.damaged)
        if replayed.whole_bytes < len(raw):
            torn_bytes = len(raw) - replayed.whole_bytes
            log.warning("manifest %s: torn tail of %d bytes cut off", self.path, torn_bytes)
            os.truncate(self.path, replayed.whole_bytes)
        return found

    def put(self, entries: Sequence[SsdEntry]) -> None:
        """Add written blocks; make_room() must have cleared their slots. OSError: none is added."""
        with self._lock:
            taken = [entry for entry in entries if self.table.put(entry)]
            assert len(taken) == len(entries), "two blocks in one slot, or no make_room() before"
            try:
                self._append([pack_put(entry) for entry in entries])
            except OSError:
                for entry in entries:
                    self.table.drop(entry.slot, entry.generation)
                raise
            self._compact_if_dead()

    def make_room(self, slots: Iterable[tuple[int, int, int]]) -> list[bool]:
        """Drop the blocks that a write to these (slot, generation, bytes) will overwrite. False
        forbids the write, because the slot has a newer block or lies outside the file. OSError:
        all writes are forbidden."""
        with self._lock:
            answers, dead = [], {}
            for slot, generation, size_bytes in slots:
                others = self.table.overlapping(slot, size_bytes)
                fits = self.table.shape.holds(SsdEntry(b"", slot, generation, 0, size_bytes))
                answers.append(fits and all(other.generation < generation for other in others))
                if answers[-1]:
                    dead.update({other.slot: other.generation for other in others})
            self._drop(dead)
            return answers

    def drop(self, slot: int, generation: int) -> None:
        """Drop a corrupt block. OSError: the block is dropped from the table, not from the file."""
        with self._lock:
            self._drop({slot: generation})

    def _drop(self, dead: dict[int, int]) -> None:
        gone = [(slot, made) for slot, made in dead.items() if self.table.drop(slot, made)]
        if gone:
            self._append([pack_drop(slot, generation) for slot, generation in gone])

    def _append(self, records: Sequence[bytes]) -> None:
        left = b"".join(records)
        start_bytes = (1 + self._records) * RECORD_BYTES
        try:
            while left:  # A full disk accepts a part and reports the error on the next write.
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            # remove an incomplete record, because later records are appended after it
            os.ftruncate(self._descriptor, start_bytes)
            raise
        self._records += len(records)

    def _is_mostly_dead(self) -> bool:
        dead = self._records - len(self.table)
        return dead > max(DEAD_RECORDS_MIN, DEAD_FRACTION_MAX * self._records)

    def _compact_if_dead(self) -> None:
        if self._is_mostly_dead():
            try:
                descriptor = self._write_anew()
            except OSError as error:  # continue with the old file, which is complete
                log.warning("manifest %s cannot be compacted: %s", self.path, error)
                return
            os.close(self._descriptor)
            self._descriptor = descriptor

    def _write_anew(self) -> int:
        """Write header and table to a new file and rename it into place; returns its descriptor."""
        entries = self.table.entries()
        new = self.path + ".new"
        with open(new, "wb") as file:
            file.write(pack_header(self.table.shape))
            file.writelines(pack_put(entry) for entry in entries)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)
        self._records = len(entries)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def check(self) -> None:
        """Prove the invariants: file and table agree."""
        with self._lock:
            self.table.check()
            with open(self.path, "rb") as file:
                raw = file.read()
            assert unpack_header(raw) == self.table.shape
            again = EntryTable(self.table.shape)
            replayed = replay(raw)
            again.play(replayed.records)
            assert replayed.whole_bytes == len(raw) == (1 + self._records) * RECORD_BYTES
            assert sorted(again.entries()) == sorted(self.table.entries())

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
