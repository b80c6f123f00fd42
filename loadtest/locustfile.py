"""Load with users, under Locust:

    locust -f loadtest/locustfile.py --headless -u 5 -t 60s --report report.html

The users are in `users/users.py`, the options in `users/settings.py`; README.md explains both.
"""

from __future__ import annotations

from typing import Any

from loadtest.users import gevent_setup  # isort: skip  before every import of gRPC

from locust import events
from locust.runners import MasterRunner, WorkerRunner

from loadtest.users.distributed import MasterSession, WorkerSession
from loadtest.users.session import DecidingSession
from loadtest.users.settings import add_options
from loadtest.users.users import USERS

globals().update({user.__name__: user for user in USERS})  # where Locust looks for users
events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def start(environment: Any, **_: Any) -> None:
    gevent_setup.interrupt_main_greenlet_only()
    roles = {MasterRunner: MasterSession, WorkerRunner: WorkerSession}
    session = roles.get(type(environment.runner), DecidingSession)(environment)
    session.start()
