"""Threads that move the parts of one batch in parallel.

Over CMA (the kernel's copy between processes of a host) the calling thread copies, so one thread
moves what one core can copy. Two threads that read half a batch each, with a NIXL agent each, are
1.6 times as fast on two cores. Copies into and out of mapped segments use threads of native.c
instead, which need no GIL.

Not here: the parts (block_reader.py, putter.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

COPIED_BYTES = 16 * 1024**2  # bytes copied in mapped segments between two checks of the deadline
T = TypeVar("T")
R = TypeVar("R")


class Movers:
    """`threads` >= 1 includes the caller's thread; 1: everything runs in the caller's thread."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1
        self.threads = threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def each(self, task: Callable[[T], R], parts: Sequence[T]) -> list[R]:
        """Run task(part) for every part. Returns the results in order, or raises the first error.
        All tasks have ended by then."""
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
        except Exception as failed:  # the other threads must end before the memory may be reused
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
    """Blocks of one size in runs of about COPIED_BYTES, but with at least one block per thread. The
    caller checks its deadline after each run."""
    count = max(COPIED_BYTES // max(1, block_bytes), threads)
    return [list(items[at : at + count]) for at in range(0, len(items), count)]


def parts_of(items: Sequence[T], size_bytes: Callable[[T], int], part_bytes: int) -> list[list[T]]:
    """Runs of consecutive items with at most `part_bytes`; a larger item is a run of its own."""
    parts: list[list[T]] = []
    filled_bytes = 0
    for item in items:
        if not parts or filled_bytes + size_bytes(item) > part_bytes:
            parts.append([])
            filled_bytes = 0
        parts[-1].append(item)
        filled_bytes += size_bytes(item)
    return parts
