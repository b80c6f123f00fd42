"""The eviction policies by name, and the protocol that they implement.

A policy only *orders* candidates and never frees a copy. A copy is a candidate only while it is
ready and has neither a lease nor a hard pin. A leased block must survive even as the coldest one,
because NIXL reads it without another request to the directory.

    use             -> call of the directory
    written, read   -> add(keys) when the last lease ends
    leased, pinned  -> discard(keys); the next add(keys) counts as one more use
    read, no lease  -> touch(key)
    evicted         -> take_coldest(count), or evicted(key) of any block: for room; a policy may
                       remember a bounded number of names
    removed         -> forget(key): rejected by a reader, removed, lost; no name is remembered

Deepest first: the directory adds or touches a chain of blocks from its end to its start, so among
blocks used together the deepest one is the coldest. Evicting block 3 makes blocks 4, 5, ...
unreachable, and the reverse does not hold. No depth is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mooncake_store.directory.core.eviction.density import Density
from mooncake_store.directory.core.eviction.lru import Lru


class EvictionOrder(Protocol):
    """Idle copies of one size on one holder, coldest first. O(1) per key, amortised."""

    def __len__(self) -> int:
        """The number of candidates."""

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is a candidate."""

    def add(self, keys: Sequence[bytes]) -> None:
        """Copies became idle after a use or a write, in this order."""

    def touch(self, key: bytes) -> None:
        """A candidate was used without a lease."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """These keys are no candidates until the next `add`. Unknown keys are allowed."""

    def take_coldest(self, count: int) -> list[bytes]:
        """Remove up to `count` candidates as evicted for room; their keys, coldest first."""

    def evicted(self, key: bytes) -> None:
        """The copy was evicted for room. The policy may remember its name."""

    def forget(self, key: bytes) -> None:
        """The copy is gone for another reason, leased or not. Nothing about it is kept."""

    def keys(self, limit: int | None = None) -> list[bytes]:
        """The first `limit` candidates, coldest first; None: all."""

    def check(self) -> None:
        """Prove the invariants."""


_MAKERS: dict[str, Callable[[], EvictionOrder]] = {"lru": Lru, "density": Density}
POLICIES = tuple(_MAKERS)


def make_eviction(name: str) -> EvictionOrder:
    """A new, empty eviction order; KeyError for an unknown name."""
    return _MAKERS[name]()
