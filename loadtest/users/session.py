"""A Locust process that decides on its runs: one alone, and the part that a master shares with it.

It prepares a run (preparation.py), begins it, judges it at its end and writes its report
(reporting.py). In web mode runs follow one another; each is a new object.

Not here: how a master and its workers work together (distributed.py), users (users.py).
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from locust import LoadTestShape
from locust.exception import StopTest

from loadtest.client.metrics_page import MetricsSampler
from loadtest.users.preparation import CannotStart, Preparation, prepare, read_settings
from loadtest.users.reporting import EndedRun, ProgressLine
from loadtest.users.run import RunClock, UserRun
from loadtest.users.senders import make_sender
from loadtest.users.settings import SettingsError, default_host
from loadtest.users.trace_share import (
    TraceProgress,
    data_set_shares,
    due_after_start_s,
    trace_share,
    users_needed,
)
from loadtest.users.users import USERS, LoadUser

log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 10.0
SPAWNED_PER_S = 100.0
EXIT_CANNOT_START = 2
EXIT_MISSED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class TraceRun:
    due_s: Sequence[float]
    now_s: Callable[[], float]
    progress: Callable[[], list[TraceProgress]]  # of each process that sends a part


class TraceShape(LoadTestShape):
    """As many users as the trace's requests in flight and soon due need. Only the trace decides
    when requests arrive; each user waits for the due time of its row. Locust has to provide enough
    users, so the shape adds users a few seconds ahead, removes none, and ends the run after the
    last answer. If users are short, requests are sent late and their records contain the lag.
    Locust asks once a second."""

    def __init__(self, run_s_max: float | None) -> None:
        super().__init__()
        self._run_s_max = run_s_max
        self._users = 1
        self._trace: TraceRun | None = None

    def follow(self, trace: TraceRun | None) -> None:
        """Follow the run that has begun; None: it has ended."""
        self._trace = trace
        self._users = 1

    def tick(self) -> tuple[int, float] | None:
        if self._trace is None:  # no run has begun
            return 1, SPAWNED_PER_S
        now_s, parts = self._trace.now_s(), self._trace.progress()
        is_time_over = now_s >= (self._run_s_max or math.inf)
        if is_time_over or all(part.is_over for part in parts):
            return None
        self._users = max(self._users, users_needed(self._trace.due_s, parts, now_s))
        return self._users, SPAWNED_PER_S


class DecidingSession:
    """The session of a process without workers. It listens to Locust's events after `start`."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.runner = environment.runner
        self.run: UserRun | None = None
        self.is_hurried = False
        self._shape: TraceShape | None = None
        self._prepared: Preparation | None = None  # for the next run
        self._preparation: Preparation | None = None  # of this run
        self._sampler: MetricsSampler | None = None
        self._progress: gevent.Greenlet | None = None
        environment.events.test_start.add_listener(self.begin)
        environment.events.test_stop.add_listener(self.end)
        environment.events.quitting.add_listener(self.quit)

    def start(self) -> None:
        """After Locust's start. Without a web page, prepare before Locust's clock runs."""
        options = self.environment.parsed_options
        # Locust's web page shows this address.
        self.environment.host = self.environment.host or default_host(options.via)
        try:
            if read_settings(self.environment).trace is not None:
                self._shape = TraceShape(options.run_time)
                self._shape.runner = self.runner
                self.environment.shape_class = self._shape
            if options.headless or options.autostart:
                self._prepared = prepare(self.environment)
        except (CannotStart, SettingsError) as error:
            log.error("cannot start: %s", error)
            sys.exit(EXIT_CANNOT_START)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)

    def begin(self, environment: Any, **_: Any) -> None:
        """At Locust's test_start, before the first user."""
        options = environment.parsed_options
        try:
            preparation = self._prepared or prepare(environment)
            trace = preparation.settings.trace
            if (trace is not None) != (self._shape is not None):
                raise CannotStart("to replay a trace, start Locust with --workload trace")
        except CannotStart as error:
            raise StopTest(f"cannot start: {error}") from None
        self._prepared, self._preparation = None, preparation
        settings = preparation.settings
        for user in USERS:
            user.weight = settings.mix.get(user.workload, 0)
        environment.stats.clear_all()  # Locust's clock ran while the server was measured
        clock = RunClock(time.time())
        self.run = UserRun(
            run_id=secrets.token_hex(8),
            settings=settings,
            facts=preparation.facts,
            clock=clock,
            sender=make_sender(settings, preparation.facts.model, clock.now_s),
            environment=environment,
        )
        self.share_out(self.run, preparation)
        if trace is not None and self._shape is not None:
            due_s = due_after_start_s(preparation.rows, trace.speed)
            self._shape.follow(TraceRun(due_s, clock.now_s, self.trace_progress))
        if settings.metrics_url is not None:
            self._sampler = MetricsSampler(settings.metrics_url, clock.now_s, key=settings.page_key)
            self._sampler.start()
        if options.headless and options.only_summary:
            self._progress = gevent.spawn(self._show_progress, self.run)

    def share_out(self, run: UserRun, preparation: Preparation) -> None:
        """Give the run to the users: here to those of this process."""
        if run.settings.trace is not None:
            run.trace = trace_share(run.settings.trace, run.facts, preparation.rows, 0, 1)
        run.data_sets = data_set_shares(run.settings, run.facts)
        LoadUser.take_part_in(run)

    def trace_progress(self) -> list[TraceProgress]:
        trace = self.run.trace if self.run is not None else None
        return [trace.progress() if trace is not None else TraceProgress()]

    def end(self, environment: Any, **_: Any) -> None:
        """At Locust's test_stop: the last user has gone."""
        run, self.run = self.run, None
        preparation, self._preparation = self._preparation, None
        LoadUser.take_part_in(None)
        if run is None or preparation is None:
            return  # no run began
        if self._progress is not None:
            self._progress.kill()
        if self._shape is not None:
            self._shape.follow(None)
        run.sender.close()
        samples = self._sampler.stop() if self._sampler is not None else []
        if self._sampler is not None and not samples:
            log.warning("no samples of the server: %s", self._sampler.problem)
        self._sampler = self._progress = None
        users = self.runner.target_user_count
        ended = EndedRun(run, preparation.rows, preparation.unloaded, samples, users)
        environment.process_exit_code = None if ended.is_good() else EXIT_MISSED

    def quit(self, environment: Any, **_: Any) -> None:
        """Before Locust decides on its exit code. After Ctrl-C users may still run."""
        if self.run is None:
            return
        try:
            self.stop_users()
        except KeyboardInterrupt:  # a second Ctrl-C: end without the grace
            self.is_hurried = True
            environment.stop_timeout = 0
            self.stop_users()

    def stop_users(self) -> None:
        self.runner.stop()

    def _show_progress(self, run: UserRun) -> None:
        progress = ProgressLine()
        while True:
            gevent.sleep(PROGRESS_EVERY_S)
            log.info("%s", progress.of(run.records.all, run.clock.now_s(), self.runner.user_count))
