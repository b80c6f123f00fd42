"""A worker process in the cluster: store, membership, reports, leases, inbox, and exit.

A process registers under its model's name and an incarnation (a random id), so two processes of one
name can coexist during a reload. Reports have their own thread. If a step of the engine or a report
hangs, the process deregisters and exits.

Not here: jobs and the engine's thread (worker.py), the measured speeds (machine_profile.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.config_pbtxt import PrefillConfig, WorkerConfig
from backends.engine.batching.pages import Occupation
from backends.errors import WorkerUnavailable
from backends.metrics.page import Observations
from backends.workers import machine_profile
from backends.workers.driver import Driver
from backends.workers.jobs import Job
from backends.workers.lasting_parts import LastingParts
from backends.workers.protocol import (
    HEARTBEAT_S,
    CallLimits,
    Heartbeat,
    WorkerMessage,
    inbox_address,
    inbox_prefixes,
    open_inbox,
)
from backends.workers.step_times import StepTimes, StepWatch
from mooncake_store.client.worker_store import WorkerStore
from mooncake_store.errors import StoreError
from mooncake_store.process.self_check import SelfCheck, is_switched_on
from mooncake_store.records.membership import WorkerInfo, WorkerReport

log = logging.getLogger(__name__)
REPORT_S = 0.5  # interval of reports to the directory
WATCH_S = 1.0  # interval of checks for a hung engine step or report
STEPS_S_MAX = 10.0  # time limit of the actions before an exit, because an action may hang too
LAST_WORDS_S = 1.0  # time to send the last replies before the exit


class WorkerProcess:
    def __init__(
        self,
        role: str,
        worker_id: str,
        config: WorkerConfig,
        repository: str,
        slots_max: int,
        driver: Driver[Any, Any],
        jobs: Mapping[str, Job[Any, Any]],
        on_message: Callable[[WorkerMessage], None],
        make_report: Callable[[], WorkerReport],
        check: Callable[[], None],
        parts: LastingParts | None = None,
    ) -> None:
        """`jobs`: request id -> job, changed by the worker. `parts`: parts that a worker keeps when
        it changes its role; the caller closes them. None: this process makes and closes them."""
        self.worker_id = worker_id
        self.config = config
        self.incarnation = uuid.uuid4().hex[:12]
        self.driver = driver
        self.engine = driver.engine
        self._has_own_parts = parts is None
        self.parts = parts or LastingParts(config, repository, driver)
        self.directory, self.store = self.parts.directory, self.parts.store
        self.outbox, self.fingerprint = self.parts.outbox, self.parts.fingerprint
        self.context_tokens_max = self.parts.context_tokens_max
        self.observations = Observations()
        self._on_message = on_message
        self.inbox = open_inbox(
            inbox_address(f"{worker_id}-{self.incarnation}"),
            self._on_messages,
            driver.message_bytes_max,
        )
        has_layers = isinstance(config, PrefillConfig) and config.layerwise
        # Layer ring buffers; None: chunked prefill for every prompt.
        self.rings = driver.rings if has_layers and self.store.keeps_digests else None
        self.info = self._info(role, slots_max)
        self.call_limits = CallLimits(
            self.context_tokens_max, self.engine.vocabulary_tokens, inbox_prefixes()
        )
        self.owners = LeaseKeeper(self.store, config.lease_s)
        self.steps = StepTimes()
        self.watch = StepWatch()  # the driver reports the start and the end of each step
        self.jobs = jobs
        self.is_lost = False
        self._heartbeat_s = float("-inf")  # time of the latest heartbeats (monotonic)
        self._reporting = StepWatch()  # a report hangs if a thread never releases the jobs' lock
        self.occupation = Occupation(time.monotonic())
        self.engine.pages.on_change = lambda used: self.occupation.changed(used, time.monotonic())
        self._make_report = make_report
        self.self_check = SelfCheck(check, is_switched_on())
        self._is_closing = threading.Event()
        self._reporter = threading.Thread(target=self._report_loop, name="reports", daemon=True)

    def _info(self, role: str, slots_max: int) -> WorkerInfo:
        """The worker's registration. Measures the engine, and reads from the store nodes."""
        config, layout, parts = self.config, self.engine.layout, self.parts
        state = Path(os.environ["MOONCAKE_STATE"])
        profile = machine_profile.load_or_measure(self.driver, role, config.threads, state)
        rates, latencies_s = parts.paths
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=role,
            node_id=config.store_node,
            fingerprint=self.fingerprint,
            description=parts.description,
            inbox=self.inbox.address,
            block_tokens=config.block_tokens,
            block_bytes=layout.block_bytes,
            context_tokens_max=self.context_tokens_max,
            pages_max=self.engine.pages.pages_max,
            slots_max=slots_max,
            prefill_coefficients=profile.prefill,
            decode_coefficients=profile.decode,
            transfer_bytes_per_s=rates,
            transfer_latency_s=latencies_s,
            grpc_address=os.environ.get("MOONCAKE_GRPC", ""),
            is_native=self.driver.is_native,
            preempts_prompts=self.driver.preempts_prompts,
            pipeline_group=config.pipeline_group,
            pipeline_stage=config.pipeline_stage,
            pipeline_stages=config.pipeline_stages,
            chunk_tokens=config.chunk_tokens if isinstance(config, PrefillConfig) else 0,
            load_beside_share=1 - 1 / layout.layers if self.rings is not None else 0.0,
            can_flip=parts.can_flip,
        )

    def _on_messages(self, messages: list[WorkerMessage]) -> None:
        for message in messages:
            try:
                self._on_message(message)
            except Exception:  # Catch all: one bad message must not drop the others
                log.exception("a message failed: %s", type(message).__name__)

    def join(self) -> None:
        """Register, and start the reports. Raises an error if the directory rejects the worker."""
        self.directory.register_worker(self.info)
        self._reporter.start()
        threading.Thread(target=self._watch_loop, name="watch", daemon=True).start()
        # The launcher looks for the second text in the log, before Triton logs that the model is
        # loaded (backends/launcher/repository.py). The first text must not match in this search.
        word = "has another role on node" if self.parts.has_joined else "serves on node"
        self.parts.has_joined = True
        log.info("%s (%s) %s %s", self.worker_id, self.incarnation, word, self.info.node_id)

    def leave(self) -> None:
        """Deregister, and close everything except `parts` of the caller."""
        self._is_closing.set()
        if self._reporter.is_alive():
            self._reporter.join(timeout=3.0)
        self.deregister()
        self.inbox.close()
        if self._has_own_parts:
            self.parts.close()
            self.driver.close()

    def deregister(self) -> None:
        """Deregister, so that no more requests are routed here, and end the reports."""
        self._is_closing.set()
        try:
            self.directory.deregister_worker(self.worker_id, self.incarnation)
        except StoreError as error:
            log.info("%s was not deregistered: %s", self.worker_id, error)

    def lose(self, reason: str) -> None:
        """Deregister, fail the jobs so that they resume on other workers, and exit the process.
        Takes no lock that guards the jobs, because a hung thread may hold it."""
        if self.is_lost:
            return
        self.is_lost = True
        log.critical("%s is lost: %s", self.worker_id, reason)

        def fail_jobs() -> None:
            for job in list(self.jobs.values()):
                job.client.fail(WorkerUnavailable(f"{self.worker_id}: {reason}"))

        end_process(self.deregister, fail_jobs, self.driver.close)

    def _watch_loop(self) -> None:
        while not self._is_closing.wait(WATCH_S):
            now_s = time.monotonic()
            for name, watch in (("an engine step", self.watch), ("a report", self._reporting)):
                if watch.is_hung(now_s):
                    self.lose(f"{name} has been under way for {watch.age_s(now_s):.0f} s")
                    return

    def report_now(self) -> bool:
        """Report at once. False: this worker is not registered. Raises StoreError."""
        return self.directory.worker_report(self._make_report())

    def _report_loop(self) -> None:
        while not self._is_closing.wait(REPORT_S):
            self._reporting.began(time.monotonic())
            try:
                if not self.report_now():
                    log.warning("the directory has no registration of this worker: registering")
                    self.directory.register_worker(self.info)
            except StoreError as error:
                log.warning("report failed: %s", error)
            try:
                self.owners.renew_due(time.monotonic())
                self.self_check.run(time.monotonic())
            except StoreError as error:
                log.warning("leases were not renewed: %s", error)
            self._reporting.ended()
            self._send_heartbeats(time.monotonic())

    def _send_heartbeats(self, now_s: float) -> None:
        """Send each frontend the ids of its requests at this worker, every HEARTBEAT_S."""
        if now_s - self._heartbeat_s < HEARTBEAT_S:
            return
        self._heartbeat_s = now_s
        by_inbox: dict[str, list[str]] = defaultdict(list)
        for request_id, job in list(self.jobs.items()):
            if inbox := job.request.reply_inbox:
                by_inbox[inbox].append(request_id)
        for inbox, request_ids in by_inbox.items():
            self.outbox.send(inbox, Heartbeat(self.incarnation, request_ids))


class LeaseKeeper:
    """Renews the leases of the worker's requests. `owner`: a request id. Thread-safe.

    A restarted directory has lost all leases. So if there is no lease to renew, `renew_due` looks
    the blocks up, which leases them again.
    """

    def __init__(self, store: WorkerStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        # Request -> (time of the next renewal, block keys).
        self._held: dict[str, tuple[float, Sequence[bytes]]] = {}
        self._renewing: set[str] = set()  # requests being renewed; `release` removes them
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, owner: str, now_s: float, keys: Sequence[bytes] = ()) -> None:
        """Renew the leases of `owner` from now on. `keys`: block keys of the leased blocks."""
        with self._lock:
            self._held[owner] = now_s + self._lease_s / 3, keys

    def drop(self, owner: str) -> None:
        """Stop renewing the leases of `owner`, which stay until they are released or expire."""
        with self._lock:
            self._held.pop(owner, None)

    def release(self, owner: str) -> None:
        """Release the leases of `owner`. If the directory does not answer, the leases expire."""
        self.drop(owner)
        with self._lock:
            self._renewing.discard(owner)
        try:
            self._store.release(owner)
        except StoreError as error:
            log.warning("leases of %s were not released and will expire: %s", owner, error)

    def renew_due(self, now_s: float) -> None:
        """Renew all leases that are due. After a StoreError, the next try is in lease_s / 3."""
        with self._lock:
            due = [(owner, keys) for owner, (due_s, keys) in self._held.items() if due_s <= now_s]
            for owner, keys in due:
                self._held[owner] = now_s + self._lease_s / 3, keys
        for owner, keys in due:
            with self._lock:
                if owner not in self._held:
                    continue
                self._renewing.add(owner)
            try:
                if not self._store.renew(owner, self._lease_s) and keys:
                    self._store.lookup(keys, owner, self._lease_s)
            finally:
                with self._lock:
                    is_over = owner not in self._renewing
                    self._renewing.discard(owner)
            if is_over:  # released during the renewal, which may have leased the blocks again
                self._store.release(owner)


def end_process(*steps: Callable[[], None]) -> None:
    """Run `steps` in a thread, wait for the last replies, and exit the process. Returns at once.
    Triton offers no other way to report a lost engine. The launcher restarts the process."""

    def take_steps() -> None:
        for step in steps:
            try:
                step()
            except Exception:  # Catch all: the process exits in any case
                log.exception("a step before the exit failed")

    def end() -> None:
        last_steps.join(STEPS_S_MAX)
        time.sleep(LAST_WORDS_S)
        os._exit(1)

    last_steps = threading.Thread(target=take_steps, name="last-steps", daemon=True)
    last_steps.start()
    threading.Thread(target=end, name="end", daemon=True).start()
