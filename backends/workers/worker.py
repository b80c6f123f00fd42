"""Common part of prefill and decode workers: jobs, the lock that guards them, the engine loop.

A state machine decides what happens to a job, and in what order (lifecycle/). Threads post events
to it; `post` carries out the actions that follow. Each turn of the engine loop lets leaving jobs
leave, admits waiting jobs, and lets the driver compute a step. Jobs join and leave between two
steps only, so a step never loses its pages.

Not here: inputs and results of a job (prefill_worker.py, decode_worker.py), the engine (driver.py),
the cluster (worker_process.py).
"""

from __future__ import annotations

import logging
import math
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
from backends.workers.kv_writer import BlockPut, JobEvent, KvWriter
from backends.workers.lasting_parts import LastingParts
from backends.workers.lifecycle.events import SLOW, Do, On
from backends.workers.lifecycle.states import JobPhase, JobState, Result
from backends.workers.protocol import DrainWorker, Stop, TakeRole, WorkerMessage
from backends.workers.worker_process import WorkerProcess
from mooncake_store.errors import StoreError
from mooncake_store.layout import PageLayout
from mooncake_store.records.membership import WorkerReport

log = logging.getLogger(__name__)
COPIES_S_MAX = 5.0  # longest wait of a failed or stopped call for copies of its KV to end
IDLE_WAIT_S = 0.1  # longest wait of an idle engine's thread for a job
GUIDES_AT_ONCE = 4  # threads that compile grammars


J = TypeVar("J", bound=Job[Any, Any])
Actions = dict[Do, Callable[[J], object]]


class JobWorker(ABC, Generic[J]):
    """Base class of both roles."""

    role: str  # "prefill" | "decode"
    step: Callable[[JobState, On, Any], Result]  # the state machine of the role's jobs
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
        self.jobs: dict[str, J] = {}  # by request id, until REMOVE
        # Jobs that are not over -> time of REMOVE (monotonic). inf: not removed, or its call ended
        # because it was late.
        self._open: dict[J, float] = {}
        self._asked: dict[J, None] = {}  # jobs that asked for BETWEEN_STEPS, in this order
        self._slow: list[tuple[J, Do]] = []  # to be carried out when `_posts` is 0
        self._posts = 0  # depth of nested calls of `post`
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
            self._on_mark,
            self._write_failed,
        )
        self._actions = {**self._common_actions(), **self._actions_of_role()}
        self._loading = ThreadPoolExecutor(self.loaders, thread_name_prefix="kv-loader")
        self._guiding = ThreadPoolExecutor(GUIDES_AT_ONCE, thread_name_prefix="guide")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _serve(self) -> None:
        """Run the engine and join the cluster. A role's constructor calls this last."""
        self._thread.start()
        self.process.join()
        self._is_ready.set()

    # -- the life of a job

    def post(self, job: J, event: On, value: Any = None) -> None:
        """Change the job's state, and carry out what follows, from any thread.

        SLOW actions are carried out after the others, without the lock. So a caller that holds the
        lock must not post LOADED, GRAMMAR_READY, KV_READ, WRITTEN or CALL_LATE, which lead to such
        actions. FINISHED leads to REPLY, but a decode worker replies in other threads.
        """
        with self.lock:
            self._posts += 1
            try:
                job.state, actions = self.step(job.state, event, value)
                for action in actions:
                    if action in SLOW:
                        self._slow.append((job, action))
                    else:
                        self._carry_out(job, action)
            finally:
                self._posts -= 1
            if job.state.phase is JobPhase.OVER and self._open.pop(job, None) is not None:
                self.lock.notify_all()
            if self._posts or not self._slow:
                return
            slow, self._slow = self._slow, []
        for job, action in slow:
            self._carry_out(job, action)

    def _carry_out(self, job: J, action: Do) -> None:
        try:
            self._actions[action](job)
        except Exception as problem:  # Catch all: only this job fails, and other actions follow
            log.exception("%s of %s failed", action.name, job.request_id)
            error = WorkerUnavailable(f"{action.name.lower()} failed: {problem!r}")
            self.fail(job, error)
            if action is Do.REPLY:  # then the state says that the call is over
                job.client.fail(error)

    @abstractmethod
    def _actions_of_role(self) -> Actions[J]:
        """action -> method, for the actions of lifecycle/events.py that are not below."""

    def _common_actions(self) -> Actions[J]:
        return {
            Do.ASK_TURN: self._ask_turn,
            Do.LOAD: lambda job: self._loading.submit(self._work, job, self._load),
            # In a pool of its own, because compiling a schema may take a second.
            Do.COMPILE: lambda job: self._guiding.submit(self._work, job, self._compile),
            Do.START: lambda job: self._work(job, self.driver.start),
            Do.REMOVE: self._remove,
            Do.STOP_ENGINE: self.driver.leave,
            Do.AWAIT_WRITES: lambda job: self.writer.mark(JobEvent(job, On.WRITTEN)),
            Do.RELEASE_PAGES: lambda job: self.release(job.pages_left),
            Do.PARK_PAGES: lambda job: self.driver.park(job.pages_left),
            Do.KEEP_LEASES: lambda job: self.process.owners.drop(job.request_id),
        }

    def _add(self, job: J) -> None:
        """Accept a job that was added to the batching. The caller holds the lock."""
        self.jobs[job.request_id] = job
        self._open[job] = math.inf
        self.lock.notify_all()

    def _ask_turn(self, job: J) -> None:
        self._asked[job] = None
        self.lock.notify_all()

    def _work(self, job: J, work: Callable[[J], On | None]) -> None:
        """Run `work` in this thread, and post the event that it returns. None: it has posted it."""
        try:
            event = work(job)
        except Exception as problem:  # Catch all: keep the thread
            self.post(job, On.LOAD_FAILED, self._load_error(job, problem))
            return
        if event is not None:
            self.post(job, event)

    @abstractmethod
    def _load(self, job: J) -> On | None:
        """Load the job's KV. Returns the event that follows, or None if it was posted."""

    def _compile(self, job: J) -> On:
        """Create the job's grammar matcher, advanced by the job's earlier output tokens.

        Raises InvalidRequest.
        """
        sampling, output_ids = job.request.sampling, job.given_output_ids()
        job.guide = self._guides.guide(
            sampling.guide, sampling.end_ids, output_ids, sampling.guide_kind
        )
        return On.GRAMMAR_READY

    def _needs_grammar(self, job: J) -> bool:
        return bool(job.request.sampling.guide) and self.driver.draws_by_guide

    def _remove(self, job: J) -> None:
        del self.jobs[job.request_id]
        job.pages_left = self.batching.remove(job.request_id)
        self._open[job] = time.monotonic()
        self.lock.notify_all()

    def _on_mark(self, mark: Any) -> None:
        """Handle a mark in the writer's queue. Runs in the writer's thread."""
        self.post(*mark)

    def fail(self, job: J, error: Exception) -> None:
        """Let the job leave with this error. Only a job's first error counts."""
        self.post(job, On.FAILED, error)

    def stop(self, request_id: str) -> None:
        """Stop a request between two steps. A decode worker rejects a request that comes later."""
        with self.lock:
            if request_id in self.jobs:
                self.post(self.jobs[request_id], On.STOPPED)
            else:
                self._stopped_early(request_id)

    @property
    def open_jobs(self) -> int:
        """Number of jobs for which something is held."""
        return len(self._open)

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
            waits = self._open or self.batching.waiting or self.batching.admitted
            return not waits and not self._pages.used_pages

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
        with self.lock:
            late = list(self._open)  # jobs that did not end in time
        for job in late:
            self.fail(job, WorkerGone(f"{self.process.worker_id} is shutting down"))
            self.post(job, On.CALL_LATE)
            self.process.owners.release(job.request_id)
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

    def release(self, pages: list[int]) -> None:
        """Release pages that no thread reads or writes any more. From any thread."""
        with self.lock:
            self._pages.release(pages)
            self.lock.notify_all()

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

    def _queue_full(self, waiting: str) -> Overloaded:
        return Overloaded(
            f"{self.role}_queue_full",
            f"{self.batching.waiting} {waiting} wait at {self.process.worker_id}, "
            f"queue_requests_max is {self._queue_requests_max}",
            1.0,
        )

    def _load_error(self, job: J, problem: Exception) -> Exception:
        """The error with which a failed load fails its job. Logs unexpected problems."""
        if isinstance(problem, StoreError):  # the request resumes on another worker
            return WorkerUnavailable(f"store: {problem}")
        if not isinstance(problem, ServingError):
            of_request = {"request_id": job.request_id, "trace_id": job.request.trace_id}
            log.error("loading %s failed", job.request_id, exc_info=problem, extra=of_request)
        return problem

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

    def _write_failed(self, put: BlockPut) -> None:
        """Handle the first error of a job's writes, in the writer's thread. See PrefillWorker."""

    def _stopped_early(self, request_id: str) -> None:
        """Handle a stop for a request that is not in `jobs`. A decode worker overrides this."""

    def _replied(self, give_up_s: float) -> None:
        """Wait until replies are sent, or until `give_up_s`. A decode worker overrides this."""

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # Catch all: no job continues without this thread
            log.exception("a turn of %s failed", self.process.worker_id)
            if not self.is_closing:
                self.process.lose("its engine loop has failed")

    def _turn(self) -> bool:
        """One turn of the engine loop. Returns False to end the loop."""
        with self.lock:
            if self.is_closing and all(job.state.phase is JobPhase.FLUSHING for job in self._open):
                return False  # the writer releases what these jobs hold
            asked, self._asked = self._asked, {}
            for job in asked:
                self.post(job, On.BETWEEN_STEPS, self._is_reading(job))
            self._pages.settle()
            self._admit()
            now_s = time.monotonic()
            late = [job for job, left_s in self._open.items() if now_s - left_s > COPIES_S_MAX]
            self._open.update(dict.fromkeys(late, math.inf))
            step = self.driver.next_step(now_s)
            if step is None and not late:
                self.lock.wait(IDLE_WAIT_S)
                return True
        for job in late:  # in another thread, because ending a call may take long
            self._loading.submit(self.post, job, On.CALL_LATE)
        if step is not None:
            step()
        return True

    def _is_reading(self, job: J) -> bool:
        """True if an announced layer is being read into the job's pages. See DecodeWorker."""
        return False

    @abstractmethod
    def _admit(self) -> None:
        """Allocate pages for waiting jobs and start their loads. The caller holds the lock."""
