"""Requests with a deadline, and their replies: a result or an error.

The requesting side has a Requester, which uses one connection per request: a Unix socket
(unix_socket.py) or a ZeroMQ socket. Without a reply before the deadline, it raises StoreUnavailable
and discards the connection with its queue. So a restarted server does not receive expired requests.

The answering side has a Responder, which decodes a request, calls the function that carries it out,
and frames the reply. Invalid bytes are answered with an error.

In a process with keys, both sides require keys over tcp:// (keys/curve.py). If the server rejects
all keys of the requester, the requester raises AccessRefused.

Not here: the requests (directory_protocol.py, node_protocol.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, Generic, Protocol, TypeVar, get_args

import msgspec
import zmq

from mooncake_store.errors import RequestInvalid, StoreError, StoreUnavailable, named
from mooncake_store.keys.curve import PeerAccess, secured_server
from mooncake_store.wire.addresses import bindable, notice_silence
from mooncake_store.wire.framing import (
    REQUEST_BYTES_MAX,
    MessageKind,
    number_of,
    pack_header,
    unpack_header,
)
from mooncake_store.wire.idle_look import look_after

CONNECTIONS_IDLE_MAX = 4  # connections that a Requester keeps for later requests
MOVED_CHECK_S = 0.25  # seconds without a reply until has_moved is called (ZeroMqConnection)

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


class Verb(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """Base of all requests. The tag of a request is its verb; T is the type of its result."""


@cache
def _result_decoder(verb: type[Verb[Any]]) -> msgspec.msgpack.Decoder[Any]:
    (result,) = get_args(verb.__orig_bases__[0])  # type: ignore[attr-defined]
    return msgspec.msgpack.Decoder(result)


class Failure(msgspec.Struct, frozen=True):
    """The body of a message of kind FAILURE: an error of errors.py by name."""

    kind: str  # class name of the error
    message: str


class Later:
    """Placeholder for a result that is not known yet. Its reply is sent later."""

    def __init__(self) -> None:
        self.number = 0  # of the request; set by the Responder
        self._on_reply: Callable[[list[bytes]], None] | None = None

    def then(self, on_reply: Callable[[list[bytes]], None]) -> None:
        """Set the function that receives the reply's frames."""
        self._on_reply = on_reply

    def resolve(self, reply: list[bytes]) -> None:
        assert self._on_reply is not None, "no receiver was set"
        self._on_reply(reply)


class Responder(Generic[R]):
    """Builds the frames of a reply from the frames of a request. Thread-safe."""

    def __init__(self, verbs: Sequence[type[R]], who: str) -> None:
        """`verbs`: the accepted requests; `who`: name of the server, for errors."""
        self._decode: Callable[[bytes], R] = msgspec.msgpack.Decoder(reduce(or_, verbs)).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._who = who

    def reply(self, frames: Sequence[bytes], carry_out: Callable[[R], object]) -> list[bytes]:
        """The frames of a reply: the result of `carry_out`, or an error."""
        reply = self.reply_or_later(frames, carry_out)
        assert not isinstance(reply, Later), "later replies are not supported here"
        return reply

    def reply_or_later(
        self, frames: Sequence[bytes], carry_out: Callable[[R], object]
    ) -> list[bytes] | Later:
        """As `reply`, but `carry_out` may return Later, which is then the result."""
        number = number_of(frames[0]) if frames else 0
        try:
            result = carry_out(self._read(frames))
            if isinstance(result, Later):
                result.number = number
                return result
            return self.answered(number, result)
        except StoreError as error:
            return self.refused(number, error)
        except Exception as error:  # Catch all: one request must not stop the server
            log.exception("request failed inside the %s", self._who)
            return self.refused(number, StoreError(f"bug in the {self._who}: {error!r}"))

    def answered(self, number: int, result: object) -> list[bytes]:
        return [pack_header(MessageKind.REPLY, number), self._encode(result)]

    def refusal(self, frames: Sequence[bytes], error: StoreError) -> list[bytes]:
        return self.refused(number_of(frames[0]) if frames else 0, error)

    def refused(self, number: int, error: StoreError) -> list[bytes]:
        body = self._encode(Failure(type(error).__name__, str(error)))
        return [pack_header(MessageKind.FAILURE, number), body]

    def _read(self, frames: Sequence[bytes]) -> R:
        if len(frames) != 2:
            raise RequestInvalid(f"a request has 2 frames, header and body; got {len(frames)}")
        header = unpack_header(frames[0])
        if header.kind is not MessageKind.REQUEST:
            raise RequestInvalid(f"a request was expected, got {header.kind.name}")
        try:
            return self._decode(frames[1])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RequestInvalid(f"the request cannot be read: {error}") from error


def listening(
    context: zmq.Context[Any], kind: int, address: str, is_directory: bool = False
) -> tuple[zmq.Socket[bytes], str]:
    """A bound ZeroMQ socket of a server, and its address for clients. Raises zmq.ZMQError if the
    bind fails, and StoreError if other hosts reach the address without keys (keys/curve.py)."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    notice_silence(socket, address)
    try:
        numbered = bindable(address)
        key = secured_server(socket, context, numbered, is_directory)
        socket.bind(numbered)
    except (zmq.ZMQError, StoreError):
        socket.close()
        raise
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT) + key


def set_reconnecting(socket: zmq.Socket[bytes]) -> None:
    """Set the options of every ZeroMQ socket that connects."""
    socket.linger = 0
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)


class Connection(Protocol):
    """Carries one request at a time; used by one thread at a time."""

    def exchange(self, frames: list[bytes], number: int, deadline_s: float) -> list[bytes] | None:
        """The reply to request `number`. None: no reply has arrived by `deadline_s`
        (time.monotonic()), or none can arrive."""

    def send(self, frames: list[bytes]) -> None:
        """Send without waiting. The request may be lost. The next exchange discards its reply."""

    def is_lost(self) -> bool:
        """Whether the server keeps rejecting this idle connection."""

    def close(self) -> None: ...


class ZeroMqConnection:
    """A DEALER socket, which reaches other hosts and reconnects by itself."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        has_moved: Callable[[], bool] | None = None,
        who: str = "",
    ) -> None:
        """`has_moved`: whether another server was elected; called while no reply arrives."""
        self._context, self._has_moved = context, has_moved
        self._address, self._access = address, PeerAccess(address, who)
        self._socket = self._connected()

    def _connected(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        set_reconnecting(socket)
        notice_silence(socket, self._address)
        try:
            self._access.connect(socket)
        except (zmq.ZMQError, StoreError):
            self._access.close()
            socket.close()
            raise
        return socket

    def exchange(self, frames: list[bytes], number: int, deadline_s: float) -> list[bytes] | None:
        """As Connection.exchange. Raises AccessRefused if the server rejects this process."""
        with contextlib.suppress(zmq.ContextTerminated):  # closed by another thread
            self.send(frames)
            while (left_s := deadline_s - time.monotonic()) > 0:
                step_s = min(left_s, MOVED_CHECK_S) if self._has_moved else left_s
                has_message, has_changed = self._poll(math.ceil(step_s * 1000))
                if has_message:
                    reply = self._socket.recv_multipart()
                    if number_of(reply[0]) == number:
                        return reply
                elif has_changed:
                    if self._access.must_redial():
                        self.close()
                        self._socket = self._connected()
                        self.send(frames)
                elif self._has_moved is not None and self._has_moved():
                    break  # the new server has not received this request
        return None

    def _poll(self, wait_ms: int) -> tuple[bool, bool]:
        """Wait; returns (a message has arrived, the state of the connection has changed)."""
        monitor = self._access.monitor
        if monitor is None:
            return bool(self._socket.poll(wait_ms)), False
        ready = dict(zmq.zmq_poll([(self._socket, zmq.POLLIN), (monitor, zmq.POLLIN)], wait_ms))
        return self._socket in ready, monitor in ready

    def send(self, frames: list[bytes]) -> None:
        # zmq.Again: ZeroMQ has closed the connection after a failed handshake; the request is lost.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def is_lost(self) -> bool:
        return self._access.is_lost()

    def close(self) -> None:
        self._access.close()
        self._socket.close(linger=0)


class Requester:
    """Sends requests to one server, and keeps connections for later requests. Thread-safe. With
    `is_in_order`, it sends one request at a time over one connection, which suits a server that
    answers fast. Otherwise concurrent requests have connections of their own, so that a slow
    request delays no other request."""

    def __init__(
        self,
        who: str,
        hint: str,
        connect: Callable[[zmq.Context[Any]], Connection],
        is_in_order: bool = False,
    ) -> None:
        """`who`: name and address of the server; `hint`: what to check if it does not answer."""
        self._who, self._hint = who, hint
        self._connect = connect
        self._context: zmq.Context[Any] = zmq.Context()
        self._turn = threading.Lock() if is_in_order else None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._number = 0
        self._is_closed = False
        look_after(self)

    def ask(self, request: Verb[T], timeout_s: float) -> T:
        """The result in the reply. Raises the error in the reply, or StoreUnavailable if there is
        no reply in time or this Requester is closed."""
        deadline_s = time.monotonic() + timeout_s
        body = msgspec.msgpack.encode(request)
        if self._turn is not None and not self._turn.acquire(timeout=timeout_s):
            raise self._silent(
                request, timeout_s, "it was not sent, because other threads used the connection"
            )
        try:
            connection, number = self._take_connection()
            frames = [pack_header(MessageKind.REQUEST, number), body]
            reply = None
            try:
                reply = connection.exchange(frames, number, deadline_s)
            finally:
                self._give_back(connection, is_usable=reply is not None)
        finally:
            if self._turn is not None:
                self._turn.release()
        if reply is None:
            raise self._silent(request, timeout_s, self._hint)
        decoder: msgspec.msgpack.Decoder[T] = _result_decoder(type(request))
        return self._result(reply, decoder)

    def send(self, request: Verb[Any], timeout_s: float) -> None:
        """As `ask`, but do not wait for a reply. The request may be lost."""
        if self._turn is not None and not self._turn.acquire(timeout=timeout_s):
            return
        try:
            connection, number = self._take_connection()
            frames = [pack_header(MessageKind.REQUEST, number), msgspec.msgpack.encode(request)]
            connection.send(frames)
            self._give_back(connection, is_usable=True)
        except StoreUnavailable:
            pass  # the request may be lost
        finally:
            if self._turn is not None:
                self._turn.release()

    def disconnect(self) -> None:
        """Close idle connections, so that the next request connects again."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def look_after_idle(self) -> None:
        """Drop connections that the other side rejects; see idle_look.py."""
        with self._lock:
            for connection in [each for each in self._idle if each.is_lost()]:
                self._idle.remove(connection)
                connection.close()

    def close(self) -> None:
        """A second call has no effect. With `is_in_order`, close waits for a request of another
        thread that is in progress. Otherwise that request ends with StoreUnavailable."""
        with self._turn or contextlib.nullcontext():
            with self._lock:
                self._is_closed = True
            self.disconnect()
            self._context.term()  # wakes requests in progress, whose connections close then

    def _take_connection(self) -> tuple[Connection, int]:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailable(f"this client of {self._who} is closed")
            self._number += 1
            number = self._number
            return self._idle.pop() if self._idle else self._connect(self._context), number

    def _give_back(self, connection: Connection, is_usable: bool) -> None:
        with self._lock:
            if not is_usable or self._is_closed or len(self._idle) >= CONNECTIONS_IDLE_MAX:
                connection.close()
            else:
                self._idle.append(connection)

    def _result(self, reply: Sequence[bytes], decoder: msgspec.msgpack.Decoder[T]) -> T:
        header = unpack_header(reply[0])
        try:
            if header.kind is MessageKind.REPLY:
                return decoder.decode(reply[1])
            failure = _FAILURE.decode(reply[1])
        except (msgspec.DecodeError, ValueError, IndexError) as error:
            raise RequestInvalid(
                f"{self._who} sent a reply that cannot be decoded: {error}"
            ) from error
        raise named(failure.kind, failure.message)

    def _silent(self, request: Verb[Any], timeout_s: float, why: str) -> StoreUnavailable:
        verb = request.__struct_config__.tag
        return StoreUnavailable(f"{self._who} did not answer {verb} within {timeout_s:g} s; {why}")


_FAILURE = msgspec.msgpack.Decoder(Failure)
