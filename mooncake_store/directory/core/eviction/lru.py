"""Least recently used (LRU) eviction, as in the Mooncake paper.

On the paper's trace, LFU and a length-aware policy have no higher hit rate than LRU at any cache
size. With 10,000 blocks, both have 0.35 and LRU has 0.40 (Mooncake, arXiv version, Table 1). At
most cache sizes, the policy of density.py has a higher hit rate than LRU (bench/RESULTS.md).

A block is useless without the blocks before it, so the end of a prompt must be evicted before its
start. The directory therefore adds the blocks of a prompt from the last to the first. Eviction in
insertion order then suffices, and neither a time nor a depth is stored. A heap of (used_s, -depth)
gives the same order at several times the cost. A leased block is not in the queue. When its last
lease ends, the block is appended as the most recently used one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

BATCH_MIN = 64  # least number of keys that RecencyQueue moves at once
BATCH_SHIFT = 7  # a batch has 1/128 of the keys of the dict if that is more than BATCH_MIN


class RecencyQueue:
    """Recency queue of key -> stamp, least recently appended first. Lru and density.py use it.

    The coldest keys, at most one batch, are in an OrderedDict. All others are in a plain dict. At
    10 million keys, the dict takes 34 to 67 bytes per key and the OrderedDict 79 to 126, depending
    on earlier use. But `next(iter(dict))` walks over all entries deleted before the first key, so
    draining a dict from its front is quadratic. Therefore the OrderedDict is filled from the dict
    in batches, with one walk per batch. When more keys have left the dict at its front than remain,
    the dict is copied, which drops the deleted entries.

    A stamp is any integer that the caller chooses. Keys that share one int object save memory.
    """

    __slots__ = ("_coldest", "_left", "_rest")

    def __init__(self) -> None:
        self._coldest: OrderedDict[bytes, int] = OrderedDict()  # colder than all of _rest
        self._rest: dict[bytes, int] = {}
        self._left = 0  # keys moved out of the front of _rest since its last copy

    def __len__(self) -> int:
        return len(self._coldest) + len(self._rest)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rest or key in self._coldest

    def items(self) -> Iterator[tuple[bytes, int]]:
        return chain(self._coldest.items(), self._rest.items())

    def append(self, key: bytes, stamp: int) -> None:
        """Append the key as the most recently used one. The key must not be in the queue."""
        self._rest[key] = stamp

    def pop(self, key: bytes) -> int | None:
        """Remove a key. Returns its stamp, or None when the key is not in the queue."""
        stamp = self._rest.pop(key, None)
        return self._coldest.pop(key, None) if stamp is None else stamp

    def head(self) -> tuple[bytes, int] | None:
        """The first key and its stamp; None for an empty queue."""
        if not self._coldest:
            if not self._rest:
                return None
            self._fill_coldest()
        return next(iter(self._coldest.items()))

    def pop_head(self) -> bytes:
        """Remove and return the first key. Call `head` directly before it."""
        return self._coldest.popitem(last=False)[0]

    def _fill_coldest(self) -> None:
        rest, coldest = self._rest, self._coldest
        batch = list(islice(rest, max(BATCH_MIN, len(rest) >> BATCH_SHIFT)))
        for key in batch:
            coldest[key] = rest.pop(key)
        self._left += len(batch)
        if self._left > len(rest):
            self._rest = dict(rest.items())
            self._left = 0

    def check(self) -> None:
        assert not self._coldest.keys() & self._rest.keys(), "a key is in both parts"
        assert self._left >= 0


class Lru:
    """An EvictionOrder without ghost entries."""

    def __init__(self) -> None:
        self._queue = RecencyQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def add(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert key not in self._queue, f"{key.hex()} is in the eviction queue already"
            self._queue.append(key, 0)

    def touch(self, key: bytes) -> None:
        was_there = self._queue.pop(key) is not None
        assert was_there, f"{key.hex()} is not in the eviction queue"
        self._queue.append(key, 0)

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._queue.pop(key)

    def forget(self, key: bytes) -> None:
        self._queue.pop(key)

    evicted = forget

    def take_coldest(self, count: int) -> list[bytes]:
        queue, taken = self._queue, list[bytes]()
        while len(taken) < count and queue.head() is not None:
            taken.append(queue.pop_head())
        return taken

    def keys(self, limit: int | None = None) -> list[bytes]:
        return [key for key, _ in islice(self._queue.items(), limit)]

    def check(self) -> None:
        self._queue.check()
