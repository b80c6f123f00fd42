"""Framing of every message of the store: a header and a MessagePack body.

Requests, replies and the event stream have two frames each. ZeroMQ sends them as one multipart
message. A Unix socket sends them in sequence:

    header (16 bytes) | body length (4 bytes, little-endian) | body

The header has the same format in every version, so each side can detect and report another version.
Its number identifies a request; the reply repeats this number.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from mooncake_store.errors import ProtocolMismatch, RequestInvalid

PROTOCOL_VERSION = 6
REQUEST_BYTES_MAX = 16 * 2**20


class MessageKind(IntEnum):
    REQUEST = 0
    REPLY = 1
    FAILURE = 2
    EVENTS = 3
    HEARTBEAT = 4


class Header(NamedTuple):
    """Frame 0. `number`: of the request, also in its reply; 0 in the event stream."""

    kind: MessageKind
    number: int


_HEADER = struct.Struct("<2sBBHHQ")  # magic, kind, zero, version, zero, number: 16 bytes
_MAGIC = b"MK"
_LENGTH = struct.Struct("<I")
_PREFIX_BYTES = _HEADER.size + _LENGTH.size


def pack_header(kind: MessageKind, number: int, version: int = PROTOCOL_VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, kind, 0, version, 0, number)


def unpack_header(frame: bytes) -> Header:
    """The header in a frame. Raises RequestInvalid or, for another version, ProtocolMismatch."""
    if len(frame) != _HEADER.size or frame[:2] != _MAGIC or frame[2] > max(MessageKind):
        raise RequestInvalid(f"this is not a mooncake_store header: {frame[:16].hex()}")
    _, kind, _, version, _, number = _HEADER.unpack(frame)
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the other side has version {version} of the mooncake_store protocol, this side "
            f"{PROTOCOL_VERSION}; run the same release on both"
        )
    return Header(MessageKind(kind), number)


def number_of(frame: bytes) -> int:
    """The request number of a header of any version; 0 for other bytes."""
    is_header = len(frame) == _HEADER.size and frame[:2] == _MAGIC
    return int(_HEADER.unpack(frame)[5]) if is_header else 0


def to_stream(frames: list[bytes]) -> bytes:
    header, body = frames
    return header + _LENGTH.pack(len(body)) + body


def from_stream(incoming: bytearray, body_bytes_max: int | None = None) -> list[bytes] | None:
    """Remove and return the first message of the received bytes; None: it is not complete yet.
    Raises ValueError if the body, complete or not, is longer than `body_bytes_max`."""
    if len(incoming) < _PREFIX_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(incoming, _HEADER.size)
    if body_bytes_max is not None and length > body_bytes_max:
        raise ValueError(f"a request of {length} bytes")
    end = _PREFIX_BYTES + length
    if len(incoming) < end:
        return None
    header = bytes(incoming[: _HEADER.size])
    body = bytes(incoming[_PREFIX_BYTES:end])
    del incoming[:end]
    return [header, body]
