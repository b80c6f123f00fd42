"""Common part of prefill and decode workers: jobs, the lock that guards them, the engine loop.

Each turn of the engine loop drops stopped and failed jobs, admits waiting jobs, and lets the driver
compute a step. Jobs join and leave between two steps only, so a step never loses its pages.

Not here: inputs and results of a job (prefill_worker.py, decode_worker.py), the engine (driver.py),
the cluster (worker_process.py).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from backends.config_pbtxt import DecodeConfig, PrefillConfig, checkpoint_folder
from backends.engine.batching.batching import Admission
from backends.errors import InvalidRequest, Overloaded, ServingError, WorkerGone, WorkerUnavailable
from backends.text.guides import Guides
from backends.text.tokenizer import Tokenizer
from backends.workers.driver import Driver
from backends.workers.jobs import Job
from backends.workers.kv_loader import PageGuard
from backends.workers.kv_writer import KvWriter
from backends.workers.lasting_parts import LastingParts
from backends.workers.protocol import DrainWorker, Stop, TakeRole, WorkerMessage
from backends.workers.worker_process import WorkerProcess
from mooncake_store.errors import StoreError
from mooncake_store.layout import PageLayout
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.1  # longest wait of an idle engine's thread for a job
GUIDES_AT_ONCE = 4  # threads that compile grammars


J = TypeVar("J", bound=Job[Any, Any])


class JobWorker(ABC, Generic[J]):
    """Base class of both roles. A role implements `_admit` and `_drop_leaving`."""

    role: str  # "prefill" | "decode"
    loaders: int  # number of threads that load KV
    batching: Admission

    def __init__(
        self,
        worker_id: str,
        config: PrefillConfig | DecodeConfig,
        repository: str,
        slots_max: int,
        driver: Driver[Any, J],
        parts: LastingParts | None = None,
    ) -> None:
        self.driver = driver
        self._checkpoint = checkpoint_folder(config.checkpoint, repository)
        self._guides = Guides(self._load_tokenizer, driver.engine.vocabulary_tokens)
        self.lock = threading.Condition()  # guards jobs, batching, pages and the driver's state
        self.jobs: dict[str, J] = {}
        self.is_closing = False
        self.is_draining = False  # True: an operator drains this worker, which rejects new jobs
        self.is_changing = False  # True: the role will change, but jobs routed here are accepted
        self.on_take_role: Callable[[TakeRole], None] = self._keep_role
        self._queue_requests_max = config.queue_requests_max
        self._is_ready = threading.Event()
        self.process = WorkerProcess(
            self.role,
            worker_id,
            config,
            repository,
            slots_max,
            driver,
            self.jobs,
            self._on_message,
            self.report,
            self.check,
            parts,
        )
        engine, store = driver.engine, self.process.store
        pages = PageLayout(engine.layout, engine.layers)
        self._loader = driver.make_loader(store, pages, config.transfer_s_max)
        self._pages = PageGuard(engine.pages, self._loader.pending_pages, self._loader.forget)
        self.writer = KvWriter(
            store,
            pages,
            engine.kv_pool,
            self.process.outbox,
            config.lease_s,
            config.transfer_s_max,
            engine.export_pages,
        )
        self._loading = ThreadPoolExecutor(self.loaders, thread_name_prefix="kv-loader")
        self._guiding = ThreadPoolExecutor(GUIDES_AT_ONCE, thread_name_prefix="guide")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _serve(self) -> None:
        """Run the engine and join the cluster. A role's constructor calls this last."""
        self._thread.start()
        self.process.join()
        self._is_ready.set()

    def stop(self, request_id: str) -> None:
        """Stop a request between two steps. A decode worker rejects a request that comes later."""
        with self.lock:
            if request_id in self.jobs:
                self.jobs[request_id].is_stopped = True
            else:
                self._stopped_early(request_id)
            self.lock.notify_all()

    @abstractmethod
    def report(self) -> WorkerReport: ...

    def _report(self, **of_role: Any) -> WorkerReport:
        """The report with the role's numbers of its queue and batch. The caller holds the lock."""
        return WorkerReport(
            worker_id=self.process.worker_id,
            incarnation=self.process.incarnation,
            pages_used=self._pages.held_pages,
            is_draining=self._takes_none,
            oldest_step_s=self.process.watch.age_s(time.monotonic()),
            **of_role,
        )

    @property
    def is_idle(self) -> bool:
        """True if there are no jobs, no expected hand-overs, and no pages in use."""
        with self.lock:
            waits = self.jobs or self.batching.waiting or self.batching.admitted
            return not waits and not self._pages.used_pages and self.driver.is_drained

    def move_jobs(self) -> None:
        """Fail all jobs with WorkerGone, so that they resume on other workers."""
        with self.lock:
            for job in list(self.jobs.values()):
                self.fail(job, WorkerGone(f"{self.process.worker_id} takes another role"))

    @property
    def _takes_none(self) -> bool:
        is_leaving = self.is_closing or self.is_draining or self.is_changing
        return is_leaving or self.process.is_lost or not self.driver.is_available

    def check(self) -> None:
        """Assert the invariants of the batching and the pages."""
        with self.lock:
            self.batching.check()
            self._pages.check()

    def close(self, timeout_s: float) -> None:
        """Finish accepted jobs for at most `timeout_s`, then leave the cluster."""
        give_up_s = time.monotonic() + timeout_s
        self.is_closing = True
        for job in self._unfinished(give_up_s):
            self.fail(job, WorkerGone(f"{self.process.worker_id} is shutting down"))
        self._thread.join(timeout=5.0)
        for pool in (self._loading, self._guiding):  # loaders, which submit to `_guiding`, first
            pool.shutdown(wait=True, cancel_futures=True)
        self.writer.close()
        for job in list(self.jobs.values()):  # jobs that the engine loop did not drop in time
            self.process.owners.release(job.request_id)
            job.client.fail(WorkerGone(f"{self.process.worker_id} is shutting down"))
        self._replied(give_up_s)
        self.process.leave()

    def _unfinished(self, give_up_s: float) -> list[J]:
        """Wait until the engine's thread has emptied `jobs`. Returns jobs left at `give_up_s`."""
        with self.lock:
            self.lock.notify_all()
            while self.jobs and time.monotonic() < give_up_s:
                self.lock.wait(IDLE_WAIT_S)
            return list(self.jobs.values())

    # -- called by a driver

    def fail(self, job: J, error: Exception) -> None:
        """Record a job's first error, from any thread. The engine loop then drops the job, as soon
        as no thread loads into its pages."""
        with self.lock:
            if self.jobs.get(job.request_id) is job and job.error is None:
                job.fail(error)
                self.lock.notify_all()

    def release(self, pages: list[int]) -> None:
        """Release pages that no thread reads or writes any more. From any thread."""
        with self.lock:
            self._pages.release(pages)
            self.lock.notify_all()

    def has_left(self, job: J) -> bool:
        """True if the job has been removed from `jobs`. The caller holds the lock."""
        return self.jobs.get(job.request_id) is not job

    # -- accepting and loading jobs

    def _refuse(self, job: J) -> None:
        """Raise a ServingError if the worker cannot accept the job. The caller holds the lock."""
        name = self.process.worker_id
        if self.process.is_lost:
            raise WorkerGone(f"{name} has failed, and its process exits")
        if self.is_closing:
            raise WorkerGone(f"{name} is shutting down")
        if self.is_draining:
            raise WorkerGone(f"{name} is being drained")
        if job.request_id in self.jobs:
            raise InvalidRequest(f"request id {job.request_id} is being served already")

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._checkpoint)

    def _guide(self, job: J) -> bool:
        """Create the job's grammar matcher, advanced by the job's earlier output tokens.

        Returns True. Raises InvalidRequest.
        """
        sampling, output_ids = job.request.sampling, job.given_output_ids()
        job.guide = self._guides.guide(
            sampling.guide, sampling.end_ids, output_ids, sampling.guide_kind
        )
        return True

    def _queue_full(self, waiting: str) -> Overloaded:
        return Overloaded(
            f"{self.role}_queue_full",
            f"{self.batching.waiting} {waiting} wait at {self.process.worker_id}, "
            f"queue_requests_max is {self._queue_requests_max}",
            1.0,
        )

    def _load(self, job: J, load: Callable[[J], bool]) -> None:
        """Run `load`, then start the job. Runs in a loader's thread.

        If `load` returns False, the role must call this again later. Another thread creates a
        grammar matcher after `load`, because compiling a schema may take a second.
        """
        needs_guide = bool(job.request.sampling.guide) and self.driver.draws_by_guide
        try:
            if not load(job):
                return
            if needs_guide and job.guide is None:
                self._guiding.submit(self._load, job, self._guide)
            else:
                self.driver.start(job)
        except Exception as problem:  # Catch all: keep the loader's thread
            error = self._load_error(job, problem)
            with self.lock:
                job.is_loading = False
                self.fail(job, error)

    def _load_error(self, job: J, problem: Exception) -> Exception:
        """The error with which a failed load fails its job. Logs unexpected problems."""
        if isinstance(problem, StoreError):  # the request resumes on another worker
            return WorkerUnavailable(f"store: {problem}")
        if not isinstance(problem, ServingError):
            of_request = {"request_id": job.request_id, "trace_id": job.request.trace_id}
            log.error("loading %s failed", job.request_id, exc_info=problem, extra=of_request)
        return problem

    def _may_join(self, job: J) -> bool:
        """Record a job as loaded. False: the job leaves or has left. The caller holds the lock."""
        job.is_loading = False
        self.lock.notify_all()
        return not self.has_left(job) and not job.is_leaving

    def _on_message(self, message: WorkerMessage) -> None:
        if self._is_ready.is_set():
            self._handle(message)

    def _handle(self, message: WorkerMessage) -> None:
        if isinstance(message, Stop):
            self.stop(message.request_id)
        elif isinstance(message, DrainWorker):
            self._drain(message)
        elif isinstance(message, TakeRole):
            self.on_take_role(message)
        else:
            self.driver.on_message(message)

    def _drain(self, message: DrainWorker) -> None:
        with self.lock:
            if self.is_draining != message.is_on:
                change = "rejects new requests" if message.is_on else "accepts requests again"
                log.info("%s %s", self.process.worker_id, change)
            self.is_draining = message.is_on
            for job in list(self.jobs.values()) if message.is_on and message.moves else []:
                self.fail(job, WorkerGone(f"{self.process.worker_id} is being drained"))

    def _keep_role(self, message: TakeRole) -> None:
        log.warning("%s cannot change to the role %s", self.process.worker_id, message.role)

    def _stopped_early(self, request_id: str) -> None:
        """Handle a stop for a request that is not in `jobs`. A decode worker overrides this."""

    def _replied(self, give_up_s: float) -> None:
        """Wait until replies are sent, or until `give_up_s`. A decode worker overrides this."""

    # -- the engine's thread

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One turn of the engine loop. Returns False to end the loop."""
        with self.lock:
            if self.is_closing and not self.jobs and self.driver.is_drained:
                return False
            self._drop_leaving()
            self._pages.settle()
            self._admit()
            step = self.driver.next_step(time.monotonic())
            if step is None:
                self.lock.wait(IDLE_WAIT_S)
                return True
        step()
        return True

    @abstractmethod
    def _drop_leaving(self) -> None:
        """Drop stopped and failed jobs that no thread is loading. The caller holds the lock."""

    @abstractmethod
    def _admit(self) -> None:
        """Allocate pages for waiting jobs and start their loads. The caller holds the lock."""
