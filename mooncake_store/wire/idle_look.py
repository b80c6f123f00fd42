"""Checks idle connections periodically, because ZeroMQ keeps retrying them.

If the other side has changed its key, ZeroMQ tries to reconnect as long as the socket is open, and
queues an event for each failure (keys/curve.py). A request or a send reads these events; on an idle
connection they would accumulate. So in a process with keys, a thread calls the owners of
connections. Each owner reads the events and drops rejected connections; the next use reconnects.

Not here: the meaning of a rejection for a request (keys/curve.py).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

from mooncake_store.keys.folder import VARIABLE

LOOK_S = 30.0  # seconds between two checks

log = logging.getLogger(__name__)
_lock = threading.Lock()
_never = threading.Event()  # never set; waiting for it is an interval


class ConnectionOwner(Protocol):
    def look_after_idle(self) -> None:
        """Read the events of idle connections, and drop connections that are rejected."""


_owners: weakref.WeakSet[ConnectionOwner] = weakref.WeakSet()
_threads: list[threading.Thread] = []  # at most one; not alive in a forked process


def look_after(owner: ConnectionOwner) -> None:
    """Check this owner's connections from now on, as long as the owner exists."""
    if not os.environ.get(VARIABLE):
        return  # without keys no connection is rejected permanently
    with _lock:
        _owners.add(owner)
        if not any(thread.is_alive() for thread in _threads):
            _threads[:] = [threading.Thread(target=_run, name="idle-look", daemon=True)]
            _threads[0].start()


def _run() -> None:
    while not _never.wait(LOOK_S):
        look_at_all()


def look_at_all() -> None:
    with _lock:
        owners = list(_owners)
    for owner in owners:
        try:
            owner.look_after_idle()
        except Exception:  # Catch all: the other owners must be called
            log.exception("checking idle connections failed")
