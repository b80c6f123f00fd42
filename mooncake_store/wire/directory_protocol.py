"""The messages between the directory and all other processes; docs/reference/store.md has them.

The requests are the verbs of `Directory`: one struct each, with the same field names and the verb
as tag. The bodies of the event stream are here too.

Bounds are part of the types (a block key has 16 bytes, a lease is 0 to one hour, ...). So msgspec
rejects a message that breaks them, with the name of the field, before the directory sees it.

Not here: sockets (directory/server.py, directory/client.py, event_feed.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    FrontendNoted,
    NodeDown,
    NodeUp,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.wire.request_reply import Verb

T = TypeVar("T")
KEYS_MAX = 65_536  # in one request
# Notes about 64 requests have 10 KB. With the longest tenant names, which clients choose, they have
# 0.4 MiB, and must still fit.
NOTES_BYTES_MAX = 512 * 1024

Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]
Lease = Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
BLOCKS_MAX = msgspec.Meta(max_length=KEYS_MAX)


class RegisterNode(Verb, tag="register_node", frozen=True):
    info: NodeInfo


class NodeReport(Verb, tag="node_report", frozen=True):
    node_id: Name
    incarnation: Name
    epoch: Count = 0  # of the directory that granted the slots or leases


class DeregisterNode(Verb, tag="deregister_node", frozen=True):
    node_id: Name
    incarnation: Name


class Attach(Verb, tag="attach", frozen=True):
    node_id: Name
    fingerprint: Name
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Allocate(Verb, tag="allocate", frozen=True):
    node_id: Name
    keys: Keys
    owner: Name
    lease_s: Lease
    ephemeral: bool
    size_bytes: Size = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Commit(Verb, tag="commit", frozen=True):
    node_id: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Count]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class CommitReserved(Verb, tag="commit_reserved", frozen=True):
    node_id: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Count]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]  # of each requested slot
    slots: Annotated[int, msgspec.Meta(ge=0, le=KEYS_MAX)]
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Abandon(Verb, tag="abandon", frozen=True):
    slots: Annotated[list[Slot], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name


class Lookup(Verb, tag="lookup", frozen=True):
    keys: Keys
    owner: Annotated[str, msgspec.Meta(max_length=256)]  # "" with lease_s = 0 only
    lease_s: Lease
    prefix_only: bool


class Exist(Verb, tag="exist", frozen=True):
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * KEYS_MAX)]


class Remove(Verb, tag="remove", frozen=True):
    keys: Keys
    node_id: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Renew(Verb, tag="renew", frozen=True):
    owner: Name
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class Release(Verb, tag="release", frozen=True):
    owner: Name


class Used(Verb, tag="used", frozen=True):
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * KEYS_MAX)]  # joined


class DropCopy(Verb, tag="drop_copy", frozen=True):
    key: Key
    node_id: Name
    generation: Count


class Adopt(Verb, tag="adopt", frozen=True):
    node_id: Name
    incarnation: Name
    blocks: Annotated[list[tuple[Key, Count, Count, Count, Size, Count]], BLOCKS_MAX]
    is_last: bool
    epoch: Count = 0  # of the directory that granted the slots or leases


class TakeSpills(Verb, tag="take_spills", frozen=True):
    node_id: Name
    owner: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class DrainNode(Verb, tag="drain", frozen=True):
    node_id: Name
    is_on: bool


class BlocksOn(Verb, tag="blocks_on", frozen=True):
    node_id: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    only_here: bool


class PlaceKeys(Verb, tag="place", frozen=True):
    keys: Keys
    excluded: Annotated[list[Name], msgspec.Meta(max_length=1_024)] = msgspec.field(
        default_factory=list
    )


class PinKeys(Verb, tag="pin", frozen=True):
    keys: Keys
    kind: Name
    ttl_s: Annotated[float, msgspec.Meta(ge=0.0, le=30 * 86_400.0)]


class SetQuota(Verb, tag="set_quota", frozen=True):
    tenant: Name
    quota_bytes: Count


class RegisterWorker(Verb, tag="register_worker", frozen=True):
    info: WorkerInfo


class ReportWorker(Verb, tag="worker_report", frozen=True):
    report: WorkerReport


class DeregisterWorker(Verb, tag="deregister_worker", frozen=True):
    worker_id: Name
    incarnation: Name


class NoteRouted(Verb, tag="note_routed", frozen=True):
    frontend: Name
    number: Count
    notes: Annotated[bytes, msgspec.Meta(max_length=NOTES_BYTES_MAX)]


class Nodes(Verb, tag="nodes", frozen=True):
    pass


class Workers(Verb, tag="workers", frozen=True):
    pass


class TakeSnapshot(Verb, tag="snapshot", frozen=True):
    with_blocks: bool = True


class IndexPage(Verb, tag="index_page", frozen=True):
    first: Count
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]


class Stats(Verb, tag="stats", frozen=True):
    pass


AnyRequest = (
    RegisterNode
    | NodeReport
    | DeregisterNode
    | Attach
    | Allocate
    | Commit
    | CommitReserved
    | Abandon
    | Lookup
    | Exist
    | Used
    | Remove
    | Renew
    | Release
    | DropCopy
    | Adopt
    | TakeSpills
    | DrainNode
    | BlocksOn
    | PlaceKeys
    | PinKeys
    | SetQuota
    | RegisterWorker
    | ReportWorker
    | DeregisterWorker
    | NoteRouted
    | Nodes
    | Workers
    | TakeSnapshot
    | IndexPage
    | Stats
)


class AddedMessage(msgspec.Struct, tag="added", array_like=True, frozen=True):
    key: Key
    node_id: str
    copy: Copy | None = None


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


class NotedMessage(msgspec.Struct, tag="noted", array_like=True, frozen=True):
    frontend: str
    number: int
    notes: bytes


EventMessage = (
    AddedMessage
    | RemovedMessage
    | NodeUpMessage
    | NodeDownMessage
    | WorkerUpMessage
    | WorkerDownMessage
    | ReportedMessage
    | NotedMessage
)

# msgspec cannot decode a union of dataclasses, and pure modules must not import msgspec. So each
# event has a struct with the same fields.
_MESSAGE_OF: dict[type[Event], type[EventMessage]] = {
    BlockAdded: AddedMessage,
    BlockRemoved: RemovedMessage,
    NodeUp: NodeUpMessage,
    NodeDown: NodeDownMessage,
    WorkerUp: WorkerUpMessage,
    WorkerDown: WorkerDownMessage,
    WorkerReported: ReportedMessage,
    FrontendNoted: NotedMessage,
}
_EVENT_OF = {message: event for event, message in _MESSAGE_OF.items()}


class Events(msgspec.Struct, frozen=True):
    """The body of EVENTS: events number first_sequence, first_sequence + 1, ... of `epoch`."""

    epoch: int
    first_sequence: int
    events: list[EventMessage]


class EventHeartbeat(msgspec.Struct, frozen=True):
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
