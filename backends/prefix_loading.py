"""Finding the cached prefix of a prompt, bringing it to the own node, loading it into pages.

The conductor decided how much may be fetched from other nodes (Algorithm 1); here it is carried
out. A block that is gone when we come for it is a miss: the prefix is shorter, nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.kv_loader import KvLoader
from mooncake_store.slots import Copy
from mooncake_store.store import Store


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Leading blocks that are in the pages now, each with its copy on the own node."""

    copies: list[Copy]
    fetched_blocks: int  # of those and beyond: what came from another node for this request


class PrefixLoading:
    def __init__(
        self, store: Store, loader: KvLoader, node_id: str, lease_s: float, deadline_s: float
    ) -> None:
        self._store = store
        self._loader = loader
        self._node_id = node_id
        self._lease_s = lease_s
        self._deadline_s = deadline_s

    def load(
        self, keys: Sequence[bytes], pages: Sequence[int], fetch_blocks: int, owner: str
    ) -> LoadedPrefix:
        """Leases everything that it returns to `owner`; raises StoreError without a directory."""
        if not keys:
            return LoadedPrefix([], 0)
        found = self._store.lookup(keys, owner, self._lease_s)
        own = self._on_own_node(found)
        fetched = 0
        if fetch_blocks and len(own) < len(found):
            fetched = self._fetch(keys, found, len(own), fetch_blocks, owner)
            if fetched:
                own = self._on_own_node(self._store.lookup(keys, owner, self._lease_s))
        arrived = self._loader.load_copies(own, pages)
        return LoadedPrefix(own[:arrived], fetched)

    def _on_own_node(self, found: Sequence[tuple[Copy, ...]]) -> list[Copy]:
        """One copy per leading block, as far as the own node has them all."""
        own = []
        for copies in found:
            mine = [copy for copy in copies if copy.node_id == self._node_id]
            if not mine:
                break
            own.append(mine[0])
        return own

    def _fetch(
        self,
        keys: Sequence[bytes],
        found: Sequence[tuple[Copy, ...]],
        local_blocks: int,
        fetch_blocks: int,
        owner: str,
    ) -> int:
        span = slice(local_blocks, min(local_blocks + fetch_blocks, len(found)))
        remote = [copies[0] for copies in found[span]]  # each non-empty: lookup stops at a miss
        return self._store.fetch(keys[span], remote, owner, self._lease_s, self._deadline_s)
