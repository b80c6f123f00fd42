"""A process's own letter box, and the way to write to another's.

A ZeroMQ PULL socket per worker *process* (a model name may be served by two processes while a
config.pbtxt reloads) and per front. What the letters say is in workers/protocol.py. Losing a letter
is harmless: hand-over progress only saves time, a stop is sent again while the request lives, and
lost tokens are noticed (token_streams.py). What comes from outside this launch is dropped: it does
not know its secret (launch_secret.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable

import msgspec
import zmq

from backends.launcher import launch_secret
from backends.workers.protocol import Letter, decode_inbox, encode

log = logging.getLogger(__name__)
LETTERS_MAX = 10_000  # queued per peer; more are dropped
READ_AT_ONCE_MAX = 256
POLL_MS = 200


class Inbox:
    """Receives letters in a thread of its own; `on_letters` gets all that wait, in order.

    It may return the seconds after which it wants to be called again even if no letter comes.
    """

    def __init__(self, address: str, on_letters: Callable[[list[Letter]], float | None]) -> None:
        self.address = address
        self._secret = launch_secret.of_launch()
        self._on_letters = on_letters
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(LETTERS_MAX)
        self._socket.bind(address)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        again_s: float | None = None
        while not self._is_closing.is_set():
            wait_ms = POLL_MS if again_s is None else min(POLL_MS, math.ceil(again_s * 1e3))
            if not self._socket.poll(wait_ms) and again_s is None:
                continue
            again_s = None
            try:
                again_s = self._on_letters(self._waiting())
            except Exception:  # edge: one bad letter must not close the letter box
                log.exception("letters failed")
        self._socket.close(linger=0)

    def _waiting(self) -> list[Letter]:
        letters: list[Letter] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(READ_AT_ONCE_MAX):
                data = launch_secret.opened(self._socket.recv(zmq.NOBLOCK), self._secret)
                if data is None:
                    log.warning("dropped a letter of somebody who is not of this launch")
                    continue
                try:
                    letters.append(decode_inbox(data))
                except msgspec.MsgspecError as error:
                    log.warning("dropped a letter that cannot be read: %s", error)
        return letters


class Outbox:
    """Sends letters to inboxes; thread-safe, never blocks, keeps one socket per inbox."""

    SOCKETS_MAX = 256

    def __init__(self) -> None:
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()
        self._secret = launch_secret.of_launch()

    def send(self, address: str, letter: Letter) -> None:
        data = launch_secret.sealed(encode(letter), self._secret)
        with self._lock:
            socket = self._sockets.get(address)
            if socket is None:
                if len(self._sockets) >= self.SOCKETS_MAX:  # workers come and go
                    self._sockets.pop(next(iter(self._sockets))).close(linger=0)
                socket = zmq.Context.instance().socket(zmq.PUSH)
                socket.set_hwm(LETTERS_MAX)
                socket.connect(address)
                self._sockets[address] = socket
            with contextlib.suppress(zmq.Again):
                socket.send(data, flags=zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            for socket in self._sockets.values():
                socket.close(linger=200)
            self._sockets.clear()
