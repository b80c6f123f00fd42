"""Workers that this frontend cannot call: they rest, and are probed until a call gets through.

A worker that refuses us, or whose link is cut, goes on reporting to the directory, and looks idle
because nobody reaches it. So the first call that finds no way to it takes it out of the choice,
here only: another frontend may have a way. No request is spent on finding out when there is one.

Not here: which errors say so (errors.py), choosing among the others (conductor/).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from backends.errors import ServingError, WorkerRefused
from backends.frontend.cluster_view import ClusterView

log = logging.getLogger(__name__)
REST_S = 2.0


class UnreachedWorkers:
    def __init__(self, cluster: ClusterView, probe: Callable[[str], None]) -> None:
        """`probe`: GrpcCalls.probe."""
        self._cluster, self._probe = cluster, probe
        self._errors: dict[tuple[str, str], ServingError] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-probes", daemon=True)
        self._thread.start()

    def add(self, worker: tuple[str, str], error: ServingError) -> None:
        """A call to it found no way."""
        with self._lock:
            is_new = worker not in self._errors
            self._errors[worker] = error
        self._cluster.worker_reached(*worker, is_reached=False)
        if is_new:
            log.warning("%s gets no request until a probe reaches it: %s", worker[0], error)

    def causes(self) -> dict[str, tuple[str, str]]:
        """Of each by its name: refused or cut_off, and the words."""
        with self._lock:
            return {
                name: ("refused" if isinstance(error, WorkerRefused) else "cut_off", str(error))
                for (name, _), error in self._errors.items()
            }

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._is_closing.wait(REST_S):
            for worker in list(self._errors):
                try:
                    self._look(worker)
                except Exception:  # edge: the others are probed all the same
                    log.exception("probing %s failed", worker[0])

    def _look(self, worker: tuple[str, str]) -> None:
        address = self._cluster.grpc_address(*worker)
        if address is not None:
            try:
                self._probe(address)
            except ServingError as error:
                self.add(worker, error)
                return
            self._cluster.worker_reached(*worker, is_reached=True)
            log.warning("%s is reached again", worker[0])
        with self._lock:
            del self._errors[worker]
