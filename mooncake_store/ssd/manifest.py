"""The file that says what lies on the SSD, written as it happens, so that blocks survive a restart.

Records are only appended. They are handed to the kernel, not forced to the disk: they survive the
death of the process, kill -9 too. After a power cut some may be missing or ahead of their blocks;
then checksums of blocks decide (entries.py says why that is safe). When most of the file is dead it
is written anew beside itself and renamed over.

A manifest that cannot be read, or describes other units, is put aside (`.damaged`) and the tier
starts empty: that loses a cache, not data. One of another release stops the node instead, because
somebody may want to go back to it. Another capacity is no damage: what still fits is kept.

Not here: the bytes of records, and which blocks they leave (entries.py).
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
DEAD_RECORDS_MIN = 4096  # fewer are not worth writing the file again
DEAD_FRACTION_MAX = 0.75


class Manifest:
    """Open it, ask `table`, tell it what changes. Thread-safe; it owns the table."""

    def __init__(self, path: str, shape: SsdShape, must_reset: bool = False) -> None:
        """ManifestVersion when another release wrote it; OSError when the disk fails."""
        self.path = path
        self.table = EntryTable(shape)
        self._lock = threading.Lock()
        self._records = 0  # in the file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".new")  # a compaction that did not end
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
                "manifest %s is damaged: %s; moved to %s, the SSD tier starts empty",
                self.path,
                error,
                aside,
            )
            return self._write_anew()
        if found != shape or self._is_mostly_dead():
            return self._write_anew()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _load(self, shape: SsdShape) -> SsdShape:
        """Fill the table from the file; what its header says."""
        with open(self.path, "rb") as file:
            raw = file.read()
        found = unpack_header(raw)
        if found.unit_bytes != shape.unit_bytes:
            raise ManifestDamaged(
                f"it describes units of {found.unit_bytes} bytes, the node has --unit-bytes "
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
        """These blocks are on the disk, in slots that make_room() cleared. OSError: not noted."""
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
        """(slot, generation, bytes) will be written: what lies there is gone from now on.

        False: something newer lies there, hands off. OSError: nothing may be overwritten.
        """
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
        """That block proved bad. OSError when this could not be noted; it is forgotten anyway."""
        with self._lock:
            self._drop({slot: generation})

    def _drop(self, dead: dict[int, int]) -> None:
        gone = [(slot, made) for slot, made in dead.items() if self.table.drop(slot, made)]
        if gone:
            self._append([pack_drop(slot, generation) for slot, generation in gone])

    def _append(self, records: Sequence[bytes]) -> None:
        raw = b"".join(records)
        start_bytes = (1 + self._records) * RECORD_BYTES
        try:
            written = os.write(self._descriptor, raw)
            if written != len(raw):  # a full disk takes what still fits, and says so the next time
                os.write(self._descriptor, raw[written:])
        except OSError:
            os.ftruncate(self._descriptor, start_bytes)  # a torn record must not be built upon
            raise
        self._records += len(records)

    def _is_mostly_dead(self) -> bool:
        dead = self._records - len(self.table)
        return dead > max(DEAD_RECORDS_MIN, DEAD_FRACTION_MAX * self._records)

    def _compact_if_dead(self) -> None:
        if self._is_mostly_dead():
            try:
                descriptor = self._write_anew()
            except OSError as error:  # the old one is whole and goes on
                log.warning("manifest %s cannot be compacted: %s", self.path, error)
                return
            os.close(self._descriptor)
            self._descriptor = descriptor

    def _write_anew(self) -> int:
        """Write header and table to a new file and put it in place; its descriptor."""
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
        """Prove the invariants: the file says what the table says."""
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
        """Twice is harmless."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
