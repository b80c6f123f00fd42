"""What the drivers of TensorRT-LLM have in common: it batches by itself, a worker hands it prompts.

A request is *staged* (the connector in the engine's processes knows its pages and keys) and only
then submitted. What the engine and its connector say comes in threads of theirs, in any order. The
worker's turns only look after the engine: is it alive, busy, hung.

Not here: tensorrt_llm itself (engine/trtllm/), what is in the pages (kv_loader.py, kv_writer.py),
where these lie (places.py).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from backends.config_pbtxt import DecodeConfig, PrefillConfig, checkpoint_folder
from backends.engine.connected.channel import ChannelError
from backends.engine.connected.generation import EngineHealth
from backends.engine.connected.messages import Stage
from backends.engine.model_config import CheckpointError
from backends.engine.trtllm.engine import TrtllmEngine
from backends.engine.trtllm.kv_shape import read_kv_dtype, read_kv_shape
from backends.engine.trtllm.settings import EngineSpec, TrtllmConfig
from backends.engine.trtllm.stats import IterationStats
from backends.errors import ConfigError, WorkerUnavailable
from backends.workers.driver import Driver
from backends.workers.kv_loader import KvLoader
from backends.workers.trtllm.places import PlacedLoader, Regions
from backends.workers.worker import JobWorker
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.layout import PageLayout

log = logging.getLogger(__name__)
UNCLAIMED_S_MAX = 1.0  # the connector's message may arrive so long after the engine's tokens
UNSTAGE_S_MAX = 60.0  # nobody waits for it; an engine that is compiling something is not dead

W = TypeVar("W", bound=JobWorker[Any])
J = TypeVar("J")


class TrtllmDriver(Driver[W, J]):
    engine: TrtllmEngine

    def __init__(
        self,
        role: str,
        worker_id: str,
        worker: PrefillConfig | DecodeConfig,
        config: TrtllmConfig,
        repository: str,
        requests_max: int,
        chunk_tokens: int = 0,
    ) -> None:
        """The last two: what one step may have. Raises ConfigError; takes minutes with real
        weights."""
        self.config = config
        self.is_native = config.handoff == "native"
        self._is_serving = False
        self._regions: Regions | None = None  # of an engine with a connector
        self._placed: PlacedLoader | None = None
        self._transfer_s_max = worker.transfer_s_max
        self._health = EngineHealth(lambda reason: self._worker.process.lose(reason))
        self._block_tokens = worker.block_tokens
        folder = checkpoint_folder(worker.checkpoint, repository)
        spec = EngineSpec(
            role=role,
            dtype=worker.dtype,
            kv_dtype=worker.kv_dtype,
            block_tokens=worker.block_tokens,
            kv_pages=_kv_pages(worker, config, folder),
            context_tokens_max=worker.context_tokens_max,
            requests_max=requests_max,
            chunk_tokens=chunk_tokens,
        )
        self.engine = TrtllmEngine(
            worker_id, spec, config, folder, repository, self, self._on_stats
        )
        self._staged = StagedPages(
            self.engine, worker.transfer_s_max, self._failed_for, self.broken
        )

    @property
    def hardware(self) -> str:
        return self.engine.hardware

    def make_loader(self, store: WorkerStore, pages: PageLayout, deadline_s: float) -> KvLoader:
        if not self.engine.is_connected:
            return super().make_loader(store, pages, deadline_s)
        self._regions = Regions(self.engine.host, store)
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

    # -- what the engine says, in threads of its own

    @abstractmethod
    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None: ...

    @abstractmethod
    def loaded(self, request_id: str) -> None: ...

    @abstractmethod
    def saved(self, request_id: str, tokens: int) -> None: ...

    def broken(self, reason: str) -> None:
        """The connector does not work any more. While we start or end, that is no news."""
        if self._is_serving and not self._worker.is_closing:
            self._health.lose(reason)

    def _on_stats(self, stats: IterationStats) -> None:
        if self._is_serving:  # else it is being measured
            self._worker.process.steps.took(stats.step_s, self._estimated_s())
            self._worker.process.watch.progressed(time.monotonic())

    def _estimated_s(self) -> float:
        """Of a step of what runs now; 0: nobody knows."""
        return 0.0

    def _failed(self, error: Exception) -> None:
        """One generation failed; through no fault of its own, the engine may be gone."""
        if isinstance(error, WorkerUnavailable):
            self._failed_for(str(error))

    def _failed_for(self, reason: str) -> None:
        """Who closes leaves in order: what fails then ends its own request and no more."""
        if not self._worker.is_closing:
            self._health.failed(reason)

    # -- turns

    def _look_after(self, now_s: float, is_busy: bool, predicted_s: float) -> None:
        """It shows no steps, but it has something to compute or not; with the lock held."""
        if not self.engine.llm.is_healthy:
            self.broken("tensorrt_llm says that its processes have failed")
        self._worker.process.watch.is_busy(now_s, is_busy, predicted_s)
        if self._regions is not None:
            self._regions.look()


class StagedPages:
    """Pages whose places TensorRT-LLM's processes may copy from or to.

    A page is given to a request, staged (the connector knows it) and unstaged; only when the
    connector has said that no copy touches it any more does it go back. A page for which that is
    never said is lost, on purpose: handing it on could put one request's KV into another's.
    """

    def __init__(
        self,
        engine: TrtllmEngine,
        timeout_s: float,
        on_failed: Callable[[str], None],
        on_dead: Callable[[str], None],
    ) -> None:
        """These are called from any thread: `on_failed` when the connector did not take a stage,
        within `timeout_s`; `on_dead` when it did not answer when pages were to be given back."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._on_dead = on_dead
        self.lost_pages = 0
        self.is_open = True  # else the engine ends, and its memory with it: nothing is lost

    def stage(self, stage: Stage) -> None:
        """Returns when the connector knows it: only then may the prompt be submitted."""
        try:
            self._engine.host.stage(stage, self._timeout_s).result()
        except ChannelError as error:
            self._on_failed(str(error))
            raise WorkerUnavailable(str(error)) from error

    def give_back(self, request_id: str, pages: list[int], then: Callable[[bool], None]) -> None:
        """Unstage the request, also one whose staging failed. `then` is called when no copy touches
        its pages any more, with False when that will never be known."""
        try:
            unstaged = self._engine.host.unstage(request_id, UNSTAGE_S_MAX)
        except ChannelError as error:
            self._lose(request_id, pages, error)
            then(False)
            return

        def over(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._lose(request_id, pages, error)
            then(error is None)

        unstaged.add_done_callback(over)

    def _lose(self, request_id: str, pages: list[int], error: BaseException) -> None:
        if not self.is_open:
            return
        self.lost_pages += len(pages)
        log.error("%d pages of %s are lost: %s", len(pages), request_id, error)
        self._on_dead(str(error))


def _kv_pages(worker: PrefillConfig | DecodeConfig, config: TrtllmConfig, folder: Path) -> int:
    """Pages of the worker's KV memory. Raises ConfigError: a wrong checkpoint, too few bytes."""
    if worker.kv_pages:
        return worker.kv_pages
    try:
        shape = read_kv_shape(folder, config.tp_size, worker.context_tokens_max)
        found: list[str] = []
        dtype = read_kv_dtype(folder, worker.kv_dtype, worker.dtype, found)
        if found:
            raise CheckpointError(folder, found)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    layout = shape.layout(dtype, worker.block_tokens, config.tp_size)
    return worker.pages_max(layout.block_bytes)
