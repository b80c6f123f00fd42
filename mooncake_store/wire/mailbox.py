"""One-way messages between processes: an inbox receives, an outbox sends to other inboxes.

An inbox is a ZeroMQ PULL socket with a thread of its own, on this host (ipc://) or for other hosts
too (tcp://HOST:0, any free port). An outbox has a PUSH socket for each inbox that it sends to. So
receiving and sending threads share no socket.

Sending never blocks. A message beyond `messages_max` for one inbox is lost, and `send` reports the
loss. So the sender must tolerate a loss, or wait for an answer with a deadline. Large bytes (an
attachment) are sent as a separate frame after the message, without copies in either process.

An inbox accepts only messages that begin with its secret and the version of these messages. Over
tcp:// an inbox of a process with keys also accepts connections of known hosts only, and its address
contains its public key (keys/curve.py).

Not here: requests with replies (request_reply.py), the content of messages.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from mooncake_store.errors import AccessRefused, ProtocolMismatch, RequestInvalid, StoreError
from mooncake_store.keys.curve import PeerAccess, is_tcp, secured_server
from mooncake_store.wire.addresses import bindable, notice_silence, with_port
from mooncake_store.wire.idle_look import look_after

log = logging.getLogger(__name__)
MESSAGES_MAX = 10_000  # messages in one queue of ZeroMQ
READ_AT_ONCE_MAX = 256  # messages per call of on_messages
OUTBOX_SOCKETS_MAX = 256  # beyond this, the socket that was opened first is closed
OUTBOX_IDLE_S = 10.0  # unused sockets may be closed; longer than worker_ttl_s of the directory
DROP_NOTE_S = 1.0  # seconds between two log lines about unreadable messages
REFUSED_S = 1.0  # pause before a retry after an inbox rejected this process
POLL_MS = 200  # delay until close() is noticed
CLOSE_S_MAX = 5.0  # seconds for an inbox's thread to end, or a closed idle socket to send its queue
MESSAGE_BYTES_MAX = 16 * 2**20  # of one frame over tcp://
MESSAGE_VERSION = 1
_MARK = b"MM" + MESSAGE_VERSION.to_bytes(2, "little")  # before each message
M = TypeVar("M")


class Inbox(Generic[M]):
    """Receives in its own thread, which calls `on_messages` with up to READ_AT_ONCE_MAX messages in
    order. `on_messages` returns the most seconds until its next call, which then happens even
    without messages, or None. After an exception in `on_messages`, the inbox continues."""

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
        attach: Callable[[M, memoryview], M] | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """`address`: ipc://PATH or tcp://HOST:PORT, * for any free port. `listen`: the address to
        bind, if it differs from the address for senders. `turn_s`: the most seconds until the next
        call of `on_messages` if it returns None. `attach` joins a message and its attachment; None:
        messages with attachments are dropped. `message_bytes_max`: per frame over tcp://.

        Raises zmq.ZMQError if the bind fails, and AddressUnguarded if other hosts reach the address
        and there are no keys.
        """
        self._decode, self._on_messages = decode, on_messages
        self._attach = attach
        self._secret, self._turn_s = secret, turn_s
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(messages_max)
        if is_tcp(address):
            self._socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
        notice_silence(self._socket, address)
        try:
            numbered = bindable(listen or address)
            key = secured_server(self._socket, zmq.Context.instance(), numbered)
            self._socket.bind(numbered)
        except (zmq.ZMQError, StoreError):
            self._socket.close(linger=0)
            raise
        # `address` contains the actual port and the public key.
        bound: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = with_port(address, bound) + key
        self._dropped, self._noted_s = 0, float("-inf")
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
            except Exception:  # Catch all: one bad message must not close the inbox
                log.exception("messages at %s failed", self.address)
        self._socket.close(linger=0)

    def _waiting(self) -> list[M]:
        messages: list[M] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(READ_AT_ONCE_MAX):
                try:
                    frame, attachment = self._socket.recv(zmq.NOBLOCK), None
                    if self._socket.getsockopt(zmq.RCVMORE):
                        attachment = self._attachment()
                    message = self._decode(opened(frame, self._secret))
                    if attachment is not None:
                        if self._attach is None:
                            raise RequestInvalid("a message with an attachment")
                        message = self._attach(message, attachment)
                    messages.append(message)
                except (msgspec.MsgspecError, StoreError, ValueError, RecursionError) as error:
                    self._drop(error)
        return messages

    def _attachment(self) -> memoryview:
        """The frame after a message. Raises RequestInvalid if there is more than one."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if len(frames) != 1:
            raise RequestInvalid(f"a message with {len(frames)} attachments")
        return frames[0].buffer

    def _drop(self, error: Exception) -> None:
        """Count a dropped message. At most one line is logged per DROP_NOTE_S."""
        self._dropped += 1
        now_s = time.monotonic()
        if now_s - self._noted_s >= DROP_NOTE_S:
            log.warning("dropped %d messages that cannot be read: %s", self._dropped, error)
            self._noted_s, self._dropped = now_s, 0


class Outbox(Generic[M]):
    """Sends to inboxes, over one socket per inbox. Thread-safe; never blocks."""

    def __init__(
        self, encode: Callable[[M], bytes], secret: str = "", messages_max: int = MESSAGES_MAX
    ) -> None:
        self._encode = encode
        self._secret = secret
        self._messages_max = messages_max
        self._sockets: dict[str, _InboxSocket] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        look_after(self)

    def send(self, address: str, message: M, attachment: memoryview | None = None) -> bool:
        """Send a message to the inbox at `address`. False: the message is lost, because the queue
        for this inbox is full, or the inbox rejects this process. After close() every message is
        lost, and the result is True. Raises zmq.ZMQError if the address is invalid. An attachment
        is not copied, so its memory must not be written any more."""
        data = sealed(self._encode(message), self._secret)
        with self._lock:
            if self._is_closed:
                return True  # after close() no caller depends on delivery
            inbox = self._sockets.get(address) or self._opened(address)
            if inbox.access.monitor is not None:
                if inbox.is_refused():
                    return False
                if inbox.must_redial:
                    inbox = self._opened(address)
            inbox.used_s = time.monotonic()
            try:
                if attachment is None:
                    inbox.socket.send(data, flags=zmq.NOBLOCK)
                else:
                    inbox.socket.send_multipart([data, attachment], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
        return True

    def _opened(self, address: str) -> _InboxSocket:
        """Open a new socket to this inbox, and close idle sockets, because ZeroMQ would retry
        without end to reach the inbox of a process that has ended."""
        if address in self._sockets:
            self._sockets.pop(address).close()
        idle_s = time.monotonic() - OUTBOX_IDLE_S
        for other in [each for each, inbox in self._sockets.items() if inbox.used_s <= idle_s]:
            self._sockets.pop(other).close(linger_ms=round(CLOSE_S_MAX * 1e3))
        if len(self._sockets) >= OUTBOX_SOCKETS_MAX:
            self._sockets.pop(next(iter(self._sockets))).close()
        inbox = self._sockets[address] = _InboxSocket(address, self._messages_max)
        return inbox

    def look_after_idle(self) -> None:
        """Drop sockets to inboxes that reject this process; see idle_look.py."""
        with self._lock:
            for address in [one for one, inbox in self._sockets.items() if inbox.access.is_lost()]:
                self._sockets.pop(address).close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for inbox in self._sockets.values():
                inbox.close(linger_ms=200)
            self._sockets.clear()


class _InboxSocket:
    def __init__(self, address: str, messages_max: int) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.set_hwm(messages_max)
        notice_silence(self.socket, address)
        self.access = PeerAccess(address, f"the inbox at {address.partition('#')[0]}")
        self.must_redial = False
        self.used_s = time.monotonic()  # time.monotonic() of the last message sent
        self._refused_until_s = float("-inf")
        try:
            self.access.connect(self.socket)
        except (zmq.ZMQError, StoreError):
            self.close()
            raise

    def is_refused(self) -> bool:
        """Whether the inbox rejects this process, so that messages are lost. After REFUSED_S, the
        next `send` opens a new socket (`must_redial`)."""
        if time.monotonic() < self._refused_until_s:
            return True
        try:
            self.must_redial |= self.access.must_redial()
        except AccessRefused as error:
            log.warning("messages are lost: %s", error)
            self._refused_until_s = time.monotonic() + REFUSED_S
            self.must_redial = True
            return True
        return False

    def close(self, linger_ms: int = 0) -> None:
        self.access.close()
        self.socket.close(linger=linger_ms)


def sealed(data: bytes, secret: str) -> bytes:
    return secret.encode() + _MARK + data


def opened(data: bytes, secret: str) -> bytes:
    """The message in `data`. Raises RequestInvalid or ProtocolMismatch."""
    known = secret.encode()
    if not hmac.compare_digest(data[: len(known)], known):
        raise RequestInvalid("its sender has another secret")
    mark = data[len(known) : len(known) + len(_MARK)]
    if len(mark) != len(_MARK) or mark[:2] != _MARK[:2]:
        raise RequestInvalid("it is not a message of a mooncake process")
    if mark != _MARK:
        raise ProtocolMismatch(
            f"its sender has version {int.from_bytes(mark[2:], 'little')} of the messages "
            f"between processes, this side {MESSAGE_VERSION}; run the same release on both"
        )
    return data[len(known) + len(_MARK) :]
