"""VRAM occupation cost: KV memory times the time that it stays taken.

The Mooncake paper's measure for what a prompt costs a prefill node beside computing, and why its
hand-over goes layer by layer. Counted at each change, so it is exact, whenever it is read.
Pure: time is an argument. Not here: the pages (pages.py), bytes per page (the worker's).
"""

from __future__ import annotations


class Occupation:
    """Changed by one thread at a time, read by any: the state is replaced as a whole."""

    def __init__(self, now_s: float) -> None:
        self._state = (0, now_s, 0.0)  # pages taken, since when, page seconds before that

    def changed(self, used_pages: int, now_s: float) -> None:
        """From now on so many pages are taken."""
        self._state = (used_pages, now_s, self.page_seconds(now_s))

    def page_seconds(self, now_s: float) -> float:
        """Since it was made."""
        pages, since_s, before = self._state
        return before + pages * max(0.0, now_s - since_s)
