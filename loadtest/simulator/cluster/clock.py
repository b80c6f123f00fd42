"""Virtual time: a heap of actions, run in the order of their due times.

Actions of one due time run in the order in which they were scheduled, so every run is the same.
Nothing here reads a real clock.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    """`now_s` moves only inside `run`. Not thread-safe."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, due_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` at `due_s`, which is not before now."""
        assert due_s >= self.now_s, f"{due_s} s has passed, it is {self.now_s} s"
        self._asked += 1
        heappush(self._heap, (due_s, self._asked, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + seconds, action, *arguments)

    def run(self) -> None:
        """Run actions until the heap is empty, without the collector of cycles: a run makes few,
        and scanning a million live objects takes a tenth of its time."""
        heap, was_collecting = self._heap, gc.isenabled()
        gc.disable()
        try:
            while heap:
                self.now_s, _, action, arguments = heappop(heap)
                action(*arguments)
        finally:
            if was_collecting:
                gc.enable()
