"""Which idle copy of a storage node to drop when its segment is full.

Redis-style: this only *orders* candidates; it never frees anything. Freeing is the directory's. A
copy is a candidate only while nobody leases it: a leased block must survive even when it is the
coldest one, because NIXL reads it without asking anybody.

Order: least recently used first, and among blocks used at once the one deepest in its prefix
chain first, because dropping block 3 makes blocks 4, 5, ... unreachable while the reverse is not
true. LRU is what the paper chose; on its trace neither LFU nor a length-aware policy hits more at
any size (Mooncake, arXiv version, Table 1: .40 against .35 and .35 with 10,000 blocks).

How: a request uses a whole chain at once, so whoever touches a chain goes through it from its end
to its start, and the order is right by construction; no clock and no depth is stored here. A heap
of (used_s, -depth) would give the same order at several times the cost of a lookup. A leased block
counts as used until its last lease ends, so it comes back as the most recent one.

Not here: where a copy lives (holder.py), who leases it (leases.py), when memory is short
(directory.py).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice


class EvictionOrder:
    """The idle copies of one node, coldest first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self.touch = self._order.move_to_end  # bound once: this is the hottest call of a lookup

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def add(self, key: bytes) -> None:
        """A copy became idle: it is now the most recently used one."""
        assert key not in self._order, f"{key.hex()} is idle already"
        self._order[key] = None

    def discard(self, key: bytes) -> None:
        """A copy is leased or gone: no candidate any more, if it was one."""
        self._order.pop(key, None)

    def coldest(self) -> bytes | None:
        """The copy to drop first; None when every copy is in use."""
        return next(iter(self._order), None)

    def coldest_keys(self, limit: int) -> list[bytes]:
        """The first candidates, coldest first."""
        return list(islice(self._order, limit))

    def keys(self) -> list[bytes]:
        """All candidates, coldest first."""
        return list(self._order)

    def check(self) -> None:
        """Prove the invariants: there is one, and `touch` keeps it."""
        assert self.coldest() in self._order or not self._order
