"""Small HTTP server for metrics pages and probes. No client can block it for other clients.

Each connection has a thread, serves one request, and ends after at most REQUEST_S_MAX. So a client
that sends nothing, or a byte now and then, occupies a thread only for that time. The number of
connections is bounded, per client address and in total. If a new connection exceeds a bound, the
server closes the oldest connection without a complete request, or else the oldest connection.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REQUEST_S_MAX = 20.0  # maximum duration of a connection
CONNECTIONS_MAX = 64  # maximum number of connections in total
OF_ADDRESS_MAX = 32  # maximum number of connections of one client address


class BoundedHttpServer(ThreadingHTTPServer):
    """The server. Each turn of `serve_forever` closes connections older than REQUEST_S_MAX."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        # connection -> (client address, monotonic time of the accept); the oldest first
        self._connections: dict[socket.socket, tuple[str, float]] = {}
        self._answered: set[socket.socket] = set()  # connections whose request was read
        super().__init__(address, self._noting(handler))

    def _noting(self, handler: type[BaseHTTPRequestHandler]) -> type[BaseHTTPRequestHandler]:
        server = self

        class Noting(handler):  # type: ignore[misc, valid-type]
            def parse_request(self) -> bool:
                is_request = bool(super().parse_request())
                with server._lock:
                    if self.connection in server._connections:
                        server._answered.add(self.connection)
                return is_request

        return Noting

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Record a new connection; called in the thread that accepts."""
        host, now_s = str(client_address[0]), time.monotonic()
        with self._lock:
            alike = [each for each, (other, _) in self._connections.items() if other == host]
            if len(alike) >= OF_ADDRESS_MAX:
                self._make_room(alike)
            elif len(self._connections) >= CONNECTIONS_MAX:
                self._make_room(list(self._connections))
            self._connections[request] = host, now_s
        return True

    def service_actions(self) -> None:
        with self._lock:
            too_old_s = time.monotonic() - REQUEST_S_MAX
            for connection, (_, connected_s) in list(self._connections.items()):
                if connected_s > too_old_s:
                    break
                self._end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
            self._answered.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore OSErrors, because closed connections cause them."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _make_room(self, connections: list[socket.socket]) -> None:
        """Close the oldest silent connection, or else the oldest. The caller holds `_lock`."""
        silent = [each for each in connections if each not in self._answered]
        self._end((silent or connections)[0])

    def _end(self, connection: socket.socket) -> None:
        """Shut a connection down, which ends its thread. The caller holds `_lock`."""
        del self._connections[connection]
        self._answered.discard(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
