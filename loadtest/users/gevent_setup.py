"""The first import of a Locust process: gRPC under gevent, and Ctrl-C for the main greenlet only.

Import this before anything that imports grpc or tritonclient. Locust replaces Python's blocking
calls by gevent's, but gRPC's are in C. Without `init_gevent` a stream that waits for a token blocks
every other user, and 20 users wait for each other forever.
"""

from __future__ import annotations

import signal

import locust  # noqa: F401  replaces the blocking calls, which must come first

import gevent  # isort: skip
from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()


def interrupt_main_greenlet_only() -> None:
    """From now on Ctrl-C interrupts the main greenlet only. Python raises KeyboardInterrupt in the
    code that happens to run. Under gevent that may be the greenlet in which gRPC reads a
    connection. That greenlet would die, its connection would hang, and Locust would miss the
    signal. Locust stops when its main greenlet is interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # in the background, where Ctrl-C is not for this process
    hub = gevent.get_hub()
    gevent.signal_handler(
        signal.SIGINT, lambda: hub.handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
    )
