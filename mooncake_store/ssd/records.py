"""What is written in a manifest: a header, then records of 64 bytes. Bytes in, facts out.

A record says that a block lies in a slot (PUT) or that whatever starts in a slot does not lie there
any more (DROP). Each carries a CRC of itself. Records have one size, so a damaged one hides nothing
but itself: reading goes on with the next. Damaged bytes at the end are a write that was cut off.

Losing any record is safe. A lost PUT is a miss. After a lost DROP a block seems to lie where other
bytes do: the overlapping PUT has a higher generation and wins, or the checksum of the block fails
when it is loaded.

Not here: the file (manifest.py), the blocks (block_file.py).
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from mooncake_store.errors import ManifestDamaged, ManifestVersion
from mooncake_store.records.blocks import GENERATION_MAX

MANIFEST_VERSION = 1
PUT, DROP = 1, 2
RECORD_BYTES = 64
_MAGIC = b"MKSM"
_HEADER = struct.Struct("<4sIQQ36s")  # magic, version, unit_bytes, capacity_bytes, spare
_RECORD = struct.Struct("<B3x16sQQQQ8x")  # kind, key, slot, generation, checksum, size, spare
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == _RECORD.size + _CRC.size == RECORD_BYTES


class Entry(NamedTuple):
    """A block on the SSD. `slot` is the number of its first unit."""

    key: bytes
    slot: int
    generation: int
    checksum: int
    size_bytes: int


class Shape(NamedTuple):
    """How the block file is cut."""

    unit_bytes: int
    capacity_bytes: int

    def units_of(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes)

    def holds(self, entry: Entry) -> bool:
        """Can it be? One of an absurd generation would keep its place against all that come."""
        end_bytes = (entry.slot + self.units_of(entry.size_bytes)) * self.unit_bytes
        is_possible = entry.size_bytes > 0 and entry.generation < GENERATION_MAX
        return is_possible and end_bytes <= self.capacity_bytes


def _sealed(fields: bytes) -> bytes:
    return fields + _CRC.pack(zlib.crc32(fields))


def _is_sealed(raw: bytes) -> bool:
    (promised,) = _CRC.unpack_from(raw, RECORD_BYTES - _CRC.size)
    return bool(promised == zlib.crc32(raw[: -_CRC.size]))


def pack_header(shape: Shape, version: int = MANIFEST_VERSION) -> bytes:
    return _sealed(_HEADER.pack(_MAGIC, version, *shape, b""))


def unpack_header(raw: bytes) -> Shape:
    """ManifestDamaged when this is none, ManifestVersion when another release wrote it.

    Its 64 bytes are laid out alike in all versions, so that one can tell the two apart.
    """
    if len(raw) < RECORD_BYTES:
        raise ManifestDamaged(f"it has {len(raw)} bytes, its header alone has {RECORD_BYTES}")
    raw = raw[:RECORD_BYTES]
    magic, version, unit_bytes, capacity_bytes, _ = _HEADER.unpack_from(raw)
    if magic != _MAGIC or not _is_sealed(raw):
        raise ManifestDamaged(f"it does not begin with a whole header: {raw[:16].hex()}")
    if version != MANIFEST_VERSION:
        raise ManifestVersion(
            f"it has version {version}, this release writes {MANIFEST_VERSION}: run the release "
            "that wrote it, or start with --ssd-reset, which forgets the blocks"
        )
    return Shape(unit_bytes, capacity_bytes)


def pack_put(entry: Entry) -> bytes:
    return _sealed(_RECORD.pack(PUT, *entry))


def pack_drop(slot: int, generation: int) -> bytes:
    return _sealed(_RECORD.pack(DROP, b"", slot, generation, 0, 0))


class Replay(NamedTuple):
    """What the records of a manifest say, in the order they were written."""

    records: list[tuple[int, Entry]]  # (PUT or DROP, ...); a DROP has only slot and generation
    damaged: int  # records that were skipped
    whole_bytes: int  # behind them nothing readable follows


def replay(raw: bytes) -> Replay:
    """All readable records behind the header."""
    records: list[tuple[int, Entry]] = []
    damaged = skipped = 0  # skipped: since the last readable one
    whole_bytes = min(len(raw), RECORD_BYTES)
    for start in range(RECORD_BYTES, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        one = raw[start : start + RECORD_BYTES]
        kind = one[0]
        if kind not in (PUT, DROP) or not _is_sealed(one):
            skipped += 1
            continue
        records.append((kind, Entry._make(_RECORD.unpack_from(one)[1:])))
        whole_bytes = start + RECORD_BYTES
        damaged, skipped = damaged + skipped, 0
    return Replay(records, damaged, whole_bytes)
