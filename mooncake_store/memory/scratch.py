"""Small registered buffers for headers and the like, used again and again.

Registering memory with RDMA pins it, which costs more than moving a header. A buffer that a timed
out transfer may still touch is never used again: NIXL reads (or writes) it later, and somebody
else's headers would lie there.

Not here: the caller's own memory (registrations.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

from mooncake_store.errors import TransferTimeout
from mooncake_store.memory.checksum import ByteArray
from mooncake_store.transports.known_nodes import KnownNodes

SIZE_BYTES = 128 * 1024  # 2,048 headers
KEPT_MAX = 8


class Scratch:
    """Thread-safe."""

    def __init__(self, nodes: KnownNodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._free: list[ByteArray] = []

    @contextlib.contextmanager
    def take(self, size_bytes: int) -> Iterator[ByteArray]:
        """At least that many bytes, until the block ends; their content is left over."""
        buffer = None
        with self._lock:
            if self._free and size_bytes <= SIZE_BYTES:
                buffer = self._free.pop()
        if buffer is None:
            buffer = np.zeros(max(size_bytes, SIZE_BYTES), np.uint8)
            self._nodes.register(buffer)
        is_safe = True
        try:
            yield buffer
        except TransferTimeout:
            is_safe = False
            raise
        finally:
            with self._lock:
                is_kept = is_safe and len(self._free) < KEPT_MAX and buffer.nbytes == SIZE_BYTES
                if is_kept:
                    self._free.append(buffer)
            if is_safe and not is_kept:
                self._nodes.unregister(buffer)
