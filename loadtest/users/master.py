"""A master: its workers run the users, it prepares, judges and reports.

    worker                        master
    test_start   -- ask        -> knows who takes part
                 <- begin      -- the run, its beginning, what the server said, the part of a trace
    every 3 s    -- parcel     -> with Locust's own report: records since the last one
                 <- drain      -- test_stopping, before Locust's own stop or quit
    users stop   -- drained    -> the last parcel

Locust's own end does not wait for requests in flight when it quits, so the last records would be
lost; hence drain. A worker that died is not waited for.
"""

from __future__ import annotations

import logging
from typing import Any

import gevent
import msgspec

from loadtest.users.preparation import Preparation
from loadtest.users.records import Parcel, unpacked
from loadtest.users.run import Run
from loadtest.users.run_clock import RunClock
from loadtest.users.server_facts import ServerFacts
from loadtest.users.session import DecidingSession
from loadtest.users.trace_share import TraceProgress

log = logging.getLogger(__name__)
ASK, BEGIN, DRAIN, DRAINED = (f"mooncake_{word}" for word in ("ask", "begin", "drain", "drained"))
PARCEL = "mooncake"  # the key in Locust's reports
DRAIN_S_EXTRA = 10.0  # beyond the grace, for the last parcels to arrive


class Begin(msgspec.Struct, frozen=True):
    run_id: str
    began_unix_s: float
    facts: ServerFacts
    worker: int
    part: int | None  # of the trace; None for a worker that came later
    parts: int


class MasterSession(DecidingSession):
    """See the module docstring."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._parts: list[str] = []  # workers at the beginning, each with its part of a trace
        self._trace_of: dict[str, TraceProgress] = {}
        self._undrained: set[str] = set()
        self.runner.register_message(ASK, self._asked)
        self.runner.register_message(DRAINED, self._drained)
        environment.events.worker_report.add_listener(self._reported)
        environment.events.test_stopping.add_listener(self._drain)

    def make_run(self, preparation: Preparation, clock: RunClock) -> Run:
        self._parts = self._present()
        self._trace_of = {}
        run = super().make_run(preparation, clock)
        run.trace = None  # its workers have it
        return run

    def trace_progress(self) -> list[TraceProgress]:
        present = set(self._present())
        gone = TraceProgress(sent=len(self.trace_due_s), is_over=True)  # it sends no more
        return [
            self._trace_of.get(worker, TraceProgress()) if worker in present else gone
            for worker in self._parts
        ]

    def stop_users(self) -> None:
        """A mere stop would make workers wait for the next run; the quit after it misses them."""
        self.runner.quit()

    def _present(self) -> list[str]:
        clients = self.runner.clients
        return [client.id for client in clients.ready + clients.spawning + clients.running]

    def _asked(self, environment: Any, msg: Any, **_: Any) -> None:
        if self.run is None:
            return  # it has ended meanwhile
        begin = Begin(
            run_id=self.run.run_id,
            began_unix_s=self.run.clock.began_unix_s,
            facts=self.run.facts,
            worker=self.runner.get_worker_index(msg.node_id),
            part=self._parts.index(msg.node_id) if msg.node_id in self._parts else None,
            parts=len(self._parts),
        )
        self.runner.send_message(BEGIN, msgspec.msgpack.encode(begin), msg.node_id)

    def _reported(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if PARCEL in data:
            self._take(client_id, unpacked(data[PARCEL]))

    def _drained(self, environment: Any, msg: Any, **_: Any) -> None:
        self._take(msg.node_id, unpacked(msg.data))
        self._undrained.discard(msg.node_id)

    def _take(self, worker: str, parcel: Parcel) -> None:
        if self.run is None or parcel.run_id != self.run.run_id:
            log.warning("records of another run came from %s and were left out", worker)
            return
        self.run.records.merge(parcel)
        if parcel.trace is not None:
            self._trace_of[worker] = parcel.trace

    def _drain(self, environment: Any, **_: Any) -> None:
        """Let users end and their last records come."""
        if self.run is None or self.is_hurried:
            return
        self._undrained = set(self._present())
        for worker in self._undrained:
            self.runner.send_message(DRAIN, self.run.run_id, worker)
        with gevent.Timeout(environment.stop_timeout + DRAIN_S_EXTRA, False):
            while self._undrained & set(self._present()):
                gevent.sleep(0.05)
        if self._undrained:
            log.warning("%d workers did not hand over their last records", len(self._undrained))
            self._undrained = set()
