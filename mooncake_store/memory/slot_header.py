"""The 64 bytes in front of a slot's life: whose block lies there, and is it whole.

Written by the worker that fills a slot, read by whoever rebuilds a directory from segments. The
header ends with a checksum of itself, so a torn or foreign header reads as "nothing here".

Each unit has a header; a block's is that of its first one. Whoever begins to fill a slot empties
those of the other units. So a header inside a block says that something else was written there
since, even if the block's own header is untouched: blocks of several sizes share a memory.

Not here: where headers lie (the directory's Geometry), what a block's checksum covers (store.py).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING

__all__ = ["STATE_READY", "STATE_WRITING", "SlotHeader"]

MAGIC = b"MKVB"
FIELDS = struct.Struct("<4sIQ16sQQ8x")  # magic, state, generation, key, checksum, length, spare
_PREFIX = struct.Struct("<4sIQ16s")
_SELF = struct.Struct("<Q")
assert FIELDS.size + _SELF.size == HEADER_BYTES, FIELDS.size


class SlotHeader(NamedTuple):
    """What a slot says about its payload."""

    state: int  # STATE_WRITING: do not trust the payload; STATE_READY: complete
    generation: int
    key: bytes  # 16 bytes
    checksum: int  # xxh3_64 of the payload
    length_bytes: int

    def pack(self) -> bytes:
        assert len(self.key) == 16, f"a key has 16 bytes, this one {len(self.key)}"
        fields = FIELDS.pack(
            MAGIC, self.state, self.generation, self.key, self.checksum, self.length_bytes
        )
        return fields + _SELF.pack(xxhash.xxh3_64_intdigest(fields))

    @staticmethod
    def unpack(raw: bytes | memoryview) -> SlotHeader | None:
        """The header in these 64 bytes, or None when no whole header lies there."""
        assert len(raw) == HEADER_BYTES, f"a header has {HEADER_BYTES} bytes, got {len(raw)}"
        magic, state, generation, key, checksum, length_bytes = FIELDS.unpack_from(raw)
        (own,) = _SELF.unpack_from(raw, FIELDS.size)
        if magic != MAGIC or own != xxhash.xxh3_64_intdigest(bytes(raw[: FIELDS.size])):
            return None
        return SlotHeader(state, generation, key, checksum, length_bytes)


def ready_prefix(generation: int, key: bytes) -> bytes:
    """How the header of this use of a slot begins once it is complete: enough to recognise it."""
    return _PREFIX.pack(MAGIC, STATE_READY, generation, key)
