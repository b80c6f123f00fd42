"""Finding the cached prefix of a prompt, bringing it to the own node, loading it into pages.

The conductor decided how much may be fetched from other nodes and from which (Algorithm 1); here it
is carried out: each block from the named node, else from the conductor's second choice, else from
whoever has it. What a node failed to send is asked of the next one. A block that is gone when we
come for it is a miss: the prefix is shorter, nothing fails. Of a prompt that passes layer by layer
the prefix is only traced here, and its blocks go from wherever they are into the pages, a layer at
a time (prefill_worker.py). `SingleFlight` keeps two prompts of one
worker from bringing the same block.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from backends.workers.kv_loader import KvLoader
from mooncake_store.client.store import Store
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX

ROUNDS_MAX = 3  # the named node, the second choice, anybody


@dataclass(frozen=True, slots=True)
class Fetching:
    """What the conductor allows: so many blocks beyond the own ones, from these nodes first."""

    blocks: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """What the directory knows of a prompt's leading blocks; leased to the request."""

    copies: list[tuple[Copy, ...]]  # of each block, up to the first that nobody has
    own: list[Copy]  # on the own node, up to the first that it lacks


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Leading blocks that are in the pages now, each with its copy on the own node."""

    copies: list[Copy]
    fetched_blocks: int  # of those and beyond: what came from another node for this request
    fetched_from: dict[str, int]  # bytes, by node


@dataclass(frozen=True, slots=True)
class LayeredPrefix:
    """Leading blocks that can be read layer by layer, from wherever they are."""

    copies: list[Copy]
    digests: list[tuple[int, ...]]  # of the layers of each
    fetched_blocks: int
    fetched_from: dict[str, int]

    def far(self, node_id: str) -> list[int]:
        """Blocks that the own node lacks."""
        return [i for i, copy in enumerate(self.copies) if copy.node_id != node_id]

    @property
    def nodes(self) -> set[str]:
        return {copy.node_id for copy in self.copies}


class PrefixLoading:
    """Raises StoreError when the directory does not answer."""

    def __init__(
        self, store: Store, loader: KvLoader, node_id: str, lease_s: float, deadline_s: float
    ) -> None:
        self._store = store
        self._loader = loader
        self._node_id = node_id
        self._lease_s = lease_s
        self._deadline_s = deadline_s

    def find(self, keys: Sequence[bytes], owner: str) -> FoundPrefix:
        copies = self._store.lookup(keys, owner, self._lease_s) if keys else []
        return FoundPrefix(copies, self._on_own_node(copies))

    def load(
        self,
        keys: Sequence[bytes],
        found: FoundPrefix,
        pages: Sequence[int],
        allowed: Fetching,
        owner: str,
    ) -> LoadedPrefix:
        """Fetch what is allowed beyond the own copies, then read all into `pages`.

        What lies on the own node's SSD is restored in any case: that is faster than computing it,
        and the conductor only decides about other nodes. What it allows begins behind that.
        """
        before = len(found.own)
        found, from_node = self._fetch(keys, found, allowed, owner)
        arrived = self._loader.load_copies(found.own, pages)
        return LoadedPrefix(found.own[:arrived], len(found.own) - before, from_node)

    def trace(
        self,
        keys: Sequence[bytes],
        found: FoundPrefix,
        allowed: Fetching,
        owner: str,
        from_far: bool,
    ) -> LayeredPrefix:
        """What is to be loaded, without loading it. What lies on an SSD is brought to memory first,
        and all that is on other nodes unless it may come `from_far`, layer by layer."""
        wanted = self._wanted(found, self._blocks_here(found) + allowed.blocks, allowed.nodes, ())
        if wanted and from_far and self._in_memory(wanted):
            copies = [*found.own, *wanted]
            digests = self._known_digests(copies)
            if len(digests) == len(copies):  # else its node does not answer, say: others may
                from_node = Counter[str]()
                for copy in wanted:
                    if copy.node_id != self._node_id:  # one behind a block that is not here
                        from_node[copy.node_id] += copy.size_bytes
                return LayeredPrefix(copies, digests, len(wanted), from_node)
        before, fetched_from = len(found.own), dict[str, int]()
        if wanted:
            found, fetched_from = self._fetch(keys, found, allowed, owner)
        digests = self._known_digests(found.own)
        blocks = len(digests)
        return LayeredPrefix(found.own[:blocks], digests, max(0, blocks - before), fetched_from)

    def _known_digests(self, copies: Sequence[Copy]) -> list[tuple[int, ...]]:
        """Of the layers of leading blocks, up to the first whose digests cannot be had."""
        found = self._store.layer_digests(copies) if copies else []
        return [digests for digests in takewhile(lambda known: known is not None, found) if digests]

    def _fetch(
        self, keys: Sequence[bytes], found: FoundPrefix, allowed: Fetching, owner: str
    ) -> tuple[FoundPrefix, dict[str, int]]:
        """What is on the own node then, and the bytes that came from each other one."""
        from_node = Counter[str]()
        limit = self._blocks_here(found) + allowed.blocks
        until_s, asked = time.monotonic() + self._deadline_s, set[Copy]()
        for turn in range(ROUNDS_MAX):
            start, left_s = len(found.own), until_s - time.monotonic()
            wanted = self._wanted(found, limit, allowed.nodes, asked)
            if not wanted or left_s <= 0:
                break
            asked.update(wanted)
            span = slice(start, start + len(wanted))
            if turn + 1 < ROUNDS_MAX and self._has_others(found.copies[span]):
                left_s /= 2  # a node that hangs leaves time to ask another one
            got = self._store.fetch(keys[span], wanted, owner, self._lease_s, left_s)
            from_node.update(got.bytes_from)
            if got.blocks:
                found = self.find(keys, owner)
            if got.blocks == len(wanted):
                break
        return found, dict(from_node)

    def _wanted(
        self, found: FoundPrefix, limit: int, nodes: Sequence[str], asked: Collection[Copy]
    ) -> list[Copy]:
        """The copies to be brought here, for consecutive blocks after the own ones: those of block
        `limit` and beyond only from the own SSD. Without those that were asked for in vain."""
        offers, start = [], len(found.own)
        for number, copies in enumerate(found.copies[start:], start):
            left = [copy for copy in copies if copy not in asked]
            near = [copy for copy in left if copy.node_id.removesuffix(SSD_SUFFIX) == self._node_id]
            if not near and number >= limit:
                break
            offers.append(near or left)
        chosen = self._store.choose(offers, nodes)
        return list(takewhile(lambda copy: copy is not None, chosen))  # type: ignore[arg-type]

    def _blocks_here(self, found: FoundPrefix) -> int:
        """How many leading blocks the own node has, on its SSD too."""
        here = {self._node_id, self._node_id + SSD_SUFFIX}
        return len(list(takewhile(lambda copies: here & {c.node_id for c in copies}, found.copies)))

    def _in_memory(self, copies: Sequence[Copy]) -> bool:
        return not any(copy.node_id.endswith(SSD_SUFFIX) for copy in copies)

    def _has_others(self, found: Sequence[Sequence[Copy]]) -> bool:
        """Whether some of these blocks could come from more than one other node."""
        own = self._node_id
        return any(
            len({copy.node_id.removesuffix(SSD_SUFFIX) for copy in copies} - {own}) > 1
            for copies in found
        )

    def _on_own_node(self, found: Sequence[tuple[Copy, ...]]) -> list[Copy]:
        own = []
        for copies in found:
            here = [copy for copy in copies if copy.node_id == self._node_id]
            if not here:
                break
            own.append(here[0])
        return own


class SingleFlight:
    """Who of this worker's prompts is just bringing which block: so that nobody brings it twice.

    Twenty prompts with one new prefix in a burst would otherwise all find it missing and all
    compute (or fetch) it. The first leads: it brings the blocks that it lacks. One whose next
    missing block is brought by another is blocked on it until that block is in the store, and looks
    again. Whoever is blocked brings nothing, so nobody waits in a circle. Pure; the worker's lock
    guards it.
    """

    def __init__(self) -> None:
        self._owner_of: dict[bytes, str] = {}
        self._keys_of: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._owner_of)

    def lead(self, missing: Sequence[bytes], owner: str) -> bool:
        """`missing` are the keys that `owner` lacks, in order. False: wait for another owner."""
        if missing and self._owner_of.get(missing[0], owner) != owner:
            return False
        # Blocks further on may be another's; then both bring them, which is waste, not harm.
        for key in missing:
            if key not in self._owner_of:
                self._owner_of[key] = owner
                self._keys_of.setdefault(owner, set()).add(key)
        return True

    def owner_of(self, key: bytes) -> str | None:
        return self._owner_of.get(key)

    def settle(self, keys: Sequence[bytes], owner: str) -> None:
        """These blocks are in the store now (or will not come)."""
        own = self._keys_of.get(owner, set())
        for key in keys:
            if key in own:
                own.discard(key)
                del self._owner_of[key]
        if not own:
            self._keys_of.pop(owner, None)

    def settle_all(self, owner: str) -> None:
        self.settle(list(self._keys_of.get(owner, ())), owner)

    def check(self) -> None:
        pairs = {(key, owner) for owner, keys in self._keys_of.items() for key in keys}
        assert pairs == set(self._owner_of.items()), "blocks and owners disagree"
        assert all(self._keys_of.values()), "an owner that brings nothing is remembered"
