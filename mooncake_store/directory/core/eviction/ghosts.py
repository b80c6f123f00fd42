"""Names of blocks that were dropped for room: did this one come back?

A table of buckets with 64 places each: in every place 24 bits of a key's hash, and when it was
dropped, counted in drops. A full bucket loses its oldest name; buckets have half as many places
more than names on average, so that is rare. It must be: blocks of one chain are dropped and come
back together, and one that is taken for new among old ones leaves a hole in its chain later. A
wrong "yes" comes once in 260,000 questions. 7.5 bytes a name; a dict of the keys needs twenty times
that.

Not here: what follows from coming back (density.py).
"""

from __future__ import annotations

from array import array

HASH_PRIME = 2**61 - 1
PLACES = 64  # of a bucket
MARK_BYTES = 3
SPARE = 1.5  # places per name
STAMP_MASK = 2**16 - 1
STAMPS = 512  # the memory's length is so many stamps
NAMES_MIN = 8_192
NAMES_MAX = 2**23  # 60 MiB


class Ghosts:
    """The last `length` names that were dropped, nearly all of them."""

    __slots__ = ("_buckets", "_drops", "_length", "_marks", "_next", "_per_stamp", "_stamps")

    def __init__(self) -> None:
        self._length = 0
        self._drops = 0
        self._per_stamp = 1  # drops
        self._buckets = 0
        self._next = bytearray()  # of each bucket: the place written next, its oldest
        self._marks = bytearray()
        self._stamps = array("H")

    @property
    def table_bytes(self) -> int:
        return len(self._marks) + 2 * len(self._stamps) + len(self._next)

    def resize(self, length: int) -> None:
        """Remember so many names, within bounds. A table that grows starts empty; none shrinks."""
        length = min(max(length, NAMES_MIN), NAMES_MAX)
        if length <= self._length:
            return
        self._length = length
        self._per_stamp = -(-length // STAMPS)
        self._buckets = int(length * SPARE) // PLACES + 1
        self._next = bytearray(self._buckets)
        self._marks = bytearray(MARK_BYTES * PLACES * self._buckets)
        self._stamps = array("H", bytes(2 * PLACES * self._buckets))

    def remember(self, key: bytes) -> None:
        """It was dropped. Only after a first resize."""
        self._drops += 1
        bucket, mark = self._place(key)
        at = self._next[bucket]
        self._next[bucket] = (at + 1) % PLACES
        at += PLACES * bucket
        self._marks[MARK_BYTES * at : MARK_BYTES * (at + 1)] = mark
        self._stamps[at] = self._drops // self._per_stamp & STAMP_MASK

    def take(self, key: bytes) -> bool:
        """Was it dropped not long ago? Its name is forgotten: the block is back."""
        if not self._buckets:
            return False
        bucket, mark = self._place(key)
        start = MARK_BYTES * PLACES * bucket
        end = start + MARK_BYTES * PLACES
        found = self._marks.find(mark, start, end)
        while found >= 0 and found % MARK_BYTES:
            found = self._marks.find(mark, found + 1, end)
        if found < 0:
            return False
        self._marks[found : found + MARK_BYTES] = bytes(MARK_BYTES)
        stamps = self._drops // self._per_stamp - self._stamps[found // MARK_BYTES] & STAMP_MASK
        return stamps <= STAMPS

    def _place(self, key: bytes) -> tuple[int, bytes]:
        """Its bucket, and the mark of it, which is never 0."""
        rest, bucket = divmod(int.from_bytes(key, "little") % HASH_PRIME, self._buckets or 1)
        return bucket, (rest & 0xFFFFFF or 1).to_bytes(MARK_BYTES, "little")

    def check(self) -> None:
        """Prove the invariants."""
        places = PLACES * self._buckets
        assert len(self._marks) == MARK_BYTES * places and len(self._stamps) == places
        assert len(self._next) == self._buckets
        assert max(self._next, default=0) < PLACES
        assert self._drops // self._per_stamp <= self._drops
