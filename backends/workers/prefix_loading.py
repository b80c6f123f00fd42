"""Finds the cached prefix of a prompt, fetches it to the local node, and loads it into pages.

The conductor decides how many blocks may be fetched, and from which node (Algorithm 1 of the
Mooncake paper). Each block is fetched from that node, else from the conductor's second choice, else
from any node that has a copy. A block that no node sends is a cache miss, and shortens the prefix.

For layer-wise prefill the blocks are only located here (`trace`). They are loaded into the layer
ring buffers, one layer at a time (prefill_worker.py). `SingleFlight` prevents two prompts of one
worker from fetching or computing the same block.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import SSD_SUFFIX

ROUNDS_MAX = 3  # rounds of a fetch: the named node, the second choice, any other node


@dataclass(frozen=True, slots=True)
class Fetching:
    """The remote fetch that the conductor allows."""

    blocks: int = 0  # largest number of blocks after the locally cached ones
    nodes: tuple[str, ...] = ()  # preferred nodes, the best first


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Copies of a prompt's leading blocks in the directory, leased to the request."""

    copies: list[tuple[Copy, ...]]  # copies of each block, up to the first block without a copy
    local: list[Copy]  # copy of each block in the local node's memory, up to the first without one


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """The leading blocks that are in the pages."""

    copies: list[Copy]  # one copy of each block, on the local node
    fetched_blocks: int  # from other nodes or the local SSD; some are not in `copies` if reads fail
    fetched_from: dict[str, int]  # node -> fetched bytes


@dataclass(frozen=True, slots=True)
class LayeredPrefix(LoadedPrefix):
    """The leading blocks that can be read layer by layer. `copies` may be on any node."""

    digests: list[tuple[int, ...]]  # digests of each block's layers

    def remote(self, node_id: str) -> list[int]:
        """Indices of the blocks that are read from other nodes than `node_id`."""
        return [i for i, copy in enumerate(self.copies) if copy.node_id != node_id]

    @property
    def nodes(self) -> set[str]:
        return {copy.node_id for copy in self.copies}


@dataclass(frozen=True, slots=True)
class PrefixLoading:
    """Public methods raise StoreError if the directory does not answer. `owner`: a request id."""

    store: WorkerStore
    load_copies: Callable[[Sequence[Copy], Sequence[int]], int]  # as KvLoader.load_copies
    node_id: str  # the local node
    lease_s: float
    deadline_s: float  # time limit of fetching one prefix

    def find(self, keys: Sequence[bytes], owner: str) -> FoundPrefix:
        found = self.store.lookup(keys, owner, self.lease_s) if keys else []
        here = ([copy for copy in copies if copy.node_id == self.node_id] for copies in found)
        return FoundPrefix(found, [local[0] for local in takewhile(bool, here)])

    def load(
        self,
        keys: Sequence[bytes],
        found: FoundPrefix,
        pages: Sequence[int],
        allowed: Fetching,
        owner: str,
    ) -> LoadedPrefix:
        """Fetch the allowed blocks to the local node, then read all local blocks into `pages`.

        Leading blocks on the local SSD are always restored, which is mostly faster than computing.
        `allowed.blocks` counts the blocks after them.
        """
        before = len(found.local)
        found, from_node = self._fetch(keys, found, allowed, owner)
        arrived = self.load_copies(found.local, pages)
        return LoadedPrefix(found.local[:arrived], len(found.local) - before, from_node)

    def trace(
        self,
        keys: Sequence[bytes],
        found: FoundPrefix,
        allowed: Fetching,
        owner: str,
        from_remote: bool,
    ) -> LayeredPrefix:
        """Locate the blocks to load layer by layer, without loading them.

        `from_remote`: blocks in the memory of other nodes may be read from there. If it is False,
        or a block is on an SSD, all missing blocks are first fetched into local memory.
        """
        wanted = self._wanted(found, self._blocks_here(found) + allowed.blocks, allowed.nodes, ())
        is_on_ssd = any(copy.node_id.endswith(SSD_SUFFIX) for copy in wanted)
        if wanted and from_remote and not is_on_ssd:
            copies = [*found.local, *wanted]
            digests = self._known_digests(copies)
            if len(digests) == len(copies):  # otherwise a node did not answer: fetch below
                from_node = Counter[str]()
                for copy in wanted:
                    if copy.node_id != self.node_id:  # a local block may follow a remote one
                        from_node[copy.node_id] += copy.size_bytes
                return LayeredPrefix(copies, len(wanted), from_node, digests)
        before = len(found.local)
        found, fetched_from = self._fetch(keys, found, allowed, owner)
        digests = self._known_digests(found.local)
        blocks = len(digests)
        return LayeredPrefix(found.local[:blocks], max(0, blocks - before), fetched_from, digests)

    def _known_digests(self, copies: Sequence[Copy]) -> list[tuple[int, ...]]:
        """Layer digests of leading blocks, up to the first block whose digests are unavailable."""
        found = self.store.layer_digests(copies) if copies else []
        return [digests for digests in takewhile(lambda known: known is not None, found) if digests]

    def _fetch(
        self, keys: Sequence[bytes], found: FoundPrefix, allowed: Fetching, owner: str
    ) -> tuple[FoundPrefix, dict[str, int]]:
        """Fetch blocks to the local node. Returns the new prefix and the bytes by source node."""
        from_node = Counter[str]()
        limit = self._blocks_here(found) + allowed.blocks
        until_s, asked = time.monotonic() + self.deadline_s, set[Copy]()
        for turn in range(ROUNDS_MAX):
            start, left_s = len(found.local), until_s - time.monotonic()
            wanted = self._wanted(found, limit, allowed.nodes, asked)
            if not wanted or left_s <= 0:
                break
            asked.update(wanted)
            span = slice(start, start + len(wanted))
            if turn + 1 < ROUNDS_MAX and self._has_others(found.copies[span]):
                left_s /= 2  # leave time for another node, if this one hangs
            got = self.store.fetch(keys[span], wanted, owner, self.lease_s, left_s)
            from_node.update(got.bytes_from)
            if got.blocks:
                found = self.find(keys, owner)
            if got.blocks == len(wanted):
                break
        return found, dict(from_node)

    def _wanted(
        self, found: FoundPrefix, limit: int, nodes: Sequence[str], asked: Collection[Copy]
    ) -> list[Copy]:
        """The copies to fetch, for consecutive blocks after the locally cached ones.

        From block `limit` on, only copies in the local node's memory or on its SSD are considered.
        Copies in `asked` are omitted, because an earlier round failed to fetch them.
        """
        offers, start = [], len(found.local)
        for number, copies in enumerate(found.copies[start:], start):
            left = [copy for copy in copies if copy not in asked]
            here = [copy for copy in left if copy.node_id.removesuffix(SSD_SUFFIX) == self.node_id]
            if not here and number >= limit:
                break
            offers.append(here or left)
        chosen = self.store.choose(offers, nodes)
        return list(takewhile(lambda copy: copy is not None, chosen))  # type: ignore[arg-type]

    def _blocks_here(self, found: FoundPrefix) -> int:
        """Number of leading blocks in the local node's memory or on its SSD."""
        here = {self.node_id, self.node_id + SSD_SUFFIX}
        return len(list(takewhile(lambda copies: here & {c.node_id for c in copies}, found.copies)))

    def _has_others(self, found: Sequence[Sequence[Copy]]) -> bool:
        """True if one of these blocks has copies on two or more remote nodes."""
        nodes_of = ({c.node_id.removesuffix(SSD_SUFFIX) for c in copies} for copies in found)
        return any(len(nodes - {self.node_id}) > 1 for nodes in nodes_of)


class SingleFlight:
    """Single-flight deduplication of missing blocks: one prompt of the worker produces each block.

    A prompt *leads* the blocks that it computes or fetches first. A prompt whose next missing block
    has another leader waits until the block is in the store, and then looks its prefix up again.
    Waiting prompts lead no block, so there is no cyclic wait. The worker's lock guards the state.
    """

    def __init__(self) -> None:
        self._owner_of: dict[bytes, str] = {}  # block key -> request that produces the block
        self._keys_of: dict[str, set[bytes]] = {}  # request -> block keys

    def __len__(self) -> int:
        return len(self._owner_of)

    def lead(self, missing: Sequence[bytes], owner: str) -> bool:
        """Make `owner` lead its `missing` blocks. False if another request leads the first one."""
        if missing and self._owner_of.get(missing[0], owner) != owner:
            return False
        # A later block may have another leader. If so, both prompts produce it, which is harmless.
        for key in missing:
            if key not in self._owner_of:
                self._owner_of[key] = owner
                self._keys_of.setdefault(owner, set()).add(key)
        return True

    def owner_of(self, key: bytes) -> str | None:
        return self._owner_of.get(key)

    def settle(self, keys: Sequence[bytes] | None, owner: str) -> None:
        """End the lead of `owner` on these blocks (None: all its blocks), because they are in the
        store, or `owner` will not produce them."""
        led = self._keys_of.get(owner, set())
        for key in list(led) if keys is None else keys:
            if key in led:
                led.discard(key)
                del self._owner_of[key]
        if not led:
            self._keys_of.pop(owner, None)

    def check(self) -> None:
        pairs = {(key, owner) for owner, keys in self._keys_of.items() for key in keys}
        assert pairs == set(self._owner_of.items()), "blocks and owners disagree"
        assert all(self._keys_of.values()), "an owner without blocks is remembered"
