"""Looks now and then at connections that nobody uses, because ZeroMQ goes on with them.

Where the other side has another key by now, it connects again and again for as long as the socket
is open, and notes each failure (keys/curve.py). Who asks or sends reads these notes; of a
connection in no use they would pile up. So a thread of a process with keys asks the owners of
connections to read them, and to drop what is refused all the time: the next use connects anew.

Not here: what a refusal means to who is asking (keys/curve.py).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

from mooncake_store.keys.folder import VARIABLE

LOOK_S = 30.0

log = logging.getLogger(__name__)
_lock = threading.Lock()
_never = threading.Event()


class ConnectionOwner(Protocol):
    def look_after_idle(self) -> None:
        """Read what its idle connections have noted, drop those that are refused."""


_owners: weakref.WeakSet[ConnectionOwner] = weakref.WeakSet()
_threads: list[threading.Thread] = []  # one, or that of the process which forked this one


def look_after(owner: ConnectionOwner) -> None:
    """From now on, for as long as it is in use."""
    if not os.environ.get(VARIABLE):
        return  # nothing is refused for long where there are no keys
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
        except Exception:  # edge: the others must be looked after all the same
            log.exception("idle connections could not be looked after")
