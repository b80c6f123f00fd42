"""Page allocator of an engine's KV memory.

Requests do not share pages, because the prefix cache is the store and not the engine. The lowest
free page number is allocated first, so a lightly loaded pool reuses few pages. These pages stay in
CPU caches and TLBs.

`Occupation` measures the VRAM occupation cost of the Mooncake paper: taken KV memory, integrated
over time. Layer-wise prefill exists to lower this cost.

Not here: the memory itself (kv_memory.py), how many pages a request needs (batching.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


class PagePool:
    def __init__(self, pages_max: int) -> None:
        assert pages_max > 0, pages_max
        self.pages_max = pages_max
        self._free = list(range(pages_max))  # heap of page numbers
        self._is_taken = bytearray(pages_max)
        # Called with the number of taken pages after each `take` and `release`.
        self.on_change: Callable[[int], None] = lambda used_pages: None

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.pages_max - len(self._free)

    def take(self, pages: int) -> list[int] | None:
        """Allocate `pages` >= 1 pages. Returns None and changes nothing if fewer are free."""
        assert pages > 0, pages
        if pages > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(pages)]
        is_taken = self._is_taken
        for page in taken:
            assert not is_taken[page], f"page {page} was free and taken"
            is_taken[page] = 1
        self.on_change(self.used_pages)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        is_taken, free, push = self._is_taken, self._free, heapq.heappush
        for page in pages:
            assert is_taken[page], f"page {page} released twice"
            is_taken[page] = 0
            push(free, page)
        self.on_change(self.used_pages)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(set(self._free)) == len(self._free), "a page is on the free list twice"
        assert len(self._is_taken) == self.pages_max, "the pool changed its size"
        assert not any(map(self._is_taken.__getitem__, self._free)), "a page is free and taken"
        assert self._is_taken.count(1) == self.used_pages, "a page is neither free nor taken"


class Occupation:
    """Page seconds of a pool. One thread at a time may call `changed`; any thread may read."""

    def __init__(self, now_s: float) -> None:
        # (taken pages, time of the last change in s, page seconds until that change). The state is
        # one tuple, so that a reader in another thread gets values that belong together.
        self._state = (0, now_s, 0.0)

    def changed(self, used_pages: int, now_s: float) -> None:
        self._state = (used_pages, now_s, self.page_seconds(now_s))

    def page_seconds(self, now_s: float) -> float:
        """Page seconds since construction."""
        pages, since_s, before = self._state
        return before + pages * max(0.0, now_s - since_s)
