"""Requests over a Unix socket of one host, beside ZeroMQ: the same frames, a tenth of the time.

A round trip through ZeroMQ wakes six threads (client, its I/O thread, the server's, the server, and
back) and takes 110-140 us here; through a Unix socket it wakes two and takes 5-6. A directory that
listens at ipc://PATH also listens at PATH.direct; clients there use it, all others use ZeroMQ.

Each message is header (16 bytes) | body length (4 bytes, little-endian) | body.

Not here: what a header or a body says (protocol.py), tcp:// and events (ZeroMQ).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable

from mooncake_store.wire.protocol import HEADER_BYTES, REQUEST_BYTES_MAX

SUFFIX = ".direct"
CONNECTIONS_MAX = 4_096
UNREAD_BYTES_MAX = 2 * REQUEST_BYTES_MAX  # answers that a client does not fetch
RECEIVE_BYTES = 256 * 1024
PATH_BYTES_MAX = 107  # of the kernel
RETRY_S = 0.02
_LENGTH = struct.Struct("<I")
_PREFIX_BYTES = HEADER_BYTES + _LENGTH.size

log = logging.getLogger(__name__)
Answer = Callable[[list[bytes]], list[bytes]]


def direct_path(address: str) -> str:
    """Where the Unix socket beside this address is; "" when it has none."""
    path = address.removeprefix("ipc://") + SUFFIX
    is_usable = address.startswith("ipc:///") and len(os.fsencode(path)) <= PATH_BYTES_MAX
    return path if is_usable else ""


def _packed(frames: list[bytes]) -> bytes:
    header, body = frames
    return header + _LENGTH.pack(len(body)) + body


class _Connection:
    """One client: bytes of a request that is not whole yet, bytes of answers not taken yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def receive(self) -> bool:
        """Take what has come; False when the client is gone."""
        try:
            data = self.peer.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.incoming += data
        return bool(data)

    def requests(self) -> list[list[bytes]]:
        """The whole requests that have come. ValueError for a length over the limit."""
        found = []
        while len(self.incoming) >= _PREFIX_BYTES:
            (length,) = _LENGTH.unpack_from(self.incoming, HEADER_BYTES)
            if length > REQUEST_BYTES_MAX:
                raise ValueError(f"a request of {length} bytes")
            end = _PREFIX_BYTES + length
            if len(self.incoming) < end:
                break
            header = bytes(self.incoming[:HEADER_BYTES])
            found.append([header, bytes(self.incoming[_PREFIX_BYTES:end])])
            del self.incoming[:end]
        return found

    def send(self) -> None:
        while self.outgoing:
            try:
                sent = self.peer.send(self.outgoing)
            except BlockingIOError:
                return
            del self.outgoing[:sent]


class DirectServer:
    """The listening side; its owner polls `files()` and calls `serve` with those that are ready."""

    def __init__(self, path: str, answer: Answer) -> None:
        self._answer = answer
        self._path = path
        self._connections: dict[int, _Connection] = {}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a life before: ZeroMQ's address has been bound, so nobody has it
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)

    def files(self) -> dict[int, bool]:
        """Descriptors to be polled for reading; True: for writing too."""
        found = {fd: bool(each.outgoing) for fd, each in self._connections.items()}
        found[self._listener.fileno()] = False
        return found

    def serve(self, ready: list[int]) -> None:
        """Answer what has come on these descriptors."""
        for fd in ready:
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._connections:
                self._serve(fd, self._connections[fd])

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                peer, _ = self._listener.accept()
                if len(self._connections) >= CONNECTIONS_MAX:
                    log.warning("refused a client: %d are connected", CONNECTIONS_MAX)
                    peer.close()
                    continue
                peer.setblocking(False)
                self._connections[peer.fileno()] = _Connection(peer)

    def _serve(self, fd: int, connection: _Connection) -> None:
        try:
            lives = connection.receive()
            for frames in connection.requests():
                connection.outgoing += _packed(self._answer(frames))
            connection.send()
            if len(connection.outgoing) > UNREAD_BYTES_MAX:
                raise ValueError("answers are not fetched")
        except (OSError, ValueError) as error:
            log.info("dropped a client: %s", error)
            lives = False
        if not lives:
            del self._connections[fd]
            connection.peer.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.peer.close()
        self._connections.clear()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class DirectClient:
    """The asking side, not thread-safe. Connects when it is first used, and again when it must."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._incoming = bytearray()

    def exchange(self, frames: list[bytes], number: int, deadline_s: float) -> list[bytes] | None:
        """The answer to request `number`; None when none came before time.monotonic() does.

        A connection that breaks means that the directory has ended: the next one is asked.
        """
        message = _packed(frames)
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                peer = self._connected(left_s)
                peer.sendall(message)
                return self._await(peer, number, deadline_s)
            except TimeoutError:
                break
            except OSError:
                self.close()
                time.sleep(min(RETRY_S, max(0.0, deadline_s - time.monotonic())))
        self.close()
        return None

    def tell(self, frames: list[bytes]) -> None:
        """Send, and do not wait: the answer is passed over by the next exchange."""
        with contextlib.suppress(OSError):
            self._connected(RETRY_S).sendall(_packed(frames))
            return
        self.close()

    def _await(self, peer: socket.socket, number: int, deadline_s: float) -> list[bytes] | None:
        while True:
            while (frames := self._next()) is not None:
                if struct.unpack_from("<Q", frames[0], 8)[0] == number:
                    return frames
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            peer.settimeout(left_s)
            data = peer.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the directory has ended")
            self._incoming += data

    def _next(self) -> list[bytes] | None:
        if len(self._incoming) < _PREFIX_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming, HEADER_BYTES)
        end = _PREFIX_BYTES + length
        if len(self._incoming) < end:
            return None
        header = bytes(self._incoming[:HEADER_BYTES])
        body = bytes(self._incoming[_PREFIX_BYTES:end])
        del self._incoming[:end]
        return [header, body]

    def _connected(self, timeout_s: float) -> socket.socket:
        if self._socket is None:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                peer.settimeout(timeout_s)
                peer.connect(self._path)
            except BaseException:
                peer.close()
                raise
            self._socket = peer
            self._incoming.clear()
        self._socket.settimeout(timeout_s)
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
