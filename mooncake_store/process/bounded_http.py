"""A small HTTP server for metrics pages and probes, which no client can keep from answering others.

Each connection has a thread, serves one request and has a deadline as a whole, so a client that
sends nothing, or a byte now and then, holds a thread for so long and not for ever. The number of
connections is bounded, of one address and of all; where there are too many, the oldest makes room.
So a probe is answered whatever other clients do.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REQUEST_S_MAX = 20.0  # of a connection, from its first byte to its last
CONNECTIONS_MAX = 64
OF_ADDRESS_MAX = 32


class BoundedHttpServer(ThreadingHTTPServer):
    """`serve_forever` looks for connections that are too old in each of its turns."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        # By connection: the address of its client and when it came; the oldest first.
        self._connections: dict[socket.socket, tuple[str, float]] = {}
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Called for each new connection, in the thread that accepts."""
        host, now_s = str(client_address[0]), time.monotonic()
        with self._lock:
            alike = [each for each, (other, _) in self._connections.items() if other == host]
            if len(alike) >= OF_ADDRESS_MAX:
                self._end(alike[0])
            elif len(self._connections) >= CONNECTIONS_MAX:
                self._end(next(iter(self._connections)))
            self._connections[request] = host, now_s
        return True

    def service_actions(self) -> None:
        with self._lock:
            too_old_s = time.monotonic() - REQUEST_S_MAX
            for connection, (_, came_s) in list(self._connections.items()):
                if came_s > too_old_s:
                    break
                self._end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left, or was ended, is no news."""

    def _end(self, connection: socket.socket) -> None:
        """Its thread reads the end of the stream, and leaves; with the lock held."""
        del self._connections[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
