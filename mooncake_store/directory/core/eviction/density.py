"""Drops the block that can bring the fewest hits for the time and memory that keeping it takes.

Least recently used keeps what came last. Of what comes to a KVCache most is never asked for again,
and the next turn of a conversation comes long after many new ones: a cache that is small against
that is swept clean between two turns of every conversation. A block that has come back once comes
back again far more often (docs/decisions/0012 has the numbers), and how old it may be before it is
not worth its place can be measured while serving. So there are two queues, each by recency: *once*
and *again*. The block to drop is the coldest of one of them: the one of less value at its age
(reuse_times.py). A block that was dropped and comes back soon enough (ghosts.py) joins `again`.

- A use counts when it ends (add after discard) or happens (touch). Uses that follow each other
  within 1/64 of the cache are one: prefill writes a block and decode reads it for the same request.
- Among blocks used at once, the start of a chain is used by more requests than its end, and both
  queues keep the order in which they were added: the deepest goes first, as with LRU. But a chain
  may lie half in one queue, half in the other; its start is then in `again`, which is kept longer.
- Nothing is per block but its entry in a queue; ages are stamps that many blocks share.

Not here: when room is needed, who is leased.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from mooncake_store.directory.core.eviction.ghosts import Ghosts
from mooncake_store.directory.core.eviction.recency_queue import RecencyQueue
from mooncake_store.directory.core.eviction.reuse_times import AGAIN, ONCE, ReuseTimes, bucket_of

GHOSTS_PER_BLOCK = 4
SAME_USE_SHIFT = 6  # uses closer than blocks / 2**this count once
STAMP_SHIFT = 8  # a stamp is shared by blocks / 2**this uses
STAMP_USES_MIN = 8  # ... and by no fewer: a new one for each use would cost more than the use


class Density:
    """An EvictionOrder of two queues and what was learned of both."""

    __slots__ = (
        "_again", "_away", "_clock", "_ghosts", "_once", "_renew_at", "_reuse", "_same_use",
        "_stamp",
    )  # fmt: skip

    def __init__(self) -> None:
        self._once = RecencyQueue()
        self._again = RecencyQueue()
        self._away: dict[bytes, RecencyQueue] = {}  # leased: where the next use puts it
        self._ghosts = Ghosts()
        self._reuse = ReuseTimes()
        self._clock = 0  # uses so far
        self._stamp = 0  # the clock, but one object for many blocks
        self._renew_at = 0
        self._same_use = 1

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: bytes) -> bool:
        return key in self._once or key in self._again

    def add(self, key: bytes) -> None:
        queue = self._away.pop(key, None)
        if queue is None:
            assert key not in self, f"{key.hex()} is idle already"
            queue = self._again if self._ghosts.take(key) else self._once
        self._use(key, queue)

    def touch(self, key: bytes) -> None:
        queue = self._next_queue(key)
        assert queue is not None, f"{key.hex()} is touched and not idle"
        self._use(key, queue)

    def discard(self, key: bytes) -> None:
        queue = self._next_queue(key)
        if queue is not None:
            self._away[key] = queue

    def _use(self, key: bytes, queue: RecencyQueue) -> None:
        self._clock = clock = self._clock + 1
        if clock >= self._renew_at:
            self._renew()
        if key[-1] < self._reuse.sampled:
            self._reuse.used(key, clock, self._same_use)
        queue.append(key, self._stamp)

    def _next_queue(self, key: bytes) -> RecencyQueue | None:
        """Take it out; where its next use puts it."""
        stamp = self._once.pop(key)
        if stamp is not None:
            return self._once if self._clock - stamp < self._same_use else self._again
        return self._again if self._again.pop(key) is not None else None

    def evicted(self, key: bytes) -> None:
        self.forget(key)
        if not self._ghosts.table_bytes:
            self._ghosts.resize(GHOSTS_PER_BLOCK * self._blocks)
        self._ghosts.remember(key)

    def forget(self, key: bytes) -> None:
        if self._once.pop(key) is None and self._again.pop(key) is None:
            self._away.pop(key, None)

    def coldest(self) -> bytes | None:
        once, again = self._once.first(), self._again.first()
        if once is None or again is None:
            return again if once is None else once
        return once if self._is_worth_less(once, again) else again

    def coldest_keys(self, limit: int) -> list[bytes]:
        return list(islice(self._in_order(), limit))

    def keys(self) -> list[bytes]:
        return list(self._in_order())

    def _in_order(self) -> Iterator[bytes]:
        """As they would go if nothing were used meanwhile."""
        queues = iter(self._once), iter(self._again)
        once, again = next(queues[ONCE], None), next(queues[AGAIN], None)
        while once is not None or again is not None:
            if again is None or (once is not None and self._is_worth_less(once, again)):
                assert once is not None
                yield once
                once = next(queues[ONCE], None)
            else:
                yield again
                again = next(queues[AGAIN], None)

    def _is_worth_less(self, once: bytes, again: bytes) -> bool:
        value, clock = self._reuse.value, self._clock
        stamp_of_once, stamp_of_again = self._once.stamp(once), self._again.stamp(again)
        of_once = value[ONCE][bucket_of(clock - stamp_of_once)]
        of_again = value[AGAIN][bucket_of(clock - stamp_of_again)]
        if of_once == of_again:
            return stamp_of_once <= stamp_of_again
        return of_once < of_again

    @property
    def _blocks(self) -> int:
        return len(self) + len(self._away)

    def _renew(self) -> None:
        """Now and then: a new stamp, and what follows from how many blocks there are."""
        blocks = self._blocks
        self._stamp = self._clock
        self._renew_at = self._clock + max(STAMP_USES_MIN, blocks >> STAMP_SHIFT)
        self._same_use = max(1, blocks >> SAME_USE_SHIFT)
        if self._clock >= self._reuse.next_lesson:
            self._reuse.learn(self._clock, blocks)
            if self._ghosts.table_bytes:
                self._ghosts.resize(GHOSTS_PER_BLOCK * blocks)

    def check(self) -> None:
        for part in (self._once, self._again, self._ghosts, self._reuse):
            part.check()
        assert len(set(self._once) | set(self._again) | self._away.keys()) == self._blocks
