"""A worker: runs users, and hands their records to its master (who says when: master.py)."""

from __future__ import annotations

import logging
from typing import Any

import gevent
import msgspec
from gevent.event import Event
from locust.runners import STATE_INIT

from loadtest.users.master import ASK, BEGIN, DRAIN, DRAINED, PARCEL, Begin
from loadtest.users.preparation import make_sender, read_rows, read_settings
from loadtest.users.records import packed
from loadtest.users.run import Run, trace_share
from loadtest.users.run_clock import RunClock
from loadtest.users.session import Session

log = logging.getLogger(__name__)
BEGIN_S_MAX = 30.0


class WorkerSession(Session):
    """See the module docstring."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._has_begun = Event()
        self.runner.register_message(BEGIN, self._told)
        self.runner.register_message(DRAIN, self._drain)
        environment.events.test_start.add_listener(self._ask)
        environment.events.report_to_master.add_listener(self._report)
        environment.events.quitting.add_listener(self._quit)

    def start(self) -> None:
        """The master says when a run begins. It may have done so while this was being set up."""
        if self.runner.worker_state != STATE_INIT:
            self._ask(self.environment)

    def run_for_user(self) -> Run | None:
        """Waits: Locust starts the first users before the master's answer is here."""
        if not self._has_begun.wait(BEGIN_S_MAX):
            log.error("the master did not say within %.0f s what to do", BEGIN_S_MAX)
        return self.run

    def _ask(self, environment: Any, **_: Any) -> None:
        self._has_begun.clear()
        self.runner.send_message(ASK)

    def _told(self, environment: Any, msg: Any, **_: Any) -> None:
        begin = msgspec.msgpack.decode(msg.data, type=Begin)
        settings = read_settings(environment)
        clock = RunClock(begin.began_unix_s)
        run = Run(
            run_id=begin.run_id,
            settings=settings,
            facts=begin.facts,
            clock=clock,
            sender=make_sender(settings, settings.model, clock.now_s),
            environment=environment,
            process_name=f"{begin.worker}.",
        )
        if settings.is_trace and begin.part is not None:
            rows = read_rows(settings)
            run.trace = trace_share(settings, begin.facts, rows, begin.part, begin.parts)
        self.run = run
        self._has_begun.set()

    def _report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if self.run is not None:
            data[PARCEL] = packed(self.run.parcel())

    def _drain(self, environment: Any, msg: Any, **_: Any) -> None:
        if self.run is not None and msg.data == self.run.run_id:
            gevent.spawn(self._stop)  # messages must go on being read meanwhile

    def _quit(self, environment: Any, **_: Any) -> None:
        """This worker alone is told to end."""
        if self.run is not None:
            self._stop()

    def _stop(self) -> None:
        """Users end within the grace; then the last parcel goes."""
        run = self.run
        assert run is not None
        self.runner.stop()
        # Told to stop, Locust would now wait as long again before it is ready for the next run;
        # with that run the master says anew how long the grace is.
        self.environment.stop_timeout = 0
        if self.run is run:
            self.runner.send_message(DRAINED, packed(run.parcel()))
            self.run = None
            run.sender.close()
