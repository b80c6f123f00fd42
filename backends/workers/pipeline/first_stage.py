"""Stage 0 of a pipeline group, the driver of a prefill worker. It owns all requests of the group.

Stage 0 plans the steps, and allocates pages and slots for all stages. Page i holds the same tokens
in each stage. Stage 0 computes its layers, and sends the plan of the step with the hidden states to
the next stage. Steps are pipelined: while stage 1 computes chunk i, stage 0 computes chunk i + 1.
Each stage writes its layers of a block into the block's slot, and sends the digests (checksums of
the layers). Stage 0 commits the block when it has all digests. The last stage samples. Only stage 0
manages leases and replies.

If an epoch of the group ends (group.py), all requests fail with errors that make them resume on
other workers. Pages that another stage may still use become free when the next epoch is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from backends.config_pbtxt import PrefillConfig
from backends.engine.batching.batching import Chunk
from backends.engine.torch.torch_engine import TorchEngine
from backends.errors import InvalidRequest, WorkerGone, WorkerUnavailable, from_wire
from backends.workers.jobs import PrefillJob
from backends.workers.kv_loader import KvLoader
from backends.workers.kv_writer import JobEvent
from backends.workers.lifecycle.events import On
from backends.workers.pipeline import group
from backends.workers.pipeline.group import PipelineGroup
from backends.workers.pipeline.stage_prefill import StagePrefill
from backends.workers.pipeline.step_window import SentStep, StepWindow
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import (
    GroupBegins,
    PrefixLoaded,
    PrefixWanted,
    SampleInputs,
    StageBeat,
    StageComputed,
    StageStep,
    StageWork,
    StageWritten,
    WorkerMessage,
)
from backends.workers.step_times import HUNG_S_MIN
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.errors import StoreError
from mooncake_store.layout import PageLayout, blocks_touched
from mooncake_store.records.blocks import Copy

log = logging.getLogger(__name__)
LOOK_S = 0.5  # interval of checks of the group
LoadCopies = Callable[[Sequence[Copy], Sequence[int]], int]  # as KvLoader.load_copies


class PipelinePrefill(StagePrefill):
    def __init__(self, engine: TorchEngine, config: PrefillConfig) -> None:
        super().__init__(engine, config)
        self._window = StepWindow(config.pipeline_stages)
        self._parked: list[int] = []  # pages that become free when the next epoch is complete
        self._is_closed = threading.Event()

    def begin(self, worker: PrefillWorker) -> None:
        """Raises ConfigError if settings of this stage and of the registered stages conflict."""
        super().begin(worker)
        own = worker.process.info
        self._group = PipelineGroup(own)
        group.refuse_mistakes(own, worker.process.directory.workers())
        threading.Thread(target=self._watch, name="group", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        super().close()

    # -- the group

    @property
    def is_available(self) -> bool:
        return self._group.is_whole

    def _watch(self) -> None:
        """Supervise the group, in its own thread, because a step may occupy the engine's thread."""
        while not self._is_closed.wait(LOOK_S):
            try:
                self._look()
            except Exception:  # Catch all: the group must stay supervised
                if self._worker.is_closing:  # the directory client may be closed already
                    return
                log.exception("supervising pipeline group %s", self.config.pipeline_group)

    def _look(self) -> None:
        try:
            workers = self._worker.process.directory.workers()
        except StoreError as error:
            log.debug("the registered workers are unknown: %s", error)
            workers = None
        now_s = time.monotonic()
        with self._worker.lock:
            lost = self._group.update_registered(workers) if workers is not None else ""
            if lost := lost or self._group.silence(now_s) or self._window.late(now_s):
                self._broken(lost)
            if self._group.to_begin(now_s):
                self._begin_epoch()

    def _begin_epoch(self) -> None:
        inboxes = self._group.others
        for number, inbox in inboxes.items():
            begins = GroupBegins(
                epoch=self._group.epoch,
                first_inbox=self._worker.process.inbox.address,
                next_inbox=inboxes.get(number + 1, ""),
                chunk_tokens=self.config.chunk_tokens,
            )
            self._worker.process.outbox.send(inbox, begins)

    def _broken(self, reason: str) -> None:
        """End the epoch, and fail all requests, so that they resume on other workers. The caller
        holds the lock."""
        worker = self._worker
        self._group.end(reason)
        name = f"{worker.process.worker_id}: pipeline group {self.config.pipeline_group}"
        log.warning("%s: %s; %d requests resume on other workers", name, reason, len(worker.jobs))
        in_flight = self._window.requests()
        for job in list(worker.jobs.values()):
            kind = WorkerUnavailable if job.request_id in in_flight else WorkerGone
            worker.fail(job, kind(f"{name}: {reason}"))
        self._window.clear()
        worker.lock.notify_all()

    def check(self, job: PrefillJob) -> None:
        if job.scores is not None:
            raise InvalidRequest("prompt_logprobs is not supported by a pipeline group of workers")
        with self._worker.lock:
            if not self._group.is_whole:
                raise WorkerGone(f"{self._worker.process.worker_id}: {self._group.missing()}")

    def on_message(self, message: WorkerMessage) -> None:
        """Handle a message of another stage. Runs in the inbox's thread."""
        with self._worker.lock:
            if isinstance(message, StageBeat):
                self._on_beat(message)
            elif getattr(message, "epoch", "") != self._group.epoch or not self._group.is_whole:
                return
            elif isinstance(message, PrefixLoaded):
                self._window.loaded(message.number, message.stage, message.blocks)
            elif isinstance(message, StageComputed):
                self._computed(message)
            elif isinstance(message, StageWritten):
                self._written(message)
            self._worker.lock.notify_all()

    def _on_beat(self, beat: StageBeat) -> None:
        was_whole, now_s = self._group.is_whole, time.monotonic()
        if lost := self._group.beat(beat.stage, beat.incarnation, beat.epoch, now_s):
            self._broken(lost)
        elif self._group.is_whole and not was_whole:
            log.info("pipeline group %s is whole", self.config.pipeline_group)
            parked, self._parked = self._parked, []
            self._worker.release(parked)

    # -- loading a prompt's prefix

    def make_loader(self, store: WorkerStore, pages: PageLayout, deadline_s: float) -> KvLoader:
        return GroupLoader(self, store, pages, deadline_s)

    def load_copies(
        self, copies: Sequence[Copy], pages: Sequence[int], load_own: LoadCopies
    ) -> int:
        """Load block i of `copies` into pages[i] in all stages; `load_own` does it in this one.
        Returns the number of leading blocks that arrived in all stages. Raises WorkerGone or
        WorkerUnavailable if a stage does not reply."""
        with self._worker.lock:
            if not self._group.is_whole:
                raise WorkerGone(self._group.missing())
            late_s = time.monotonic() + 2 * self.config.transfer_s_max + HUNG_S_MIN
            load = self._window.wanted(pages, late_s)
            wanted = PrefixWanted(self._group.epoch, load.number, list(copies), list(pages))
            for inbox in self._group.others.values():
                self._worker.process.outbox.send(inbox, wanted)
        loaded = load_own(copies, pages)
        with self._worker.lock:
            self._worker.lock.wait_for(lambda: load.is_over, 2 * self.config.transfer_s_max)
            if not load.is_here:
                raise WorkerUnavailable("another stage has not loaded the cached prefix")
            return min(loaded, load.blocks)

    def start(self, job: PrefillJob) -> None:
        """Queue the allocation of slots for all stages, then ENGINE_READY."""
        blocks = blocks_touched(len(job.token_ids), self._block_tokens)
        writer = self._worker.writer
        writer.allocate(job.put, range(job.put.first_block, blocks))
        writer.mark(JobEvent(job, On.ENGINE_READY))

    # -- steps

    def next_step(self, now_s: float) -> Callable[[], None] | None:
        if not self._group.is_whole or self._window.is_full:
            return None
        return super().next_step(now_s)

    def _step(self, chunks: Sequence[Chunk], jobs: Sequence[PrefillJob]) -> None:
        worker, started_s = self._worker, time.monotonic()
        with worker.lock:
            epoch = self._group.epoch
        batch, finished, on_layer = self._prepare(chunks, jobs)
        hidden = self.engine.forward_stage(batch, None, on_layer)
        worker.process.steps.took(time.monotonic() - started_s)
        parts = list(zip(chunks, jobs, finished, strict=True))
        plans = [_plan(*part, self._block_tokens) for part in parts]
        predicted_s = sum(worker.estimate.seconds(c.tokens, c.start) for c in chunks)
        with worker.lock:
            if self._group.epoch != epoch or not self._group.is_whole:
                return  # the epoch has ended, and the step's requests have failed
            sent = SentStep(
                number=self._window.next_number,
                parts=parts,
                started_s=started_s,
                sent_s=time.monotonic(),
                predicted_s=predicted_s,
            )
            self._window.sent(sent)
            worker.batching.computed(chunks)
            step = StageStep(epoch, sent.number, plans)
            inbox = self._group.others[1]
            if not worker.process.outbox.send(inbox, step, hidden.data):
                self._broken("stage 1 accepts no step")

    def _computed(self, message: StageComputed) -> None:
        step = self._window.computed(message.number)
        if step is None:
            return
        now_s = time.monotonic()
        for index, (chunk, job, _) in enumerate(step.parts):
            if job.computing_from_s is None:
                job.computing_from_s = step.started_s
            job.compute_s += now_s - max(step.started_s, job.computed_at_s)
            job.computed_at_s = now_s
            job.computed_tokens += chunk.tokens
            if message.errors[index]:
                self._worker.fail(job, from_wire(message.errors[index], "the last stage"))
            elif chunk.is_last and not job.is_leaving:
                job.logprobs = message.logprobs[index] if message.logprobs else []
                self._worker.post(job, On.SAMPLED, message.token_ids[index])

    def _written(self, message: StageWritten) -> None:
        """Record that a stage has written its layers. Commit the blocks if all stages have."""
        worker = self._worker
        step = self._window.written(message.number, message.stage)
        if step is None:
            return
        answers = zip(step.parts, message.errors, message.digests, strict=True)
        for (_, job, _), error, digests in answers:
            if error:
                job.put.has_late_write = True
                worker.fail(job, WorkerUnavailable(error))
            elif digests:
                worker.writer.add_digests(job.put, digests)
        if not step.is_over:
            return
        for chunk, job, blocks in step.parts:
            if blocks:
                worker.writer.blocks_done(job.put, blocks)
                worker.settle_behind(job, blocks)
            if chunk.is_last:
                worker.post(job, On.COMPUTED)
        self._window.over(step)

    # -- leaving

    def leave(self, job: PrefillJob) -> None:
        # A stage that has left the epoch may still compute in the pages, and write the slots.
        post = self._worker.post
        self._window.behind(job, lambda: post(job, On.ENGINE_LEFT, self._group.is_whole))

    def park(self, pages: list[int]) -> None:
        if self._group.is_whole:  # again: all stages have ended the work of earlier epochs
            self._worker.release(pages)
        else:
            self._parked += pages


class GroupLoader(KvLoader):
    """Loads a prefix in all stages of the group."""

    def __init__(
        self, driver: PipelinePrefill, store: WorkerStore, pages: PageLayout, deadline_s: float
    ) -> None:
        super().__init__(store, pages, driver.engine.kv_pool, deadline_s)
        self._driver = driver

    def load_copies(self, copies: Sequence[Copy], pages: Sequence[int]) -> int:
        if not copies:
            return 0
        return self._driver.load_copies(copies, pages[: len(copies)], super().load_copies)


def _plan(chunk: Chunk, job: PrefillJob, blocks: range, block_tokens: int) -> StageWork:
    put, last = job.put, None
    if chunk.is_last:
        prompt, output = np.split(job.token_ids, [job.request.prompt_tokens])
        last = SampleInputs(job.request.sampling, prompt.tobytes(), output.tobytes())
    return StageWork(
        request_id=job.request_id,
        start=chunk.start,
        tokens=chunk.tokens,
        pages=list(put.pages[: blocks_touched(chunk.start + chunk.tokens, block_tokens)]),
        kv_tokens=put.kv_tokens,
        reserve_tokens=put.reserve_tokens,
        decode_inbox=put.decode_inbox,
        slots=[(block, put.slots[block]) for block in blocks],
        last=last,
    )
