"""Pages of an engine that go back to the pool only when nothing can write them any more.

A transfer that missed its deadline may still write into its pages later (NIXL cannot revoke
access). Such pages wait here until the store says that the transfer is over. Not thread-safe:
the worker's lock guards it, like the batching that takes pages from the same pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.engine.pages import PagePool


class PageGuard:
    def __init__(self, pool: PagePool, pending_pages: Callable[[], set[int]]) -> None:
        """`pending_pages` names the pages that unresolved transfers may still write."""
        self._pool = pool
        self._pending_pages = pending_pages
        self._waiting: list[int] = []  # given back by their users, perhaps still written

    def release(self, pages: Sequence[int]) -> None:
        self._waiting += pages
        self.settle()

    def settle(self) -> None:
        """Return what is safe by now; the worker calls it at every turn."""
        if self._waiting:
            pending = self._pending_pages()
            self._pool.release([page for page in self._waiting if page not in pending])
            self._waiting = [page for page in self._waiting if page in pending]

    @property
    def used_pages(self) -> int:
        self.settle()
        return self._pool.used_pages

    def check(self) -> None:
        self._pool.check()
