"""Memory that begins at a page, as segments do."""

from __future__ import annotations

import mmap

import numpy as np

from mooncake_store.memory.buffers import ByteArray


def pages(size_bytes: int) -> ByteArray:
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
