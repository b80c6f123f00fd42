"""Virtual time: a heap of things to do, done in the order of their times.

What is due at one moment is done in the order in which it was asked for, so a run is the same every
time. Nothing here looks at a real clock.
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
        """Until nothing is left to do.

        Without the collector of cycles: a run makes few, and looking for them among a million live
        objects again and again takes a tenth of its time.
        """
        heap, was_collecting = self._heap, gc.isenabled()
        gc.disable()
        try:
            while heap:
                self.now_s, _, action, arguments = heappop(heap)
                action(*arguments)
        finally:
            if was_collecting:
                gc.enable()
