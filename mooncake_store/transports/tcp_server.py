"""A storage node's plain TCP server: reads and writes spans of its segment for authorized clients.

It serves hosts where NIXL cannot load, and networks that are not trusted. With keys (of `mooncake
keys`), clients present a certificate of the cluster and all bytes are encrypted (tcp_tls.py).
Without keys, the kernel copies bytes between the socket and the mapped segment, outside the GIL.
One thread accepts connections, and each connection has a thread of its own.

A client first sends a token, which the directory lists and which is unique to this incarnation of
the node. So neither a client without the token, nor a client that addresses an earlier incarnation
on a reused port, can touch this memory.

A connection that has not sent the token yet is *unauthenticated*, later a *member*. Unauthenticated
connections have limits of their own, per host and in total, so they cannot take the room of
members. At a limit, the oldest connection that counts towards it is closed if it is older than
CLOSABLE_AGE_S_MIN. Otherwise the new connection is rejected.

A write must stop once its client has abandoned it. The client resets the connection at its
deadline, and the server checks for a reset before it reads each batch of pieces from the socket.
So a server that was frozen discards the queued bytes of an abandoned write, except for the batch in
progress. These bytes would otherwise change memory that may have a new owner by now.

Not here: the frames (tcp_frames.py), the client (tcp_transport.py), granting slots (directory).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import ssl
import threading
import time
from dataclasses import dataclass

from mooncake_store.errors import StoreError
from mooncake_store.keys import folder
from mooncake_store.keys.curve import refuse_unguarded
from mooncake_store.keys.gate import RefusalLog
from mooncake_store.keys.tls import TlsContexts, contexts_of_process
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports.tcp_frames import (
    FrameInvalid,
    FrameKind,
    LimitReached,
    PeerClosed,
    Pieces,
)
from mooncake_store.transports.tcp_tls import PLAIN_CLIENT, server_handshake, wrapped_by_server
from mooncake_store.transports.transport import TransferCounters, TransferTally

log = logging.getLogger("mooncake_store.tcp")
CONNECTIONS_MAX = 256  # of members
UNAUTHENTICATED_MAX, UNAUTHENTICATED_HOST_MAX = 256, 64  # connections that have not sent the token
HELLO_S = 5.0  # for a new client's TLS handshake and token together, and to send a rejection
CLOSABLE_AGE_S_MIN = 0.5  # a younger unauthenticated connection is not closed to make room
SILENCE_S = 30.0  # the longest silence within a message
_ABORTED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class TcpServerRefused(StoreError):
    """The server cannot listen at this address; the message names the remedy."""


class RequestRefused(Exception):
    """The request is rejected; the text is sent to the client."""


@dataclass(slots=True, eq=False)
class OpenConnection:
    socket: socket.socket  # with keys: wrapped in TLS before the handshake starts
    host: str  # address of the client
    opened_s: float  # time.monotonic() of the accept
    is_member: bool = False  # the client has sent the token
    reached_limit: int = 0  # > 0: the connection is being closed because this limit was reached
    thread: threading.Thread | None = None


class TcpServer:
    """Serves `memory` until close(), at HOST:PORT `address`. `is_advertised`: the node registers
    another address for clients, so `host` may be a wildcard address."""

    def __init__(
        self,
        memory: ByteArray,
        host: str,
        port: int = 0,
        token: bytes = b"",
        is_advertised: bool = False,
    ) -> None:
        assert 0 < len(token) <= frames.TOKEN_BYTES_MAX, f"a token of {len(token)} bytes"
        assert memory.ndim == 1 and memory.itemsize == 1 and memory.flags.c_contiguous
        if not host or (host in ("0.0.0.0", "::") and not is_advertised):
            raise TcpServerRefused(
                f"cannot serve plain TCP at {host or 'no host'}: name an address of this host to "
                "which clients can connect"
            )
        refuse_unguarded(f"{host}:{port}", folder.of_process())
        self._tls = contexts_of_process()
        if self._tls is not None:
            _ = self._tls.server  # raises KeysInvalid now, not at the first client
        self._memory = memory
        self._token = token
        self._lock = threading.Lock()
        self._open: list[OpenConnection] = []  # oldest first
        self._is_closing = False
        self._refusals = RefusalLog(log)
        self._tally = TransferTally()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise TcpServerRefused(
                f"cannot serve plain TCP at {host}:{port} ({error.strerror or error}): choose an "
                "address of this host and a free port (0: any)"
            ) from error
        name = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{name}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._open)

    @property
    def counters(self) -> TransferCounters:
        """Totals of clients' reads and writes. Rejected requests and broken connections count as
        failures."""
        return self._tally.counters()

    def close(self) -> None:
        """Stop listening, close every connection, wait for the threads. A second call has no
        effect."""
        with self._lock:
            self._is_closing = True
            clients = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for client in clients:
            _wake(client.socket)
        for thread in [self._acceptor, *(client.thread for client in clients)]:
            assert thread is not None
            thread.join()
        self._memory = self._memory[:0].copy()  # so that the owner can unmap it

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._is_closing:
                    return
                log.warning("no TCP connection accepted: %s", error)  # no descriptor, for example
                time.sleep(0.1)
                continue
            client = OpenConnection(connection, peer[0], time.monotonic())
            try:
                self._begin(client)
            except LimitReached as error:
                self._reject(client, error)
                connection.close()
            except RuntimeError as error:  # the process has reached its limit of threads
                log.warning("no TCP connection accepted: %s", error)
                connection.close()

    def _begin(self, client: OpenConnection) -> None:
        """Start a thread that serves the client. Raises LimitReached if there is no room."""
        with self._lock:
            if self._is_closing:
                client.socket.close()
                return
            self._make_room(client)
            client.thread = threading.Thread(
                target=self._serve, args=(client,), name="tcp-serve", daemon=True
            )
            client.thread.start()
            self._open.append(client)

    def _make_room(self, arriving: OpenConnection) -> None:
        pending = [each for each in self._open if not each.is_member and not each.reached_limit]
        of_host = [each for each in pending if each.host == arriving.host]
        for group, limit in ((of_host, UNAUTHENTICATED_HOST_MAX), (pending, UNAUTHENTICATED_MAX)):
            if len(group) >= limit:
                if arriving.opened_s - group[0].opened_s < CLOSABLE_AGE_S_MIN:
                    raise LimitReached(FrameKind.CROWDED, limit)
                group[0].reached_limit = limit
                _wake(group[0].socket, socket.SHUT_RD)  # its thread can still send the reason
                return

    def _reject(self, client: OpenConnection, why: LimitReached) -> None:
        self._refusals.note(client.host, str(why))
        header = memoryview(frames.pack(why.kind, why.limit))
        with contextlib.suppress(OSError):
            frames.send(client.socket, [header], time.monotonic() + HELLO_S)

    def _serve(self, client: OpenConnection) -> None:
        """Serve one connection until the client or close() ends it."""
        try:
            client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            if not self._is_admitted(client):
                return
            while True:
                client.socket.settimeout(None)  # a member may be idle without limit
                if not (first := client.socket.recv(1)):
                    return
                self._answer(client.socket, first, time.monotonic())
        except LimitReached as error:
            self._reject(client, error)
        except (RequestRefused, FrameInvalid) as error:
            self._tally.failed(is_timeout=False)
            self._refusals.note(client.host, str(error))
            with contextlib.suppress(OSError):
                _send_text(client.socket, str(error))
        except OSError as error:  # timeouts and closed peers are among them
            self._tally.failed(isinstance(error, TimeoutError))
            if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
                self._refusals.note(client.host, str(error))
            log.debug("TCP connection of %s ended: %s", client.host, error)
        finally:
            with self._lock:
                self._open.remove(client)
            client.socket.close()

    def _is_admitted(self, client: OpenConnection) -> bool:
        """True: the client is authenticated. False: the client closed the connection without
        sending, because it only tested the address (nixl_lane.is_reached)."""
        until_s = client.opened_s + HELLO_S
        try:
            client.socket.settimeout(HELLO_S)
            first = client.socket.recv(len(frames.MAGIC), socket.MSG_PEEK)
            if not first:
                if client.reached_limit:
                    raise PeerClosed("it sent nothing")
                return False
            if self._tls is not None:
                if first == frames.MAGIC:
                    raise RequestRefused(PLAIN_CLIENT)
                server_handshake(self._wrapped(client, self._tls), until_s)
            self._authenticate(client, until_s)
        except OSError:
            if client.reached_limit:
                raise LimitReached(FrameKind.CROWDED, client.reached_limit) from None
            raise
        return True

    def _wrapped(self, client: OpenConnection, tls: TlsContexts) -> ssl.SSLSocket:
        """The same connection with TLS. It replaces `client.socket`, so that close() closes it."""
        with self._lock:
            client.socket = wrapped = wrapped_by_server(client.socket, tls)
            is_closing = self._is_closing
        if is_closing:
            _wake(wrapped)
        return wrapped

    def _authenticate(self, client: OpenConnection, until_s: float) -> None:
        header = frames.receive_bytes(client.socket, frames.HEADER.size, until_s)
        kind, count = frames.unpack(header)
        if kind is not FrameKind.HELLO or count > frames.TOKEN_BYTES_MAX:
            raise RequestRefused("a connection must begin with its token")
        token = frames.receive_bytes(client.socket, count, until_s)
        if not hmac.compare_digest(bytes(token), self._token):
            raise RequestRefused(
                "the token is not valid here: this storage node restarted, or another node listens "
                "here now; look the node's address up in the directory again"
            )
        with self._lock:
            if client.reached_limit:  # during the handshake
                raise LimitReached(FrameKind.CROWDED, client.reached_limit)
            if sum(each.is_member for each in self._open) >= CONNECTIONS_MAX:
                raise LimitReached(FrameKind.FULL, CONNECTIONS_MAX)
            client.is_member = True
        done = memoryview(frames.pack(FrameKind.DONE, 0))
        frames.send(client.socket, [done], until_s)

    def _answer(self, connection: socket.socket, first: bytes, started_s: float) -> None:
        """Read the rest of the request that begins with this byte, and reply."""
        until_s = started_s + SILENCE_S
        header = first + frames.receive_bytes(connection, frames.HEADER.size - 1, until_s)
        kind, count = frames.unpack(header)
        if kind not in (FrameKind.READ, FrameKind.WRITE) or count > frames.SPANS_MAX:
            raise RequestRefused(f"{kind.name} of {count} spans is not a valid request")
        raw = frames.receive_bytes(connection, count * frames.SPAN_BYTES, until_s)
        pieces = self._pieces(frames.unpack_spans(raw))
        moved_bytes = sum(piece.nbytes for piece in pieces)
        if kind is FrameKind.READ:
            answer = memoryview(frames.pack(FrameKind.DONE, moved_bytes))
            frames.send(connection, [answer, *pieces], until_s)
        else:
            _receive_unless_aborted(connection, pieces)
            frames.send(connection, [memoryview(frames.pack(FrameKind.DONE, 0))], until_s)
        self._tally.moved(kind is FrameKind.READ, moved_bytes, time.monotonic() - started_s)

    def _pieces(self, spans: list[tuple[int, int]]) -> list[memoryview]:
        memory = self._memory.data
        for offset, length in spans:
            if offset + length > memory.nbytes:
                raise RequestRefused(
                    f"{length} bytes at {offset} are outside a segment of {memory.nbytes} bytes"
                )
        return [memory[offset : offset + length] for offset, length in spans]


def _wake(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wake the thread that waits for this connection, by a shutdown of the socket below TLS,
    because the shutdown of TLS itself is not thread-safe."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)


def _receive_unless_aborted(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Fill the pieces, but stop when the client closes the connection."""
    watch = select.poll()
    watch.register(connection, select.POLLIN | select.POLLRDHUP)
    connection.settimeout(0.0)
    left = Pieces(pieces)
    while batch := left.next():
        # bytes that TLS has already decrypted do not make the socket readable
        is_pending = isinstance(connection, ssl.SSLSocket) and connection.pending() > 0
        events = watch.poll(0 if is_pending else SILENCE_S * 1000)
        if not events and not is_pending:
            raise TimeoutError("a client stopped sending during a write")
        if events and events[0][1] & _ABORTED:
            raise PeerClosed("a client aborted its write")
        with contextlib.suppress(ssl.SSLWantReadError):  # not a whole record yet
            left.moved(frames.received(connection, batch))


def _send_text(connection: socket.socket, text: str) -> None:
    raw = text.encode()[: frames.TEXT_BYTES_MAX]
    pieces = [memoryview(frames.pack(FrameKind.REFUSED, len(raw))), memoryview(raw)]
    frames.send(connection, pieces, time.monotonic() + HELLO_S)
