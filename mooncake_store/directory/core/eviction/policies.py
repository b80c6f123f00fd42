"""The eviction policies by name, and the protocol that they implement.

A policy only *orders* candidates and never frees a copy, as in Redis. A copy is a candidate only
while it has no lease. A leased block must survive even as the coldest one, because NIXL reads it
without another request to the directory.

    use             -> call of the directory
    written, read   -> add(key) when the last lease ends
    leased          -> discard(key); the next add(key) counts as one more use
    read, no lease  -> touch(key)
    evicted         -> evicted(key): for room; a policy may remember a bounded number of names
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
    """The idle copies of one size on one holder, coldest first. Every call is O(1) amortised."""

    def __len__(self) -> int:
        """The number of candidates."""

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is a candidate."""

    def add(self, key: bytes) -> None:
        """A copy became idle after a use or a write."""

    def touch(self, key: bytes) -> None:
        """A candidate was used without a lease."""

    def discard(self, key: bytes) -> None:
        """The copy is leased: no candidate until the next `add`. Unknown keys are allowed."""

    def add_many(self, keys: Sequence[bytes]) -> None:
        """`add` for each key, in this order."""

    def discard_many(self, keys: Sequence[bytes]) -> None:
        """`discard` for each key."""

    def coldest(self) -> bytes | None:
        """The copy to evict first; None without a candidate."""

    def take_coldest(self, count: int) -> list[bytes]:
        """`coldest` and `evicted`, up to `count` times: the keys that were evicted for room."""

    def coldest_keys(self, limit: int) -> list[bytes]:
        """The first `limit` candidates, coldest first."""

    def evicted(self, key: bytes) -> None:
        """The copy was evicted for room. The policy may remember its name."""

    def forget(self, key: bytes) -> None:
        """The copy is gone for another reason, leased or not. Nothing about it is kept."""

    def keys(self) -> list[bytes]:
        """All candidates, coldest first."""

    def check(self) -> None:
        """Prove the invariants."""


_MAKERS: dict[str, Callable[[], EvictionOrder]] = {"lru": Lru, "density": Density}
POLICIES = tuple(_MAKERS)


def make_eviction(name: str) -> EvictionOrder:
    """A new, empty eviction order."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"unknown eviction policy {name!r}; use one of {', '.join(POLICIES)}")
    return maker()
