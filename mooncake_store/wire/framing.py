"""Framing of every message of the store: a header that never changes, and a MessagePack body.

Requests, replies and the event stream have two frames each. ZeroMQ sends them as one multipart
message. A Unix socket sends them in sequence:

    header (16 bytes) | body length (4 bytes, little-endian) | body

The header is the same in every version, so each side can reject another version by name instead of
misreading it. The number in the header is the request's; the reply repeats it.
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
    """Frame 0. `number` is the request's, repeated in the reply; 0 in the event stream."""

    kind: MessageKind
    number: int


_HEADER = struct.Struct("<2sBBHHQ")  # magic, kind, zero, version, zero, number: 16 bytes
_MAGIC = b"MK"
_LENGTH = struct.Struct("<I")
_PREFIX_BYTES = _HEADER.size + _LENGTH.size


def pack_header(kind: MessageKind, number: int, version: int = PROTOCOL_VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, kind, 0, version, 0, number)


def unpack_header(frame: bytes) -> Header:
    """The header. RequestInvalid: other bytes. ProtocolMismatch: another version."""
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
    """The bytes of a message on a Unix socket."""
    header, body = frames
    return header + _LENGTH.pack(len(body)) + body


def from_stream(incoming: bytearray, body_bytes_max: int | None = None) -> list[bytes] | None:
    """Take the first complete message out of the received bytes. None: no complete message yet.
    ValueError: the body exceeds the limit; raised before the rest of the body arrives."""
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
