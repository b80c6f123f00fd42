"""Limits of client connections: their number, and the times of slow and silent clients.

uvicorn implements HTTP/1.1, but has no such limits. This module limits the time in which a request
arrives, the time for which an unread answer fills the send buffer, and the number of connections.
It rejects requests that are not HTTP, in OpenAI's error format. It detects a disconnected client
even if the client sent bytes after its request.

The time limit of a connection's first head (request line and headers) begins with the connection.
The limit of a later head begins with the first byte of this head, and the limit of a body begins
after the head. Received bytes do not extend a limit.

A connection counts from `accept` on, before TLS. When the limit of one address or of all addresses
is reached, the connection that has been idle longest is closed. If none is idle, the new connection
is rejected. Silent clients and a single address therefore cannot block other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from backends.gateway.gateway_counts import GatewayCounts
from backends.statuses import HttpRefusal, unavailable

HEAD_S_MAX = 10.0  # seconds in which the head of a request must arrive
BODY_S_MAX = 60.0  # seconds in which the body of a request must arrive
STALLED_S_MAX = 60.0  # seconds for which an unread answer may fill the send buffer
KEEP_ALIVE_S = 75  # seconds for which a connection may be idle between two requests
HANDSHAKE_S_MAX = 10.0  # seconds in which a TLS handshake must end
CONNECTIONS_MAX = 2048  # connections of one process
OF_ADDRESS_MAX = 1024  # connections of one address; all clients of a proxy share one address
REFUSED_MAX = 64  # connections above CONNECTIONS_MAX that get an error; further ones are closed
AHEAD_BYTES_MAX = 65_536  # bytes that a client may send after a request before it gets the answer
# TCP keep-alive: seconds before the first probe, seconds between probes, number of probes. The
# probes detect the loss of a client's host within a minute.
PROBE_IDLE_S, PROBE_EVERY_S, PROBES_MAX = 30, 10, 3
HEAD, BODY = "head", "body"


class AcceptedConnection(socket.socket):
    """A connection in its listener's table, from `accept` to `close`."""

    address = ""  # the client's IPv4 address, or the /64 network of its IPv6 address
    idle_s: float | None = None  # event loop's time since which it is idle; None: in a request
    is_shaking = False  # True during the TLS handshake
    is_over = False  # True: this connection is rejected, because there are too many
    table: set[AcceptedConnection] | None = None  # table that counts it; None: not counted

    def close(self) -> None:
        self._leave_table()
        super().close()

    def end(self) -> None:
        """Stop counting the connection and shut it down, so that its transport closes it."""
        self._leave_table()
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def _leave_table(self) -> None:
        if self.table is not None:
            self.table.discard(self)
            self.table = None


class BoundedListener(socket.socket):
    """A listening socket of one event loop. It limits the number of accepted connections."""

    has_tls = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError if no client waits, or if the new connection was closed. asyncio
        then calls again in the next turn of the loop, so a flood of clients does not stall it."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        connection = AcceptedConnection(self.family, self.type, self.proto, descriptor)
        if self._admit(connection, str(address[0])):
            return connection, address
        connection.close()
        raise BlockingIOError("there are too many connections")

    @functools.cached_property
    def connections(self) -> set[AcceptedConnection]:
        return set()

    def of(self, descriptor: int) -> AcceptedConnection | None:
        """The accepted connection with this file descriptor, or None."""
        return next((each for each in self.connections if each.fileno() == descriptor), None)

    def _admit(self, connection: AcceptedConnection, host: str) -> bool:
        """Add the connection to the table, and close an idle one if needed. False: no room."""
        if len(self.connections) >= CONNECTIONS_MAX + REFUSED_MAX:
            return False
        loop = asyncio.get_running_loop()
        connection.address = network_of(host)
        connection.idle_s = loop.time()
        alike = [each for each in self.connections if each.address == connection.address]
        if len(alike) >= OF_ADDRESS_MAX:  # close only a connection of the same address
            is_over = not _end_idlest(alike)
        else:
            is_full = len(self.connections) >= CONNECTIONS_MAX
            is_over = is_full and not _end_idlest(self.connections)
        connection.is_over, connection.table = is_over, self.connections
        self.connections.add(connection)
        if self.has_tls:
            connection.is_shaking = True
            loop.call_later(HANDSHAKE_S_MAX, _end_handshake, connection)
        return True


def _end_idlest(connections: Iterable[AcceptedConnection]) -> bool:
    """Close the connection that has been idle longest; False if none is idle."""
    idle = [each for each in connections if each.idle_s is not None]
    if idle:
        min(idle, key=lambda each: each.idle_s or 0.0).end()
    return bool(idle)


def _end_handshake(connection: AcceptedConnection) -> None:
    if connection.is_shaking:
        connection.end()


def network_of(host: str) -> str:
    """The IPv4 address, or the /64 network of an IPv6 address, because a client has a whole /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


class BoundedConnection(H11Protocol):
    def __init__(
        self, counts: GatewayCounts, listener: BoundedListener | None = None, **of_uvicorn: Any
    ) -> None:
        super().__init__(**of_uvicorn)
        self._counts, self._listener = counts, listener
        self._accepted: AcceptedConnection | None = None
        self._awaited = ""  # HEAD or BODY while this part of a request is incomplete
        self._slow: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if self._listener is not None and raw is not None:
            self._accepted = self._listener.of(raw.fileno())
        if self._accepted is not None:
            self._accepted.is_shaking = False
        if self._accepted is not None and self._accepted.is_over:
            self._refuse(unavailable("this gateway has too many connections; retry later"))
        else:
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.DONE and self.flow.read_paused:
            # uvicorn stops reading until the answer is sent. This module resumes reading, because
            # only a read detects that the client has disconnected.
            if len(self.conn.trailing_data[0]) > AHEAD_BYTES_MAX:
                self.transport.abort()
                return
            self.flow.resume_reading()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALLED_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpRefusal(400, "invalid_request", "this is not an HTTP/1.1 request"))

    def _look(self) -> None:
        state = self.conn.their_state
        if (accepted := self._accepted) is not None:
            is_sent = not self.transport.get_write_buffer_size()
            is_free = is_sent and state is h11.IDLE and self.conn.our_state is h11.IDLE
            accepted.idle_s = (accepted.idle_s or self.loop.time()) if is_free else None
        is_idle = state is h11.IDLE and self.timeout_keep_alive_task is None
        self._await(BODY if state is h11.SEND_BODY else HEAD if is_idle else "")

    def _await(self, part: str) -> None:
        if part == self._awaited:
            return
        self._awaited = part
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if part:
            limit_s = BODY_S_MAX if part == BODY else HEAD_S_MAX
            self._slow = self.loop.call_later(limit_s, self._end_slow, limit_s)

    def _end_slow(self, limit_s: float) -> None:
        what = f"the {self._awaited} of the request did not arrive within {limit_s:g} s"
        self._refuse(HttpRefusal(408, "slow_request", what))

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Send the refusal, unless an answer has begun. Then close the connection."""
        self._counts.refused(refusal)
        self._await("")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(refusal.body())
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            parts = (
                h11.Response(status_code=refusal.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        if self.cycle is not None:  # end the request's handler, so that it sends no second answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def probe_clients(listener: socket.socket) -> None:
    """Enable TCP keep-alive probes, which accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, PROBE_IDLE_S),
        (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, PROBES_MAX),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
