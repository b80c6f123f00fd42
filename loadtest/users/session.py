"""One Locust process under this load test, and the run that goes on in it.

The process that decides, alone or as the master, prepares a run (preparation.py), begins it, and
when it has ended judges it and writes its report (ending.py). Runs follow one another in web mode;
each is a new object and begins anew. How a master and its workers work together: master.py and
worker.py.

Not here: users (users.py).
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

import gevent
from locust.exception import StopTest

from loadtest.client.metrics_page import MetricsSampler
from loadtest.users.ending import Ended, is_reported, judged
from loadtest.users.preparation import Preparation, make_sender, prepare, read_settings
from loadtest.users.probe import CannotStart
from loadtest.users.progress import Progress
from loadtest.users.run import Run, trace_share
from loadtest.users.run_clock import RunClock
from loadtest.users.settings import HOST, SettingsError
from loadtest.users.trace_share import TraceProgress, due_times_s
from loadtest.users.users import USERS

log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 10.0
EXIT_CANNOT_START = 2
EXIT_MISSED = 1
EXIT_INTERRUPTED = 130


class Session:
    """What users and shapes see: the run, once it goes on."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.runner = environment.runner
        self.run: Run | None = None

    def run_for_user(self) -> Run | None:
        """The run to take part in; None when there is none any more."""
        return self.run


class DecidingSession(Session):
    """Of a process without workers. Listens to Locust's events from `start` on."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.trace_due_s: Sequence[float] = ()
        self._prepared: Preparation | None = None  # for the next run
        self._preparation: Preparation | None = None  # of this run
        self._sampler: MetricsSampler | None = None
        self._progress: gevent.Greenlet | None = None
        self.is_hurried = False
        self._is_headless = environment.parsed_options.headless
        environment.events.test_start.add_listener(self.begin)
        environment.events.test_stop.add_listener(self.end)
        environment.events.quitting.add_listener(self.quit)

    def start(self) -> None:
        """When Locust has started. Without a web page, prepare before its clock runs."""
        options = self.environment.parsed_options
        self.environment.host = self.environment.host or HOST  # the web page shows it
        try:
            if read_settings(self.environment).is_trace:
                self._set_shape()
            if options.headless or options.autostart:
                self._prepared = prepare(self.environment)
        except (CannotStart, SettingsError) as error:
            log.error("cannot start: %s", error)
            sys.exit(EXIT_CANNOT_START)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)

    def begin(self, environment: Any, **_: Any) -> None:
        """At Locust's test_start: users come when this returns."""
        try:
            preparation = self._prepared or prepare(environment)
            if preparation.settings.is_trace != (environment.shape_class is not None):
                raise CannotStart("to replay a trace, start Locust with --workload trace")
        except CannotStart as error:
            raise StopTest(f"cannot start: {error}") from None
        self._prepared = None
        self._preparation = preparation
        settings = preparation.settings
        for user in USERS:
            user.weight = settings.mix.get(user.workload, 0)
        self.trace_due_s = due_times_s(preparation.rows, settings.trace.speed)
        environment.stats.clear_all()  # its clock ran while the server was measured
        clock = RunClock(time.time())
        run = self.make_run(preparation, clock)
        if settings.metrics_url is not None:
            self._sampler = MetricsSampler(settings.metrics_url, clock.now_s)
            self._sampler.start()
        if self._is_headless and environment.parsed_options.only_summary:
            self._progress = gevent.spawn(self._show_progress)
        self.run = run

    def make_run(self, preparation: Preparation, clock: RunClock) -> Run:
        settings, facts = preparation.settings, preparation.facts
        run = Run(
            run_id=secrets.token_hex(8),
            settings=settings,
            facts=facts,
            clock=clock,
            sender=make_sender(settings, settings.model, clock.now_s),
            environment=self.environment,
            process_name="",
        )
        if settings.is_trace:
            run.trace = trace_share(settings, facts, preparation.rows, 0, 1)
        return run

    def trace_progress(self) -> list[TraceProgress]:
        """Of each process that sends a part."""
        trace = self.run.trace if self.run is not None else None
        return [trace.progress() if trace is not None else TraceProgress()]

    def end(self, environment: Any, **_: Any) -> None:
        """At Locust's test_stop: the last user has gone."""
        run, self.run = self.run, None
        if run is None or self._preparation is None:
            return  # it never began
        if self._progress is not None:
            self._progress.kill()
        run.sender.close()
        samples = self._sampler.stop() if self._sampler is not None else []
        if self._sampler is not None and not samples:
            log.warning("no samples of the server: %s", self._sampler.problem)
        ended = Ended(run, self._preparation, samples, self.runner.target_user_count)
        self._sampler = self._progress = self._preparation = None
        environment.process_exit_code = None if judged(ended).is_passed else EXIT_MISSED
        if not is_reported(ended):
            environment.process_exit_code = EXIT_MISSED

    def quit(self, environment: Any, **_: Any) -> None:
        """Before Locust decides on its exit code. After Ctrl-C users may still be there."""
        if self.run is None:
            return
        try:
            self.stop_users()
        except KeyboardInterrupt:  # once more: without the grace
            self.is_hurried = True
            environment.stop_timeout = 0
            self.stop_users()

    def stop_users(self) -> None:
        """And end the run with them."""
        self.runner.stop()

    def _set_shape(self) -> None:
        from loadtest.users.shapes import TraceShape  # knows this file

        shape = TraceShape(self, self.environment.parsed_options)
        shape.runner = self.runner
        self.environment.shape_class = shape

    def _show_progress(self) -> None:
        progress = Progress()
        while True:
            gevent.sleep(PROGRESS_EVERY_S)
            if (run := self.run) is not None:
                users = self.runner.user_count
                log.info("%s", progress.line(run.records.all, run.clock.now_s(), users))
