"""The records of an SSD manifest, and the table of blocks that they describe.

A manifest has a header and then records of 64 bytes. PUT: a block is in a slot. DROP: the block is
no longer in the slot. Each record ends with a CRC of its fields. All records have one size, so
reading continues after a damaged record. Damaged bytes at the end come from an interrupted write.

Any record may be lost. Without its PUT, a block is a miss. Without its DROP, the table lists a
block whose bytes may have been replaced. Such bytes are never used: either the new block has a PUT
with a higher generation, which replaces the old entry, or the old block's checksum fails.

Blocks in the table never overlap. A byte string with one byte per unit shows where blocks start. A
backward search finds the last block before a slot. No other earlier block can reach into the slot.

Not here: the file (manifest.py), the blocks (block_file.py), the choice of blocks (the directory).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from mooncake_store.errors import ManifestDamaged, ManifestVersion
from mooncake_store.records.blocks import GENERATION_MAX

MANIFEST_VERSION = 2
PUT, DROP = 1, 2
RECORD_BYTES = 64
_MAGIC = b"MKSM"
_START = b"\x01"  # value of a unit in which a block starts
_HEADER = struct.Struct("<4sIQQ36s")  # magic, version, unit_bytes, capacity_bytes, spare
# kind, block key, slot, generation, checksum, size, layers, spare
_RECORD = struct.Struct("<B3x16sQQQQI4x")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == _RECORD.size + _CRC.size == RECORD_BYTES


class SsdEntry(NamedTuple):
    """A block on the SSD."""

    key: bytes  # block key, 16 bytes
    slot: int  # number of the first unit in the block file
    generation: int  # number of this use of the slot; larger for later uses
    checksum: int  # of the block (digests.py)
    size_bytes: int
    layers: int = 0  # number of layers whose digests the checksum covers; 0: it covers the bytes


class SsdShape(NamedTuple):
    """The division of the block file."""

    unit_bytes: int  # size of a unit
    capacity_bytes: int  # size of the file

    def units_of(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes)

    def holds(self, entry: SsdEntry) -> bool:
        """True if the entry is valid and fits. An entry with an impossibly high generation is
        invalid, because no later entry could replace it."""
        end_bytes = (entry.slot + self.units_of(entry.size_bytes)) * self.unit_bytes
        is_possible = entry.size_bytes > 0 and entry.generation < GENERATION_MAX
        return is_possible and end_bytes <= self.capacity_bytes


def _sealed(fields: bytes) -> bytes:
    return fields + _CRC.pack(zlib.crc32(fields))


def _is_sealed(raw: bytes) -> bool:
    (promised,) = _CRC.unpack_from(raw, RECORD_BYTES - _CRC.size)
    return bool(promised == zlib.crc32(raw[: -_CRC.size]))


def pack_header(shape: SsdShape, version: int = MANIFEST_VERSION) -> bytes:
    return _sealed(_HEADER.pack(_MAGIC, version, *shape, b""))


def unpack_header(raw: bytes) -> SsdShape:
    """The shape in a header. ManifestDamaged: not a valid header. ManifestVersion: another release
    wrote the header, which has the same layout in all versions."""
    if len(raw) < RECORD_BYTES:
        raise ManifestDamaged(f"it has {len(raw)} bytes, fewer than a header ({RECORD_BYTES})")
    raw = raw[:RECORD_BYTES]
    magic, version, unit_bytes, capacity_bytes, _ = _HEADER.unpack_from(raw)
    if magic != _MAGIC or not _is_sealed(raw):
        raise ManifestDamaged(f"its header is invalid and begins with {raw[:16].hex()}")
    if version != MANIFEST_VERSION:
        raise ManifestVersion(
            f"the SSD manifest has version {version}, this release writes {MANIFEST_VERSION}: run "
            "the release that wrote it, or start with --ssd-reset, which discards the blocks"
        )
    return SsdShape(unit_bytes, capacity_bytes)


def pack_put(entry: SsdEntry) -> bytes:
    return _sealed(_RECORD.pack(PUT, *entry))


def pack_drop(slot: int, generation: int) -> bytes:
    return _sealed(_RECORD.pack(DROP, b"", slot, generation, 0, 0, 0))


class ManifestReplay(NamedTuple):
    """The records of a manifest, in the order in which they were written."""

    records: list[tuple[int, SsdEntry]]  # (PUT, entry), or (DROP, slot and generation as an entry)
    damaged: int  # number of damaged records before the last readable one
    whole_bytes: int  # length of the file up to the end of the last readable record


def replay(raw: bytes) -> ManifestReplay:
    """All readable records after the header."""
    records: list[tuple[int, SsdEntry]] = []
    damaged = skipped = 0  # skipped: damaged records since the last readable one
    whole_bytes = min(len(raw), RECORD_BYTES)
    for start in range(RECORD_BYTES, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        one = raw[start : start + RECORD_BYTES]
        kind = one[0]
        if kind not in (PUT, DROP) or not _is_sealed(one):
            skipped += 1
            continue
        records.append((kind, SsdEntry._make(_RECORD.unpack_from(one)[1:])))
        whole_bytes = start + RECORD_BYTES
        damaged, skipped = damaged + skipped, 0
    return ManifestReplay(records, damaged, whole_bytes)


class EntryTable:
    """The blocks of one SSD file, by slot."""

    def __init__(self, shape: SsdShape) -> None:
        self.shape = shape
        self._entries: dict[int, SsdEntry] = {}
        self._starts = bytearray(shape.capacity_bytes // shape.unit_bytes)  # by unit; see _START
        self._units_max = 1  # units of the largest block so far; bounds the backward search

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, slot: int) -> SsdEntry | None:
        """The block that starts in this slot, or None."""
        return self._entries.get(slot)

    def entries(self) -> list[SsdEntry]:
        return list(self._entries.values())

    def overlapping(self, slot: int, size_bytes: int) -> list[SsdEntry]:
        """The blocks that a block of this size in this slot would overwrite."""
        end = min(slot + self.shape.units_of(size_bytes), len(self._starts))
        found: list[SsdEntry] = []
        below = self._starts.rfind(_START, max(0, slot - self._units_max), slot)
        if below >= 0:
            neighbour = self._entries[below]
            if below + self.shape.units_of(neighbour.size_bytes) > slot:
                found.append(neighbour)
        start = self._starts.find(_START, slot, end)
        while start >= 0:
            found.append(self._entries[start])
            start = self._starts.find(_START, start + 1, end)
        return found

    def put(self, entry: SsdEntry) -> bool:
        """Add an entry and remove the entries that it overlaps. False: the table is unchanged,
        because the entry is invalid or overlaps an entry of a higher generation."""
        if not self.shape.holds(entry):
            return False
        others = self.overlapping(entry.slot, entry.size_bytes)
        if any(other.generation > entry.generation for other in others):
            return False
        for other in others:
            self._remove(other.slot)
        self._entries[entry.slot] = entry
        self._starts[entry.slot] = 1
        self._units_max = max(self._units_max, self.shape.units_of(entry.size_bytes))
        return True

    def drop(self, slot: int, generation: int) -> bool:
        """Remove the block of this generation. False: the slot has no block, or another one."""
        entry = self._entries.get(slot)
        if entry is None or entry.generation != generation:
            return False
        self._remove(slot)
        return True

    def play(self, records: Iterable[tuple[int, SsdEntry]]) -> None:
        """Apply the records of a manifest in their order."""
        for kind, entry in records:
            if kind == DROP:
                self.drop(entry.slot, entry.generation)
            else:
                self.put(entry)

    def _remove(self, slot: int) -> None:
        del self._entries[slot]
        self._starts[slot] = 0

    def check(self) -> None:
        """Prove the invariants."""
        end = 0
        for slot, entry in sorted(self._entries.items()):
            units = self.shape.units_of(entry.size_bytes)
            assert slot == entry.slot >= end and self._starts[slot], (entry, end)
            assert self.shape.holds(entry) and units <= self._units_max, entry
            end = slot + units
        assert sum(self._starts) == len(self._entries)
