"""Least recently used first: what the paper chose.

On its trace neither LFU nor a length-aware policy hits more at any size (Mooncake, arXiv version,
Table 1: .40 against .35 and .35 with 10,000 blocks). `density.py` does: bench/RESULTS.md.

A request uses a whole chain at once, so whoever touches a chain goes through it from its end to its
start, and the order is right by construction; no clock and no depth is stored here. A heap of
(used_s, -depth) would give the same order at several times the cost of a lookup. A leased block
counts as used until its last lease ends, so it comes back as the most recent one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

BATCH_MIN = 64
BATCH_SHIFT = 7  # a batch is this power of two smaller than the queue


class RecencyQueue:
    """key -> stamp, least recently appended first: what the policies are built of.

    A plain dict keeps insertion order and needs 34 to 67 bytes a key; collections.OrderedDict keeps
    it too, and needs 79 to 126 (both at 10 million, just grown and after much use). But
    `next(iter(dict))` walks over everything deleted in front of the first key, so draining a dict
    from its front is quadratic. So the coldest 1/128 of the keys lie in a small OrderedDict, which
    is filled from the dict a batch at a time: one walk over the deleted ones per batch. And when
    more keys have left by the front than are there, the dict is copied, which leaves the deleted
    ones behind. Stamps are the caller's; it shares one int object among many keys, so they cost no
    memory.
    """

    __slots__ = ("_coldest", "_left", "_rest")

    def __init__(self) -> None:
        self._coldest: OrderedDict[bytes, int] = OrderedDict()  # colder than all of _rest
        self._rest: dict[bytes, int] = {}
        self._left = 0  # keys that left _rest by its front since it was copied

    def __len__(self) -> int:
        return len(self._coldest) + len(self._rest)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rest or key in self._coldest

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._coldest, self._rest)

    def append(self, key: bytes, stamp: int) -> None:
        """The most recently used one; it must not be here."""
        self._rest[key] = stamp

    def pop(self, key: bytes) -> int | None:
        """Take a key out; its stamp, or None when it is not here."""
        stamp = self._rest.pop(key, None)
        return self._coldest.pop(key, None) if stamp is None else stamp

    def first(self) -> bytes | None:
        if not self._coldest:
            if not self._rest:
                return None
            self._fill_coldest()
        return next(iter(self._coldest))

    def head(self) -> tuple[bytes, int] | None:
        """The first key and its stamp."""
        if not self._coldest and self.first() is None:
            return None
        return next(iter(self._coldest.items()))

    def pop_head(self) -> bytes:
        """Take out the key that `head` has just named."""
        return self._coldest.popitem(last=False)[0]

    def stamp(self, key: bytes) -> int:
        stamp = self._rest.get(key)
        return self._coldest[key] if stamp is None else stamp

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
        """Prove the invariants."""
        assert not self._coldest.keys() & self._rest.keys(), "a key lies in both parts"
        assert len(set(self)) == len(self)
        assert self._left >= 0


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

    def add_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.add(key)

    def discard_many(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._queue.pop(key)

    def coldest(self) -> bytes | None:
        return self._queue.first()

    def take_coldest(self, count: int) -> list[bytes]:
        queue, taken = self._queue, list[bytes]()
        while len(taken) < count and queue.first() is not None:
            taken.append(queue.pop_head())
        return taken

    def coldest_keys(self, limit: int) -> list[bytes]:
        return list(islice(self._queue, limit))

    def keys(self) -> list[bytes]:
        return list(self._queue)

    def check(self) -> None:
        self._queue.check()
