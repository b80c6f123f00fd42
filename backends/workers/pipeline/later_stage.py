"""A later stage of a pipeline group: computes its layers of each step after the stage before it.

Stage 0 describes the work of all stages (first_stage.py). Steps are numbered within an epoch. If a
stage misses a number, the group starts a new epoch (group.py).

Threads: the inbox queues steps, the engine's thread computes them in order, loaders read prefixes,
the writer writes KV.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from backends.config_pbtxt import PrefillConfig, checkpoint_folder
from backends.engine.interface import Work
from backends.engine.sampling import Drawn, draw
from backends.errors import InvalidRequest, WorkerGone
from backends.text.guides import Guides
from backends.text.tokenizer import Tokenizer
from backends.workers.kv_writer import BlockPut, KvWriter
from backends.workers.pipeline import group
from backends.workers.pipeline.stage_prefill import StagePrefill
from backends.workers.protocol import (
    ArrivedStep,
    DrainWorker,
    GroupBegins,
    PrefixLoaded,
    PrefixWanted,
    StageBeat,
    StageComputed,
    StageStep,
    StageWork,
    StageWritten,
    WorkerMessage,
)
from backends.workers.worker_process import WorkerProcess
from conductor.estimates.estimates import PrefillEstimate
from mooncake_store.layout import PageLayout
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
LOADERS = 2
LATE_READ_WAIT_S = 0.05  # interval of checks whether a read past its deadline has ended
LOADS_WAIT_S = 0.05  # interval of checks whether a stage that waits for its loads closes
NO_TOKEN = Drawn(-1, None)
NO_EPOCH = GroupBegins(epoch="", first_inbox="", next_inbox="", chunk_tokens=0)


class StageWorker:
    def __init__(
        self, worker_id: str, config: PrefillConfig, repository: str, driver: StagePrefill
    ) -> None:
        self.config = config
        self._engine = engine = driver.engine
        self.check = engine.pages.check  # asserts the invariants of the pages
        checkpoint = checkpoint_folder(config.checkpoint, repository)
        self._guides = Guides(lambda: Tokenizer.load(checkpoint), engine.vocabulary_tokens)
        self._newest_epoch = self._epoch = ""  # latest announced epoch; epoch of accepted steps
        self._expected = 0  # number of the next step
        self._begins = NO_EPOCH  # of the latest joined epoch
        self._loads: set[Future[None]] = set()  # queued and running loads of prefixes
        self._beating = threading.Lock()  # keeps heartbeats of two threads in order
        self._writing: dict[int, list[BlockPut]] = {}  # step number -> writes of the step
        self._is_closing = self._is_draining = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loading = ThreadPoolExecutor(LOADERS, thread_name_prefix="kv-loader")
        self.process = WorkerProcess(
            "prefill",
            worker_id,
            config,
            repository,
            config.queue_requests_max,
            driver,
            {},
            self._on_message,
            self._report_and_beat,
            self.check,
        )
        store = self.process.store
        store.expect_threads(LOADERS)
        self._estimate = PrefillEstimate.of(self.process.info.prefill_coefficients)
        pages = PageLayout(engine.layout, engine.layers)
        self._loader = driver.make_loader(store, pages, config.transfer_s_max)
        self._writer = KvWriter(
            store,
            pages,
            engine.kv_pool,
            self.process.outbox,
            config.lease_s,
            config.transfer_s_max,
            engine.export_pages,
            self._on_mark,
        )
        group.refuse_mistakes(self.process.info, self.process.directory.workers())
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.process.join()

    @property
    def _name(self) -> str:
        stage, name = self.config.pipeline_stage, self.config.pipeline_group
        return f"{self.process.worker_id} is stage {stage} of pipeline group {name}"

    def submit(self, request: object, ids: object, client: object) -> None:
        raise WorkerGone(f"{self._name}: only stage 0 accepts requests")

    def stop(self, request_id: str) -> None:
        """Do nothing, because stage 0 sends no further chunks of a stopped request."""

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=self.process.worker_id,
            incarnation=self.process.incarnation,
            queue_requests=0,
            queue_tokens=0,
            running=0,
            pages_used=0,
            context_tokens=0,
            step_s=self.process.steps.recent_s,
            is_draining=self._is_closing or self._is_draining or self.process.is_lost,
            oldest_step_s=self.process.watch.age_s(time.monotonic()),
        )

    def close(self, timeout_s: float) -> None:
        """Leave the group, whose requests then resume on other workers."""
        self._is_closing, self._newest_epoch = True, ""
        self._tasks.put(self._lose_place)
        self._tasks.put(None)
        self._thread.join(timeout=timeout_s)
        self._loading.shutdown(wait=True, cancel_futures=True)
        self._writer.close()
        self.process.leave()

    # -- messages

    def _on_message(self, message: WorkerMessage | ArrivedStep) -> None:
        if isinstance(message, GroupBegins):
            self._newest_epoch = "" if self._is_closing else message.epoch
            self._tasks.put(functools.partial(self._begin, message))
        elif isinstance(message, ArrivedStep):
            self._tasks.put(functools.partial(self._take, *message))
        elif isinstance(message, StageStep):
            self._tasks.put(functools.partial(self._take, message, None))
        elif isinstance(message, PrefixWanted):
            load = self._loading.submit(self._load_prefix, message)
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        elif isinstance(message, DrainWorker):
            self._is_draining = message.is_on

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # Catch all: the group starts a new epoch
                log.exception("%s failed", self._name)
                self._lose_place()

    def _begin(self, begins: GroupBegins) -> None:
        """Join an epoch when all work of earlier epochs has ended, so that no page is in use."""
        if begins.epoch != self._newest_epoch:
            return
        if (theirs := begins.chunk_tokens) != (own := self.config.chunk_tokens):
            text = "%s: chunk_tokens is %d, that of stage 0 is %d; use one value in all stages"
            log.error(text, self._name, own, theirs)
            return
        if begins.epoch != self._epoch:
            self._end_epoch()
            self._begins, self._expected, self._epoch = begins, 0, begins.epoch
            log.info("%s: joined epoch %s", self._name, begins.epoch)
        self._beat()

    def _end_epoch(self) -> None:
        """Wait until no work of this epoch reads or writes any more. `watch` supervises the wait
        like a step, so that a process whose wait hangs is restarted."""
        self._epoch = ""
        for puts in list(self._writing.values()):
            for put in puts:
                put.is_ended = True
        self.process.watch.began(time.monotonic())
        try:
            is_written = threading.Event()
            self._writer.mark(is_written)
            is_written.wait()
            while wait(list(self._loads), LOADS_WAIT_S).not_done and not self._is_closing:
                pass
        finally:
            self.process.watch.ended()
        self._writing.clear()

    def _report_and_beat(self) -> WorkerReport:
        self._beat()
        return self.report()

    def _beat(self) -> None:
        stage, incarnation = self.config.pipeline_stage, self.process.incarnation
        with self._beating:
            self._answer(StageBeat(self._epoch, stage, incarnation))

    def _lose_place(self) -> None:
        self._epoch = ""
        self._beat()

    def _load_prefix(self, wanted: PrefixWanted) -> None:
        """Read this stage's layers of a cached prefix, and answer. Runs in a loader's thread."""
        blocks = 0
        try:
            if wanted.epoch == self._newest_epoch:
                blocks = self._loader.load_copies(wanted.copies, wanted.pages)
        except Exception:  # Catch all: the prefix is computed again
            log.exception("%s: loading a prefix failed", self._name)
        # Stage 0 uses the pages after the answer, so a read past its deadline must end first.
        while self._loader.pending_pages().intersection(wanted.pages):
            time.sleep(LATE_READ_WAIT_S)
        self._answer(PrefixLoaded(wanted.epoch, self.config.pipeline_stage, wanted.number, blocks))

    def _answer(self, message: WorkerMessage) -> None:
        """Send a message to stage 0, if this stage has joined an epoch."""
        if inbox := self._begins.first_inbox:
            self.process.outbox.send(inbox, message)

    # -- steps

    def _take(self, step: StageStep, hidden: memoryview | None) -> None:
        if step.epoch != self._epoch or step.epoch != self._newest_epoch:
            return
        if step.number != self._expected:
            numbers = step.number, self._expected
            log.warning("%s: received step %d, expected %d", self._name, *numbers)
            self._lose_place()
            return
        self._expected += 1
        self._writing[step.number] = puts = [_put(work) for work in step.works]
        if step.error or hidden is None:
            self._pass_on_failure(step, step.error or "the step has no hidden states")
            return
        predicted_s = sum(self._estimate.seconds(w.tokens, w.start) for w in step.works)
        started_s = time.monotonic()
        self.process.watch.began(started_s, predicted_s)
        try:
            self._compute(step, np.frombuffer(hidden, np.uint8), puts)
        except Exception as error:  # Catch all: only the requests fail
            log.exception("a step of %s failed", self.process.worker_id)
            self._pass_on_failure(step, f"{self._name}: {error}")
        finally:
            self.process.watch.ended()
            self.process.steps.took(time.monotonic() - started_s)

    def _compute(self, step: StageStep, hidden: np.ndarray, puts: Sequence[BlockPut]) -> None:
        batch = [Work([0] * work.tokens, work.start, work.pages) for work in step.works]

        def on_layer(layer: int) -> None:
            for put in puts:
                if put.slots:
                    self._writer.layer_done(put, list(put.slots), layer)

        if next_inbox := self._begins.next_inbox:
            states = self._engine.forward_stage(batch, hidden, on_layer)
            if not self.process.outbox.send(next_inbox, step, states.data):
                self._lose_place()
        else:
            logits = self._engine.forward_last(batch, hidden, on_layer)
            rows = zip(step.works, logits, strict=True)
            self._computed(step, [self._sampled(work, row) for work, row in rows])
        self._writer.mark((step, ""))

    def _pass_on_failure(self, step: StageStep, error: str) -> None:
        """Report the failed step to the next stage, which must miss no number, and to stage 0."""
        if next_inbox := self._begins.next_inbox:
            failed = StageStep(step.epoch, step.number, step.works, error)
            self.process.outbox.send(next_inbox, failed)
        else:
            self._computed(step, [(NO_TOKEN, error)] * len(step.works))
        self._writer.mark((step, error))

    def _computed(self, step: StageStep, sampled: Sequence[tuple[Drawn, str]]) -> None:
        """Report the last stage's (token, error) of each chunk to stage 0."""
        token_ids = [drawn.token_id for drawn, _ in sampled]
        errors = [error for _, error in sampled]
        logprobs = [[drawn.logprobs] if drawn.logprobs else [] for drawn, _ in sampled]
        self._answer(StageComputed(step.epoch, step.number, token_ids, errors, logprobs))

    def _on_mark(self, mark: tuple[StageStep, str] | threading.Event) -> None:
        """Report a step's writes to stage 0. Runs in the writer's thread, after the writes."""
        if isinstance(mark, threading.Event):
            mark.set()
            return
        step, error = mark
        puts = self._writing.pop(step.number, [])
        digests = [put.digests for put in puts]
        errors = [error or str(put.error or "") for put in puts]
        stage = self.config.pipeline_stage
        self._answer(StageWritten(step.epoch, stage, step.number, digests, errors))

    def _sampled(self, work: StageWork, logits: np.ndarray) -> tuple[Drawn, str]:
        """(token, "") or (NO_TOKEN, error). An error must not fail other requests of the step."""
        if (last := work.last) is None:
            return NO_TOKEN, ""
        prompt = np.frombuffer(last.prompt_ids, np.int32).tolist()
        output = np.frombuffer(last.output_ids, np.int32).tolist()
        sampling, guide = last.sampling, None
        try:
            if text := sampling.guide:
                guide = self._guides.guide(text, sampling.end_ids, output, sampling.guide_kind)
            return draw(logits, sampling, len(output), prompt, output, guide), ""
        except InvalidRequest as error:  # the request's schema is invalid at every worker
            return NO_TOKEN, error.wire_message()
        except Exception as error:  # Catch all: only this request fails
            log.exception("sampling of %s failed", work.request_id)
            return NO_TOKEN, f"sampling failed: {error!r}"


def _put(work: StageWork) -> BlockPut:
    """The writes of one chunk, into slots whose leases stage 0 renews and releases."""
    return BlockPut(
        work.request_id,
        work.kv_tokens,
        work.pages,
        keys=[],
        first_block=0,
        decode_inbox=work.decode_inbox,
        reserve_tokens=work.reserve_tokens,
        slots=dict(work.slots),
    )
