"""Frames of the plain TCP transport, version 1, and sending and receiving pieces of memory.

A connection begins with HELLO and its token. Then the client sends one request after another:

    HELLO    header(count = bytes of the token)    token
    READ     header(count = spans)    spans                 -> DONE, bytes of the spans in order
    WRITE    header(count = spans)    spans    bytes        -> DONE, when they are in the segment
    replies: DONE     header(count = bytes that follow)
             REFUSED  header(count = bytes of a text with the reason)
             CROWDED  header(count = limit of connections that are not authenticated yet)
             FULL     header(count = limit of authenticated connections, the members)

A client that is rejected before its TLS handshake receives CROWDED unencrypted.

A header has 16 bytes, little-endian: magic "MKTB", version, kind (two bytes each), count (eight). A
span is two numbers of eight bytes: offset in the segment, length.

Processes with keys send the same frames through TLS (tcp_tls.py).

Not here: the two ends (tcp_server.py, tcp_transport.py).
"""

from __future__ import annotations

import enum
import socket
import ssl
import struct
import time
from collections.abc import Sequence

import numpy as np

MAGIC, VERSION = b"MKTB", 1
HEADER = struct.Struct("<4sHHQ")
SPAN_BYTES = 16
SPANS_MAX = 65_536  # in one request; the client splits longer ones
TOKEN_BYTES_MAX = 256
TEXT_BYTES_MAX = 4_096
PIECES_MAX = 512  # passed to the kernel in one call (it accepts 1,024)


class FrameKind(enum.IntEnum):
    HELLO = 0
    READ = 1
    WRITE = 2
    DONE = 3
    REFUSED = 4
    CROWDED = 5
    FULL = 6


class FrameInvalid(Exception):
    """The bytes are no frame of this version; the connection cannot continue."""


class PeerClosed(ConnectionError):
    """The other side closed the connection in the middle of a frame or reply."""


class LimitReached(ConnectionError):
    """The server is at its limit of connections: CROWDED or FULL."""

    def __init__(self, kind: FrameKind, limit: int) -> None:
        whose = (
            "connections that are not authenticated yet"
            if kind is FrameKind.CROWDED
            else "connections of members"
        )
        super().__init__(f"it has reached its limit of {limit} {whose}")
        self.kind, self.limit = kind, limit


def pack(kind: FrameKind, count: int, version: int = VERSION) -> bytes:
    return HEADER.pack(MAGIC, version, kind, count)


def unpack(raw: bytes | bytearray) -> tuple[FrameKind, int]:
    """(kind, count) of a header. Raises FrameInvalid if it is no header of this version."""
    magic, version, kind, count = HEADER.unpack(raw)
    if magic != MAGIC:
        raise FrameInvalid(f"{bytes(raw[:4])!r} is not the start of a {MAGIC.decode()} frame")
    if version != VERSION:
        raise FrameInvalid(
            f"the other side has version {version} of the TCP transport, this one {VERSION}: "
            "run one release on all hosts"
        )
    if kind not in FrameKind.__members__.values():
        raise FrameInvalid(f"kind {kind} of frame is unknown")
    return FrameKind(kind), count


def pack_spans(spans: Sequence[tuple[int, int]]) -> bytes:
    return np.array(spans, "<u8").tobytes()


def unpack_spans(raw: bytes | bytearray) -> list[tuple[int, int]]:
    rows: list[list[int]] = np.frombuffer(raw, "<u8").reshape(-1, 2).tolist()
    return [(offset, length) for offset, length in rows]


def send(connection: socket.socket, pieces: Sequence[memoryview], until_s: float) -> None:
    """Send all pieces in order. Raises TimeoutError at `until_s`, or another OSError."""
    left = Pieces(pieces)
    while batch := left.next():
        connection.settimeout(_left_s(until_s))
        left.moved(_sent(connection, batch))


def receive(connection: socket.socket, pieces: Sequence[memoryview], until_s: float) -> None:
    """Fill all pieces in order. Raises PeerClosed if the stream ends before."""
    left = Pieces(pieces)
    while batch := left.next():
        connection.settimeout(_left_s(until_s))
        left.moved(received(connection, batch))


def receive_bytes(connection: socket.socket, length_bytes: int, until_s: float) -> bytearray:
    raw = bytearray(length_bytes)
    receive(connection, [memoryview(raw)], until_s)
    return raw


def _sent(connection: socket.socket, pieces: Sequence[memoryview]) -> int:
    """One call of sendmsg; TLS has only send."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.sendmsg(pieces)
    try:
        return connection.send(pieces[0])
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise PeerClosed("the connection was closed by the other side") from error


def received(connection: socket.socket, pieces: Sequence[memoryview]) -> int:
    """One call of recvmsg_into; TLS has only recv_into. PeerClosed if the stream has ended."""
    if isinstance(connection, ssl.SSLSocket):
        try:
            moved_bytes = connection.recv_into(pieces[0])
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            moved_bytes = 0
    else:
        moved_bytes = connection.recvmsg_into(pieces)[0]
    if moved_bytes == 0:
        raise PeerClosed("the connection was closed by the other side")
    return moved_bytes


class Pieces:
    """Pieces of memory for sendmsg and recvmsg, which may stop at any byte."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if piece.nbytes]
        self._at = 0

    def next(self) -> list[memoryview]:
        return self._pieces[self._at : self._at + PIECES_MAX]

    def moved(self, moved_bytes: int) -> None:
        while moved_bytes:
            piece = self._pieces[self._at]
            if moved_bytes < piece.nbytes:
                self._pieces[self._at] = piece[moved_bytes:]
                return
            moved_bytes -= piece.nbytes
            self._at += 1


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline passed")
    return left_s
