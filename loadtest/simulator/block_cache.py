"""One holder with room for a number of blocks, under an eviction policy.

Requests are served in order. A request leases the blocks of its chain that are found, allocates the
others, for which idle blocks are evicted, and releases all blocks, deepest first. BlockCache has
the real order of eviction only, and is fast. DirectoryCache calls the real Directory on a virtual
clock; a test proves that both count the same (tests/loadtest/simulator/test_hit_rate.py).

A reference to a block is a hit when the block *and* every block before it in its prompt are cached:
KV after a hole cannot be used. Cached blocks after a hole are counted apart (`behind_holes`).

`best_hits` is the bound of a policy that knows the future: Belady's MIN with bypass, which evicts
the block with the farthest next use, even one that was just used. For blocks of one size and one
cost no policy has more hits (Belady 1966; Mattson 1970). It leaves no holes, because a chain is
used from its start.

Not here: the experiment (hit_rate.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush

from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.store import SimulatedStore
from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.directory.core.eviction import make_eviction

NODE, OWNER, LEASE_S = "s0", "request", 60.0
NEVER = 2**62  # the next use of a block that is never used again


@dataclass(frozen=True, slots=True)
class Hits:
    references: int
    hits: int
    behind_holes: int  # cached, but unusable after a hole

    @property
    def percent(self) -> float:
        return 100 * self.hits / self.references


def key_of(hash_id: int) -> bytes:
    """A block key for this id, as evenly distributed as real keys, which are hashes too."""
    return blake2b(hash_id.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


class BlockCache:
    def __init__(self, blocks: int, policy: str) -> None:
        self.blocks = blocks
        self._order = make_eviction(policy)
        self._there: set[bytes] = set()

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        """Use the blocks of one request; returns which of them were cached."""
        assert len(keys) <= self.blocks, f"a request of {len(keys)} blocks does not fit"
        there, order = self._there, self._order
        was_there = [key in there for key in keys]
        order.discard([key for key, is_there in zip(keys, was_there, strict=True) if is_there])
        for key, is_there in zip(keys, was_there, strict=True):
            if is_there:
                continue
            if len(there) == self.blocks:
                there.remove(*order.take_coldest(1))
            there.add(key)
        order.add(keys[::-1])
        return was_there

    def check(self) -> None:
        self._order.check()
        assert len(self._order) == len(self._there) <= self.blocks


class DirectoryCache:
    """The real Directory with one holder of `blocks` units, each of them one block."""

    def __init__(self, blocks: int, policy: str) -> None:
        self._store = SimulatedStore(VirtualClock(), lambda events: None, policy)
        self._store.add_node(NODE, blocks)

    def use(self, keys: Sequence[bytes]) -> list[bool]:
        store = self._store
        found = store.directory.lookup(keys, OWNER, LEASE_S, store.now_s, prefix_only=False)
        assert store.put(keys, NODE, OWNER) == len(keys), "a request does not fit"
        store.release(OWNER)
        return [bool(copies) for copies in found]

    def check(self) -> None:
        self._store.directory.check()


def play(cache: BlockCache | DirectoryCache, requests: Iterable[Sequence[bytes]]) -> Hits:
    references = hits = present = 0
    for keys in requests:
        was_there = cache.use(keys)
        references += len(keys)
        present += sum(was_there)
        hits += was_there.index(False) if False in was_there else len(keys)
    return Hits(references, hits, present - hits)


def best_hits(requests: Sequence[Sequence[bytes]], blocks: int) -> Hits:
    """The most hits that any policy could have with room for `blocks`, knowing the future."""
    used = [key for keys in requests for key in keys]
    next_use = [NEVER] * len(used)
    following: dict[bytes, int] = {}
    for at in reversed(range(len(used))):
        next_use[at] = following.get(used[at], NEVER)
        following[used[at]] = at
    kept: dict[bytes, int] = {}  # block key -> its next use
    # (-next use, block key); may contain blocks used again or evicted
    farthest: list[tuple[int, bytes]] = []
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
