"""A Locust master and its workers: workers run users; the master prepares, judges and reports.

All messages except `drain` are Locust's own:

    worker                        master
                 <- spawn       -- with Locust's options: the run, its start, the server's
                                   description, and which workers send a part of a trace
    every 3 s    -- stats       -> with Locust's own report: records since the last one
                 <- drain       -- at test_stopping, before Locust's own stop or quit
    users stop   -- stats       -> the last records

Locust does not wait for requests in flight when it quits, so the last records would be lost without
drain. The master does not wait for a worker that died.
"""

from __future__ import annotations

import logging
from typing import Any

import gevent
from locust.runners import STATE_INIT

from loadtest.users.preparation import Preparation, read_rows, read_settings
from loadtest.users.run import RunBeginning, RunClock, RunReport, UserRun
from loadtest.users.senders import make_sender
from loadtest.users.session import DecidingSession
from loadtest.users.trace_share import TraceProgress, data_set_shares, trace_share
from loadtest.users.users import LoadUser

log = logging.getLogger(__name__)
BEGINNING = "mooncake_beginning"  # among Locust's options, which its spawn messages carry
REPORT = "mooncake"  # key of our data in Locust's reports
DRAIN = "mooncake_drain"
DRAIN_S_EXTRA = 10.0  # added to the grace, for the last reports to arrive


class MasterSession(DecidingSession):
    """The deciding process of a distributed run; the module docstring has its messages."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._parts: list[str] = []
        self._rows = 0
        self._trace_of: dict[str, TraceProgress] = {}
        self._undrained: set[str] = set()
        environment.events.worker_report.add_listener(self._reported)
        environment.events.test_stopping.add_listener(self._drain)

    def share_out(self, run: UserRun, preparation: Preparation) -> None:
        self._parts = sorted(self._present())  # on one host Locust assigns users in this order
        self._rows = len(preparation.rows)
        self._trace_of = {}
        beginning = RunBeginning(run.run_id, run.clock.began_unix_s, run.facts, self._parts)
        vars(self.environment.parsed_options)[BEGINNING] = beginning.packed()

    def trace_progress(self) -> list[TraceProgress]:
        present = set(self._present())
        # of a lost worker: it sends no more rows
        gone = TraceProgress(sent=self._rows, is_over=True)
        return [
            self._trace_of.get(worker, TraceProgress()) if worker in present else gone
            for worker in self._parts
        ]

    def stop_users(self) -> None:
        """Drain: after a stop, workers wait for the next run and miss the quit after it."""
        self.runner.quit()

    def _present(self) -> list[str]:
        clients = self.runner.clients
        return [client.id for client in clients.ready + clients.spawning + clients.running]

    def _reported(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if REPORT not in data:
            return
        report = RunReport.unpacked(data[REPORT])
        if report.is_last:
            self._undrained.discard(client_id)
        if self.run is None or report.run_id != self.run.run_id:
            log.warning("records of another run came from %s and were left out", client_id)
            return
        self.run.records.merge(report)
        if report.trace is not None:
            self._trace_of[client_id] = report.trace

    def _drain(self, environment: Any, **_: Any) -> None:
        """Wait until users have ended and workers have sent their last records."""
        if self.run is None or self.is_hurried:
            return
        self._undrained = set(self._present())
        for worker in self._undrained:
            self.runner.send_message(DRAIN, self.run.run_id, worker)
        with gevent.Timeout(environment.stop_timeout + DRAIN_S_EXTRA, False):
            while self._undrained & set(self._present()):
                gevent.sleep(0.05)
        if self._undrained:
            log.warning("%d workers did not send their last records", len(self._undrained))
            self._undrained = set()


class WorkerSession:
    """Runs users, and sends their records to the master when the master asks for them."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.runner = environment.runner
        self.run: UserRun | None = None
        self._is_last = False  # whether the next report is the last
        self.runner.register_message(DRAIN, self._drain)
        environment.events.test_start.add_listener(self._begin)
        environment.events.test_stop.add_listener(self._end)
        environment.events.report_to_master.add_listener(self._report)
        environment.events.quitting.add_listener(self._quit)

    def start(self) -> None:
        """Begin a run that the master may have started while this worker was being set up."""
        if self.runner.worker_state != STATE_INIT:
            self._begin(self.environment)

    def _begin(self, environment: Any, **_: Any) -> None:
        """At Locust's test_start, before the first user."""
        beginning = RunBeginning.unpacked(vars(environment.parsed_options)[BEGINNING])
        settings = read_settings(environment)
        clock = RunClock(beginning.began_unix_s)
        self._is_last = False
        self.run = UserRun(
            run_id=beginning.run_id,
            settings=settings,
            facts=beginning.facts,
            clock=clock,
            sender=make_sender(settings, beginning.facts.model, clock.now_s),
            environment=environment,
            process_name=f"{self.runner.worker_index}.",
        )
        parts = beginning.parts
        if self.runner.client_id in parts:
            part = parts.index(self.runner.client_id)
            self.run.part, self.run.parts = part, len(parts)
            self.run.data_sets = data_set_shares(settings, self.run.facts, part, len(parts))
            if settings.trace is not None:
                rows = read_rows(settings.trace)
                self.run.trace = trace_share(settings.trace, self.run.facts, rows, part, len(parts))
        LoadUser.take_part_in(self.run)

    def _report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if self.run is not None:
            data[REPORT] = self.run.report(self._is_last).packed()

    def _drain(self, environment: Any, msg: Any, **_: Any) -> None:
        if self.run is not None and msg.data == self.run.run_id:
            gevent.spawn(self.runner.stop)  # in a greenlet, because messages must still be read

    def _quit(self, environment: Any, **_: Any) -> None:
        """The master ends this worker alone."""
        if self.run is not None:
            self.runner.stop()

    def _end(self, environment: Any, **_: Any) -> None:
        """At Locust's test_stop, after the last user: the next regular report is the last."""
        if self.run is None:
            return
        self._is_last = True
        report: dict[str, Any] = {}
        environment.events.report_to_master.fire(client_id=self.runner.client_id, data=report)
        self.runner.send_message("stats", report)
        self.run.sender.close()
        self.run = None
        LoadUser.take_part_in(None)
        # Locust would wait the same time again before it is ready for the next run. The master
        # sends the grace with each run.
        environment.stop_timeout = 0
