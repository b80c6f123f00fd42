"""The orders of eviction by name, and the contract that they keep.

An order, as in Redis, only *orders* candidates; it never frees anything. A copy is a candidate only
while nobody leases it: a leased block must survive even when it is the coldest one, because NIXL
reads it without asking anybody.

    use             -> the directory calls
    written, read   -> add(key) when the last lease ends
    leased          -> discard(key); the next add(key) means that it was used once more
    read, no lease  -> touch(key)
    dropped         -> evicted(key): for room; a policy may remember the name, bounded
    gone            -> forget(key): dropped by a reader, removed, lost: the name means nothing now

Deepest first: whoever uses a chain of blocks adds or touches it from its end to its start, so among
blocks used at once the deepest is the coldest. Dropping block 3 makes blocks 4, 5, ... unreachable,
the reverse is not true. No depth is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mooncake_store.directory.core.eviction.density import Density
from mooncake_store.directory.core.eviction.lru import Lru


class EvictionOrder(Protocol):
    """The idle copies of one size on one holder, coldest first. Every call is O(1) amortised."""

    def __len__(self) -> int:
        """How many candidates there are."""

    def __contains__(self, key: bytes) -> bool:
        """Is it a candidate?"""

    def add(self, key: bytes) -> None:
        """A copy became idle: it has just been used, or written."""

    def touch(self, key: bytes) -> None:
        """A candidate was used without a lease."""

    def discard(self, key: bytes) -> None:
        """It is leased: no candidate until it is added again. Unknown keys are no mistake."""

    def add_many(self, keys: Sequence[bytes]) -> None:
        """`add` each of them, in this order."""

    def discard_many(self, keys: Sequence[bytes]) -> None:
        """`discard` each of them."""

    def coldest(self) -> bytes | None:
        """The copy to drop first; None when there is no candidate."""

    def take_coldest(self, count: int) -> list[bytes]:
        """Up to so many times `coldest`, `evicted`: they were dropped for room."""

    def coldest_keys(self, limit: int) -> list[bytes]:
        """The first candidates, coldest first."""

    def evicted(self, key: bytes) -> None:
        """It was dropped for room: no candidate any more. Its name may be remembered."""

    def forget(self, key: bytes) -> None:
        """It is gone for another reason, leased or not: nothing about it is kept."""

    def keys(self) -> list[bytes]:
        """All candidates, coldest first."""

    def check(self) -> None:
        """Prove the invariants."""


_MAKERS: dict[str, Callable[[], EvictionOrder]] = {"lru": Lru, "density": Density}
POLICIES = tuple(_MAKERS)


def make_eviction(name: str) -> EvictionOrder:
    """A new, empty order."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"no eviction policy is called {name!r}; there are {', '.join(POLICIES)}")
    return maker()
