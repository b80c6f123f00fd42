"""Common part of the drivers of connected engines: engines with a process and pages of their own.

Such an engine batches by itself. A request is *staged* first: the connector in the engine's
processes learns where its blocks are. Then the request is submitted. The engine and its connector
report in threads of their own, in any order. The worker's turns only supervise the engine.

A worker that changes its role makes another driver for the same engine (`EngineUse`).

Not here: the engines (engine/connected/, engine/trtllm/), the places of blocks (places.py).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from backends.config_pbtxt import DecodeConfig, PrefillConfig
from backends.engine.connected.channel import ChannelError, Listener
from backends.engine.connected.generation import ConnectedEngine, EngineHealth
from backends.engine.connected.messages import Stage
from backends.errors import WorkerUnavailable
from backends.workers.connected.places import PlacedLoader, Regions
from backends.workers.driver import Driver
from backends.workers.kv_loader import KvLoader
from backends.workers.worker import JobWorker
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.layout import PageLayout

log = logging.getLogger(__name__)
UNCLAIMED_S_MAX = 1.0  # the connector's message may come this much later than the engine's tokens
UNSTAGE_S_MAX = 60.0  # a call waits COPIES_S_MAX at most; an engine that compiles is not dead

W = TypeVar("W", bound=JobWorker[Any])
J = TypeVar("J")
# Makes the engine. Arguments: listener of the connector, function that gets the seconds of a step.
MakeEngine = Callable[[Listener, Callable[[float], None]], ConnectedEngine]


class EngineUse:
    """An engine, and the newest driver that was made for it. It passes the engine's reports on."""

    def __init__(self, make_engine: MakeEngine) -> None:
        """Raises ConfigError. Making an engine with real weights takes minutes."""
        self.driver: ConnectedDriver[Any, Any] | None = None
        self._regions: Regions | None = None
        self.engine = make_engine(self, self._on_step)

    def regions(self, store: WorkerStore) -> Regions:
        """The segments that the ranks have mapped. Later drivers get the same."""
        if self._regions is None:
            self._regions = Regions(self.engine.host, store)
        return self._regions

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        if self.driver is not None:
            self.driver.claimed(request_id, local_tokens, loaded_tokens)

    def loaded(self, request_id: str) -> None:
        if self.driver is not None:
            self.driver.loaded(request_id)

    def saved(self, request_id: str, tokens: int) -> None:
        if self.driver is not None:
            self.driver.saved(request_id, tokens)

    def broken(self, reason: str) -> None:
        if self.driver is not None:
            self.driver.broken(reason)

    def _on_step(self, step_s: float) -> None:
        if self.driver is not None:
            self.driver.took_step(step_s)


class ConnectedDriver(Driver[W, J]):
    engine: ConnectedEngine
    preempts_prompts = False

    def __init__(self, worker: PrefillConfig | DecodeConfig, use: EngineUse) -> None:
        self._is_serving = False
        self._regions: Regions | None = None  # None: the engine has no connector
        self._placed: PlacedLoader | None = None  # likewise
        self._transfer_s_max = worker.transfer_s_max
        self._block_tokens = worker.block_tokens
        self._health = EngineHealth(lambda reason: self._worker.process.lose(reason))
        self._use, self.engine = use, use.engine
        self.is_native, self.hardware = self.engine.is_native, self.engine.hardware
        self._staged = StagedPages(
            self.engine, worker.transfer_s_max, self._failed_for, self.broken
        )
        use.driver = self

    def make_loader(self, store: WorkerStore, pages: PageLayout, deadline_s: float) -> KvLoader:
        if not self.engine.is_connected:
            return super().make_loader(store, pages, deadline_s)
        self._regions = self._use.regions(store)
        self._placed = PlacedLoader(store, pages, self.engine.kv_pool, deadline_s, self._regions)
        return self._placed

    @property
    def _places(self) -> PlacedLoader:
        assert self._placed is not None, "this engine has no connector"
        return self._placed

    def begin(self, worker: W) -> None:
        super().begin(worker)
        self._is_serving = True

    def series(self) -> Iterable[tuple[str, dict[str, str], float]]:
        stats = self.engine.stats
        return stats.series() if stats.raw else ()

    def close(self) -> None:
        self._is_serving = self._staged.is_open = False
        self.engine.close()

    # -- reports of the engine, in its threads

    @abstractmethod
    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...

    @abstractmethod
    def loaded(self, request_id: str) -> None: ...

    @abstractmethod
    def saved(self, request_id: str, tokens: int) -> None: ...

    def broken(self, reason: str) -> None:
        """The connector does not work any more. Ignored during the start and the end."""
        if self._is_serving and not self._worker.is_closing:
            self._health.lose(reason)

    def took_step(self, step_s: float) -> None:
        if self._is_serving:  # otherwise the engine's speed is being measured
            self._worker.process.steps.took(step_s, self._estimated_s())
            self._worker.process.watch.progressed(time.monotonic())

    def _estimated_s(self) -> float:
        """Estimated duration of a step of the running requests; 0: unknown."""
        return 0.0

    def _failed(self, error: Exception) -> None:
        """A generation failed. If its request is not the cause, the engine may be lost."""
        if isinstance(error, WorkerUnavailable):
            self._failed_for(str(error))

    def _failed_for(self, reason: str) -> None:
        """Count a failure, but not while the worker closes."""
        if not self._worker.is_closing:
            self._health.failed(reason)

    # -- turns of the engine loop

    def _look_after(self, now_s: float, is_busy: bool, predicted_s: float) -> None:
        """Supervise the engine. `is_busy`: it has something to compute. The caller holds the
        lock."""
        if not self.engine.llm.is_healthy:
            self.broken("the engine says that its processes have failed")
        self._worker.process.watch.is_busy(now_s, is_busy, predicted_s)
        if self._regions is not None:
            self._regions.look()


class StagedPages:
    """Pages whose places the engine's processes may copy from or to.

    A page is given to a request, staged and unstaged. It is free when the connector has reported
    that no copy uses it any more. Without that report the page is lost on purpose, because its next
    request could get wrong KV.
    """

    def __init__(
        self,
        engine: ConnectedEngine,
        timeout_s: float,
        on_failed: Callable[[str], None],
        on_dead: Callable[[str], None],
    ) -> None:
        """Both are called from any thread. `on_failed`: the connector did not accept a stage within
        `timeout_s`. `on_dead`: the connector did not answer when pages were given back."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._on_dead = on_dead
        self.lost_pages = 0
        self.is_open = True  # False: the engine ends with its memory, so no page is lost

    def stage(self, stage: Stage) -> None:
        """Returns when the connector knows the stage. The prompt must be submitted after that."""
        try:
            self._engine.host.stage(stage, self._timeout_s).result()
        except ChannelError as error:
            self._on_failed(str(error))
            raise WorkerUnavailable(str(error)) from error

    def give_back(self, request_id: str, pages: list[int], then: Callable[[bool], None]) -> None:
        """Unstage the request, even if its staging failed. `then(True)` is called when no copy uses
        its pages any more, `then(False)` when that will never be known."""

        def over(error: BaseException | None) -> None:
            if error is not None and self.is_open:
                self.lost_pages += len(pages)
                log.error("%d pages of %s are lost: %s", len(pages), request_id, error)
                self._on_dead(str(error))
            then(error is None)

        def unstaged(future: Future[None]) -> None:
            over(future.exception())

        try:
            asked = self._engine.host.unstage(request_id, UNSTAGE_S_MAX)
        except ChannelError as error:
            over(error)
        else:
            asked.add_done_callback(unstaged)
