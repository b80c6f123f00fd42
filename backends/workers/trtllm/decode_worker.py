"""The decode worker on TensorRT-LLM: handed-over KV goes into its pages, it batches and decodes.

As with the torch engine (decode_worker.py) KV is read ahead into reserved pages while prefill
computes. Those are pages of the staging pool here: when all of it is there the request is *staged*
and submitted, as prompt and first token; the engine copies whole pages of its own from there and
computes the few tokens that are left. Blocks that it fills come back into pages that the request
has reserved for them, and go to the store. A request that has ended keeps its pages until the last
of its blocks came out, or a moment is over.

handoff "native": the engine gets KV from the prefill engine by itself; there is no connector, and
what it generates does not go to the store.

Not here: tensorrt_llm itself (engine/trtllm/).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.engine.trtllm.engine import TrtllmEngine
from backends.engine.trtllm.llm_thread import Order, Outcome, Running
from backends.engine.trtllm.messages import Stage
from backends.engine.trtllm.settings import TrtllmConfig
from backends.engine.trtllm.stats import EngineHealth, IterationStats
from backends.errors import ServingError, WorkerGone, WorkerUnavailable
from backends.workers.config import DecodeConfig, checkpoint_folder
from backends.workers.decode_job import DecodeClient, DecodeJob
from backends.workers.decode_worker import DecodeWorker
from backends.workers.protocol import DecodeRequest, Tokens, TokenUpdate
from backends.workers.trtllm.staged_pages import StagedPages
from backends.workers.worker import IDLE_WAIT_S, LOCK_S_MAX, end_process
from mooncake_store.block_keys import block_keys, chain_seed, packed_tokens
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
ENDS_WELL = ("length", "end_id", "stop_word")
# A block that the very last step filled may not come any more: the engine was done with it.
LAST_BLOCK_S_MAX = 1.0


class TrtllmDecodeJob(DecodeJob):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.running: Running | None = None
        self.is_staged = False
        self.staged_tokens = 0
        self.filled: list[int] = []  # blocks that are to go to the store once they are in a page
        self.saved_blocks = 0  # so many are, from the first on
        self.ended_s = 0.0

    def take_ready(self) -> list[int]:
        """Blocks that can go to the store now."""
        ready = [block for block in self.filled if block < self.saved_blocks]
        self.filled = [block for block in self.filled if block >= self.saved_blocks]
        return ready


@dataclass(frozen=True, slots=True)
class AnswerSink:
    """What the engine says of one request."""

    worker: TrtllmDecodeWorker
    job: TrtllmDecodeJob

    def tokens(self, token_ids: list[int]) -> None:
        self.worker.decoded(self.job, token_ids)

    def ended(self, outcome: Outcome) -> None:
        self.worker.ended(self.job, outcome)


class TrtllmDecodeWorker(DecodeWorker):
    def __init__(
        self, worker_id: str, config: DecodeConfig, repository: str, trtllm: TrtllmConfig
    ) -> None:
        self._trtllm = trtllm
        self._is_native = trtllm.handoff == "native"
        self._engine: Any = None
        self._health = EngineHealth(self._lost)
        self._staged_jobs: dict[str, TrtllmDecodeJob] = {}
        self._leaving: dict[str, tuple[TrtllmDecodeJob, list[int]]] = {}  # ended, blocks to come
        self._updates: dict[str, list[TokenUpdate]] = defaultdict(list)  # by front, of this moment
        try:
            super().__init__(worker_id, config, repository)
            self.worker.on_hung = self.broken
        except BaseException:
            if self._engine is not None:
                self._engine.close()
            raise

    def submit(self, request: DecodeRequest, ids: np.ndarray, client: DecodeClient) -> None:
        if self._health.is_lost:
            raise WorkerGone(f"{self.worker.worker_id} has lost its engine")
        if bool(request.native) != self._is_native:
            raise WorkerUnavailable(
                f"{self.worker.worker_id} has handoff {self._trtllm.handoff}, the prefill worker "
                "has another; give all workers the same"
            )
        super().submit(request, ids, client)

    def report(self) -> WorkerReport:
        report = super().report()
        return replace(report, is_draining=True) if self._health.is_lost else report

    def close(self, timeout_s: float) -> None:
        if not self._is_native:
            self._staged.is_closing = True
        super().close(timeout_s)

    # -- the engine

    def _own_engine(self, worker_id: str, config: DecodeConfig, repository: str) -> Any:
        folder = checkpoint_folder(config.checkpoint, repository)
        self._engine = TrtllmEngine(
            worker_id, config, self._trtllm, folder, repository, self, self._on_stats
        )
        if not self._is_native:
            self._staged = StagedPages(
                self._engine.host,
                config.transfer_s_max,
                self._release,
                self._health.failed,
                self.broken,
            )
        return self._engine

    def _on_stats(self, stats: IterationStats) -> None:
        if hasattr(self, "_estimate"):  # else still starting: it is being measured
            running, context_tokens = self._batching.running, self._batching.context_tokens
            estimated_s = self._estimate.step_s(running, context_tokens)
            self.worker.steps.took(stats.step_s, estimated_s)
            self.worker.watch.progressed(time.monotonic())

    def _job(self, *given: Any) -> TrtllmDecodeJob:
        return TrtllmDecodeJob(*given)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closing and not self._jobs and not self._leaving:
                    return
                if not self._engine.llm.is_healthy:
                    self.broken("tensorrt_llm says that its processes have failed")
                self._drop_stopped()
                self._pages.settle()
                self._admit()
                if not self._jobs:
                    self.worker.steps.batch_is_empty()
                self._let_go(time.monotonic())
                self._watch_engine(time.monotonic())
                self._lock.wait(IDLE_WAIT_S)

    def _watch_engine(self, now_s: float) -> None:
        """It shows no steps, but it has something to compute or not; with the lock held."""
        running = [job for job in self._jobs.values() if job.running is not None]  # type: ignore[attr-defined]
        predicted_s = self._estimate.step_s(len(running), self._batching.context_tokens)
        self.worker.watch.is_busy(now_s, bool(running), predicted_s)

    def _refuse_uncovered(self, request: DecodeRequest, kv_tokens: int) -> None:
        """All that is due, or nothing at all: then its engine computes the prompt."""
        if request.blocks:
            super()._refuse_uncovered(request, kv_tokens)

    def _blocks_due(self, kv_tokens: int) -> int:
        """Whole pages of the engine; it computes the tokens behind them again."""
        page = self._trtllm.page_tokens
        return 0 if self._is_native else super()._blocks_due(kv_tokens // page * page)

    def _loaded(self, job: DecodeJob) -> None:
        """In the loader's thread: stage, then submit."""
        assert isinstance(job, TrtllmDecodeJob)
        try:
            if not job.is_leaving and not self._is_native:
                self._stage(job)
            order = self._order(job)
        except ServingError as error:
            with self._lock:
                job.is_loading = False
                self._fail(job, error)
            return
        with self._lock:
            job.is_loading = False
            self._lock.notify_all()
            if job.is_leaving or job.request_id not in self._jobs:
                return  # dropped at the next turn, or gone with the engine
            self._batching.start(job.request_id, len(job.token_ids))
            job.running = self._engine.generate(order, AnswerSink(self, job))

    def _stage(self, job: TrtllmDecodeJob) -> None:
        ids, salt, page = (
            np.asarray(job.token_ids),
            job.request.cache_salt,
            self._trtllm.page_tokens,
        )
        seed = chain_seed(self.worker.fingerprint, cache_salt=salt)
        kv_tokens = len(ids) - 1  # the newest token's KV is nobody's yet
        job.is_staged, job.staged_tokens = True, len(ids)
        with self._lock:
            self._staged_jobs[job.request_id] = job
        self._staged.stage(Stage(
            job.request_id, bytes(packed_tokens(ids)), salt, seed,
            block_keys(ids, self._config.block_tokens, seed), list(job.pages),
            kv_tokens // page * page if job.request.blocks else 0,
        ))  # fmt: skip

    def _order(self, job: TrtllmDecodeJob) -> Order:
        sampling, done = job.request.sampling, len(job.output_ids)
        prompt = job.request.prompt_tokens
        if self._is_native:  # the first token counts, and is among what prefill's engine left
            params = self._engine.native_params(job.request_id, job.request.native)
            wanted = self._engine.sampling(
                sampling, done - 1, sampling.max_tokens - done + 1, prompt
            )
            return Order(job.token_ids[:-1], wanted, job.request.cache_salt, True, params)
        wanted = self._engine.sampling(sampling, done, sampling.max_tokens - done, prompt)
        return Order(list(job.token_ids), wanted, job.request.cache_salt)

    # -- what the engine says: in the LLM's thread, or in the channel's

    def decoded(self, job: TrtllmDecodeJob, token_ids: list[int]) -> None:
        self.worker.watch.progressed(time.monotonic())
        for token_id in token_ids:
            with self._lock:
                if job.request_id not in self._jobs or job.is_stopped or job.finish_reason:
                    return
                job.kv_grew()
                if job.full_block is not None:
                    job.filled.append(job.full_block)
                job.append(token_id)
                self._batching.computed([job.request_id])
                self.tokens_generated += 1
                self._put(job)
        if job.finish_reason:
            self._health.went_well()
            self._end(job)
        elif job.has_update:
            if not self._updates:
                self._engine.llm.soon(self._send_updates)
            self._updates[job.request.reply_inbox].append(job.take_update())

    def _send_updates(self) -> None:
        """One letter per front with what this turn of the LLM's loop brought."""
        updates, self._updates = self._updates, defaultdict(list)
        for inbox, of_front in updates.items():
            self.worker.outbox.send(inbox, Tokens(self.worker.incarnation, of_front))

    def ended(self, job: TrtllmDecodeJob, outcome: Outcome) -> None:
        if job.finish_reason or job.request_id not in self._jobs:
            return  # we saw its end before the engine did
        if outcome.error is not None:
            self._health_of(outcome.error)
            self._end(job, error=outcome.error)
        elif outcome.finish_reason == "stop":  # the end id itself is kept by some releases
            end_ids = job.request.sampling.end_ids
            self.decoded(job, list(end_ids[:1]))
            if not job.finish_reason:
                self._end(job, error=WorkerUnavailable("the engine stopped without an end id"))
        elif not job.is_stopped:
            reason = f"the engine ended it after {len(job.output_ids)} tokens: "
            error = WorkerUnavailable(reason + outcome.finish_reason)
            self._health_of(error)
            self._end(job, error=error)

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        with self._lock:
            job = self._staged_jobs.get(request_id)
        if job is None:
            return
        paths = {"loaded": loaded_tokens, "local": local_tokens}
        paths["computed"] = job.staged_tokens - loaded_tokens - local_tokens
        for path, tokens in paths.items():
            if tokens > 0:
                self.worker.observations.observe("mooncake_handover_tokens_total", tokens,
                                                 path=path)  # fmt: skip

    def saved(self, request_id: str, tokens: int) -> None:
        """So many leading tokens are in the pages, of every rank."""
        with self._lock:
            job = self._staged_jobs.get(request_id)
            if job is not None:
                job.saved_blocks = max(job.saved_blocks, tokens // self._config.block_tokens)
                self._put(job)
                self._lock.notify_all()

    def broken(self, reason: str) -> None:
        """The connector does not work any more. While we start or end, that is no news."""
        if hasattr(self, "worker") and not self._is_closing:
            self._health.lose(reason)

    def _health_of(self, error: Exception) -> None:
        if isinstance(error, WorkerUnavailable) and not self._is_closing:
            self._health.failed(str(error))

    def _lost(self, reason: str) -> None:
        if self._is_closing:
            return
        jobs = list(self._jobs.values())
        if self._lock.acquire(timeout=LOCK_S_MAX):
            self._lock.release()
            for job in jobs:
                self._end(job, error=WorkerUnavailable(reason))
        else:  # what hangs holds the lock
            for job in jobs:
                job.client.fail(WorkerUnavailable(reason))
        end_process(self.worker.deregister, self._engine.close)

    def _put(self, job: TrtllmDecodeJob) -> None:
        """With the lock held: once it has no more blocks to come, its pages may be given back, and
        that must stand behind this in the writer's line."""
        if ready := job.take_ready():
            self._writer.put_whole(job.put, ready)

    # -- and leaves

    def _end(self, job: DecodeJob, error: Exception | None = None) -> None:
        assert isinstance(job, TrtllmDecodeJob)
        if job.running is not None and job.finish_reason not in ("length", "end_id"):
            job.running.abort()  # also where only we know that a stop word ended it
        super()._end(job, error)

    def _freed(self, job: DecodeJob, pages: list[int]) -> None:
        """In the writer's thread, behind what it had to do for this job."""
        assert isinstance(job, TrtllmDecodeJob)
        if not job.is_staged:
            super()._freed(job, pages)
            return
        with self._lock:
            job.ended_s = time.monotonic()
            if job.finish_reason not in ENDS_WELL or self._health.is_lost:
                job.filled.clear()
            self._leaving[job.request_id] = (job, pages)
            self._lock.notify_all()

    def _let_go(self, now_s: float) -> None:
        """Those whose blocks all came out, or that took too long; with the lock held."""
        over = [
            (job, pages) for job, pages in self._leaving.values()
            if not job.filled or now_s - job.ended_s > LAST_BLOCK_S_MAX
        ]  # fmt: skip
        for job, pages in over:
            del self._leaving[job.request_id], self._staged_jobs[job.request_id]
            self._writer.then(self._give_back(job, pages))

    def _give_back(self, job: TrtllmDecodeJob, pages: list[int]) -> Callable[[], None]:
        def give_back() -> None:
            job.end_put()
            self.worker.owners.release(job.request_id)
            self._staged.give_back(job.request_id, pages)

        return give_back

    def _release(self, pages: list[int]) -> None:
        with self._lock:
            self._pages.release(pages)
            self._lock.notify_all()
