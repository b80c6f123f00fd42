"""A few threads that move the parts of one batch side by side.

Over CMA a transfer is a copy by the calling thread: one thread moves what one core can. Reading a
batch in two halves by two threads (each on a NIXL lane of its own) is 1.6 times as fast on two
cores. Copies into and out of the own node's mapped segment are shared by helpers in native.c, as
many in all, which need no lock of Python's.

Not here: which parts (block_reader.py, putter.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

COPIED_BYTES = 16 * 1024**2  # through a mapped segment between two looks at the clock
T = TypeVar("T")
R = TypeVar("R")


class Movers:
    """`threads` of them, the caller's included; 1: everything in the caller's thread."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1
        self.threads = threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def each(self, task: Callable[[T], R], parts: Sequence[T]) -> list[R]:
        """task(part) of every part. All have ended when this returns, or raises the first error."""
        if self.threads == 1 or len(parts) < 2:
            return _all(task, parts)
        shares = [parts[number :: self.threads] for number in range(self.threads)]
        shares = [share for share in shares if share]
        pool = self._ready()
        others = [pool.submit(_all, task, share) for share in shares[1:]]
        error: Exception | None = None
        results: list[list[R]] = []
        try:
            results.append(_all(task, shares[0]))
        except Exception as failed:  # the others must end before anybody may use the memory
            error = failed
        for other in others:
            try:
                results.append(other.result())
            except Exception as failed:
                error = error or failed
        if error is not None:
            raise error
        return [results[i % len(shares)][i // len(shares)] for i in range(len(parts))]

    def _ready(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, "store-mover")
            return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


def _all(task: Callable[[T], R], parts: Sequence[T]) -> list[R]:
    return [task(part) for part in parts]


def copied_parts(items: Sequence[T], block_bytes: int, threads: int) -> list[list[T]]:
    """Blocks of one size that are copied between two looks at the clock: no fewer than threads."""
    count = max(COPIED_BYTES // max(1, block_bytes), threads)
    return [list(items[at : at + count]) for at in range(0, len(items), count)]


def parts_of(items: Sequence[T], size_bytes: Callable[[T], int], part_bytes: int) -> list[list[T]]:
    """Consecutive items in runs of at most `part_bytes`; one that is larger is a run of its own."""
    parts: list[list[T]] = []
    filled_bytes = 0
    for item in items:
        if not parts or filled_bytes + size_bytes(item) > part_bytes:
            parts.append([])
            filled_bytes = 0
        parts[-1].append(item)
        filled_bytes += size_bytes(item)
    return parts
