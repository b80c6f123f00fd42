"""Keys in the order of their last use, with a stamp each: what the policies are built of.

A plain dict keeps insertion order and needs 34 to 67 bytes a key; collections.OrderedDict keeps it
too, and needs 79 to 126 (both at 10 million, just grown and after much use). But `next(iter(dict))`
walks over everything deleted in front of the first key, so draining a dict from its front is
quadratic. So the coldest 1/128 of the keys lie in a small OrderedDict, which is filled from the
dict a batch at a time: one walk over the deleted ones per batch. And when more keys have left by
the front than are there, the dict is copied, which leaves the deleted ones behind.

Stamps are the caller's; it shares one int object among many keys, so they cost no memory.

Not here: what a stamp means, which queue a key belongs to (lru.py, density.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

BATCH_MIN = 64
BATCH_SHIFT = 7  # a batch is this power of two smaller than the queue


class RecencyQueue:
    """key -> stamp, least recently appended first."""

    __slots__ = ("_front", "_left", "_rest")

    def __init__(self) -> None:
        self._front: OrderedDict[bytes, int] = OrderedDict()  # colder than all of _rest
        self._rest: dict[bytes, int] = {}
        self._left = 0  # keys that left _rest by its front since it was copied

    def __len__(self) -> int:
        return len(self._front) + len(self._rest)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rest or key in self._front

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._front, self._rest)

    def append(self, key: bytes, stamp: int) -> None:
        """The most recently used one; it must not be here."""
        self._rest[key] = stamp

    def pop(self, key: bytes) -> int | None:
        """Take a key out; its stamp, or None when it is not here."""
        stamp = self._rest.pop(key, None)
        return self._front.pop(key, None) if stamp is None else stamp

    def first(self) -> bytes | None:
        if not self._front:
            if not self._rest:
                return None
            self._fill_front()
        return next(iter(self._front))

    def stamp(self, key: bytes) -> int:
        stamp = self._rest.get(key)
        return self._front[key] if stamp is None else stamp

    def _fill_front(self) -> None:
        rest, front = self._rest, self._front
        batch = list(islice(rest, max(BATCH_MIN, len(rest) >> BATCH_SHIFT)))
        for key in batch:
            front[key] = rest.pop(key)
        self._left += len(batch)
        if self._left > len(rest):
            self._rest = dict(rest.items())
            self._left = 0

    def check(self) -> None:
        """Prove the invariants."""
        assert not self._front.keys() & self._rest.keys(), "a key lies in both parts"
        assert len(set(self)) == len(self)
        assert self._left >= 0
