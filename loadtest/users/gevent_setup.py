"""What a process of Locust needs before anything else: gRPC under gevent, Ctrl-C where it belongs.

To be imported before anything that imports grpc or tritonclient. Locust replaces Python's blocking
calls by gevent's, gRPC's are in C and stay: without `init_gevent` a stream that waits for a token
stops every other user, and 20 of them wait for each other for ever.
"""

from __future__ import annotations

import signal

import locust  # noqa: F401  replaces the blocking calls, which must come first

import gevent  # isort: skip
from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()


def interrupt_main_greenlet_only() -> None:
    """From now on Ctrl-C ends the main greenlet's waiting in this process, and nothing else.

    Python raises KeyboardInterrupt in whatever happens to run. Under gevent that may be the
    greenlet in which gRPC reads a connection: it dies, everyone on that connection waits for ever,
    and Locust does not hear of the signal. Locust's own end begins where its main greenlet is
    interrupted.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # started in the background, where Ctrl-C is for others
    hub = gevent.get_hub()
    gevent.signal_handler(
        signal.SIGINT, lambda: hub.handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
    )
