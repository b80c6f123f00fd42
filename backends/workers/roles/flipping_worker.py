"""A worker that changes its role (prefill or decode) in service.

A flipping worker is a `PrefillWorker` or a `DecodeWorker`, and keeps its engine, page pool and
store client (lasting_parts.py) when it changes between the two. Steps of a change:

    1. report the drain          frontends route no new requests to this worker
    2. check the other workers   if no other worker of the same role stays, this one keeps its role.
                                 Each worker reports before it checks, so not all of them leave
    3. finish the requests       requests that were routed before step 1 are still accepted; after
                                 DRAIN_S_MAX, unfinished requests resume on other workers
    4. leave and join again      with a new incarnation, in the other role

A call for the other role is rejected (`WrongRole`), and the frontend retries on another worker. If
the worker cannot join again, its process exits, and the launcher restarts it in its first role.

Not here: when a change of roles pays (conductor/roles), Triton (triton/worker_model.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backends.errors import WrongRole
from backends.workers.decode_worker import DecodeWorker
from backends.workers.lasting_parts import LastingParts
from backends.workers.prefill_worker import PrefillWorker
from backends.workers.protocol import DecodeRequest, PrefillRequest, TakeRole
from backends.workers.worker_process import end_process
from mooncake_store.errors import StoreError

log = logging.getLogger(__name__)
IDLE_S = 1.0  # idle time before the change, because requests routed earlier may still arrive
LOOK_S = 0.02  # interval of checks whether the worker is idle
# Time for requests to finish; nearly all outputs take less. DRAIN_S_MAX + MOVE_S_MAX must be below
# ORDER_S_MAX, after which the conductor's order expires (conductor/roles/controller.py).
DRAIN_S_MAX = 60.0
MOVE_S_MAX = 30.0  # after DRAIN_S_MAX: time for requests to fail, and their transfers to end
CLOSE_S = 10.0  # time limit for closing the worker of the old role

ActiveWorker = PrefillWorker | DecodeWorker
MakeWorker = Callable[[LastingParts], ActiveWorker]


class FlippingWorker:
    def __init__(
        self,
        role: str,
        parts: LastingParts,
        makers: Mapping[str, MakeWorker],
        close_engine: Callable[[], None],
    ) -> None:
        """`makers`: role -> function that creates and registers a worker of that role."""
        self.on_change: Callable[[ActiveWorker], None] = lambda worker: None
        self._parts, self._makers, self._close_engine = parts, makers, close_engine
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._changing: threading.Thread | None = None
        self.active: ActiveWorker | None = self._made(role)  # None between two roles

    def submit(self, request: PrefillRequest | DecodeRequest, ids: np.ndarray, client: Any) -> None:
        """Submit to the active worker. Raises WrongRole if no worker of its role is active."""
        worker: Any = self.active
        role = worker.process.info.role if worker is not None else "changing"
        if role != ("prefill" if isinstance(request, PrefillRequest) else "decode"):
            raise WrongRole(f"its role is {role}, the call is a {type(request).__name__}")
        worker.submit(request, ids, client)

    def stop(self, request_id: str) -> None:
        if (worker := self.active) is not None:
            worker.stop(request_id)

    def close(self, timeout_s: float) -> None:
        """Finish accepted requests, then leave the cluster."""
        self._is_closing.set()
        if self._changing is not None:
            self._changing.join(timeout_s)
        if self.active is not None:
            self.active.close(timeout_s)
        self._parts.close()
        self._close_engine()

    def take_role(self, message: TakeRole) -> None:
        """Start a valid change of the role in its own thread. Called in the inbox's thread."""
        with self._lock:
            worker = self.active
            if worker is None or self._is_closing.is_set() or worker.is_changing:
                return
            info = worker.process.info
            others = self._makers.keys() - {info.role}
            if message.incarnation != info.incarnation or message.role not in others:
                return
            worker.is_changing = True
            self._changing = threading.Thread(
                target=self._change, args=(worker, message.role), name="role", daemon=True
            )
            self._changing.start()

    def _made(self, role: str) -> ActiveWorker:
        worker = self._makers[role](self._parts)
        worker.on_take_role = self.take_role
        return worker

    def _change(self, worker: ActiveWorker, role: str) -> None:
        name, began_s = worker.process.worker_id, time.monotonic()
        is_free = False
        try:
            is_free = self._may_leave(worker) and self._drained(worker)
        except Exception:  # Catch all: keep serving in this role
            log.exception("%s keeps its role", name)
        if not is_free:
            worker.is_changing = False
            return
        try:
            self.active = None
            worker.close(CLOSE_S)
            assert not worker.driver.engine.pages.used_pages, "pages are not released"
            changed = self._made(role)
            changed.is_draining = worker.is_draining  # an operator's drain outlives the change
            self.active = changed
            log.info("%s is a %s worker after %.1f s", name, role, time.monotonic() - began_s)
            self.on_change(changed)
        except Exception:  # Catch all: a process without a role exits, and is restarted
            log.exception("%s could not take the role %s", name, role)
            end_process(self._parts.close)

    def _may_leave(self, worker: ActiveWorker) -> bool:
        """Report the drain. True if another worker of the same role does not drain."""
        own = worker.process.info
        try:
            worker.process.report_now()
            snapshot = self._parts.directory.snapshot()
        except StoreError as error:
            log.warning("%s keeps its role: %s", own.worker_id, error)
            return False
        # A worker without a report has just registered, so it is not draining.
        leaving = {
            (report.worker_id, report.incarnation)
            for report in snapshot.reports
            if report.is_draining
        }
        stays = any(
            info.role == own.role
            and info.worker_id != own.worker_id
            and (info.worker_id, info.incarnation) not in leaving
            for info in snapshot.workers
        )
        if not stays:
            name, role = own.worker_id, own.role
            log.warning("%s keeps its role: no other %s worker would stay", name, role)
        return stays

    def _drained(self, worker: ActiveWorker) -> bool:
        """Wait until the worker is idle. False if the process closes, or the time is over."""
        now_s = time.monotonic()
        idle_since_s, move_s = now_s, now_s + DRAIN_S_MAX
        while now_s < move_s + MOVE_S_MAX:
            if self._is_closing.wait(LOOK_S):
                return False
            now_s = time.monotonic()
            if not worker.is_idle:
                idle_since_s = now_s
            if now_s - idle_since_s >= IDLE_S:
                return True
            if now_s >= move_s:
                worker.move_jobs()
        log.warning("%s keeps its role: it did not become idle", worker.process.worker_id)
        return False
