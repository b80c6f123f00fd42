"""Lets known keys in: the answer to ZeroMQ's question whose client key it is (ZAP, RFC 27).

ZeroMQ asks at the first handshake step at which the key of a client is proven, before any byte of a
message is read. A thread per context answers from the folder of keys as it is at that moment, so a
host that was added or removed is known without a restart. Connections that stand are not asked
again.
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

from mooncake_store.errors import StoreError
from mooncake_store.keys.folder import Keys

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"mooncake"
LOG_PAUSE_S = 10.0  # between two lines about refusals: a stranger must not fill the log

log = logging.getLogger(__name__)
_lock = threading.Lock()
_gates: weakref.WeakKeyDictionary[zmq.Context[Any], KeyGate] = weakref.WeakKeyDictionary()


def guard(context: zmq.Context[Any], keys: Keys) -> None:
    """From here on the CURVE sockets of this context let known hosts in, and nobody else.

    Ends by itself with the context. A second call gives it other keys.
    """
    with _lock:
        if context in _gates:
            _gates[context].keys = keys
            return
        gate = KeyGate(keys)
        # A shadow: whoever destroys the context closes the sockets that it made, and this one is
        # another thread's.
        shadow: zmq.Context[Any] = zmq.Context.shadow(context.underlying)
        questions = shadow.socket(zmq.REP)
        questions.linger = 0
        questions.bind(ADDRESS)
        thread = threading.Thread(target=gate.run, args=(questions,), name="zap", daemon=True)
        thread.start()
        _gates[context] = gate


class RefusalLog:
    """Says who was refused, in a line every LOG_PAUSE_S at most. Thread-safe."""

    def __init__(self, into: logging.Logger) -> None:
        self._log = into
        self._lock = threading.Lock()
        self._logged_s = float("-inf")
        self._refused = 0  # since that line

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
    """Who comes in, by the keys of one folder."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._refusals = RefusalLog(log)

    def run(self, questions: zmq.Socket[bytes]) -> None:
        try:
            while True:
                frames = questions.recv_multipart()
                if len(frames) >= 2:
                    questions.send_multipart(self.answer(frames))
        except (zmq.ContextTerminated, zmq.ZMQError):
            with contextlib.suppress(zmq.ZMQError):
                questions.close()

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to [version, number, domain, peer, identity, mechanism, public key]."""
        version, number = frames[:2]
        host = self._host(frames)
        if not host:
            peer = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
            self._refusals.note(peer, "its key is not that of a host of this cluster")
            return [version, number, b"400", b"unknown key", b"", b""]
        return [version, number, b"200", b"", host.encode(), b""]

    def _host(self, frames: list[bytes]) -> str:
        if len(frames) != 7 or frames[5] != b"CURVE" or len(frames[6]) != 32:
            return ""
        try:
            return self.keys.curve.host_of(z85.encode(frames[6]).decode())
        except StoreError:  # the folder went away before it was ever read: let nobody in
            return ""
