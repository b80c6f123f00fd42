"""Admission of known client keys: the handler of ZeroMQ's authentication requests (ZAP, RFC 27).

When a client has proven that it owns its key, ZeroMQ sends an authentication request, before it
reads any message. One thread per context answers from the current files of the folder of keys. A
host is therefore added or removed without a restart. Established connections are not checked again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import Any

import zmq
from zmq.utils import z85

from mooncake_store.keys.folder import Keys

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"mooncake"
LOG_PAUSE_S = 10.0  # minimum time between log lines, because unknown clients might fill the log

log = logging.getLogger(__name__)
_lock = threading.Lock()
_gates: weakref.WeakKeyDictionary[zmq.Context[Any], KeyGate] = weakref.WeakKeyDictionary()


def guard(context: zmq.Context[Any], keys: Keys) -> None:
    """Make the CURVE sockets of this context reject unknown hosts until the context is destroyed.
    A second call replaces the keys."""
    with _lock:
        if context in _gates:
            _gates[context].keys = keys
            return
        gate = KeyGate(keys)
        # A shadow context, because destroying a context closes the sockets that it made. The thread
        # below owns this socket, so no other thread may close it.
        shadow: zmq.Context[Any] = zmq.Context.shadow(context.underlying)
        socket = shadow.socket(zmq.REP)
        socket.linger = 0
        socket.bind(ADDRESS)
        thread = threading.Thread(target=gate.run, args=(socket,), name="zap", daemon=True)
        thread.start()
        _gates[context] = gate


class RefusalLog:
    """Logs rejected clients, at most one line per LOG_PAUSE_S. Thread-safe."""

    def __init__(self, into: logging.Logger) -> None:
        self._log = into
        self._lock = threading.Lock()
        self._logged_s = float("-inf")
        self._refused = 0  # rejections since the last log line

    def note(self, peer: str, why: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._refused += 1
            if now_s - self._logged_s < LOG_PAUSE_S:
                return
            refused, self._refused, self._logged_s = self._refused, 0, now_s
        self._log.warning(
            "refused %s: %s (%d refused since the last such line)", peer, why, refused
        )


class KeyGate:
    """Accepts the clients whose keys are in one folder of keys."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._refusals = RefusalLog(log)

    def run(self, socket: zmq.Socket[bytes]) -> None:
        """Answer until the context ends. A REP socket must answer every message."""
        try:
            while True:
                socket.send_multipart(self.answer(socket.recv_multipart()))
        except zmq.ZMQError:
            with contextlib.suppress(zmq.ZMQError):
                socket.close()

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The ZAP reply to [version, number, domain, peer, identity, mechanism, public key]. A
        request with fewer or more frames is rejected."""
        version, number = (*frames, b"", b"")[:2]
        host = self._host(frames)
        if not host:
            peer = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
            self._refusals.note(peer, "it has no key of a host of this cluster")
            return [version, number, b"400", b"unknown key", b"", b""]
        return [version, number, b"200", b"", host.encode(), b""]

    def _host(self, frames: list[bytes]) -> str:
        """The host with the client's key; "" for an unknown key or an invalid request."""
        if len(frames) != 7 or frames[5] != b"CURVE" or len(frames[6]) != 32:
            return ""
        return self.keys.curve.host_of(z85.encode(frames[6]).decode())
