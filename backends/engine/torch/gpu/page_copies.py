"""Copies between the pages of a GPU and their mirror in host memory, concurrent with the steps.

Each direction has its own CUDA stream. CUDA events order these streams and the computing stream, as
follows (A ──▶ B: B waits for A):

    in    the latest completely queued step ──▶ copies ──▶ steps that read or write these pages
    out   computation that is queued so far ──▶ copies ──▶ the thread that reads the mirror

A step waits for copies into all its pages, including pages that it only writes (`PagesArriving`).
Reason: a request may end while a copy into its page is pending. The next request with this page may
import nothing, and only compute in the page.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

PageCopy = tuple[torch.Tensor, torch.Tensor]  # target, source


class Done:
    """Handle of started copies. In this base class, the copies are done already."""

    def synchronize(self) -> None:
        """Block the calling thread until the copies are done."""

    def hold(self) -> None:
        """Make later work on the calling thread's computing stream wait for the copies."""

    def is_over(self) -> bool:
        return True


class CopyQueue:
    """Copies synchronously, for devices without CUDA."""

    def bring(self, copies: Sequence[PageCopy]) -> Done:
        """Copy into pages, after all completely queued steps. Any thread may call this."""
        for target, source in copies:
            target.copy_(source)
        return Done()

    def fetch(self, copies: Sequence[PageCopy]) -> Done:
        """Copy from pages, after all work on the computing stream. Any thread may call this."""
        return self.bring(copies)

    def step_is_begun(self) -> None:
        """Record that a step is completely queued. Only the engine's thread may call this."""


class StreamQueue(CopyQueue):
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


@dataclass(frozen=True, slots=True)
class _StreamDone(Done):
    event: torch.cuda.Event  # follows the copies in their stream
    device: torch.device

    def synchronize(self) -> None:
        self.event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def is_over(self) -> bool:
        return self.event.query()


class PagesArriving:
    """Tracks pending copies into pages. A *unit* is one layer of one page. Thread-safe."""

    def __init__(self, units: int) -> None:
        self._lock = threading.Lock()
        self.tickets = np.zeros(units, dtype=np.int64)  # unit -> number of its last copy, or 0
        self._under_way: dict[int, Done] = {}  # number of a pending copy -> its handle
        self._last = 0  # number of the last copy; numbers begin at 1

    def sent(self, units: NDArray[np.int64], done: Done) -> None:
        """Record that the copy with handle `done` writes these units."""
        with self._lock:
            over = [ticket for ticket, it in self._under_way.items() if it.is_over()]
            for ticket in over:
                del self._under_way[ticket]
            self._last += 1
            self._under_way[self._last] = done
            self.tickets[units] = self._last

    def hold(self, units: NDArray[np.int64]) -> None:
        """Make the computing stream wait for pending copies into these units. The units then count
        as copied, so that no later step waits again."""
        if not self._under_way:
            return
        with self._lock:
            for ticket in np.unique(self.tickets[units]).tolist():
                if (done := self._under_way.get(ticket)) is not None:
                    done.hold()
            self.tickets[units] = 0


def runs(pages: Sequence[int]) -> Iterator[slice]:
    """Slices of consecutive page numbers, each of which one copy can move."""
    for _, numbered in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        run = [page for _, page in numbered]
        yield slice(run[0], run[-1] + 1)
