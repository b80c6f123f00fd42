"""Interface between a worker and its engine: what an engine must offer.

The worker loads KV, allocates pages, writes KV to the store and replies. A driver runs the engine:
step by step (step_driver.py), spread over several workers (pipeline/), or as an engine with a
process of its own (connected/). The contract:

* Compute this: after `start` returned or posted ENGINE_READY, the job takes part in steps (JOIN).
  The driver posts SAMPLED and COMPUTED for a prompt, and calls `decoded` of a decode worker.
* Copy this: the driver queues a write (worker.writer) as soon as KV is in the pages. It queues the
  last write of a prompt before it posts COMPUTED.
* Stop that: `leave` stops a job. ENGINE_LEFT follows when the engine neither reads nor writes the
  job's pages and slots, and all writes are queued. `leave` may come for a job that never started.
* What is your load: the worker calls `next_step` at each turn, and `has_room` before it admits a
  prompt.

The events are in lifecycle/events.py. Late events of a leaving job are ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from backends.engine.batching.layer_passes import RingLayout
from backends.engine.interface import ServingEngine
from backends.workers.kv_loader import KvLoader
from backends.workers.lifecycle.events import On
from backends.workers.protocol import WorkerMessage
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.layout import PageLayout
from mooncake_store.wire.mailbox import MESSAGE_BYTES_MAX

W = TypeVar("W")  # the worker
J = TypeVar("J")  # the worker's jobs
Samples = Sequence[tuple[int, int, float]]  # see Driver.measure


class Driver(ABC, Generic[W, J]):
    engine: ServingEngine
    is_native: bool = False  # the engine hands KV over by itself
    preempts_prompts: bool = True  # as in WorkerInfo
    rings: RingLayout | None = None  # layer ring buffers; None: no layer-wise prefill
    hardware: str = ""  # hardware whose speed `measure` measures; "": this machine's CPU
    draws_by_guide: bool = False  # the driver samples with a grammar matcher (text/guides.py)
    _worker: W  # set by `begin`

    @abstractmethod
    def measure(self, budget_s: float) -> Samples:
        """Measure the durations of steps, on an idle engine, before `begin`.

        Prefill: (new tokens, tokens before them, seconds). Decode: (sequences, context tokens of
        all sequences, seconds).
        """

    def begin(self, worker: W) -> None:
        """Set the worker. Jobs may be submitted from now on."""
        self._worker = worker

    def make_loader(self, store: WorkerStore, pages: PageLayout, deadline_s: float) -> KvLoader:
        """Create the loader of blocks into the engine's pages."""
        return KvLoader(store, pages, self.engine.kv_pool, deadline_s)

    def check(self, job: J) -> None:
        """Raise a ServingError if this engine cannot serve the job. From any thread."""

    def has_room(self) -> bool:
        """False: admit no prompt now, even if pages are free. The caller holds the lock."""
        return True

    @abstractmethod
    def start(self, job: J) -> On | None:
        """Prepare the engine for a job whose loaded KV is in its pages. Runs in a loader's thread.

        Returns ENGINE_READY, or None if the driver posts it. An exception fails the job.
        """

    @abstractmethod
    def next_step(self, now_s: float) -> Callable[[], None] | None:
        """The next step, which the engine's thread runs without the lock; None: wait.

        Called at every turn of the engine loop (worker.py), with the lock held. A driver whose
        engine batches by itself supervises the engine here.
        """

    @abstractmethod
    def leave(self, job: J) -> None:
        """Stop computing a job; ENGINE_LEFT follows. The caller holds the lock."""

    def park(self, pages: list[int]) -> None:
        """Keep the pages of a job that has left with an uncertain ENGINE_LEFT. The default is never
        to use them again. The caller holds the lock."""

    def series(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """(metric, labels, value): the engine's own metrics."""
        return ()

    # -- for an engine that is spread over several workers (pipeline/)

    @property
    def is_available(self) -> bool:
        """True if the engine can compute jobs. The caller holds the lock."""
        return True

    @property
    def message_bytes_max(self) -> int:
        """Size limit of a message to the worker's inbox from another host."""
        return MESSAGE_BYTES_MAX

    def on_message(self, message: WorkerMessage) -> None:
        """Handle a message that the worker itself does not handle. Runs in the inbox's thread."""

    def close(self) -> None:
        """End the engine. It may be called before `begin`, and twice."""
        self.engine.close()


class DecodeDriver(Driver[W, J]):
    can_preempt: bool = False  # True: between two steps, a job's only state is in its pages

    def has_read(self, job: J) -> bool:
        """True if the handed-over KV is in the job's pages, so that its leases may be released."""
        return True

    @abstractmethod
    def blocks_due(self, handed_over: int, kv_tokens: int) -> int:
        """Number of leading blocks that must be handed over for `kv_tokens` tokens.

        `handed_over`: number of blocks that were handed over. An engine that can compute the prompt
        again also accepts 0.
        """
