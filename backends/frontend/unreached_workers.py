"""Workers that this frontend cannot call: excluded from routing until a probe succeeds.

A worker that refuses the connection, or whose link is cut, keeps reporting to the directory. It
seems idle, because it gets no requests. So the first call that does not reach the worker excludes
it from routing. The exclusion holds for this frontend only, because other frontends may reach the
worker. Probes detect when the worker can be called again. A worker with another launch secret
(WorkerDistrusts) is not probed. The worker stays excluded until its process leaves the directory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from backends.errors import ServingError, WorkerDistrusts, WorkerRefused
from backends.frontend.cluster_view import ClusterView

log = logging.getLogger(__name__)
PROBE_PERIOD_S = 2.0
PROBES_AT_ONCE = 8
CLOSE_S_MAX = 0.5  # longest wait for the thread in `close`, in seconds


class UnreachedWorkers:
    """The set of unreached workers. The lock is held while the Conductor is notified, so that the
    Conductor sees the results of calls and probes in the order in which this set sees them."""

    def __init__(self, cluster: ClusterView, probe: Callable[[str], None]) -> None:
        """`probe`: GrpcCalls.probe (grpc_calls.py)."""
        self._cluster, self._probe = cluster, probe
        self._errors: dict[tuple[str, str], ServingError] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._probes = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="worker-probe")
        self._thread = threading.Thread(target=self._run, name="worker-probes", daemon=True)
        self._thread.start()

    def add(self, worker: tuple[str, str], error: ServingError) -> None:
        """A call or a probe did not reach the worker."""
        with self._lock:
            is_new = worker not in self._errors
            self._errors[worker] = error
            self._cluster.worker_reached(*worker, is_reached=False)
        if is_new:
            log.warning("this frontend excludes %s from routing: %s", worker[0], error)

    def causes(self) -> dict[str, tuple[str, str]]:
        """Worker name -> ("refused" or "cut_off", error text)."""
        with self._lock:
            return {
                name: ("refused" if isinstance(error, WorkerRefused) else "cut_off", str(error))
                for (name, _), error in self._errors.items()
            }

    def close(self) -> None:
        """Stop probing. Waits at most CLOSE_S_MAX for running probes, and leaves the others."""
        self._is_closing.set()
        self._thread.join(timeout=CLOSE_S_MAX)
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._is_closing.wait(PROBE_PERIOD_S):
            self._probe_all()

    def _probe_all(self) -> None:
        """Probe each worker once. Probes run at the same time, because some of them time out."""
        with self._lock:
            unreached = dict(self._errors)
        wait([self._probes.submit(self._look, *each) for each in unreached.items()])

    def _look(self, worker: tuple[str, str], seen: ServingError) -> None:
        try:
            address = self._cluster.grpc_address(*worker)
            if address is not None and isinstance(seen, WorkerDistrusts):
                return
            if address is not None:
                self._probe(address)
        except ServingError as error:
            self.add(worker, error)
        except Exception:  # Catch all: the next round probes the worker again
            log.exception("probing %s failed", worker[0])
        else:
            self._forget(worker, seen, is_there=address is not None)

    def _forget(self, worker: tuple[str, str], seen: ServingError, is_there: bool) -> None:
        with self._lock:
            if self._errors.get(worker) is not seen:
                return  # a call has failed since this probe began, so the next probe decides
            if is_there:
                self._cluster.worker_reached(*worker, is_reached=True)
                log.warning("this frontend can reach %s again", worker[0])
            del self._errors[worker]
