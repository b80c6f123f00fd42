"""The clock of the replay: arrivals, prefill passes, hand-overs and decode spans in order of time.

A scheduler sees each arrival and may be told what follows (Scheduler); it chooses the workers and
the place in the queue, the engine does the rest.

Not here: the engine's rules (prefill_worker.py, decode_worker.py, blocks.py, timing.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from conductor.load.step_sharing import ALWAYS
from loadtest.simulator.dynamo.blocks import Watcher
from loadtest.simulator.dynamo.decode_worker import DecodeWorker
from loadtest.simulator.dynamo.job import Job
from loadtest.simulator.dynamo.prefill_worker import PrefillWorker


class Scheduler(Protocol):
    """Who decides. Every method gets the time of the virtual clock in seconds."""

    def watcher(self, prefill: int) -> Watcher | None:
        """Told about the blocks of this prefill worker's cache; None: nobody is."""

    def attach(self, replay: Replay) -> None:
        """Before the first request."""

    def arrive(self, job: Job, now_s: float) -> bool:
        """Choose `prefill`, `order_key_s` and perhaps `decode`; False rejects."""

    def prefilled(self, job: Job, now_s: float) -> None:
        """Its prompt is computed. Here at the latest `decode` is chosen."""

    def finished(self, job: Job, now_s: float) -> None:
        """Its last token is there."""


class Replay:
    """One run over a list of jobs in order of arrival."""

    def __init__(
        self, scheduler: Scheduler, blocks: int, prefills: int = 2, decodes: int = 2,
        overhead_tokens: float = ALWAYS,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.now_s = 0.0
        self.prefills = [
            PrefillWorker(number, blocks, scheduler.watcher(number), overhead_tokens)
            for number in range(prefills)
        ]
        self.decodes = [DecodeWorker(number, blocks) for number in range(decodes)]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.unfinished = 0
        scheduler.attach(self)

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (due_s, next(self._order), action))

    def run(self, jobs: Sequence[Job], arrived: Callable[[], None] = lambda: None) -> None:
        """Play all of them to the end; `arrived` is called after each arrival."""
        self.unfinished = len(jobs)
        arrivals = iter(jobs)
        coming = next(arrivals, None)
        heap = self._heap
        while coming is not None or heap:
            if coming is None or (heap and heap[0][0] < coming.arrived_s):
                self.now_s, _, action = heappop(heap)
                action()
                continue
            self.now_s = coming.arrived_s
            # All that arrive at one moment are in their queues before a pass starts.
            came = []
            while coming is not None and coming.arrived_s == self.now_s:
                came.append(coming)
                coming = next(arrivals, None)
            for job in came:
                self._arrive(job)
                arrived()
            for worker in self.prefills:
                self._prefill(worker)

    def _arrive(self, job: Job) -> None:
        if self.scheduler.arrive(job, self.now_s):
            self.prefills[job.prefill].add(job)
        else:
            job.is_rejected = True
            self.unfinished -= 1

    def _prefill(self, worker: PrefillWorker) -> None:
        if worker.is_busy:
            return
        seconds, _ = worker.start_pass(self.now_s)
        if worker.is_busy:
            self.at(self.now_s + seconds, lambda: self._prefilled(worker))

    def _prefilled(self, worker: PrefillWorker) -> None:
        chosen: dict[DecodeWorker, None] = {}  # what ends at one moment is pending before it starts
        for job in worker.end_pass():
            job.prefilled_s = self.now_s
            self.scheduler.prefilled(job, self.now_s)
            decode = self.decodes[job.decode]
            decode.pending.append(job)
            chosen[decode] = None
        for decode in chosen:
            if decode.is_idle:
                self._decode(decode)
            else:
                self._watch(decode, decode.cut(self.now_s))
        self._prefill(worker)

    def _decode(self, worker: DecodeWorker) -> None:
        """At a boundary: take over, free the sources, and plan the next steps."""
        came, end_s = worker.plan(self.now_s)
        for job in came:
            source = self.prefills[job.prefill]
            source.release(job)
            self._prefill(source)
        if end_s is not None:
            self._watch(worker, end_s)

    def _watch(self, worker: DecodeWorker, end_s: float) -> None:
        span = worker.span
        self.at(end_s, lambda: self._stepped(worker, span))

    def _stepped(self, worker: DecodeWorker, span: int) -> None:
        if span != worker.span:
            return
        for job in worker.end_span(self.now_s):
            self.unfinished -= 1
            self.scheduler.finished(job, self.now_s)
        self._decode(worker)

    def check(self) -> None:
        """Prove the invariants of every worker's blocks."""
        for pool in [w.pool for w in self.prefills] + [w.pool for w in self.decodes]:
            pool.check()
