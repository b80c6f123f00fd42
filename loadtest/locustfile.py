"""Load with users, under Locust:

    locust -f loadtest/locustfile.py --headless -u 5 -t 60s --report report.html

The users are in `swarm/users.py`, the options in `swarm/options.py`, and README.md explains both.
"""

from __future__ import annotations

from typing import Any

from loadtest.swarm import gevent_grpc  # noqa: F401  isort: skip  before anything that uses gRPC

from locust import events
from locust.runners import MasterRunner, WorkerRunner

from loadtest.swarm import interrupts
from loadtest.swarm.master import MasterSession
from loadtest.swarm.options import add_options
from loadtest.swarm.session import DecidingSession
from loadtest.swarm.users import (
    BurstUser,
    ChatUser,
    DocumentUser,
    SharedPromptUser,
    SwarmUser,
    TraceUser,
)
from loadtest.swarm.worker import WorkerSession

__all__ = ["BurstUser", "ChatUser", "DocumentUser", "SharedPromptUser", "TraceUser"]

events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def start(environment: Any, **_: Any) -> None:
    interrupts.to_main_greenlet()
    roles = {MasterRunner: MasterSession, WorkerRunner: WorkerSession}
    session = roles.get(type(environment.runner), DecidingSession)(environment)
    SwarmUser.join(session)
    session.start()
