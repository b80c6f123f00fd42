"""Mutual TLS on the connections of the TCP transport, for processes with keys.

Each side presents its host's certificate before the first frame. A rejected client receives the
reason: a client without TLS as an unencrypted frame, another client as a TLS alert.

Not here: the certificates (keys/tls.py), the frames (tcp_frames.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time

from mooncake_store.errors import AccessRefused, TransferFailed
from mooncake_store.keys import folder
from mooncake_store.keys.folder import MEMBER
from mooncake_store.keys.tls import TlsContexts
from mooncake_store.transports import tcp_frames as frames
from mooncake_store.transports.tcp_frames import FrameKind

LEFTOVER_BYTES_MAX = 64 * 1024  # most bytes to read and discard in _close_after_alert
LEFTOVER_S_MAX = 1.0
RECORD_HEADER_BYTES = 5  # TLS reads this many bytes before it rejects a stream that is not TLS
PLAIN_CLIENT = (
    "this storage node requires a certificate, and the client uses plain TCP: set "
    f"{folder.VARIABLE} to the folder of the client's host (mooncake keys add-host)"
)


class TransferRefused(AccessRefused, TransferFailed):
    """No bytes move, because one side rejects the other's certificate or lack of one."""


def wrapped_by_server(connection: socket.socket, contexts: TlsContexts) -> ssl.SSLSocket:
    """TLS on an accepted connection; the caller must not use `connection` afterwards."""
    return contexts.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def server_handshake(secured: ssl.SSLSocket, until_s: float) -> None:
    """Complete the handshake. Raises OSError if the client presents no valid certificate."""
    secured.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        secured.do_handshake()
    except ssl.SSLError:
        _close_after_alert(secured)
        raise


def client_handshake(connection: socket.socket, tls: TlsContexts, until_s: float) -> ssl.SSLSocket:
    """The client's side of the handshake. After an OSError the connection is closed. If the server
    rejects this client's certificate, only the first read raises the error."""
    secured = tls.client.wrap_socket(
        connection, server_hostname=MEMBER, do_handshake_on_connect=False
    )
    secured.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        secured.do_handshake()
    except OSError as error:
        reason = _plain_reply(secured)
        secured.close()
        if reason is None and isinstance(error, ssl.SSLEOFError | ConnectionResetError):
            reason = frames.PeerClosed("it closed the connection during the handshake")
        if reason is None:
            raise
        raise reason from error
    return secured


def _plain_reply(secured: ssl.SSLSocket) -> ConnectionError | None:
    """LimitReached if the server has sent CROWDED instead of TLS, else None. OpenSSL has consumed
    the first bytes of that frame."""
    with contextlib.suppress(OSError, struct.error, frames.FrameInvalid):
        raw = socket.socket.recv(secured, frames.HEADER.size, socket.MSG_DONTWAIT)
        begin = frames.pack(FrameKind.CROWDED, 0)[:RECORD_HEADER_BYTES]
        kind, limit = frames.unpack(begin + raw)
        if kind is FrameKind.CROWDED:
            return frames.LimitReached(kind, limit)
    return None


def _close_after_alert(secured: ssl.SSLSocket) -> None:
    """Close after reading what the client still sends. With unread bytes the kernel would reset the
    connection, and the alert would not arrive."""
    with contextlib.suppress(OSError):
        secured.settimeout(LEFTOVER_S_MAX)
        secured.shutdown(socket.SHUT_WR)  # of the socket below TLS: bytes read from here on are raw
        until_s, left_bytes = time.monotonic() + LEFTOVER_S_MAX, LEFTOVER_BYTES_MAX
        while left_bytes > 0 and time.monotonic() < until_s:
            if not (data := secured.recv(4096)):
                break
            left_bytes -= len(data)
    secured.close()
