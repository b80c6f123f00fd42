"""The prefill worker on TensorRT-LLM: it batches and computes, we bring prefixes and take KV out.

A prompt waits its turn, gets pages of the staging pool, has its cached prefix loaded into them as
with the torch engine (prefill_worker.py), is *staged* (the connector in the engine's processes
knows its pages and keys) and only then submitted, for one token. What the engine computes comes
back block by block into the pages and goes to the store; the answer leaves after the last one.

The engine takes prompts in the order in which it gets them, so only as many are given to it as
keep it busy for two steps: the others wait in our queue, whose order is the conductor's.

handoff "native": the engine hands KV to the decode engine by itself, so the answer does not wait
for the store; blocks go there all the same, for the next prompt with that prefix.

Not here: tensorrt_llm itself (engine/trtllm/).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.engine.batching.batching import Chunk
from backends.engine.trtllm.engine import TrtllmEngine
from backends.engine.trtllm.llm_thread import Order, Outcome
from backends.engine.trtllm.messages import Stage
from backends.engine.trtllm.settings import TrtllmConfig
from backends.engine.trtllm.stats import EngineHealth, IterationStats
from backends.errors import WorkerGone, WorkerUnavailable
from backends.workers.config import PrefillConfig, checkpoint_folder
from backends.workers.prefill_job import PrefillClient, PrefillJob
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import PrefillRequest
from backends.workers.trtllm.prefill_job import TrtllmPrefillJob
from backends.workers.trtllm.staged_pages import StagedPages
from backends.workers.worker import IDLE_WAIT_S, LOCK_S_MAX, end_process
from mooncake_store.block_keys import chain_seed, packed_tokens
from mooncake_store.layout import blocks_touched
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
STEPS_AHEAD = 2  # so many steps' tokens are in the engine's own queue
UNCLAIMED_S_MAX = 1.0  # the connector's word may come a little after the engine's
SAME_STEP_S = 0.001  # first tokens that come so close to each other are of one step


@dataclass(frozen=True, slots=True)
class PromptSink:
    """What the engine says of one prompt."""

    worker: TrtllmPrefillWorker
    job: TrtllmPrefillJob

    def tokens(self, token_ids: list[int]) -> None:
        self.worker.computed(self.job, token_ids[0])

    def ended(self, outcome: Outcome) -> None:
        self.worker.ended(self.job, outcome)


class TrtllmPrefillWorker(PrefillWorker):
    def __init__(
        self, worker_id: str, config: PrefillConfig, repository: str, trtllm: TrtllmConfig
    ) -> None:
        self._trtllm = trtllm
        self._is_native = trtllm.handoff == "native"
        self._engine: Any = None
        self._health = EngineHealth(self._lost)
        self._step_began_s = self._step_ended_s = 0.0
        self._staging = threading.Lock()
        try:
            super().__init__(worker_id, config, repository)
            self.worker.on_hung = self.broken
        except BaseException:
            if self._engine is not None:
                self._engine.close()
            raise

    def submit(self, request: PrefillRequest, ids: np.ndarray, client: PrefillClient) -> None:
        if self._health.is_lost:
            raise WorkerGone(f"{self.worker.worker_id} has lost its engine")
        self._sampling(request, len(ids))  # refused now rather than when it is staged
        super().submit(request, ids, client)

    def report(self) -> WorkerReport:
        report = super().report()
        return replace(report, is_draining=True) if self._health.is_lost else report

    def close(self, timeout_s: float) -> None:
        self._staged.is_closing = True
        super().close(timeout_s)

    # -- the engine

    def _own_engine(self, worker_id: str, config: PrefillConfig, repository: str) -> Any:
        folder = checkpoint_folder(config.checkpoint, repository)
        self._engine = TrtllmEngine(
            worker_id, config, self._trtllm, folder, repository, self, self._on_stats
        )
        self._staged = StagedPages(
            self._engine.host,
            config.transfer_s_max,
            self._release,
            self._health.failed,
            self.broken,
        )
        return self._engine

    def _on_stats(self, stats: IterationStats) -> None:
        if hasattr(self, "worker"):  # else still starting: it is being measured
            self.worker.steps.took(stats.step_s)
            self.worker.watch.progressed(time.monotonic())

    def _job(self, *given: Any) -> TrtllmPrefillJob:
        job = TrtllmPrefillJob(*given)
        if self._is_native:
            job.put.decode_inbox = ""  # nothing is read ahead: the engines do it themselves
        return job

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closing and not self._jobs:
                    return
                if not self._engine.llm.is_healthy:
                    self.broken("tensorrt_llm says that its processes have failed")
                self._drop_stopped()
                self._pages.settle()
                self._admit()
                late = self._late(time.monotonic())
                self._watch_engine(time.monotonic())
                self._lock.wait(0.0 if late else IDLE_WAIT_S)
            for job in late:
                if job.is_claimed:
                    error = WorkerUnavailable("the engine computed a prompt, but gave no KV")
                    self._health_of(error)
                    self._fail(job, error)
                else:
                    self._hand_over_nothing(job)

    def _watch_engine(self, now_s: float) -> None:
        """It shows no steps, but it has something to compute or not; with the lock held."""
        busy = any(
            isinstance(job, TrtllmPrefillJob) and job.running is not None and not job.ended_s
            for job in self._jobs.values()
        )
        predicted_s = self._estimate.seconds(self._tokens_ahead(), 0)  # it may tell of none alone
        self.worker.watch.is_busy(now_s, busy, predicted_s)

    def _admit(self) -> None:
        """As many prompts as keep the engine busy; with the lock held."""
        ahead = STEPS_AHEAD * self._config.chunk_tokens
        while self._tokens_ahead() < ahead:
            for admitted in self._batching.admit(at_most=1):
                job = self._jobs[admitted.request_id]
                job.put.pages = admitted.pages
                job.is_loading = True
                self._loaders.submit(self._load, job)
                break
            else:
                return

    def _tokens_ahead(self) -> int:
        """What the engine has got or gets, and has not computed."""
        return sum(
            len(job.token_ids) - job.cached_tokens
            for job in self._jobs.values()
            if job.put.pages and not job.computed_at_s
        )

    def _late(self, now_s: float) -> list[TrtllmPrefillJob]:
        """Ended, but their KV does not come out; with the lock held."""
        late = []
        for job in self._jobs.values():
            assert isinstance(job, TrtllmPrefillJob)
            limit_s = self._config.transfer_s_max if job.is_claimed else UNCLAIMED_S_MAX
            is_open = bool(job.unsaved) or not job.is_known
            if job.ended_s and is_open and now_s - job.ended_s > limit_s:
                late.append(job)
        return late

    def _hand_over_nothing(self, job: TrtllmPrefillJob) -> None:
        """Its stage was never matched: this release may not tell connectors of salts, say. The
        token is right; decode computes the prompt again instead of loading it."""
        log.warning("the connector did not recognise %s: decode computes it again", job.request_id)
        with self._lock:
            job.is_unmatched, job.unsaved = True, range(0)
        self._writer.then(lambda: self._settle(job, None))
        self._tell_first(job)
        self._answer_if_done(job)

    def _loaded(self, job: PrefillJob) -> None:
        """In a loader's thread: stage, then submit.

        One at a time: of equal prompts the engine's first request takes the first stage, so they
        must come in the same order, or one that is cancelled takes the other's stage with it.
        """
        assert isinstance(job, TrtllmPrefillJob)
        with self._staging:
            self._stage_and_submit(job)

    def _stage_and_submit(self, job: TrtllmPrefillJob) -> None:
        put, salt, page = job.put, job.request.cache_salt, self._trtllm.page_tokens
        if not job.is_leaving:
            job.is_staged = True
            self._staged.stage(Stage(
                job.request_id, bytes(packed_tokens(job.token_ids)), salt,
                chain_seed(self.worker.fingerprint, cache_salt=salt), list(put.keys),
                list(put.pages), put.first_block * self._block_tokens,
            ))  # fmt: skip
        job.whole_tokens = len(job.token_ids) // page * page  # decode computes the rest again
        stop = blocks_touched(job.whole_tokens, self._block_tokens)
        job.unsaved = range(put.first_block, max(put.first_block, stop))
        order = self._order(job)
        with self._lock:
            job.is_loading = False
            self._lock.notify_all()
            if job.request_id not in self._jobs or job.is_leaving:
                return  # dropped at the next turn
            self._batching.start(job.request_id, job.cached_tokens)
            job.started_tokens = job.cached_tokens
            job.given_s = time.monotonic()
            job.running = self._engine.generate(order, PromptSink(self, job))

    def _order(self, job: TrtllmPrefillJob) -> Order:
        request = job.request
        native = self._is_native and request.decode_inbox
        return Order(
            job.token_ids.tolist(),
            self._sampling(request, len(job.token_ids)),
            request.cache_salt,
            is_streaming=False,
            disaggregated_params=self._engine.native_params(job.request_id, b"")
            if native else None,
        )  # fmt: skip

    def _sampling(self, request: PrefillRequest, tokens: int) -> Any:
        """Of the one token behind so many."""
        prompt = request.prompt_tokens
        return self._engine.sampling(request.sampling, tokens - prompt, 1, prompt)

    # -- what the engine says: in the LLM's thread, or in the channel's

    def claimed(self, request_id: str, local_tokens: int, loaded_tokens: int) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None:
                return
            assert isinstance(job, TrtllmPrefillJob)
            job.is_claimed = True
            if not job.is_told:
                job.cached_tokens = min(local_tokens + loaded_tokens, len(job.token_ids) - 1)
        self._tell_first(job)
        self._answer_if_done(job)

    def computed(self, job: TrtllmPrefillJob, token_id: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            if job.request_id not in self._jobs or job.token_id is not None:
                return
            if now_s - self._step_ended_s > SAME_STEP_S:
                self._step_began_s = self._step_ended_s
            self._step_ended_s = now_s
            self.worker.watch.progressed(now_s)
            job.compute_s = now_s - max(job.given_s, self._step_began_s)
            job.computed_at_s = now_s
            job.token_id = token_id
            left = len(job.token_ids) - job.started_tokens
            self._batching.computed([Chunk(job.request_id, job.started_tokens, left, True)])
            self._lock.notify_all()
        self._tell_first(job)
        self._answer_if_done(job)

    def _tell_first(self, job: TrtllmPrefillJob) -> None:
        """The first token goes ahead of the reply, once it is known what was cached."""
        with self._lock:
            if job.token_id is None or job.is_told or not job.is_known:
                return
            if job.request_id not in self._jobs:
                return
            job.is_told, token_id = True, job.token_id
        if letter := job.first_token(token_id):
            self.worker.outbox.send(job.request.reply_inbox, letter)

    def ended(self, job: TrtllmPrefillJob, outcome: Outcome) -> None:
        job.ended_s = time.monotonic()
        if job.request_id not in self._jobs:
            return
        if outcome.error is not None:
            self._health_of(outcome.error)
            self._fail(job, outcome.error)
            return
        if outcome.finish_reason == "stop" and job.token_id is None:  # the end id itself is kept
            self.computed(job, job.request.sampling.end_ids[0])
        elif job.token_id is None:
            if not job.is_stopped:  # else it is dropped at the next turn
                error = WorkerUnavailable(f"the engine ended a prompt: {outcome.finish_reason}")
                self._health_of(error)
                self._fail(job, error)
            return
        job.native = outcome.native
        self._answer_if_done(job)

    def saved(self, request_id: str, tokens: int) -> None:
        """So many leading tokens are in the pages, of every rank."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None:
                return
            assert isinstance(job, TrtllmPrefillJob)
            done = job.unsaved.stop if tokens >= job.whole_tokens else tokens // self._block_tokens
            new = range(job.unsaved.start, max(job.unsaved.start, done))
            job.unsaved = range(new.stop, job.unsaved.stop)
            if new:  # with the lock held: the answer must stand behind it in the writer's line
                self._writer.put_whole(job.put, new, is_handover=not self._is_native)
                keys = [job.put.keys[block] for block in new if block < len(job.put.keys)]
                self._writer.then(lambda: self._settle(job, keys))
        self._answer_if_done(job)

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
                self._fail(job, WorkerUnavailable(reason))
        else:  # what hangs holds the lock
            for job in jobs:
                job.client.fail(WorkerUnavailable(reason))
        end_process(self.worker.deregister, self._engine.close)

    # -- and leaves

    def _answer_if_done(self, job: TrtllmPrefillJob) -> None:
        """The last of: the token, the KV in the store (or, native, the engine's word for it)."""
        with self._lock:
            if job.token_id is None or job.request_id not in self._jobs:
                return
            is_done = job.native is not None if self._is_native else not job.unsaved
            is_ready = is_done and job.is_known
            is_first, job.is_answered = is_ready and not job.is_answered, is_ready
            is_over = self._is_native and job.is_answered and not job.unsaved
        token_id = job.token_id
        if is_first:
            self._health.went_well()
        if is_first and self._is_native:
            self._writer.then(lambda: self._answer_early(job, token_id))
        elif is_first:
            self._writer.then(lambda: self._answer(job, token_id))
        if is_over:
            self._writer.then(lambda: self._over(job))

    def _answer_early(self, job: TrtllmPrefillJob, token_id: int) -> None:
        """The engines hand KV over by themselves; what is still being saved goes on."""
        reply = job.reply(self.worker.incarnation, self._engine.layout.block_bytes)
        job.observe(reply, self._block_tokens, self.worker.observations)
        job.client.prefilled(token_id, reply)

    def _over(self, job: TrtllmPrefillJob) -> None:
        self._forget(job, keep_leases=False)

    def _free(self, job: PrefillJob, pages: list[int]) -> None:
        assert isinstance(job, TrtllmPrefillJob)
        if job.running is not None:
            job.running.abort()
        if job.is_staged:
            # Behind what the writer still copies from these pages.
            self._writer.then(lambda: self._staged.give_back(job.request_id, pages))
        else:
            self._pages.release(pages)

    def _release(self, pages: list[int]) -> None:
        with self._lock:
            self._pages.release(pages)
            self._lock.notify_all()
