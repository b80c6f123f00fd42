"""The messages between the directory and everybody else. README.md documents them.

One request is two ZeroMQ frames, a header and a MessagePack body; so is a reply, and so is a
message of the event stream. The header never changes between versions, so that each side can refuse
the other by name instead of misreading it. The requests are the verbs of `Directory`, one
struct each, with the same field names; its tag is the verb.

Bounds are part of the types (a key has 16 bytes, a lease is 0 to one hour, ...), so msgspec refuses
what breaks them with the name of the field, before the directory sees it.

Not here: sockets (directory/server.py, directory/client.py, event_feed.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from mooncake_store.errors import ProtocolMismatch, RequestInvalid, named
from mooncake_store.records.blocks import Slot
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeDown,
    NodeUp,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

PROTOCOL_VERSION = 3
KEYS_MAX = 65_536  # in one request
REQUEST_BYTES_MAX = 16 * 2**20

Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
Lease = Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
BLOCKS_MAX = msgspec.Meta(max_length=KEYS_MAX)


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


T = TypeVar("T")

_HEADER = struct.Struct("<2sBBHHQ")  # magic, kind, zero, version, zero, number: 16 bytes
_MAGIC = b"MK"
HEADER_BYTES = _HEADER.size


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
    size_bytes: Size = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Commit(Request, tag="commit", frozen=True):
    node_id: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Count]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    lease_s: Lease


class Abandon(Request, tag="abandon", frozen=True):
    slots: Annotated[list[Slot], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name


class Lookup(Request, tag="lookup", frozen=True):
    keys: Keys
    owner: Annotated[str, msgspec.Meta(max_length=256)]  # "" with lease_s = 0 only
    lease_s: Lease
    prefix_only: bool


class Exist(Request, tag="exist", frozen=True):
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * KEYS_MAX)]


class Remove(Request, tag="remove", frozen=True):
    keys: Keys
    node_id: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Renew(Request, tag="renew", frozen=True):
    owner: Name
    lease_s: Lease


class Release(Request, tag="release", frozen=True):
    owner: Name


class DropCopy(Request, tag="drop_copy", frozen=True):
    key: Key
    node_id: Name
    generation: Count


class Adopt(Request, tag="adopt", frozen=True):
    node_id: Name
    incarnation: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Count, Size, Count]], BLOCKS_MAX]
    is_last: bool


class TakeSpills(Request, tag="take_spills", frozen=True):
    node_id: Name
    owner: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    lease_s: Lease


class Drain(Request, tag="drain", frozen=True):
    node_id: Name
    is_on: bool


class BlocksOn(Request, tag="blocks_on", frozen=True):
    node_id: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    only_here: bool


class Place(Request, tag="place", frozen=True):
    keys: Keys
    excluded: Annotated[list[Name], msgspec.Meta(max_length=1_024)] = []


class PinKeys(Request, tag="pin", frozen=True):
    keys: Keys
    kind: Name
    ttl_s: Annotated[float, msgspec.Meta(ge=0.0, le=30 * 86_400.0)]


class SetQuota(Request, tag="set_quota", frozen=True):
    tenant: Name
    quota_bytes: Count


class RegisterWorker(Request, tag="register_worker", frozen=True):
    info: WorkerInfo


class ReportWorker(Request, tag="worker_report", frozen=True):
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
    | Exist
    | Remove
    | Renew
    | Release
    | DropCopy
    | Adopt
    | TakeSpills
    | Drain
    | BlocksOn
    | Place
    | PinKeys
    | SetQuota
    | RegisterWorker
    | ReportWorker
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


_FAILURE = msgspec.msgpack.Decoder(Failure)


def result_of(reply: Sequence[bytes], decoder: msgspec.msgpack.Decoder[T], who: str) -> T:
    """What a reply says; the error that a FAILURE names is raised."""
    header = unpack_header(reply[0])
    try:
        if header.kind is Kind.REPLY:
            return decoder.decode(reply[1])
        failure = _FAILURE.decode(reply[1])
    except (msgspec.DecodeError, IndexError) as error:
        raise RequestInvalid(f"{who} answered what this side cannot read: {error}") from error
    raise named(failure.kind, failure.message)


class AddedMessage(msgspec.Struct, tag="added", array_like=True, frozen=True):
    key: Key
    node_id: str


class RemovedMessage(msgspec.Struct, tag="removed", array_like=True, frozen=True):
    key: Key
    node_id: str


class NodeUpMessage(msgspec.Struct, tag="node_up", array_like=True, frozen=True):
    info: NodeInfo


class NodeDownMessage(msgspec.Struct, tag="node_down", array_like=True, frozen=True):
    node_id: str
    incarnation: str


class WorkerUpMessage(msgspec.Struct, tag="worker_up", array_like=True, frozen=True):
    info: WorkerInfo


class WorkerDownMessage(msgspec.Struct, tag="worker_down", array_like=True, frozen=True):
    worker_id: str
    incarnation: str


class ReportedMessage(msgspec.Struct, tag="reported", array_like=True, frozen=True):
    report: WorkerReport


EventMessage = (
    AddedMessage
    | RemovedMessage
    | NodeUpMessage
    | NodeDownMessage
    | WorkerUpMessage
    | WorkerDownMessage
    | ReportedMessage
)

# msgspec cannot decode a union of dataclasses, and the pure modules may not know msgspec: hence a
# struct beside each event, with the same fields.
_MESSAGE_OF: dict[type[Event], type[EventMessage]] = {
    BlockAdded: AddedMessage,
    BlockRemoved: RemovedMessage,
    NodeUp: NodeUpMessage,
    NodeDown: NodeDownMessage,
    WorkerUp: WorkerUpMessage,
    WorkerDown: WorkerDownMessage,
    WorkerReported: ReportedMessage,
}
_EVENT_OF = {message: event for event, message in _MESSAGE_OF.items()}


class Events(msgspec.Struct, frozen=True):
    """The body of EVENTS: events number first_sequence, first_sequence + 1, ... of `epoch`."""

    epoch: int
    first_sequence: int
    events: list[EventMessage]


class Heartbeat(msgspec.Struct, frozen=True):
    """The body of HEARTBEAT: `sequence` is the number of the latest event."""

    epoch: int
    sequence: int


def to_messages(events: Iterable[Event]) -> list[EventMessage]:
    return [_convert(event, _MESSAGE_OF[type(event)]) for event in events]


def from_messages(messages: Iterable[EventMessage]) -> list[Event]:
    return [_convert(message, _EVENT_OF[type(message)]) for message in messages]


def _convert(source: object, target: type[T]) -> T:
    names = target.__match_args__  # type: ignore[attr-defined]
    return target(*[getattr(source, name) for name in names])
