"""The most hits that any policy could have, knowing the future.

Belady's MIN with a choice not to keep a block at all: when there is no room, the block whose next
use is farthest goes, be it the one just used. For blocks of one size and one cost no policy has
more hits (Belady 1966; Mattson 1970), and what a directory must do besides (room for a whole
request at once) can only cost hits. A chain is used from its start, so no start is used later than
its end: there are no holes.

Not here: what a policy that does not know the future reaches (block_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from loadtest.simulator.block_cache import Hits

NEVER = 2**62


def best_hits(requests: Sequence[Sequence[bytes]], blocks: int) -> Hits:
    """With room for `blocks`."""
    used = [key for keys in requests for key in keys]
    next_use, following = [NEVER] * len(used), {}
    for at in reversed(range(len(used))):
        next_use[at] = following.get(used[at], NEVER)
        following[used[at]] = at
    kept: dict[bytes, int] = {}  # key -> its next use
    farthest: list[tuple[int, bytes]] = []  # (-next use, key), also of blocks used since or gone
    hits = 0
    for key, later in zip(used, next_use, strict=True):
        hits += key in kept
        kept[key] = later
        heappush(farthest, (-later, key))
        while len(kept) > blocks:
            minus_later, candidate = heappop(farthest)
            if kept.get(candidate) == -minus_later:
                del kept[candidate]
    return Hits(len(used), hits, 0)
