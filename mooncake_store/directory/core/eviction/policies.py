"""The eviction policies by name, and the protocol that they implement.

A policy only *orders* candidates and never frees a copy. A copy is a candidate only while it is
ready and has neither a lease nor a hard pin. A leased block is never a candidate, because a
one-sided transfer (NIXL) reads it without another request to the directory.

    event                 call by the directory
    last lease ended      add(keys)
    leased, or pinned     discard(keys); the next add(keys) counts as one more use
    read without a lease  touch(key)
    evicted for room      take_coldest(count), or evicted(key) of any block; a policy may remember
                          the names of a bounded number of evicted blocks
    removed or corrupt    forget(key); no name is remembered

The directory adds or touches the blocks of a prompt from its end to its start. So of the blocks
used together, the last one of the prompt is the coldest, without a stored position. Evicting block
3 makes blocks 4, 5, ... unreachable; evicting the last block costs only this block.
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
        """Make keys candidates after a use or a write, the first key as the coldest."""

    def touch(self, key: bytes) -> None:
        """Record the use of a candidate without a lease."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove keys until their next `add`. Unknown keys are allowed."""

    def take_coldest(self, count: int) -> list[bytes]:
        """Remove up to `count` candidates, evicted for room. Returns their keys, coldest first."""

    def evicted(self, key: bytes) -> None:
        """Remove the key of a copy that was evicted for room. The policy may remember the key."""

    def forget(self, key: bytes) -> None:
        """Remove a key for another reason, whether it is a candidate or leased."""

    def keys(self, limit: int | None = None) -> list[bytes]:
        """The first `limit` candidates, coldest first; None: all."""

    def check(self) -> None:
        """Assert the invariants."""


_MAKERS: dict[str, Callable[[], EvictionOrder]] = {"lru": Lru, "density": Density}
POLICIES = tuple(_MAKERS)


def make_eviction(name: str) -> EvictionOrder:
    """A new, empty eviction order; KeyError for an unknown name."""
    return _MAKERS[name]()
