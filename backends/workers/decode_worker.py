"""The decode worker: handed-over KV in, a stream of tokens out, generated blocks into the store.

The hand-over starts early: prefill announces layers while it computes, and they are read into
reserved pages (arrivals.py). When the request itself comes, the rest is read and it joins the
running batch. Threads: the engine thread computes one token per running request and step and
writes one letter per front with them, one loader reads KV in, the writer puts generated blocks,
the repliers end requests; `_lock` guards jobs, batching and pages.

Not here: Triton (decode/model.py), the text of tokens (text_stream.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from backends.engine.batching.batching import DecodeBatching
from backends.engine.interface import Work
from backends.engine.sampling import sample
from backends.errors import (
    Cancelled,
    KvMissing,
    Overloaded,
    RequestInvalid,
    WorkerGone,
    WorkerUnavailable,
)
from backends.text.tokenizer import Tokenizer
from backends.workers.arrivals import Arrivals
from backends.workers.config import DecodeConfig, checkpoint_folder
from backends.workers.decode_job import DecodeClient, DecodeJob
from backends.workers.kv_loader import KvLoader, PageGuard
from backends.workers.kv_writer import KvWriter
from backends.workers.protocol import (
    DecodeRequest,
    LayersReady,
    Letter,
    Stop,
    Tokens,
    TokenUpdate,
)
from backends.workers.worker import IDLE_WAIT_S, Worker, fail_stuck, unfinished
from conductor.admission.arrival_check import BatchOnArrival, refusal
from conductor.estimates.estimates import DecodeEstimate
from mooncake_store.errors import StoreError
from mooncake_store.layout import blocks_touched
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
REPLIERS = 8


class DecodeWorker:
    """With an engine that computes step by step; decode_worker.py has one that batches."""

    def __init__(self, worker_id: str, config: DecodeConfig, repository: str) -> None:
        self._config = config
        self._lock = threading.Condition()
        self._jobs: dict[str, DecodeJob] = {}
        self._is_closing = False
        self.tokens_generated = 0
        self._tokenizer = Tokenizer.load(checkpoint_folder(config.checkpoint, repository))
        self._arrivals = Arrivals(ttl_s=config.lease_s)
        self.worker = Worker(
            "decode", worker_id, config, repository, config.slots,
            self._on_letter, self.report, self.check,
            self._own_engine(worker_id, config, repository),
        )  # fmt: skip
        self._engine, store = self.worker.engine, self.worker.store
        self.worker.jobs = self._jobs
        self._estimate = DecodeEstimate.of(self.worker.info.decode_coefficients)
        layout, pool = self._engine.layout, self._engine.kv_pool
        self._batching = DecodeBatching(
            self._engine.pages, config.block_tokens, config.slots,
            waiting_max=config.queue_requests_max,
        )  # fmt: skip
        self._loader = KvLoader(store, layout, pool, config.transfer_s_max)
        self._pages = PageGuard(self._engine.pages, self._loader.pending_pages)
        self._writer = KvWriter(store, layout, pool, self.worker.outbox, config.lease_s)
        # One thread: letters and the request that they belong to stay in order.
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="kv-loader")
        self._repliers = Repliers()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.worker.join()
        self._is_ready.set()

    def submit(self, request: DecodeRequest, ids: np.ndarray, client: DecodeClient) -> None:
        """Queue a request; the client is answered from another thread. Raises ServingError."""
        self.worker.call_limits.check(request, ids)
        tokens_max = request.prompt_tokens + request.sampling.max_tokens
        job = self._job(
            request, ids, client, self._tokenizer, self.worker.fingerprint,
            self.worker.incarnation, self._config.block_tokens,
        )  # fmt: skip
        with self._lock:
            if self._is_closing:
                raise WorkerGone(f"{self.worker.worker_id} is shutting down")
            if request.request_id in self._jobs:
                raise RequestInvalid(f"request id {request.request_id} is being served already")
            if self._arrivals.is_refused(request.request_id):
                raise Cancelled("it was stopped before it came")
            self._refuse_uncovered(request, len(ids) - 1)
            self._look_again(request, len(ids))
            if not self._arrivals.has(request.request_id) and not self._reserve(
                request.request_id, tokens_max, request.is_resumed
            ):
                raise Overloaded(
                    "decode_queue_full",
                    f"{self._batching.waiting} requests wait at {self.worker.worker_id}, "
                    f"queue_requests_max is {self._config.queue_requests_max}",
                    1.0,
                )
            self._jobs[request.request_id] = job
            self._lock.notify_all()
        self.worker.owners.hold(request.request_id, time.monotonic())

    def _refuse_uncovered(self, request: DecodeRequest, kv_tokens: int) -> None:
        """Exactly the blocks that its engine hands over, each once: pages that nothing was read
        into hold whatever was there before. With the lock held."""
        given = sorted(ref.index for ref in request.blocks)
        due = list(range(self._blocks_due(kv_tokens)))
        if given != due:
            self._arrivals.refuse(request.request_id, time.monotonic())  # its place is freed
            self._lock.notify_all()
            raise KvMissing(f"blocks {given[:8]} were handed over, {len(due)} from 0 on are due")

    def _look_again(self, request: DecodeRequest, tokens: int) -> None:
        """Refuse a request that would slow everybody down too much; with the lock held."""
        jobs = self._jobs.values()
        there = BatchOnArrival(
            sum(len(job.token_ids) for job in jobs),
            [job.request.sampling.max_tokens - len(job.output_ids) for job in jobs],
            self.worker.steps.speed,
        )  # fmt: skip
        refused = refusal(there, tokens, self._estimate, request.tbt_slo_s)
        if refused is not None:
            self._arrivals.refuse(request.request_id, time.monotonic())  # its place is freed
            self._lock.notify_all()
            raise Overloaded(refused.kind, refused.reason, refused.retry_after_s)

    def stop(self, request_id: str) -> None:
        """End a request at the next step; one that is not here yet will not start."""
        with self._lock:
            if request_id in self._jobs:
                self._jobs[request_id].is_stopped = True
            else:
                self._arrivals.refuse(request_id, time.monotonic())
            self._lock.notify_all()

    def report(self) -> WorkerReport:
        with self._lock:
            return WorkerReport(
                worker_id=self.worker.worker_id,
                incarnation=self.worker.incarnation,
                queue_requests=len(self._jobs) - self._batching.running,
                queue_tokens=0,
                running=self._batching.running,
                pages_used=self._pages.used_pages,
                context_tokens=self._batching.context_tokens,
                step_s=self.worker.steps.speed
                * self._estimate.step_s(self._batching.running, self._batching.context_tokens),
                is_draining=self._is_closing,
                oldest_step_s=self.worker.watch.age_s(time.monotonic()),
            )

    def check(self) -> None:
        """Prove the invariants of everything that this worker owns."""
        with self._lock:
            self._batching.check()
            self._pages.check()

    def close(self, timeout_s: float) -> None:
        """Finish what was accepted (at most `timeout_s`), then leave the cluster."""
        give_up_s = time.monotonic() + timeout_s
        self._is_closing = True
        for job in unfinished(self._lock, self._jobs, give_up_s):
            self._fail(job, WorkerGone(f"{self.worker.worker_id} is shutting down"))
        self._thread.join(timeout=5.0)
        self._loading.shutdown(wait=True, cancel_futures=True)
        self._writer.close()
        fail_stuck(self._jobs, self.worker)
        self._repliers.close(max(0.0, give_up_s - time.monotonic()))
        self.worker.leave()

    def _reserve(self, request_id: str, tokens_max: int, is_resumed: bool = False) -> bool:
        """A place in the queue for pages and a slot; with the lock held."""
        return self._batching.add(request_id, 1, tokens_max - 1, is_resumed)

    # -- what another kind of engine does otherwise

    def _own_engine(self, worker_id: str, config: DecodeConfig, repository: str) -> Any:
        return None  # the torch engine, which Worker makes

    def _job(self, *given: Any) -> DecodeJob:
        return DecodeJob(*given)

    def _blocks_due(self, kv_tokens: int) -> int:
        """How many leading blocks prefill hands over of a request with so much KV."""
        return blocks_touched(kv_tokens, self._config.block_tokens)

    def _loaded(self, job: DecodeJob) -> None:
        """In the loader's thread: all its KV is in its pages."""
        with self._lock:
            job.is_loading = False
            self._batching.start(job.request_id, len(job.token_ids))
            self._lock.notify_all()

    # -- KV comes in

    def _on_letter(self, letter: Letter) -> None:
        if not self._is_ready.is_set():
            return
        if isinstance(letter, Stop):
            self.stop(letter.request_id)
        elif isinstance(letter, LayersReady):
            self._on_layers(letter)

    def _on_layers(self, letter: LayersReady) -> None:
        """Reserve a place for a request that is still in prefill, and read ahead."""
        request_id = letter.request_id
        with self._lock:
            if request_id in self._jobs or self._arrivals.is_refused(request_id):
                return
            if not self._arrivals.has(request_id):
                if letter.reserve_tokens > self.worker.context_tokens_max:
                    return
                if not self._reserve(request_id, letter.reserve_tokens):
                    return
                self._arrivals.expect(request_id, time.monotonic())
                self._lock.notify_all()
        self._loading.submit(self._load_announced, letter)

    def _load_announced(self, letter: LayersReady) -> None:
        with self._lock:
            arrival = self._arrivals.get(letter.request_id)
            if arrival is None and letter.request_id in self._jobs:
                # The request came meanwhile; its own loading stands behind this letter in line.
                arrival = self._jobs[letter.request_id].arrival
            if arrival is None or not arrival.pages:
                return
            arrival.is_loading = True
        try:
            self._loader.load_announced(arrival, letter)
        except Exception as error:  # edge: only the head start is lost
            log.warning("an announced layer was not read: %s", error)
        finally:
            with self._lock:
                arrival.is_loading = False

    def _load_rest(self, job: DecodeJob) -> None:
        """In the loader's thread, when the job has pages: everything not read yet."""
        started_s = time.monotonic()
        job.queue_s = started_s - job.submitted_s
        error: Exception | None = None
        try:
            if not job.is_leaving:
                early = job.arrival.whole_blocks(self._engine.layout.layers)
                missing = self._loader.load_rest(job.arrival, job.request.blocks)
                job.loaded_early_blocks = early
                self._engine.import_pages(job.pages)
                if missing:
                    error = KvMissing(f"blocks {missing[:8]} of {len(job.request.blocks)} are gone")
        except StoreError as problem:
            error = WorkerUnavailable(f"store: {problem}")
        except Exception as problem:  # edge: one request must not take the loader down
            log.exception("loading %s failed", job.request_id)
            error = problem
        job.load_s = time.monotonic() - started_s
        self.worker.observations.observe("mooncake_decode_queue_seconds", job.queue_s)
        self.worker.observations.observe("mooncake_handover_load_seconds", job.load_s)
        self.worker.owners.release(job.request_id)
        if error is None:
            self._loaded(job)
            return
        with self._lock:
            job.is_loading = False
            self._fail(job, error)

    # -- tokens are computed

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One turn of the engine's thread; False: it was the last."""
        with self._lock:
            if self._is_closing and not self._jobs:
                return False
            self._drop_stopped()
            self._pages.settle()
            self._admit()
            jobs = [self._jobs[request_id] for request_id in self._batching.next_step()]
            if not jobs:
                self.worker.steps.batch_is_empty()
                self._lock.wait(IDLE_WAIT_S)
                return True
            predicted_s = self._estimate.step_s(len(jobs), self._batching.context_tokens)
        self.worker.watch.began(time.monotonic(), predicted_s)
        try:
            self._step(jobs)
        except Exception as error:  # edge: a failed step fails its requests, not the worker
            log.exception("a decode step failed")
            for job in jobs:
                self._end(job, error=error)
        finally:
            self.worker.watch.ended()
        return True

    def _admit(self) -> None:
        """Hand out pages and start loading; with the lock held."""
        for admitted in self._batching.admit():
            self._arrivals.give_pages(admitted.request_id, admitted.pages)
        for job in self._jobs.values():
            if job.arrival is None and self._arrivals.has_pages(job.request_id):
                job.arrival = self._arrivals.pop(job.request_id)
                job.is_loading = True
                self._loading.submit(self._load_rest, job)

    def _drop_stopped(self) -> None:
        """Stopped jobs and arrivals whose request never came; with the lock held."""
        now_s = time.monotonic()
        for request_id, pages in self._arrivals.reap(now_s, self._jobs.keys()):
            self._batching.remove(request_id)
            self._pages.release(pages)
        for job in [j for j in self._jobs.values() if j.is_leaving and not j.is_loading]:
            if self._arrivals.is_loading(job.request_id):
                continue  # a layer of it is just being read into its pages
            self._arrivals.discard(job.request_id)
            job.finish_reason = "cancelled"
            self._end(job, error=job.error)

    def _step(self, jobs: Sequence[DecodeJob]) -> None:
        started_s = time.monotonic()
        works = [Work([job.token_ids[-1]], len(job.token_ids) - 1, job.pages) for job in jobs]
        logits = self._engine.forward(works)
        for row, job in enumerate(jobs):
            job.kv_grew()
            if job.full_block is not None:
                self._writer.put_whole(job.put, [job.full_block])
            try:
                job.append(sample(
                    logits[row], job.request.sampling, len(job.output_ids), job.prompt_ids,
                    job.output_ids,
                ))  # fmt: skip
            except Exception as error:  # edge: it must not fail its neighbours in the batch
                self._fail(job, error)
        estimated_s = self._estimate.step_s(len(works), sum(work.end for work in works))
        self.worker.steps.took(time.monotonic() - started_s, estimated_s)
        self.tokens_generated += len(jobs)
        with self._lock:
            self._batching.computed([job.request_id for job in jobs])
        updates: dict[str, list[TokenUpdate]] = defaultdict(list)
        for job in jobs:
            if job.finish_reason:
                self._end(job)
            elif job.has_update:
                updates[job.request.reply_inbox].append(job.take_update())
        for inbox, of_front in updates.items():
            self.worker.outbox.send(inbox, Tokens(self.worker.incarnation, of_front))

    def _fail(self, job: DecodeJob, error: Exception) -> None:
        """From any thread: it leaves at the next turn, when nobody is at its pages."""
        with self._lock:
            if self._jobs.get(job.request_id) is job and job.error is None:
                job.error = error
                self._lock.notify_all()

    def _end(self, job: DecodeJob, error: Exception | None = None) -> None:
        """Free everything of a job, then answer; the writer's work on its pages comes first."""
        with self._lock:
            if self._jobs.pop(job.request_id, None) is None:
                return
            pages = self._batching.remove(job.request_id)
            self._arrivals.refuse(job.request_id, time.monotonic())  # letters may still come
            self._lock.notify_all()
        self._writer.then(lambda: self._freed(job, pages))
        if error is None:
            self._repliers.send(job.reply)
        else:
            self._repliers.send(lambda: job.client.fail(error))

    def _freed(self, job: DecodeJob, pages: list[int]) -> None:
        job.end_put()
        self.worker.owners.release(job.request_id)
        with self._lock:
            self._pages.release(pages)
            self._lock.notify_all()


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
