"""Finding the cached prefix of a prompt, bringing it to the own node, loading it into pages.

The conductor decided how much may be fetched from other nodes (Algorithm 1); here it is carried
out. A block that is gone when we come for it is a miss: the prefix is shorter, nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.kv_loader import KvLoader
from mooncake_store.client.store import Store
from mooncake_store.membership import SSD_SUFFIX
from mooncake_store.slots import Copy


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
        fetch_blocks: int,
        owner: str,
    ) -> LoadedPrefix:
        """Fetch at most `fetch_blocks` beyond the own copies, then read all into `pages`.

        What lies on the own node's SSD is restored in any case: that is faster than computing it,
        and the conductor only decides about other nodes.
        """
        own, fetched = found.own, 0
        remote = self._remote(found, fetch_blocks)
        if remote:
            span = slice(len(own), len(own) + len(remote))
            fetched = self._store.fetch(keys[span], remote, owner, self._lease_s, self._deadline_s)
            if fetched:
                own = self.find(keys, owner).own
        arrived = self._loader.load_copies(own, pages)
        return LoadedPrefix(own[:arrived], fetched)

    def _remote(self, found: FoundPrefix, fetch_blocks: int) -> list[Copy]:
        """The copies to be brought here, for consecutive blocks after the own ones."""
        wanted = []
        for number, copies in enumerate(found.copies[len(found.own) :]):
            near = [
                copy for copy in copies if copy.node_id.removesuffix(SSD_SUFFIX) == self._node_id
            ]
            if not near and number >= fetch_blocks:
                break
            wanted.append(near[0] if near else copies[0])
        return wanted

    def _on_own_node(self, found: Sequence[tuple[Copy, ...]]) -> list[Copy]:
        own = []
        for copies in found:
            mine = [copy for copy in copies if copy.node_id == self._node_id]
            if not mine:
                break
            own.append(mine[0])
        return own
