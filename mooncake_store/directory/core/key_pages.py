"""The keys of a table in the order in which they came, in pages.

A dict keeps that order too, but cannot be walked a little at a time while it changes, and its
first key takes ever longer to find once many before it are gone. Here the oldest key is at hand,
and a sweep goes on from page to page where it last stopped. Eight bytes for a key.

Not here: what belongs to a key (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

PAGE_KEYS = 512


class KeyPages:
    def __init__(self) -> None:
        self._pages: list[list[bytes]] = []  # none of them empty
        self._next = 0  # the page that is swept next

    def __iter__(self) -> Iterator[bytes]:
        for page in self._pages:
            yield from page

    def extend(self, keys: list[bytes]) -> None:
        """These are the newest. None of them may be here already."""
        room = 0
        if self._pages:
            last = self._pages[-1]
            room = PAGE_KEYS - len(last)
            last += keys[:room] if len(keys) > room else keys
        for start in range(room, len(keys), PAGE_KEYS):
            self._pages.append(keys[start : start + PAGE_KEYS])

    def pop_oldest(self) -> bytes:
        key = self._pages[0].pop(0)
        if not self._pages[0]:
            del self._pages[0]
            self._next = max(0, self._next - 1)
        return key

    def pop_page(self) -> list[bytes]:
        """Some of the keys, the newest; none when none are left."""
        return self._pages.pop() if self._pages else []

    def sweep(self, keep: Callable[[list[bytes]], list[bytes]]) -> int:
        """`keep` says what stays of the next page. Returns how many keys it was asked about."""
        pages = self._pages
        if not pages:
            return 0
        at = self._next if self._next < len(pages) else 0
        asked = len(pages[at])
        kept = keep(pages[at])
        if at and len(pages[at - 1]) + len(kept) <= PAGE_KEYS:
            pages[at - 1] += kept
            kept = []
        if kept:
            pages[at] = kept
            at += 1
        else:
            del pages[at]
        self._next = at
        return asked

    def check(self) -> None:
        """Prove the invariants."""
        assert all(0 < len(page) <= PAGE_KEYS for page in self._pages), "an odd page"
        keys = list(self)
        assert len(set(keys)) == len(keys), "a key is in two places"
