"""The prefill worker: prompts in, KV into the store, one token out.

A prompt waits for pages, has its cached prefix loaded (prefix_loading.py), is computed in chunks
together with others (engine/batching/batching.py), and leaves: its KV goes to the store layer by
layer meanwhile (kv_writer.py). Threads: the engine thread computes, loaders move prefixes in, the
writer moves KV out; `_lock` guards jobs, batching and pages.

Not here: Triton (prefill/model.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from backends.engine.batching.batching import Chunk, PrefillBatching
from backends.engine.interface import Work
from backends.engine.sampling import sample
from backends.errors import (
    Cancelled,
    Overloaded,
    RequestInvalid,
    ServingError,
    WorkerGone,
    WorkerUnavailable,
)
from backends.workers.config import PrefillConfig
from backends.workers.kv_loader import KvLoader, PageGuard
from backends.workers.kv_writer import BlockPut, KvWriter
from backends.workers.prefill_job import PrefillClient, PrefillJob
from backends.workers.prefix_loading import Fetching, PrefixLoading, SingleFlight
from backends.workers.protocol import (
    BlockRef,
    Letter,
    PrefillRequest,
    Stop,
)
from backends.workers.worker import IDLE_WAIT_S, Worker, fail_stuck, unfinished
from conductor.estimates.estimates import PrefillEstimate
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.errors import StoreError
from mooncake_store.layout import blocks_touched
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
LOADERS = 2


class PrefillWorker:
    """With an engine that computes step by step; prefill_worker.py has one that batches."""

    def __init__(self, worker_id: str, config: PrefillConfig, repository: str) -> None:
        self._config = config
        self._lock = threading.Condition()
        self._jobs: dict[str, PrefillJob] = {}
        self._single_flight = SingleFlight()
        self._blocked: list[PrefillJob] = []  # until a block that they lack is there
        self._is_closing = False
        self.worker = Worker(
            "prefill", worker_id, config, repository, config.queue_requests_max,
            self._on_letter, self.report, self.check,
            self._own_engine(worker_id, config, repository),
        )  # fmt: skip
        self._engine, store = self.worker.engine, self.worker.store
        store.expect_threads(LOADERS)
        self._block_tokens = config.block_tokens
        self.worker.jobs = self._jobs
        self._estimate = PrefillEstimate.of(self.worker.info.prefill_coefficients)
        layout, pool = self._engine.layout, self._engine.kv_pool
        self._batching = PrefillBatching(
            self._engine.pages, self._block_tokens, config.chunk_tokens,
            slots_max=config.kv_pages, waiting_max=config.queue_requests_max,
            overhead_tokens=self._estimate.overhead_tokens,
        )  # fmt: skip
        self._loader = KvLoader(store, layout, pool, config.transfer_s_max)
        self._pages = PageGuard(self._engine.pages, self._loader.pending_pages)
        self._prefixes = PrefixLoading(
            store, self._loader, config.store_node, config.lease_s, config.transfer_s_max
        )
        self._writer = KvWriter(store, layout, pool, self.worker.outbox, config.lease_s)
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="kv-loader")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.worker.join()

    def submit(self, request: PrefillRequest, ids: np.ndarray, client: PrefillClient) -> None:
        """Queue a prompt; the client is answered from another thread. Raises ServingError."""
        self.worker.call_limits.check(request, ids)
        seed = chain_seed(self.worker.fingerprint, cache_salt=request.cache_salt)
        put = BlockPut(
            request.request_id, len(ids), [], block_keys(ids, self._block_tokens, seed),
            first_block=0, decode_inbox=request.decode_inbox,
            reserve_tokens=request.reserve_tokens, tenant=request.cache_salt,
        )  # fmt: skip
        now_s = time.monotonic()
        job = self._job(request, ids.astype(np.int32), client, put, now_s)
        with self._lock:
            if self._is_closing:
                raise WorkerGone(f"{self.worker.worker_id} is shutting down")
            if request.request_id in self._jobs:
                raise RequestInvalid(f"request id {request.request_id} is being served already")
            place_s = now_s + request.place_s
            if not self._batching.add(request.request_id, len(ids), place_s, request.is_resumed):
                raise Overloaded(
                    "prefill_queue_full",
                    f"{self._batching.waiting} prompts wait at {self.worker.worker_id}, "
                    f"queue_requests_max is {self._config.queue_requests_max}",
                    1.0,
                )
            job.queue_ahead = self._batching.ahead(request.request_id)
            self._jobs[request.request_id] = job
            self._lock.notify_all()

    def stop(self, request_id: str) -> None:
        """Forget a request at the next chunk border; unknown ids are none of our business."""
        with self._lock:
            if request_id in self._jobs:
                self._jobs[request_id].is_stopped = True
                self._lock.notify_all()

    def report(self) -> WorkerReport:
        with self._lock:
            return WorkerReport(
                worker_id=self.worker.worker_id,
                incarnation=self.worker.incarnation,
                queue_requests=len(self._jobs),
                queue_tokens=self._batching.queue_tokens,
                running=self._batching.admitted,
                pages_used=self._pages.used_pages,
                context_tokens=0,
                step_s=self.worker.steps.recent_s,
                is_draining=self._is_closing,
                oldest_step_s=self.worker.watch.age_s(time.monotonic()),
            )

    def check(self) -> None:
        """Prove the invariants of everything that this worker owns."""
        with self._lock:
            self._batching.check()
            self._pages.check()
            self._single_flight.check()

    def close(self, timeout_s: float) -> None:
        """Finish what was accepted (at most `timeout_s`), then leave the cluster."""
        give_up_s = time.monotonic() + timeout_s
        self._is_closing = True
        for job in unfinished(self._lock, self._jobs, give_up_s):
            self._fail(job, WorkerGone(f"{self.worker.worker_id} is shutting down"))
        self._thread.join(timeout=5.0)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._writer.close()
        fail_stuck(self._jobs, self.worker)
        self.worker.leave()

    def _on_letter(self, letter: Letter) -> None:
        if isinstance(letter, Stop):
            self.stop(letter.request_id)

    # -- what another kind of engine does otherwise

    def _own_engine(self, worker_id: str, config: PrefillConfig, repository: str) -> Any:
        return None  # the torch engine, which Worker makes

    def _job(self, *given: Any) -> PrefillJob:
        return PrefillJob(*given)

    def _loaded(self, job: PrefillJob) -> None:
        """In a loader's thread: its cached prefix is in its pages, the rest can be computed."""
        with self._lock:
            job.is_loading = False
            if job.request_id in self._jobs:
                self._batching.start(job.request_id, job.cached_tokens)
                self._lock.notify_all()

    def _free(self, job: PrefillJob, pages: list[int]) -> None:
        """Nothing of this worker's reads or writes its pages any more; with the lock held."""
        self._pages.release(pages)

    # -- the prefix comes in

    def _load(self, job: PrefillJob) -> None:
        """In a loader's thread: the cached prefix into the job's pages."""
        started_s = time.monotonic()
        self.worker.owners.hold(job.request_id, started_s)
        try:
            if not job.is_leaving and not self._load_prefix(job):
                return  # waits for another prompt's blocks; loaded again when they are there
            job.load_s = time.monotonic() - started_s
            self._loaded(job)
        except StoreError as error:  # without the store there is no hand-over
            self._not_loaded(job, WorkerUnavailable(f"store: {error}"))
        except ServingError as error:  # it says itself what is wrong, with the request say
            self._not_loaded(job, error)
        except Exception as error:  # edge: one request must not take the loader down
            log.exception("loading %s failed", job.request_id)
            self._not_loaded(job, error)

    def _not_loaded(self, job: PrefillJob, error: Exception) -> None:
        with self._lock:
            job.is_loading = False
            self._fail(job, error)

    def _load_prefix(self, job: PrefillJob) -> bool:
        """False: another prompt is bringing the next block, the job was set aside."""
        put = job.put
        found = self._prefixes.find(put.keys, job.request_id)
        with self._lock:
            if not self._single_flight.lead(put.keys[len(found.own) :], job.request_id):
                job.is_loading = False
                self._blocked.append(job)
                return False
        allowed = Fetching(job.request.fetch_blocks, tuple(job.request.fetch_nodes))
        loaded = self._prefixes.load(put.keys, found, put.pages, allowed, job.request_id)
        self._loader.refuse_late(put.pages)
        put.first_block = blocks = len(loaded.copies)
        put.refs = {i: BlockRef(i, *copy[:4]) for i, copy in enumerate(loaded.copies)}
        job.fetched_blocks, job.fetched_from = loaded.fetched_blocks, loaded.fetched_from
        # One token at least is computed: its logits are what the request came for.
        job.cached_tokens = min(blocks * self._block_tokens, len(job.token_ids) - 1)
        self._engine.import_pages(put.pages[:blocks])
        self._writer.then(lambda: self._writer.tell_cached(put))
        self._settle(job, put.keys[:blocks])
        return True

    def _settle(self, job: PrefillJob, keys: Sequence[bytes] | None) -> None:
        """Blocks (None: all) of this job are in the store, or given up: others may look again."""
        with self._lock:
            if keys is None:
                self._single_flight.settle_all(job.request_id)
            else:
                self._single_flight.settle(keys, job.request_id)
            waiting, self._blocked = self._blocked, []
            for other in waiting:
                if other.request_id in self._jobs and not other.is_leaving:
                    other.is_loading = True
                    self._loaders.submit(self._load, other)

    # -- the rest is computed

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
            for admitted in self._batching.admit():
                job = self._jobs[admitted.request_id]
                job.put.pages = admitted.pages
                job.is_loading = True
                self._loaders.submit(self._load, job)
            chunks = self._batching.next_step()
            if not chunks:
                self._lock.wait(IDLE_WAIT_S)
                return True
            jobs = [self._jobs[chunk.request_id] for chunk in chunks]
        predicted_s = sum(self._estimate.seconds(chunk.tokens, chunk.start) for chunk in chunks)
        self.worker.watch.began(time.monotonic(), predicted_s)
        try:
            self._step(chunks, jobs)
        except Exception as error:  # edge: a failed step fails its requests, not the worker
            log.exception("a prefill step failed")
            for job in jobs:
                self._fail(job, error)
        finally:
            self.worker.watch.ended()
        return True

    def _drop_stopped(self) -> None:
        """Between steps, with the lock held: nobody computes or loads these any more, so what they
        hold goes back behind the writer's last work on it."""
        leaving = [j for j in self._jobs.values() if j.is_leaving and not j.is_loading]
        for job in leaving:
            del self._jobs[job.request_id]
            pages = self._batching.remove(job.request_id)
            self._writer.then(lambda job=job, pages=pages: self._left(job, pages))  # type: ignore[misc]

    def _left(self, job: PrefillJob, pages: list[int]) -> None:
        """In the writer's thread."""
        self.worker.owners.release(job.request_id)
        with self._lock:
            self._free(job, pages)
            self._lock.notify_all()
        self._settle(job, None)
        job.observe_abort(self.worker.observations)
        job.client.fail(job.error or job.put.error or Cancelled("stopped"))

    def _step(self, chunks: Sequence[Chunk], jobs: Sequence[PrefillJob]) -> None:
        started_s = time.monotonic()
        works = [
            Work(job.token_ids[c.start : c.start + c.tokens].tolist(), c.start, job.put.pages)
            for c, job in zip(chunks, jobs, strict=True)
        ]
        finished = [self._blocks_finished(c, job) for c, job in zip(chunks, jobs, strict=True)]

        def on_layer(layer: int) -> None:
            for job, blocks in zip(jobs, finished, strict=True):
                if blocks:
                    self._writer.layer_done(job.put, blocks, layer)

        logits = self._engine.forward(works, on_layer)
        step_s = time.monotonic() - started_s
        self.worker.steps.took(step_s)
        with self._lock:
            self._batching.computed(chunks)
        for row, (chunk, job, blocks) in enumerate(zip(chunks, jobs, finished, strict=True)):
            job.compute_s += step_s
            job.computed_tokens += chunk.tokens
            if blocks:
                self._writer.blocks_done(job.put, blocks)
                keys = job.put.keys[blocks.start : blocks.stop]
                self._writer.then(lambda job=job, keys=keys: self._settle(job, keys))  # type: ignore[misc]
            if chunk.is_last:
                try:
                    self._computed(job, self._sample(job, logits[row]))
                except Exception as error:  # edge: it must not fail its neighbours in the batch
                    self._fail(job, error)

    def _computed(self, job: PrefillJob, token_id: int) -> None:
        job.computed_at_s = time.monotonic()
        if letter := job.first_token(token_id):
            self.worker.outbox.send(job.request.reply_inbox, letter)
        self._writer.then(lambda: self._answer(job, token_id))

    def _blocks_finished(self, chunk: Chunk, job: PrefillJob) -> range:
        """Blocks that this chunk fills (or ends the prompt in) and that the store lacks."""
        end = chunk.start + chunk.tokens
        stop = (
            blocks_touched(end, self._block_tokens) if chunk.is_last else end // self._block_tokens
        )
        return range(max(job.put.first_block, chunk.start // self._block_tokens), stop)

    def _sample(self, job: PrefillJob, logits: np.ndarray) -> int:
        prompt = job.token_ids[: job.request.prompt_tokens].tolist()
        output = job.token_ids[job.request.prompt_tokens :].tolist()
        return sample(logits, job.request.sampling, len(output), prompt, output)

    # -- and leaves

    def _answer(self, job: PrefillJob, token_id: int) -> None:
        """In the writer's thread, after the last block is committed."""
        if job.put.error is not None:
            self._fail(job, job.put.error)
            return
        reply = job.reply(self.worker.incarnation, self._engine.layout.block_bytes)
        job.observe(reply, self._block_tokens, self.worker.observations)
        if self._forget(job, keep_leases=bool(job.request.decode_inbox)):
            job.client.prefilled(token_id, reply)

    def _fail(self, job: PrefillJob, error: Exception) -> None:
        """From any thread: nothing more is written for it, and it leaves at the next turn."""
        with self._lock:
            if self._jobs.get(job.request_id) is job and job.error is None:
                job.error = error
                job.put.is_ended = True
                self._lock.notify_all()

    def _forget(self, job: PrefillJob, keep_leases: bool) -> bool:
        """In the writer's thread, behind the last block of a job that went well: pages go back;
        leases stay for the decode worker or go too. False if it has failed meanwhile."""
        with self._lock:
            if self._jobs.get(job.request_id) is not job or job.error is not None:
                return False
            del self._jobs[job.request_id]
            self._free(job, self._batching.remove(job.request_id))
            self._lock.notify_all()
        self._settle(job, None)
        if keep_leases:
            self.worker.owners.drop(job.request_id)
        else:
            self.worker.owners.release(job.request_id)
        return True
