"""The messages between the directory and everybody else. README.md documents them.

One request is two ZeroMQ frames, a header and a MessagePack body; so is a reply, and so is a
message of the event stream. The header never changes between versions, so that each side can refuse
the other by name instead of misreading it. The requests are the verbs of `Directory`, one
struct each, with the same field names; its tag is the verb.

Bounds are part of the types (a key has 16 bytes, a lease is 0 to one hour, ...), so msgspec refuses
what breaks them with the name of the field, before the directory sees it.

Not here: sockets (directory_server.py, directory_client.py, event_feed.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from mooncake_store.errors import ProtocolMismatch, RequestInvalid
from mooncake_store.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeDown,
    NodeUp,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.layout import Geometry
from mooncake_store.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.slots import Allocation, Copy, Slot
from mooncake_store.status import DirectoryStats

PROTOCOL_VERSION = 1
KEYS_MAX = 65_536  # in one request
MESSAGE_BYTES_MAX = 256 * 2**20

Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
Lease = Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Word = Annotated[int, msgspec.Meta(ge=0, le=2**64 - 1)]


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 0
    REPLY = 1
    FAILURE = 2
    EVENTS = 3
    HEARTBEAT = 4


class Header(NamedTuple):
    """Frame 0. `number` is the request's, echoed; or, in the event stream, 0."""

    kind: Kind
    number: int


_HEADER = struct.Struct("<2sBBHHQ")  # magic, kind, zero, version, zero, number: 16 bytes
_MAGIC = b"MK"


def pack_header(kind: Kind, number: int, version: int = PROTOCOL_VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, kind, 0, version, 0, number)


def unpack_header(frame: bytes) -> Header:
    """The header, or RequestInvalid for other bytes, ProtocolMismatch for another version."""
    if len(frame) != _HEADER.size or frame[:2] != _MAGIC or frame[2] > max(Kind):
        raise RequestInvalid(f"this is no mooncake_store header: {frame[:16].hex()}")
    _, kind, _, version, _, number = _HEADER.unpack(frame)
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the other side speaks version {version} of the mooncake_store protocol, this side "
            f"{PROTOCOL_VERSION}; run the same release on both"
        )
    return Header(Kind(kind), number)


def number_of(frame: bytes) -> int:
    """The request number of a header of any version; 0 when it is no header."""
    is_header = len(frame) == _HEADER.size and frame[:2] == _MAGIC
    return int(_HEADER.unpack(frame)[5]) if is_header else 0


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the verbs."""


class RegisterNode(Request, tag="register_node", frozen=True):
    info: NodeInfo


class NodeReport(Request, tag="node_report", frozen=True):
    node_id: Name
    incarnation: Name


class DeregisterNode(Request, tag="deregister_node", frozen=True):
    node_id: Name
    incarnation: Name


class Attach(Request, tag="attach", frozen=True):
    node_id: Name
    fingerprint: Name
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Allocate(Request, tag="allocate", frozen=True):
    node_id: Name
    keys: Keys
    owner: Name
    lease_s: Lease
    ephemeral: bool


class Commit(Request, tag="commit", frozen=True):
    node_id: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Word]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    lease_s: Lease


class Abandon(Request, tag="abandon", frozen=True):
    slots: Annotated[list[Slot], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name


class Lookup(Request, tag="lookup", frozen=True):
    keys: Keys
    owner: Name
    lease_s: Lease
    prefix_only: bool


class Renew(Request, tag="renew", frozen=True):
    owner: Name
    lease_s: Lease


class Release(Request, tag="release", frozen=True):
    owner: Name


class DropCopy(Request, tag="drop_copy", frozen=True):
    key: Key
    node_id: Name
    generation: Count


class RegisterWorker(Request, tag="register_worker", frozen=True):
    info: WorkerInfo


class WorkerReportRequest(Request, tag="worker_report", frozen=True):
    report: WorkerReport


class DeregisterWorker(Request, tag="deregister_worker", frozen=True):
    worker_id: Name
    incarnation: Name


class Nodes(Request, tag="nodes", frozen=True):
    pass


class Workers(Request, tag="workers", frozen=True):
    pass


class TakeSnapshot(Request, tag="snapshot", frozen=True):
    pass


class Stats(Request, tag="stats", frozen=True):
    pass


AnyRequest = (
    RegisterNode
    | NodeReport
    | DeregisterNode
    | Attach
    | Allocate
    | Commit
    | Abandon
    | Lookup
    | Renew
    | Release
    | DropCopy
    | RegisterWorker
    | WorkerReportRequest
    | DeregisterWorker
    | Nodes
    | Workers
    | TakeSnapshot
    | Stats
)


class Failure(msgspec.Struct, frozen=True):
    """The body of a FAILURE: an error of errors.py by name."""

    kind: str
    message: str
