"""Ctrl-C ends the main greenlet's waiting, and nothing else.

Python raises KeyboardInterrupt in whatever happens to run. Under gevent that may be the greenlet in
which gRPC reads a connection: it dies, everyone on that connection waits for ever, and Locust does
not hear of the signal. Locust's own end begins where its main greenlet is interrupted.
"""

from __future__ import annotations

import signal

import gevent


def to_main_greenlet() -> None:
    """From now on, in this process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # started in the background, where Ctrl-C is for others
    hub = gevent.get_hub()
    gevent.signal_handler(
        signal.SIGINT, lambda: hub.handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
    )
