"""Copies between the pages of a GPU and their mirror in host memory, beside the steps.

Each direction has a stream of its own, tied to the computing stream by events, so that nobody waits
for more than he needs:

    in:   what the steps had begun when the last of them returned ──event──▶ copies
          copies ──event──▶ a step that reads or writes one of these pages; other steps do not wait
    out:  computing so far ──event──▶ copies ──event──▶ the thread that wants to read them

A page that is on its way in belongs to one request; whoever gets the page after it may not import
anything, but computes in it: so a step waits for all pages that it has, also those that it only
writes (`PagesArriving`).

`HereQueue` is the twin without CUDA: the same calls, done at once. Not here: the memory itself
(backends/engine/torch/kv_memory.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PageCopy = tuple[torch.Tensor, torch.Tensor]  # target, source


class Done(Protocol):
    def synchronize(self) -> None:
        """This thread waits until it is."""
        ...

    def hold(self) -> None:
        """What the calling thread's computing stream gets from now on waits until it is."""
        ...

    def is_over(self) -> bool: ...


class CopyQueue(Protocol):
    def bring(self, copies: Sequence[PageCopy]) -> Done:
        """Into pages, after the steps that have returned. From any thread."""
        ...

    def fetch(self, copies: Sequence[PageCopy]) -> Done:
        """Out of pages, after what the computing stream has so far. From any thread."""
        ...

    def step_is_begun(self) -> None:
        """All of a step is on the computing stream. From the engine's thread, before it returns."""
        ...


class HereQueue:
    def bring(self, copies: Sequence[PageCopy]) -> Done:
        for target, source in copies:
            target.copy_(source)
        return _Over()

    def fetch(self, copies: Sequence[PageCopy]) -> Done:
        return self.bring(copies)

    def step_is_begun(self) -> None:
        """It is over."""


class _Over:
    def synchronize(self) -> None:
        """It is."""

    def hold(self) -> None:
        """Nothing to wait for."""

    def is_over(self) -> bool:
        return True


class StreamQueue:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._begun: torch.cuda.Event | None = None

    def bring(self, copies: Sequence[PageCopy]) -> Done:
        begun = self._begun
        with torch.cuda.stream(self._in):
            if begun is not None:
                self._in.wait_event(begun)
            return self._issued(copies, self._in)

    def fetch(self, copies: Sequence[PageCopy]) -> Done:
        computed = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(computed)
            return self._issued(copies, self._out)

    def step_is_begun(self) -> None:
        self._begun = torch.cuda.current_stream(self._device).record_event()

    def _issued(self, copies: Sequence[PageCopy], stream: torch.cuda.Stream) -> Done:
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        return _StreamDone(stream.record_event(), self._device)


class _StreamDone:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_over(self) -> bool:
        return self._event.query()


class PagesArriving:
    """What of the pages is on its way in. A unit is a layer of a page. Thread-safe."""

    def __init__(self, units: int) -> None:
        self._lock = threading.Lock()
        self.tickets = np.zeros(units, dtype=np.int64)  # of each unit's last copy; 0: none
        self._under_way: dict[int, Done] = {}
        self._last = 0

    def sent(self, units: NDArray[np.int64], done: Done) -> None:
        """`units`: what of `tickets` this copy brings."""
        with self._lock:
            over = [ticket for ticket, it in self._under_way.items() if it.is_over()]
            for ticket in over:
                del self._under_way[ticket]
            self._last += 1
            self._under_way[self._last] = done
            self.tickets[units] = self._last

    def hold(self, units: NDArray[np.int64]) -> None:
        """The computing stream goes on when these are there."""
        if not self._under_way:
            return
        with self._lock:
            for ticket in np.unique(self.tickets[units]).tolist():
                if (done := self._under_way.get(ticket)) is not None:
                    done.hold()
            self.tickets[units] = 0


def runs(pages: Sequence[int]) -> Iterator[slice]:
    """Pages that lie one after the other, each with the next: one copy instead of several."""
    first = stop = None
    for page in pages:
        if page == stop:
            stop = page + 1
            continue
        if first is not None:
            yield slice(first, stop)
        first, stop = page, page + 1
    if first is not None:
        yield slice(first, stop)
