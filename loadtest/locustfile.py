"""Load with users, under Locust:

    locust -f loadtest/locustfile.py --headless -u 5 -t 60s --report report.html

The users are in `users/users.py`, the options in `users/options.py`, and README.md explains both.
"""

from __future__ import annotations

from typing import Any

from loadtest.users import gevent_grpc  # noqa: F401  isort: skip  before anything that uses gRPC

from locust import events
from locust.runners import MasterRunner, WorkerRunner

from loadtest.users import interrupts
from loadtest.users.master import MasterSession
from loadtest.users.options import add_options
from loadtest.users.session import DecidingSession
from loadtest.users.users import (
    BurstUser,
    ChatUser,
    DocumentUser,
    SharedPromptUser,
    SwarmUser,
    TraceUser,
)
from loadtest.users.worker import WorkerSession

__all__ = ["BurstUser", "ChatUser", "DocumentUser", "SharedPromptUser", "TraceUser"]

events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def start(environment: Any, **_: Any) -> None:
    interrupts.to_main_greenlet()
    roles = {MasterRunner: MasterSession, WorkerRunner: WorkerSession}
    session = roles.get(type(environment.runner), DecidingSession)(environment)
    SwarmUser.join(session)
    session.start()
