"""Requests over a Unix socket of one host: the same frames as over ZeroMQ, in less time.

A round trip through ZeroMQ wakes a thread six times (the server, both I/O threads, the client) and
takes 110-140 us on two shared cores. Through a Unix socket it wakes a thread twice and takes 5-6
us. A directory that listens at ipc://PATH also listens at PATH.direct. Clients of ipc://PATH use
the Unix socket; other clients use ZeroMQ.

Not here: the bytes of a message (framing.py), tcp:// and events (ZeroMQ).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from mooncake_store.wire.framing import REQUEST_BYTES_MAX, from_stream, number_of, to_stream
from mooncake_store.wire.request_reply import Later

SUFFIX = ".direct"
CONNECTIONS_MAX = 4_096  # connected clients
UNREAD_BYTES_MAX = 2 * REQUEST_BYTES_MAX  # a client with more bytes of unread replies is dropped
RECEIVE_BYTES = 64 * 1024  # per recv; above 128 KiB, malloc would use mmap, which takes 12 us
PATH_BYTES_MAX = 107  # limit of the kernel
RETRY_S = 0.02  # pause between two attempts of a client to connect
ACCEPT_PAUSE_S = 0.1  # pause after a failed accept, for example without free descriptors
NOTE_S = 10.0  # seconds between two log lines about failed accepts

log = logging.getLogger(__name__)
Reply = Callable[[list[bytes]], list[bytes] | Later]  # frames of a request -> frames of its reply


def direct_path(address: str) -> str:
    """The path of the Unix socket beside this address; "" if the address has none."""
    path = address.removeprefix("ipc://") + SUFFIX
    is_usable = address.startswith("ipc:///") and len(os.fsencode(path)) <= PATH_BYTES_MAX
    return path if is_usable else ""


class _Client:
    """A connected client, with the bytes of an incomplete request and the replies to be sent."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def receive(self) -> bool:
        """Read the bytes that have arrived. False: the client is gone."""
        try:
            data = self.peer.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.incoming += data
        return bool(data)

    def send_reply(self, reply: list[bytes]) -> None:
        """Send a reply that was not ready at once (Later); lost if the client is gone."""
        self.outgoing += to_stream(reply)
        with contextlib.suppress(OSError):
            self.send()

    def send(self) -> None:
        while self.outgoing:
            try:
                sent = self.peer.send(self.outgoing)
            except BlockingIOError:
                return
            del self.outgoing[:sent]


class UnixListener:
    """The listening side. Its owner polls `files()` and passes ready descriptors to `serve`."""

    def __init__(self, path: str, reply: Reply) -> None:
        self._reply = reply
        self._path = path
        self._clients: dict[int, _Client] = {}
        # time.monotonic() of the next accept and of the next log line
        self._accept_s = self._note_s = float("-inf")
        with contextlib.suppress(FileNotFoundError):
            # Only an ended process can have left the file, because this process has bound the
            # ZeroMQ address beside it.
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)

    def files(self) -> dict[int, bool]:
        """Descriptors to poll for reading. The value is True to poll for writing too."""
        found = {fd: bool(each.outgoing) for fd, each in self._clients.items()}
        if time.monotonic() >= self._accept_s:
            found[self._listener.fileno()] = False
        return found

    def serve(self, ready: list[int]) -> None:
        for fd in ready:
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._clients:
                self._serve(fd, self._clients[fd])

    def _accept(self) -> None:
        """Accept waiting clients. After an error, the remaining ones wait in the kernel's queue."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # for example, there is no free descriptor
                self._accept_s = time.monotonic() + ACCEPT_PAUSE_S
                self._note(f"accepted no client: {error}")
                return
            if len(self._clients) >= CONNECTIONS_MAX:
                self._note(f"refused a client: {CONNECTIONS_MAX} are connected")
                peer.close()
                continue
            peer.setblocking(False)
            self._clients[peer.fileno()] = _Client(peer)

    def _note(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._note_s:
            self._note_s = now_s + NOTE_S
            log.warning("%s", what)

    def _serve(self, fd: int, client: _Client) -> None:
        try:
            is_there = client.receive()
            while (frames := from_stream(client.incoming, REQUEST_BYTES_MAX)) is not None:
                reply = self._reply(frames)
                if isinstance(reply, Later):
                    reply.then(client.send_reply)
                else:
                    client.outgoing += to_stream(reply)
            client.send()
            if len(client.outgoing) > UNREAD_BYTES_MAX:
                raise ValueError("replies are not read")
        except (OSError, ValueError) as error:
            log.info("dropped a client: %s", error)
            is_there = False
        if not is_there:
            del self._clients[fd]
            client.peer.close()

    def close(self) -> None:
        for client in self._clients.values():
            client.peer.close()
        self._clients.clear()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class UnixConnection:
    """The requesting side. It connects on first use, and again after an error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._incoming = bytearray()

    def exchange(self, frames: list[bytes], number: int, deadline_s: float) -> list[bytes] | None:
        """The reply, or None at the deadline. After a broken connection (the server has ended or
        has dropped this client), the request is repeated over a new connection."""
        message = to_stream(frames)
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

    def send(self, frames: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            self._connected(RETRY_S).sendall(to_stream(frames))
            return
        self.close()

    def is_lost(self) -> bool:
        return False  # a Unix socket does not reconnect by itself

    def _await(self, peer: socket.socket, number: int, deadline_s: float) -> list[bytes] | None:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            peer.settimeout(left_s)
            data = peer.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the directory has ended")
            self._incoming += data
            while (frames := from_stream(self._incoming)) is not None:
                if number_of(frames[0]) == number:
                    return frames

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
