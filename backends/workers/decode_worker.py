"""The decode worker: reads handed-over KV, streams tokens, writes generated blocks to the store.

lifecycle/decode.py decides what happens to a request, and in what order. The methods here are in
the same order.

Hand-over: a prefill worker announces each layer's KV as soon as the layer is in the store. The
loader reads announced layers into pages that are reserved for the request (arrivals.py). When the
request itself arrives, the loader reads the remaining blocks, and the request joins the batch.

Preemption: if a request of higher priority lacks pages or a slot, running requests are preempted
between two steps (engine/batching/batching.py). The writer stores a preempted request's KV, and the
request waits. When the request has pages again, the loader reads this KV back. If the KV is gone,
the request fails, and its frontend starts another attempt.

Threads: the engine's thread runs the engine loop (worker.py), one loader reads KV, the writer
writes KV to the store, and `Repliers` send replies. The driver reports all tokens in one thread.
Each frontend gets one message with the tokens of a step, or of several short steps.

Not here: Triton's API (decode/model.py), the text of tokens (text_stream.py), steps and engines
(step_driver.py, connected/decode.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from backends.config_pbtxt import DecodeConfig, checkpoint_folder
from backends.engine.batching.batching import DecodeBatching
from backends.errors import Cancelled, KvMissing, Overloaded
from backends.text.tokenizer import Tokenizer
from backends.workers.arrivals import Arrival, Arrivals
from backends.workers.driver import DecodeDriver
from backends.workers.jobs import DecodeClient, DecodeJob
from backends.workers.lasting_parts import LastingParts
from backends.workers.lifecycle.decode import step
from backends.workers.lifecycle.events import Do, On
from backends.workers.lifecycle.states import JobPhase, JobState
from backends.workers.protocol import (
    DecodeRequest,
    LayersReady,
    Tokens,
    TokenUpdate,
    WorkerMessage,
    gap_s,
)
from backends.workers.worker import Actions, JobWorker
from conductor.admission.arrival_check import BatchOnArrival, refusal
from conductor.estimates.estimates import DecodeEstimate
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
REPLIERS = 8  # threads that send replies


class DecodeWorker(JobWorker[DecodeJob]):
    role = "decode"
    step = staticmethod(step)
    loaders = 1  # so that a request's announced layers are read before its remaining blocks
    batching: DecodeBatching

    def __init__(
        self,
        worker_id: str,
        config: DecodeConfig,
        repository: str,
        driver: DecodeDriver[DecodeWorker, DecodeJob],
        parts: LastingParts | None = None,
    ) -> None:
        self._arrivals = Arrivals(ttl_s=config.lease_s)
        self._tokenizer = Tokenizer.load(checkpoint_folder(config.checkpoint, repository))
        super().__init__(worker_id, config, repository, config.slots, driver, parts)
        self.config = config
        self.driver: DecodeDriver[DecodeWorker, DecodeJob] = driver
        self.tokens_generated = 0
        self.estimate = DecodeEstimate.of(self.process.info.decode_coefficients)
        self.batching = DecodeBatching(
            driver.engine.pages,
            config.block_tokens,
            config.slots,
            waiting_max=config.queue_requests_max,
        )
        # New tokens of unfinished jobs by reply inbox, until `send_news`.
        self._updates: dict[str, list[TokenUpdate]] = defaultdict(list)
        self._pace = MessagePace()
        self._repliers = Repliers()
        driver.begin(self)
        self._serve()

    def _actions_of_role(self) -> Actions[DecodeJob]:
        """In the order of a request's life."""
        return {
            Do.RELEASE_GIVEN: self._release_leases,
            Do.JOIN: self._join,
            Do.SEND: self._send,
            Do.TAKE_PAGES: self._take_pages,
            Do.SAVE: self.writer.save_soon,
            Do.END_SAVE: self._end_save,
            Do.REPLY: lambda job: self._repliers.send(job.reply),
            Do.RELEASE_LEASES: self._release_leases,
            Do.FAIL: self._fail,
        }

    # -- a prefill worker announces KV of a request that has not arrived yet

    def _handle(self, message: WorkerMessage) -> None:
        if isinstance(message, LayersReady):
            self._on_layers(message)
        else:
            super()._handle(message)

    def _on_layers(self, message: LayersReady) -> None:
        """Reserve pages for a request that is still in prefill, and read the announced layer."""
        request_id = message.request_id
        with self.lock:
            if request_id in self.jobs or self._arrivals.is_refused(request_id):
                return
            if self._arrivals.get(request_id) is None:
                if message.reserve_tokens > self.process.context_tokens_max:
                    return
                if not self._reserve(request_id, message.reserve_tokens):
                    return
                self._arrivals.expect(request_id, time.monotonic())
                self.lock.notify_all()
        self._loading.submit(self._load_announced, message)

    def _load_announced(self, message: LayersReady) -> None:
        with self.lock:
            arrival = self._arrivals.get(message.request_id)
            if arrival is None and message.request_id in self.jobs:
                # The request has arrived. Its remaining blocks are read after this message.
                arrival = self.jobs[message.request_id].arrival
            if arrival is None or not arrival.pages:
                return
            arrival.is_loading = True
        try:
            self._loader.load_announced(arrival, message)
        except Exception as error:  # Catch all: `_load_rest` reads the layer later
            log.warning("an announced layer was not read: %s", error)
        finally:
            with self.lock:
                arrival.is_loading = False

    def _reserve(self, request_id: str, tokens_max: int, is_resumed: bool = False) -> bool:
        """Queue a request for admission. False: the queue is full. The caller holds the lock."""
        now_s = time.monotonic()
        return self.batching.add(request_id, 1, tokens_max - 1, is_resumed, arrived_s=now_s)

    # -- the request arrives, and waits for pages

    def submit(self, request: DecodeRequest, ids: np.ndarray, client: DecodeClient) -> None:
        """Queue a request. `client` gets the reply in another thread. Raises ServingError."""
        self.process.call_limits.check(request, ids)
        tokens_max = request.prompt_tokens + request.sampling.max_tokens
        job = DecodeJob(
            request,
            ids,
            client,
            self._tokenizer,
            self.process.fingerprint,
            self.process.incarnation,
            self.config.block_tokens,
        )
        job.state = JobState(needs_grammar=self._needs_grammar(job))
        self.driver.check(job)
        with self.lock:
            self._refuse(job)
            if self._arrivals.is_refused(request.request_id):
                raise Cancelled("the request was stopped before it arrived at this worker")
            self._refuse_incomplete(request, len(ids) - 1)
            self._check_again(request, len(ids))
            if self._arrivals.get(request.request_id) is None and not self._reserve(
                request.request_id, tokens_max, request.is_resumed
            ):
                raise self._queue_full("requests")
            if request.priority:
                self.batching.prioritise(request.request_id, request.priority)
            # The lock is still held. Otherwise the request could end before `hold` is called, and
            # the request's leases would be renewed for ever.
            self.process.owners.hold(request.request_id, time.monotonic(), job.keys_given)
            self._add(job)

    def _load_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def _refuse_incomplete(self, request: DecodeRequest, kv_tokens: int) -> None:
        """Raise KvMissing if the handed-over blocks are not exactly those that the engine needs.

        A page into which no block is read would hold old data. The caller holds the lock.
        """
        given = sorted(ref.index for ref in request.blocks)
        due = list(range(self.driver.blocks_due(len(given), kv_tokens)))
        if given != due:
            self._refuse_arrival(request.request_id)
            raise KvMissing(
                f"blocks {given[:8]} ({len(given)} in all) were sent; the first {len(due)} are due"
            )

    def _check_again(self, request: DecodeRequest, tokens: int) -> None:
        """Raise Overloaded if a step would exceed `tbt_slo_s`. The caller holds the lock."""
        jobs = self.jobs.values()
        there = BatchOnArrival(
            sum(len(job.token_ids) for job in jobs),
            [job.request.sampling.max_tokens - len(job.output_ids) for job in jobs],
            self.process.steps.speed,
        )
        refused = refusal(there, tokens, self.estimate, request.tbt_slo_s)
        if refused is not None:
            self._refuse_arrival(request.request_id)
            raise Overloaded(refused.kind, refused.reason, refused.retry_after_s)

    def _refuse_arrival(self, request_id: str) -> None:
        """Ignore later messages about the request. The next turn of the engine loop frees pages
        that were reserved for the request. The caller holds the lock."""
        self._arrivals.refuse(request_id, time.monotonic())
        self.lock.notify_all()

    def _stopped_early(self, request_id: str) -> None:
        self._arrivals.refuse(request_id, time.monotonic())

    def _admit(self) -> None:
        for request_id, pages in self._arrivals.reap(time.monotonic(), self.jobs.keys()):
            self.batching.remove(request_id)  # an early reservation that was refused or has expired
            self.release(pages)
        if self.driver.can_preempt:
            for request_id in self.batching.to_preempt():
                if not self.jobs[request_id].is_leaving:  # it gives up its pages soon
                    self._preempt(self.jobs[request_id])
        for admitted in self.batching.admit():
            self._arrivals.give_pages(admitted.request_id, admitted.pages)
        for job in self.jobs.values():
            if job.state.phase is not JobPhase.QUEUED:
                continue
            arrival = self._arrivals.get(job.request_id)
            if arrival is not None and arrival.pages:
                job.arrival = self._arrivals.pop(job.request_id)
                self.post(job, On.PAGES_GIVEN)

    # -- a loader reads the blocks that were not read before

    def _load(self, job: DecodeJob) -> On:
        """Read the job's blocks that are not in its pages yet. Runs in the loader's thread."""
        assert job.arrival is not None, f"{job.request_id} has no pages"
        started_s = time.monotonic()
        is_new = job.saved is None
        if is_new:
            job.queue_s = started_s - job.submitted_s
        try:
            if not job.is_leaving:
                self._load_rest(job, job.arrival, is_new)
        finally:
            if is_new:
                job.load_s = time.monotonic() - started_s
                observations = self.process.observations
                observations.observe("mooncake_decode_queue_seconds", job.queue_s)
                observations.observe("mooncake_handover_load_seconds", job.load_s)
            if self.driver.has_read(job):
                self.post(job, On.KV_READ)
        return On.LOADED

    def _load_rest(self, job: DecodeJob, arrival: Arrival, is_new: bool) -> None:
        early = arrival.whole_blocks(self.driver.engine.layout.layers)
        missing = self._loader.load_rest(arrival, job.blocks)
        if is_new:
            job.loaded_early_blocks = early
        self.driver.engine.import_pages(job.pages)
        if missing:
            raise KvMissing(f"blocks {missing[:8]} of {len(job.blocks)} are gone")

    def _join(self, job: DecodeJob) -> None:
        self.batching.start(job.request_id, len(job.token_ids))
        self.lock.notify_all()

    # -- the driver decodes tokens (step_driver.py, connected/decode.py)

    def decoded(self, tokens_of: Iterable[tuple[DecodeJob, Sequence[int]]]) -> None:
        """Record new tokens of jobs, in decoding order. The driver must then call `send_news`."""
        computed: list[str] = []
        gaps_s: dict[str, float] = {}  # reply inbox -> least time between two of its messages
        now_s = time.monotonic()
        with self.lock:
            for job, token_ids in tokens_of:
                try:
                    for token_id in token_ids:
                        if job.finish_reason or job.is_leaving:
                            break
                        job.decoded(token_id)
                        computed.append(job.request_id)
                    if job.filled:
                        self.put_saved(job)
                    if job.finish_reason:
                        self.post(job, On.FINISHED, job.tokens_decoded)
                    elif job.has_update and self._is_update_due(job, gaps_s, now_s):
                        job.update_sent_s = now_s
                        self.post(job, On.DECODED, job.tokens_decoded)
                except Exception as error:  # Catch all: a request must not fail the batch
                    self.fail(job, error)
            self.batching.computed(computed)
            self.tokens_generated += len(computed)

    def _is_update_due(self, job: DecodeJob, gaps_s: dict[str, float], now_s: float) -> bool:
        inbox = job.request.reply_inbox
        if not job.waits_for_more:
            return True
        if inbox not in gaps_s:
            streams = sum(other.request.reply_inbox == inbox for other in self.jobs.values())
            gaps_s[inbox] = gap_s(streams, job.request.messages_per_s_max)
        step_s = self.process.steps.recent_s
        return self._pace.is_due(inbox, gaps_s[inbox], step_s, now_s, job.update_sent_s)

    def _send(self, job: DecodeJob) -> None:
        self._updates[job.request.reply_inbox].append(job.take_update())

    def send_news(self) -> None:
        """Send each frontend one message with the new tokens of the unfinished jobs. Runs in the
        thread that recorded the tokens."""
        updates, self._updates = self._updates, defaultdict(list)
        for inbox, of_frontend in updates.items():
            self.process.outbox.send(inbox, Tokens(self.process.incarnation, of_frontend))

    def put_saved(self, job: DecodeJob) -> None:
        """Queue the write of full blocks whose KV is complete in the pages. The caller holds the
        lock, so that a release of the pages is later in the writer's queue."""
        if blocks := job.take_saved():
            self.writer.put_whole(job.put, blocks)

    # -- it is preempted between two steps, and waits for pages again

    def _preempt(self, job: DecodeJob) -> None:
        if job.has_update:  # send it now, because the job may wait for long
            self.post(job, On.DECODED, job.tokens_decoded)
            self.send_news()
        self.post(job, On.PREEMPTED)

    def _take_pages(self, job: DecodeJob) -> None:
        self.batching.preempt(job.request_id)
        job.saving = job.give_up_pages()
        log.info("%s is preempted", job.request_id)
        self.process.observations.observe("mooncake_decode_preemptions_total")
        self.process.owners.hold(job.request_id, time.monotonic(), job.saving.keys)

    def _end_save(self, job: DecodeJob) -> None:
        self.batching.saved(job.request_id)
        job.saving = None
        self.release(job.pages_left)

    # -- it is answered, and leaves

    def _is_reading(self, job: DecodeJob) -> bool:
        arrival = self._arrivals.get(job.request_id) or job.arrival
        return arrival is not None and arrival.is_loading

    def _remove(self, job: DecodeJob) -> None:
        super()._remove(job)
        self._pages.leave(job.pages_left)
        self._arrivals.pop(job.request_id)
        self._refuse_arrival(job.request_id)  # a late LayersReady must not reserve pages

    def _fail(self, job: DecodeJob) -> None:
        error = job.state.error
        if error is None:
            job.finish_reason = "cancelled"
            self._repliers.send(job.reply)
        else:
            self._repliers.send(lambda: job.client.fail(error))

    def _release_leases(self, job: DecodeJob) -> None:
        """Release the leases on the job's blocks.

        Exception: if the engines hand KV over by themselves, this worker only stops renewing. The
        prefill worker, which may still be writing leased slots, releases the leases.
        """
        owners = self.process.owners
        (owners.drop if job.request.native else owners.release)(job.request_id)

    # -- what the worker says of itself

    def report(self) -> WorkerReport:
        with self.lock:
            running, context_tokens = self.batching.running, self.batching.context_tokens
            speed = self.process.steps.speed
            return self._report(
                queue_requests=len(self.jobs) - running,
                queue_tokens=0,
                running=running,
                context_tokens=context_tokens,
                step_s=speed * self.estimate.step_s(running, context_tokens),
            )

    def _replied(self, give_up_s: float) -> None:
        self._repliers.close(max(0.0, give_up_s - time.monotonic()))


class MessagePace:
    """Decides when new tokens are sent to a frontend. Not thread-safe.

    A frontend keeps a minimum gap between two messages of a stream (token_streams.py). If the
    worker keeps the same gap, it sends fewer messages, each with the tokens of several steps. But a
    token may then wait one step longer. So the worker keeps the gap only if steps are short.
    """

    INBOXES_MAX = 256  # largest size of `_sent_s`; a restarted frontend has a new inbox
    STEPS_MIN = 4  # steps are short if a gap has 4 or more; a gap grows by one step at most

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}  # inbox -> start of its current gap (monotonic)

    def is_due(
        self,
        inbox: str,
        its_gap_s: float,
        step_s: float,
        now_s: float,
        update_sent_s: float = float("inf"),
    ) -> bool:
        """Whether to send a stream's unsent tokens now. True if `step_s` is 0 (unknown).

        `update_sent_s`: time of the stream's previous message. An engine may report a step's tokens
        request by request, so within a gap each stream may still send one message.
        """
        is_short = 0 < step_s * self.STEPS_MIN <= its_gap_s
        sent_s = self._sent_s.get(inbox, float("-inf"))
        if is_short and now_s < sent_s + its_gap_s:
            return update_sent_s < sent_s
        if len(self._sent_s) >= self.INBOXES_MAX:
            self._sent_s.clear()
        self._sent_s[inbox] = now_s
        return True


class Repliers:
    """Threads that send replies. A send waits until Triton has taken the reply, but the engine's
    thread must not wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(REPLIERS, thread_name_prefix="replier")
        self._replies: set[Future[None]] = set()
        begun = threading.Barrier(REPLIERS + 1)  # start all threads now, not under load
        for _ in range(REPLIERS):
            self._pool.submit(begun.wait)
        begun.wait()

    def send(self, reply: Callable[[], None]) -> None:
        future = self._pool.submit(reply)
        self._replies.add(future)
        future.add_done_callback(self._sent)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for all replies, then drop replies that no thread has begun."""
        wait(list(self._replies), timeout=timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sent(self, reply: Future[None]) -> None:
        self._replies.discard(reply)
        if not reply.cancelled() and (error := reply.exception()) is not None:
            log.error("a reply was not sent", exc_info=error)
