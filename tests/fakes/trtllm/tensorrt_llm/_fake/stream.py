"""A CUDA stream in miniature: work runs later, in order, in a thread of its own.

So a connector that reads a page before the forward pass that fills it has run gets old bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

WAIT_S = 30.0


class FakeEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        if not self._reached.wait(WAIT_S):
            raise RuntimeError("an event of a fake stream was never reached")

    def reach(self) -> None:
        self._reached.set()


class FakeStream:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()

    def run(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.run(event.reach)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.run(event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # shown at the next synchronize
                self._error = self._error or error
