"""One-way messages between processes: an inbox of one's own, and the way into those of others.

An inbox is a ZeroMQ PULL socket with a thread of its own, on this host (ipc://) or for others too
(tcp://HOST:0, any free port); an outbox has a PUSH socket for each
inbox that it writes to, so no socket is shared between threads that wait and threads that send.
Sending never blocks: what a peer lets wait beyond `messages_max` is lost, and the sender knows it.
So a message is something that may be lost, or whose answer somebody waits for with a deadline.

With a secret only those who know it are heard. It stands in front of each message: a receiver has
nothing but the bytes.

Not here: requests that are answered (request_reply.py), what the messages say.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from mooncake_store.wire.addresses import bindable, notice_silence, with_port

log = logging.getLogger(__name__)
MESSAGES_MAX = 10_000  # queued per peer
READ_AT_ONCE_MAX = 256
OUTBOX_SOCKETS_MAX = 256
POLL_MS = 200  # how late it may notice that it is closed
CLOSE_S_MAX = 5.0  # for messages under way
M = TypeVar("M")


class Inbox(Generic[M]):
    """Receives in a thread of its own; `on_messages` gets all that wait, in order.

    It may return the seconds after which it wants to be called again even if no message comes. An
    error in it is logged, and the next messages are handed on.
    """

    def __init__(
        self,
        address: str,
        decode: Callable[[bytes], M],
        on_messages: Callable[[list[M]], float | None],
        secret: str = "",
        messages_max: int = MESSAGES_MAX,
        turn_s: float | None = None,
        thread_name: str = "inbox",
        listen: str = "",
    ) -> None:
        """`turn_s`: call `on_messages` at least so often, with no messages if there are none.
        `listen`: what is bound, when that is not what others use.

        zmq.ZMQError when nothing can listen at the address.
        """
        self._decode, self._on_messages = decode, on_messages
        self._secret, self._turn_s = secret, turn_s
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(messages_max)
        notice_silence(self._socket, address)
        try:
            self._socket.bind(bindable(listen or address))
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self.address = with_port(address, self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=CLOSE_S_MAX)

    def _run(self) -> None:
        again_s = self._turn_s
        while not self._is_closing.is_set():
            wait_ms = POLL_MS if again_s is None else min(POLL_MS, math.ceil(again_s * 1e3))
            if not self._socket.poll(wait_ms) and again_s is None:
                continue
            again_s = self._turn_s
            try:
                wanted_s = self._on_messages(self._waiting())
                again_s = again_s if wanted_s is None else wanted_s
            except Exception:  # edge: one bad message must not close the inbox
                log.exception("messages at %s failed", self.address)
        self._socket.close(linger=0)

    def _waiting(self) -> list[M]:
        messages: list[M] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(READ_AT_ONCE_MAX):
                data = opened(self._socket.recv(zmq.NOBLOCK), self._secret)
                if data is None:
                    log.warning("dropped a message of somebody who does not know our secret")
                    continue
                try:
                    messages.append(self._decode(data))
                except msgspec.MsgspecError as error:
                    log.warning("dropped a message that cannot be read: %s", error)
        return messages


class Outbox(Generic[M]):
    """Sends to inboxes; thread-safe, never blocks, keeps one socket per inbox."""

    def __init__(
        self, encode: Callable[[M], bytes], secret: str = "", messages_max: int = MESSAGES_MAX
    ) -> None:
        self._encode = encode
        self._secret = secret
        self._messages_max = messages_max
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, address: str, message: M) -> bool:
        """False: the peer lets too many wait, and this one is lost. After close() all are."""
        data = sealed(self._encode(message), self._secret)
        with self._lock:
            if self._is_closed:
                return True  # nobody waits for what is said after the goodbye
            socket = self._sockets.get(address) or self._connected(address)
            try:
                socket.send(data, flags=zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        if len(self._sockets) >= OUTBOX_SOCKETS_MAX:  # workers come and go
            self._sockets.pop(next(iter(self._sockets))).close(linger=0)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.set_hwm(self._messages_max)
        notice_silence(socket, address)
        socket.connect(address)
        self._sockets[address] = socket
        return socket

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for socket in self._sockets.values():
                socket.close(linger=200)
            self._sockets.clear()


def sealed(data: bytes, secret: str) -> bytes:
    return secret.encode() + data


def opened(data: bytes, secret: str) -> bytes | None:
    """What was sealed with this secret; None for anything else."""
    mark = secret.encode()
    return data[len(mark) :] if hmac.compare_digest(data[: len(mark)], mark) else None
