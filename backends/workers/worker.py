"""What prefill and decode workers have in common: engine, store, membership, reports, leases.

A worker process registers under its model's name and an incarnation of its own, so that during a
reload two processes of one name coexist. Not here: what a worker computes (prefill_worker.py,
decode_worker.py), the measured speeds (machine_profile.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.pages import Occupation, PagePool
from backends.engine.interface import Engine
from backends.errors import ConfigError, WorkerGone, WorkerUnavailable
from backends.metrics.page import Observations
from backends.workers import machine_profile
from backends.workers.config import WorkerConfig, checkpoint_folder
from backends.workers.inbox import open_inbox, open_outbox
from backends.workers.protocol import HEARTBEAT_S, CallLimits, Heartbeat, Letter
from backends.workers.steps import StepTimes, StepWatch
from mooncake_store import layout as kv_layout
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.layout import KvLayout
from mooncake_store.process.self_check import SelfCheck, is_switched_on
from mooncake_store.records.membership import WorkerInfo, WorkerReport

log = logging.getLogger(__name__)
REPORT_S = 0.5
WATCH_S = 1.0
IDLE_WAIT_S = 0.1
STEPS_S_MAX = 10.0  # what is broken may hang as well
LAST_WORDS_S = 1.0  # for answers that are on their way to clients

LOCK_S_MAX = 5.0  # for who must go on although what holds a worker's lock may hang


class ServingEngine(Protocol):
    """What a worker needs of its engine beside computing, which each kind does in its own way."""

    layout: KvLayout
    context_tokens_max: int
    vocabulary_tokens: int
    model_id: str
    weights_id: str
    tp_shape: str  # for the fingerprint: how KV is spread over ranks and pages
    pages: PagePool
    kv_pool: NDArray[np.uint8]

    def close(self) -> None: ...


def make_engine(config: WorkerConfig, folder: Path) -> Engine:
    from backends.engine.torch.torch_engine import TorchEngine

    return TorchEngine.load(
        folder, pages_max=config.kv_pages, block_tokens=config.block_tokens, dtype=config.dtype,
        device=config.device, threads=config.threads,
    )  # fmt: skip


class Worker:
    """One worker process's engine and its ties to the rest; prefill and decode build on it."""

    def __init__(
        self,
        role: str,
        worker_id: str,
        config: WorkerConfig,
        repository: str,
        slots_max: int,
        on_letter: Callable[[Letter], None],
        make_report: Callable[[], WorkerReport],
        check: Callable[[], None],
        engine: ServingEngine | None = None,
    ) -> None:
        """`engine`: one that is there already; None: a torch engine is made."""
        self.worker_id = worker_id
        self.config = config
        self.incarnation = uuid.uuid4().hex[:12]
        folder = checkpoint_folder(config.checkpoint, repository)
        self.engine: Any = engine if engine is not None else make_engine(config, folder)
        self.context_tokens_max = self._context_tokens_max(folder)
        layout = self.engine.layout
        print_fields = (
            self.engine.model_id, self.engine.weights_id, layout, self.engine.tp_shape
        )  # fmt: skip
        self.directory = DirectoryClient(os.environ["MOONCAKE_DIRECTORY"])
        self.fingerprint = kv_layout.fingerprint(*print_fields)
        self.store = Store(
            self.directory, config.store_node, self.fingerprint, layout, config.transport
        )
        self.store.register_buffer(self.engine.kv_pool)
        self.outbox = open_outbox()
        sockets = os.environ["MOONCAKE_SOCKETS"]
        self._on_letter = on_letter
        self.inbox = open_inbox(f"ipc://{sockets}/{worker_id}-{self.incarnation}", self._on_letters)
        profile = machine_profile.load_or_measure(
            self.engine, role, config.threads, Path(os.environ["MOONCAKE_STATE"])
        )
        self.info = self._info(role, kv_layout.describe(*print_fields), slots_max, profile)
        self.call_limits = CallLimits(
            self.context_tokens_max, self.engine.vocabulary_tokens, f"ipc://{sockets}/"
        )
        self.owners = LeaseKeeper(self.store, config.lease_s)
        self.started_at_s = time.time()
        self.observations = Observations()
        self.steps = StepTimes()
        self.watch = StepWatch()  # told by whoever runs the engine
        self.on_hung: Callable[[str], None] = self.lose
        self.jobs: Mapping[str, Any] = {}  # whom to tell when we are lost; set by whoever has them
        self._heartbeat_s = float("-inf")  # when they were sent last
        self._reporting = StepWatch()  # it needs the lock that guards jobs and pages
        self.occupation = Occupation(time.monotonic())
        self.engine.pages.on_change = lambda used: self.occupation.changed(used, time.monotonic())
        self._make_report = make_report
        self.self_check = SelfCheck(check, is_switched_on())
        self._is_closing = threading.Event()
        self._reporter = threading.Thread(target=self._report_loop, name="reports", daemon=True)
        self._watcher = threading.Thread(target=self._watch_loop, name="watch", daemon=True)

    def _info(
        self, role: str, description: str, slots_max: int, profile: machine_profile.MachineProfile
    ) -> WorkerInfo:
        """What the directory is told of this worker; measures how far its nodes are."""
        config, layout = self.config, self.engine.layout
        return WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=role,
            node_id=config.store_node,
            fingerprint=self.fingerprint,
            description=description,
            inbox=self.inbox.address,
            block_tokens=config.block_tokens,
            block_bytes=layout.block_bytes,
            context_tokens_max=self.context_tokens_max,
            pages_max=config.kv_pages,
            slots_max=slots_max,
            prefill_coefficients=profile.prefill,
            decode_coefficients=profile.decode,
            transfer_bytes_per_s=self.store.measure_rates(),
            transfer_latency_s=self.store.latencies_s(),  # as those found them
            grpc_address=os.environ.get("MOONCAKE_GRPC", ""),
        )

    def _context_tokens_max(self, folder: Path) -> int:
        """Longest prompt and output; raises ConfigError where the checkpoint allows less."""
        asked, allowed = self.config.context_tokens_max, self.engine.context_tokens_max
        if asked > allowed:
            raise ConfigError(
                f"context_tokens_max is {asked}, but {folder.name} allows {allowed}; lower it or "
                "leave it 0"
            )
        return min(asked or allowed, self.config.kv_pages * self.config.block_tokens)

    def _on_letters(self, letters: list[Letter]) -> None:
        for letter in letters:
            try:
                self._on_letter(letter)
            except Exception:  # edge: one bad letter must not take its neighbours along
                log.exception("a letter failed: %s", type(letter).__name__)

    def join(self) -> None:
        """Register, or raise with the reason why the pool refuses this worker."""
        self.directory.register_worker(self.info)
        self._reporter.start()
        self._watcher.start()
        log.info("%s (%s) serves on node %s", self.worker_id, self.incarnation, self.info.node_id)

    def leave(self) -> None:
        """Say goodbye and close everything; the store keeps what was put."""
        self._is_closing.set()
        if self._reporter.is_alive():
            self._reporter.join(timeout=3.0)
        self.deregister()
        self.inbox.close()
        self.outbox.close()
        self.store.close()
        self.directory.close()
        self.engine.close()

    def deregister(self) -> None:
        """From now on nothing is routed here."""
        self._is_closing.set()
        try:
            self.directory.deregister_worker(self.worker_id, self.incarnation)
        except StoreError as error:
            log.info("the directory is gone already: %s", error)

    def lose(self, reason: str) -> None:
        """We are of no use any more: leave, so that our jobs go on elsewhere, and end.

        Without the lock that guards them, which may be what hangs.
        """

        def fail_jobs() -> None:
            for job in list(self.jobs.values()):
                job.client.fail(WorkerUnavailable(f"{self.worker_id}: {reason}"))

        end_process(self.deregister, fail_jobs)

    def _watch_loop(self) -> None:
        while not self._is_closing.wait(WATCH_S):
            now_s = time.monotonic()
            for name, watch in (("an engine step", self.watch), ("a report", self._reporting)):
                if watch.is_hung(now_s):
                    reason = f"{name} has been under way for {watch.age_s(now_s):.0f} s"
                    log.critical("%s hangs: %s", self.worker_id, reason)
                    self.on_hung(reason)
                    return

    def _report_loop(self) -> None:
        while not self._is_closing.wait(REPORT_S):
            self._reporting.began(time.monotonic())
            try:
                if not self.directory.worker_report(self._make_report()):
                    log.warning("the directory does not know us (any more): registering again")
                    self.directory.register_worker(self.info)
                self.owners.renew_due(time.monotonic())
                self.self_check.run(time.monotonic())
            except StoreError as error:
                log.warning("report failed: %s", error)
            self._reporting.ended()
            self._send_heartbeats(time.monotonic())

    def _send_heartbeats(self, now_s: float) -> None:
        """Every frontend hears now and then which of its requests we have."""
        if now_s - self._heartbeat_s < HEARTBEAT_S:
            return
        self._heartbeat_s = now_s
        in_hand: dict[str, list[str]] = defaultdict(list)
        for request_id, job in list(self.jobs.items()):
            in_hand[job.request.reply_inbox].append(request_id)
        for inbox, request_ids in in_hand.items():
            if inbox:
                self.outbox.send(inbox, Heartbeat(self.incarnation, request_ids))


def unfinished(
    lock: threading.Condition, jobs: MutableMapping[str, Any], give_up_s: float
) -> list[Any]:
    """Wake the engine thread and wait until it has emptied `jobs`; what is left then."""
    with lock:
        lock.notify_all()
        while jobs and time.monotonic() < give_up_s:
            lock.wait(IDLE_WAIT_S)
        return list(jobs.values())


def fail_stuck(jobs: MutableMapping[str, Any], worker: Worker) -> None:
    """Jobs that the engine thread never let go of: answered here, their memory ends with us."""
    for job in list(jobs.values()):
        worker.owners.release(job.request_id)
        job.client.fail(WorkerGone(f"{worker.worker_id} is shutting down"))


class LeaseKeeper:
    """Renews the leases of requests that this worker is still busy with."""

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._due_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._due_s)

    def hold(self, owner: str, now_s: float) -> None:
        with self._lock:
            self._due_s[owner] = now_s + self._lease_s / 3

    def drop(self, owner: str) -> None:
        """Stop renewing; the leases stay until they are released or run out."""
        with self._lock:
            self._due_s.pop(owner, None)

    def release(self, owner: str) -> None:
        self.drop(owner)
        try:
            self._store.release(owner)
        except StoreError as error:
            log.warning("leases of %s run out by themselves: %s", owner, error)

    def renew_due(self, now_s: float) -> None:
        with self._lock:
            due = [owner for owner, due_s in self._due_s.items() if due_s <= now_s]
            for owner in due:
                self._due_s[owner] = now_s + self._lease_s / 3
        for owner in due:
            self._store.renew(owner, self._lease_s)


def end_process(*steps: Callable[[], None]) -> None:
    """Leave the cluster, end what can be ended (these `steps`), let answers out, and end.

    Triton's stub has no other way to say that its engine is of no use any more; the launcher
    starts it again.
    """
    is_done = threading.Event()

    def take_steps() -> None:
        for step in steps:
            try:
                step()
            except Exception:  # edge: it is broken, and it will end
                log.exception("leaving")
        is_done.set()

    def end() -> None:
        is_done.wait(STEPS_S_MAX)
        threading.Event().wait(LAST_WORDS_S)
        os._exit(1)

    threading.Thread(target=end, name="end", daemon=True).start()
    threading.Thread(target=take_steps, name="last-steps", daemon=True).start()
