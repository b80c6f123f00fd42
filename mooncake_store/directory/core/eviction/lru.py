"""Least recently used first: what the paper chose.

On its trace neither LFU nor a length-aware policy hits more at any size (Mooncake, arXiv version,
Table 1: .40 against .35 and .35 with 10,000 blocks). `density.py` does: docs/measurements.md.

A request uses a whole chain at once, so whoever touches a chain goes through it from its end to its
start, and the order is right by construction; no clock and no depth is stored here. A heap of
(used_s, -depth) would give the same order at several times the cost of a lookup. A leased block
counts as used until its last lease ends, so it comes back as the most recent one.
"""

from __future__ import annotations

from itertools import islice

from mooncake_store.directory.core.eviction.recency_queue import RecencyQueue


class Lru:
    """An EvictionOrder without any memory of what is gone."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue = RecencyQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def add(self, key: bytes) -> None:
        assert key not in self._queue, f"{key.hex()} is idle already"
        self._queue.append(key, 0)

    def touch(self, key: bytes) -> None:
        was_there = self._queue.pop(key) is not None
        assert was_there, f"{key.hex()} is touched and not idle"
        self._queue.append(key, 0)

    def discard(self, key: bytes) -> None:
        self._queue.pop(key)

    evicted = discard
    forget = discard

    def coldest(self) -> bytes | None:
        return self._queue.first()

    def coldest_keys(self, limit: int) -> list[bytes]:
        return list(islice(self._queue, limit))

    def keys(self) -> list[bytes]:
        return list(self._queue)

    def check(self) -> None:
        self._queue.check()
