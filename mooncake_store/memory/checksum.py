"""The checksum of a block, and copying a block while it is computed.

xxh3-64 does some 45 GB/s on bytes that lie in the CPU's cache and a third of that on others, so it
is nearly free right after a copy of a piece that fits there, and costs half a copy later.

Not here: what is compared with what (block_reader.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

ByteArray = npt.NDArray[np.uint8]
PIECE_BYTES = 256 * 1024  # 128 and 512 KiB were no better (docs/measurements.md)


def checksum(view: ByteArray) -> int:
    """xxh3_64 of a C-contiguous uint8 array."""
    return xxhash.xxh3_64_intdigest(view.data)


def copy_and_sum(target: ByteArray, source: ByteArray) -> int:
    """Copy `source` to `target` (1-D uint8 of equal length); the checksum of what arrived."""
    length_bytes = source.nbytes
    if length_bytes <= PIECE_BYTES:
        target[:] = source
        return xxhash.xxh3_64_intdigest(target.data)
    running = xxhash.xxh3_64()
    for start in range(0, length_bytes, PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        running.update(piece.data)
    return running.intdigest()
