"""What the headers of a segment say lies there, all of them at once.

A segment of a terabyte has millions of headers and most of them are empty, so numpy finds the ones
that begin like a header; only these are checked one by one.

Not here: the 64 bytes themselves (slot_header.py), which claims to believe (inventory.py).
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import xxhash

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.layout import HEADER_BYTES, Geometry
from mooncake_store.memory.segment import ByteArray
from mooncake_store.memory.slot_header import FIELDS, MAGIC

Block = tuple[bytes, int, int, int, int, int]  # key, slot, generation, checksum, bytes, state
KEY_AT = 16
_COLUMNS = np.dtype(
    [("magic", "<u4"), ("state", "<u4"), ("generation", "<u8"), ("key", "V16"),
     ("checksum", "<u8"), ("length_bytes", "<u8"), ("spare", "<u8"), ("own", "<u8")]
)  # fmt: skip
assert _COLUMNS.fields is not None and _COLUMNS.fields["key"][1] == KEY_AT
assert _COLUMNS.itemsize == HEADER_BYTES == FIELDS.size + _COLUMNS["own"].itemsize


def scan(view: ByteArray, shape: Geometry) -> list[Block]:
    """The whole headers of a segment, in order of their slots."""
    table = view[: shape.units * HEADER_BYTES].view(_COLUMNS)
    slots = np.flatnonzero(table["magic"] == int.from_bytes(MAGIC, "little"))
    rows = table[slots]  # a copy: writers go on meanwhile, a torn header fails its own checksum
    raw, digest = rows.tobytes(), xxhash.xxh3_64_intdigest
    starts = range(0, len(raw), HEADER_BYTES)
    found = [digest(raw[start : start + FIELDS.size]) for start in starts]
    is_whole = np.array(found, np.uint64) == rows["own"]
    keys = [raw[start + KEY_AT : start + KEY_AT + KEY_BYTES] for start in starts]
    rows, slots = rows[is_whole], slots[is_whole]
    columns = [rows[name].tolist() for name in ("generation", "checksum", "length_bytes", "state")]
    # Plain tuples: a million NamedTuples take a second more, most of it in the garbage collector.
    return list(zip(compress(keys, is_whole), slots.tolist(), *columns, strict=True))
