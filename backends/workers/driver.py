"""What a worker asks of its engine's driver.

A worker brings KV in, decides who gets pages, takes KV out and answers. Between, its driver runs
the engine in the engine's own way: one computes step by step (step_driver.py), another batches by
itself (trtllm/). A driver says what came of a job by calling the worker's own verbs, which
`PrefillWorker` and `DecodeWorker` name.

A job meets its driver in this order: `check` when it is submitted, `start` when its KV is in its
pages, then steps; `abort` when it leaves, however it ends, and `free` behind the writer's last work
for it. One that leaves early meets no `start`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from backends.engine.batching.layer_passes import LayerWindows
from backends.engine.interface import ServingEngine
from backends.workers.kv_loader import KvLoader
from backends.workers.protocol import WorkerMessage
from mooncake_store.client.store import Store
from mooncake_store.layout import PageLayout
from mooncake_store.wire.mailbox import MESSAGE_BYTES_MAX

W = TypeVar("W")  # the worker that it drives
J = TypeVar("J")  # that worker's jobs
Samples = Sequence[tuple[int, int, float]]


class Driver(ABC, Generic[W, J]):
    engine: ServingEngine
    is_native: bool = False  # the engine hands KV over by itself
    windows: LayerWindows | None = None  # where long prompts can pass layer by layer
    draws_by_guide: bool = False  # tokens are drawn here, so a guide (text/guides.py) is of use
    _worker: W  # from `begin` on

    @property
    def hardware(self) -> str:
        """Whose speed `measure` finds; "" for this machine's CPU."""
        return ""

    @abstractmethod
    def measure(self, budget_s: float) -> Samples:
        """How fast it computes, for the machine profile: before `begin`, while nothing else runs.

        (new tokens, tokens before them, seconds) of prefill; (requests, their tokens, seconds of a
        step) of decode.
        """

    def begin(self, worker: W) -> None:
        """From now on the worker takes jobs, and hears of them."""
        self._worker = worker

    def make_loader(self, store: Store, pages: PageLayout, deadline_s: float) -> KvLoader:
        """What brings blocks into the engine's pages."""
        return KvLoader(store, pages, self.engine.kv_pool, deadline_s)

    def check(self, job: J) -> None:
        """Raises ServingError for a job that this engine cannot serve. From any thread."""

    def has_room(self) -> bool:
        """Another prompt should be admitted now, if there are pages. With the lock held."""
        return True

    @abstractmethod
    def start(self, job: J) -> None:
        """All KV that the job comes with is in its pages: compute. In a loader's thread.

        The worker's `join_batch` says whether the job is still there. Raises ServingError or
        StoreError: the job fails.
        """

    @abstractmethod
    def next_step(self, now_s: float) -> Callable[[], None] | None:
        """What the engine's thread does next, without the lock; None: wait for something new.

        Called at every turn of that thread, with the lock held: also the place to look after an
        engine that runs by itself.
        """

    def abort(self, job: J) -> None:
        """Nobody wants further tokens of this job. With the lock held; also too late, or early."""

    @abstractmethod
    def free(self, job: J, pages: list[int], then: Callable[[], None] = lambda: None) -> None:
        """The job has left: release its pages when the engine neither reads nor writes them, nor
        what is leased for it, and call `then`.

        In the writer's thread, behind what it had to do for the job.
        """

    @property
    def is_drained(self) -> bool:
        """Of the jobs that have left nothing is still to be done. With the lock held."""
        return True

    def series(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """(metric, labels, value): what the engine itself has for the metrics page."""
        return ()

    # -- what an engine that is spread over several workers needs (pipeline/)

    @property
    def is_available(self) -> bool:
        """Jobs can be taken. With the lock held."""
        return True

    @property
    def message_bytes_max(self) -> int:
        """Of a frame that comes to the worker's inbox from another host."""
        return MESSAGE_BYTES_MAX

    def heard(self, message: WorkerMessage) -> None:
        """A message that is not the worker's own business. In the inbox's thread."""

    def prefix_loader(self, loader: KvLoader) -> KvLoader:
        """What brings the cached prefix into the pages, which `loader` does here."""
        return loader

    def behind(self, job: J, action: Callable[[], None]) -> None:
        """`action` when nobody elsewhere is at the pages of a job that leaves. With the lock
        held."""
        action()

    def close(self) -> None:
        """End the engine; also before `begin`, and twice."""
        self.engine.close()


class DecodeDriver(Driver[W, J]):
    can_preempt: bool = False  # nothing of a job is in the engine between two steps but its pages

    def has_read(self, job: J) -> bool:
        """What was handed over is in its pages, and nobody reads it where it lies any more."""
        return True

    @abstractmethod
    def blocks_due(self, handed_over: int, kv_tokens: int) -> int:
        """How many leading blocks must be handed over of a request with so much KV.

        `handed_over`: as many came. An engine that computes a prompt again can do with none.
        """
