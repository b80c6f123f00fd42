"""What each key's block must be: any process can tell right bytes from wrong ones.

Not here: who stores them (client.py).
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

SIZES = (4_096, 60_000, 65_536, 200_000)  # several slots of 4 KiB units, some not whole ones
ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]


def key_of(kind: str, number: int) -> bytes:
    return hashlib.blake2b(f"{kind}/{number}".encode(), digest_size=16).digest()


def size_of(key: bytes) -> int:
    return SIZES[key[0] % len(SIZES)]


@functools.lru_cache(maxsize=512)
def block_of(key: bytes) -> ByteArray:
    """Random bytes that depend on the key alone."""
    chance = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
    block = chance.integers(0, 256, size_of(key), dtype=np.uint8)
    block.flags.writeable = False
    return block


def is_block_of(key: bytes, found: ByteArray, offset_bytes: int = 0) -> bool:
    expected = block_of(key)[offset_bytes : offset_bytes + found.size]
    return found.size > 0 and np.array_equal(found, expected)
