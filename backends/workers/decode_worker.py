"""The decode worker: handed-over KV in, a stream of tokens out, generated blocks into the store.

A request of higher priority that lacks pages preempts others (engine/batching/batching.py): between
two steps they lose their pages, what the store lacks of their KV is put there, and they wait. With
pages again it is read back as a hand-over is, and they go on where they were. If it is gone, they
go on elsewhere, as after any loss.

The hand-over starts early: prefill announces layers while it computes, and they are read into
reserved pages (arrivals.py). When the request itself comes, the rest is read and it joins the
running batch. Threads: the engine's thread takes the turns (worker.py), one loader reads KV in, the
writer puts generated blocks, the repliers end requests. Tokens come in the one thread that the
driver says them in, and leave as one message per frontend and step, or per several short steps.

Not here: Triton (decode/model.py), the text of tokens (text_stream.py), steps and engines
(step_driver.py, trtllm/decode.py).
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
from backends.errors import (
    Cancelled,
    KvMissing,
    Overloaded,
    ServingError,
    WorkerUnavailable,
)
from backends.text.tokenizer import Tokenizer
from backends.workers.arrivals import Arrivals
from backends.workers.driver import DecodeDriver
from backends.workers.jobs import DecodeClient, DecodeJob
from backends.workers.kv_writer import BlockPut
from backends.workers.lasting_parts import LastingParts
from backends.workers.protocol import (
    DecodeRequest,
    LayersReady,
    Tokens,
    TokenUpdate,
    WorkerMessage,
    gap_s,
)
from backends.workers.worker import JobWorker
from conductor.admission.arrival_check import BatchOnArrival, refusal
from conductor.estimates.estimates import DecodeEstimate
from mooncake_store.errors import StoreError
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
LOADERS = 1  # layers and the request that they belong to stay in order
REPLIERS = 8


class DecodeWorker(JobWorker[DecodeJob]):
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
        super().__init__(
            "decode", worker_id, config, repository, config.slots, driver, LOADERS, parts
        )
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
        # These, and the updates by frontend, wait for `send_news`.
        self._ended: list[DecodeJob] = []
        self._updates: dict[str, list[TokenUpdate]] = defaultdict(list)
        self._pace = MessagePace()
        self._repliers = Repliers()
        driver.begin(self)
        self._serve()

    def submit(self, request: DecodeRequest, ids: np.ndarray, client: DecodeClient) -> None:
        """Queue a request; the client is answered from another thread. Raises ServingError."""
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
        self.driver.check(job)
        with self.lock:
            self._refuse(job)
            if self._arrivals.is_refused(request.request_id):
                raise Cancelled("it was stopped before it came")
            self._refuse_incomplete(request, len(ids) - 1)
            self._check_again(request, len(ids))
            if not self._arrivals.has(request.request_id) and not self._reserve(
                request.request_id, tokens_max, request.is_resumed
            ):
                raise self._queue_full("requests")
            if request.priority:
                self.batching.prioritise(request.request_id, request.priority)
            self.jobs[request.request_id] = job
            # Before anybody can end it: leases of a request that is over are nobody's to renew.
            self.process.owners.hold(request.request_id, time.monotonic(), job.keys_given)
            self.lock.notify_all()

    def _load_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def _refuse_incomplete(self, request: DecodeRequest, kv_tokens: int) -> None:
        """Exactly the blocks that its engine wants, each once: pages that nothing was read into
        hold whatever was there before. With the lock held."""
        given = sorted(ref.index for ref in request.blocks)
        due = list(range(self.driver.blocks_due(len(given), kv_tokens)))
        if given != due:
            self._refuse_arrival(request.request_id)
            raise KvMissing(f"blocks {given[:8]} were handed over, {len(due)} from 0 on are due")

    def _check_again(self, request: DecodeRequest, tokens: int) -> None:
        """Refuse a request that would slow everybody down too much; with the lock held."""
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
        """What was reserved for it is freed at the next turn; with the lock held."""
        self._arrivals.refuse(request_id, time.monotonic())
        self.lock.notify_all()

    def _stopped_early(self, request_id: str) -> None:
        self._arrivals.refuse(request_id, time.monotonic())

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

    def _reserve(self, request_id: str, tokens_max: int, is_resumed: bool = False) -> bool:
        """It waits for pages and a slot. False: the queue is full. With the lock held."""
        now_s = time.monotonic()
        return self.batching.add(request_id, 1, tokens_max - 1, is_resumed, came_s=now_s)

    # -- KV comes in

    def _heard(self, message: WorkerMessage) -> None:
        if isinstance(message, LayersReady):
            self._on_layers(message)
        else:
            super()._heard(message)

    def _on_layers(self, message: LayersReady) -> None:
        """Reserve pages for a request that is still in prefill, and read ahead."""
        request_id = message.request_id
        with self.lock:
            if request_id in self.jobs or self._arrivals.is_refused(request_id):
                return
            if not self._arrivals.has(request_id):
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
                # The request came meanwhile; its own loading stands behind this message in line.
                arrival = self.jobs[message.request_id].arrival
            if arrival is None or not arrival.pages:
                return
            arrival.is_loading = True
        try:
            self._loader.load_announced(arrival, message)
        except Exception as error:  # edge: only the head start is lost
            log.warning("an announced layer was not read: %s", error)
        finally:
            with self.lock:
                arrival.is_loading = False

    def _load_rest(self, job: DecodeJob) -> bool:
        """In the loader's thread, when the job has pages: everything not read yet."""
        assert job.arrival is not None, f"{job.request_id} has no pages"
        started_s = time.monotonic()
        is_new = job.saved is None
        if is_new:
            job.queue_s = started_s - job.submitted_s
        try:
            if not job.is_leaving:
                early = job.arrival.whole_blocks(self.driver.engine.layout.layers)
                missing = self._loader.load_rest(job.arrival, job.blocks)
                if is_new:
                    job.loaded_early_blocks = early
                self.driver.engine.import_pages(job.pages)
                if missing:
                    raise KvMissing(f"blocks {missing[:8]} of {len(job.blocks)} are gone")
        finally:
            if is_new:
                job.load_s = time.monotonic() - started_s
                observations = self.process.observations
                observations.observe("mooncake_decode_queue_seconds", job.queue_s)
                observations.observe("mooncake_handover_load_seconds", job.load_s)
            if self.driver.has_read(job):
                self.release_handed_over(job)
        return True

    # -- KV goes out for a while, and comes back

    def _preempt(self, job: DecodeJob) -> None:
        """Between two steps, with the lock held."""
        pages, put = self.batching.preempt(job.request_id), job.give_up_pages()
        if job.has_update:  # it would wait for as long as the job does
            update = Tokens(self.process.incarnation, [job.take_update()])
            self.process.outbox.send(job.request.reply_inbox, update)
        log.info("%s is preempted", job.request_id)
        self.process.observations.observe("mooncake_decode_preemptions_total")
        self.process.owners.hold(job.request_id, time.monotonic(), put.keys)
        self.writer.then(lambda: self._save(job, put, pages))

    def _save(self, job: DecodeJob, put: BlockPut, pages: list[int]) -> None:
        """In the writer's thread, behind what it had to do in these pages."""
        error: Exception | None = None
        try:
            if not job.is_leaving:
                job.saved = self.writer.save(put)
        except (ServingError, StoreError) as problem:
            error = WorkerUnavailable(f"it was preempted, and its KV was not saved: {problem}")
        except Exception as problem:  # edge: its pages must come back all the same
            log.exception("saving %s failed", job.request_id)
            error = WorkerUnavailable(f"it was preempted, and its KV was not saved: {problem!r}")
        with self.lock:
            self.batching.saved(job.request_id)
            if error is not None:
                self.fail(job, error)
        self.release(pages)

    # -- what a driver says of a request

    def join_batch(self, job: DecodeJob) -> bool:
        """Its KV is in its pages: it may decode. False: it leaves instead. With the lock held."""
        if not self._may_join(job):
            return False
        self.batching.start(job.request_id, len(job.token_ids))
        return True

    def decoded(self, tokens_of: Iterable[tuple[DecodeJob, Sequence[int]]]) -> None:
        """These tokens came, a job's one after the other; behind them `send_news` is due."""
        computed: list[str] = []
        gaps_s: dict[str, float] = {}  # by inbox
        now_s = time.monotonic()
        with self.lock:
            for job, token_ids in tokens_of:
                try:
                    for token_id in token_ids:
                        if job.finish_reason or job.is_leaving or self.has_left(job):
                            break
                        job.decoded(token_id)
                        computed.append(job.request_id)
                    has_news = job.has_update and not job.finish_reason
                    if has_news and self._may_tell(job, gaps_s, now_s):
                        job.update_sent_s = now_s
                        self._updates[job.request.reply_inbox].append(job.take_update())
                except Exception as error:  # edge: it must not fail its neighbours in the batch
                    self.fail(job, error)
                if job.filled:
                    self.put_saved(job)
                if job.finish_reason:
                    self._ended.append(job)
            self.batching.computed(computed)
            self.tokens_generated += len(computed)

    def _may_tell(self, job: DecodeJob, gaps_s: dict[str, float], now_s: float) -> bool:
        inbox = job.request.reply_inbox
        if not job.waits_for_more:
            return True
        if inbox not in gaps_s:
            streams = sum(other.request.reply_inbox == inbox for other in self.jobs.values())
            gaps_s[inbox] = gap_s(streams, job.request.messages_per_s_max)
        step_s = self.process.steps.recent_s
        return self._pace.is_due(inbox, gaps_s[inbox], step_s, now_s, job.update_sent_s)

    def put_saved(self, job: DecodeJob) -> None:
        """Blocks that it has filled go to the store once they are in a page. With the lock held:
        what gives the pages back must stand behind this in the writer's line."""
        if blocks := job.take_saved():
            self.writer.put_whole(job.put, blocks)

    def send_news(self) -> None:
        """To the clients of what was decoded: who has ended, and one message per frontend with the
        tokens of those that go on. In the thread of `decoded`."""
        ended, self._ended = self._ended, []
        updates, self._updates = self._updates, defaultdict(list)
        for job in ended:
            self.end(job)
        for inbox, of_frontend in updates.items():
            self.process.outbox.send(inbox, Tokens(self.process.incarnation, of_frontend))

    def end(self, job: DecodeJob, error: Exception | None = None) -> None:
        """It leaves now, and its client hears; its pages go back behind the writer's work on them.
        Never while a step computes in its pages, unless from that step."""
        with self.lock:
            if self.has_left(job):
                return
            del self.jobs[job.request_id]
            pages = self.batching.remove(job.request_id)
            self._pages.leave(pages)
            self.driver.abort(job)
            self._refuse_arrival(job.request_id)  # messages may still come
        self.writer.then(lambda: self.driver.free(job, pages))
        if error is None:
            self._repliers.send(job.reply)
        else:
            self._repliers.send(lambda: job.client.fail(error))

    def forget(self, job: DecodeJob) -> None:
        """In the writer's thread: nothing more of it goes to the store."""
        job.end_put()
        self.release_handed_over(job)

    def release_handed_over(self, job: DecodeJob) -> None:
        """The prefill worker's leases on blocks, which are its own business where the engines hand
        KV over: there it may still be writing slots in the name of this request."""
        owners = self.process.owners
        (owners.drop if job.request.native else owners.release)(job.request_id)

    # -- turns

    def _admit(self) -> None:
        if self.driver.can_preempt:
            for request_id in self.batching.to_preempt():
                self._preempt(self.jobs[request_id])
        for admitted in self.batching.admit():
            self._arrivals.give_pages(admitted.request_id, admitted.pages)
        for job in self.jobs.values():
            if job.arrival is None and self._arrivals.has_pages(job.request_id):
                job.arrival = self._arrivals.pop(job.request_id)
                job.is_loading = True
                self._loading.submit(self._load, job, self._load_rest)

    def _drop_leaving(self) -> None:
        """Also arrivals whose request never came."""
        for request_id, pages in self._arrivals.reap(time.monotonic(), self.jobs.keys()):
            self.batching.remove(request_id)
            self._pages.release(pages)
        for job in [j for j in self.jobs.values() if j.is_leaving and not j.is_loading]:
            if self._arrivals.is_loading(job.request_id):
                continue  # a layer of it is just being read into its pages
            self._arrivals.discard(job.request_id)
            job.finish_reason = "cancelled"
            self.end(job, error=job.error)


class MessagePace:
    """When the tokens of a frontend's streams leave. The frontend lets tokens wait that come close
    together (token_streams.py): rather here, where those of several steps then cost one message.
    A step later than that gap at most, so not where steps are long. Not thread-safe.
    """

    INBOXES_MAX = 256  # frontends come and go
    STEPS_MIN = 4  # in a gap, so that it gets a quarter longer at most

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}  # inbox -> when it had its latest message

    def is_due(
        self,
        inbox: str,
        its_gap_s: float,
        step_s: float,
        now_s: float,
        update_sent_s: float = float("inf"),
    ) -> bool:
        """What the latest step brought leaves now, with what waits. `step_s`: 0, nobody knows.

        `update_sent_s`: when this stream had its latest tokens. Engines say those of a step one
        request after the other, so one that had none in this gap may have them yet.
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
    """Threads that answer requests, because a reply blocks until Triton has taken it.

    The engine's thread must not wait for that.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(REPLIERS, thread_name_prefix="replier")
        self._replies: set[Future[None]] = set()
        begun = threading.Barrier(REPLIERS + 1)  # all its threads now, and none under load
        for _ in range(REPLIERS):
            self._pool.submit(begun.wait)
        begun.wait()

    def send(self, reply: Callable[[], None]) -> None:
        """Soon, in a thread of ours."""
        future = self._pool.submit(reply)
        self._replies.add(future)
        future.add_done_callback(self._sent)

    def close(self, timeout_s: float) -> None:
        """Wait for those that are on their way, at most so long."""
        wait(list(self._replies), timeout=timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sent(self, reply: Future[None]) -> None:
        self._replies.discard(reply)
        if not reply.cancelled() and (error := reply.exception()) is not None:
            log.error("a reply was not sent", exc_info=error)
