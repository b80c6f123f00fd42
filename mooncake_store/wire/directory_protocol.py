"""The messages between the directory and all other processes (docs/reference/store.md).

Each verb of `Directory` has a struct. Its fields are the arguments of the verb, its tag is the name
of the verb, and its type argument is the type of the result. The bodies of the event stream follow.

Bounds are part of the types (a block key has 16 bytes, a lease is 0 to 3,600 s, ...). So msgspec
rejects a message that exceeds a bound when it decodes the message, and names the field.

Not here: sockets (directory/server.py, directory/client.py, event_feed.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_type_hints

import msgspec

from mooncake_store.layout import Geometry
from mooncake_store.records.blocks import Allocation, BlockPage, Copy, ReservedCommit, Slot, Spill
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    FrontendNoted,
    NodeDown,
    NodeUp,
    Snapshot,
    WorkerDown,
    WorkerReported,
    WorkerUp,
)
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.records.status import DirectoryStats
from mooncake_store.wire.request_reply import Verb

T = TypeVar("T")
KEYS_MAX = 65_536  # block keys in one request
# Most bytes of NoteRouted.notes. Notes about 64 routed requests usually have 10 KB. With the
# longest tenant names, which clients choose, they have 0.4 MiB.
NOTES_BYTES_MAX = 512 * 1024

Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Keys = Annotated[Sequence[Key], msgspec.Meta(max_length=KEYS_MAX)]
Lease = Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
BLOCKS_MAX = msgspec.Meta(max_length=KEYS_MAX)


class DirectoryVerb(Verb[T], Generic[T], frozen=True):
    """A verb of `Directory`; T is the type of its result."""


class RegisterNode(DirectoryVerb[int], tag="register_node", frozen=True):
    info: NodeInfo


class NodeReport(DirectoryVerb[bool], tag="node_report", frozen=True):
    node_id: Name
    incarnation: Name
    epoch: Count = 0  # of the directory that the node registered with; 0: unknown


class DeregisterNode(DirectoryVerb[bool], tag="deregister_node", frozen=True):
    node_id: Name
    incarnation: Name


class Attach(DirectoryVerb[Geometry], tag="attach", frozen=True):
    node_id: Name
    fingerprint: Name
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Allocate(DirectoryVerb[Allocation], tag="allocate", frozen=True):
    node_id: Name
    keys: Keys
    owner: Name
    lease_s: Lease
    ephemeral: bool
    size_bytes: Size = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Commit(DirectoryVerb[list[bool]], tag="commit", frozen=True):
    node_id: Name
    blocks: Annotated[Sequence[tuple[Key, Count, Count, Count]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class CommitReserved(DirectoryVerb[ReservedCommit], tag="commit_reserved", frozen=True):
    node_id: Name
    blocks: Annotated[Sequence[tuple[Key, Count, Count, Count]], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]  # of each requested slot
    slots: Annotated[int, msgspec.Meta(ge=0, le=KEYS_MAX)]
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Abandon(DirectoryVerb[int], tag="abandon", frozen=True):
    slots: Annotated[Sequence[Slot], msgspec.Meta(max_length=KEYS_MAX)]
    owner: Name


class Lookup(DirectoryVerb[list[tuple[Copy, ...]]], tag="lookup", frozen=True):
    keys: Keys
    owner: Annotated[str, msgspec.Meta(max_length=256)]  # "" with lease_s = 0 only
    lease_s: Lease
    prefix_only: bool


class Exist(DirectoryVerb[bytes], tag="exist", frozen=True):
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * KEYS_MAX)]


class Remove(DirectoryVerb[list[bool]], tag="remove", frozen=True):
    keys: Keys
    node_id: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Renew(DirectoryVerb[bool], tag="renew", frozen=True):
    owner: Name
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class Release(DirectoryVerb[bool], tag="release", frozen=True):
    owner: Name


class Used(DirectoryVerb[None], tag="used", frozen=True):
    keys: Annotated[bytes, msgspec.Meta(max_length=16 * KEYS_MAX)]  # joined


class DropCopy(DirectoryVerb[bool], tag="drop_copy", frozen=True):
    key: Key
    node_id: Name
    generation: Count


class Adopt(DirectoryVerb[int], tag="adopt", frozen=True):
    node_id: Name
    incarnation: Name
    blocks: Annotated[Sequence[tuple[Key, Count, Count, Count, Size, Count]], BLOCKS_MAX]
    is_last: bool
    epoch: Count = 0  # of the directory that the node registered with; 0: unknown


class TakeSpills(DirectoryVerb[list[Spill]], tag="take_spills", frozen=True):
    node_id: Name
    owner: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    lease_s: Lease
    epoch: Count = 0  # of the directory that granted the slots or leases


class DrainNode(DirectoryVerb[None], tag="drain", frozen=True):
    node_id: Name
    is_on: bool


class BlocksOn(DirectoryVerb[list[tuple[bytes, Copy]]], tag="blocks_on", frozen=True):
    node_id: Name
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]
    only_here: bool


class PlaceKeys(DirectoryVerb[list[str]], tag="place", frozen=True):
    keys: Keys
    excluded: Annotated[Sequence[Name], msgspec.Meta(max_length=1_024)] = ()


class PinKeys(DirectoryVerb[list[bool]], tag="pin", frozen=True):
    keys: Keys
    kind: Name
    ttl_s: Annotated[float, msgspec.Meta(ge=0.0, le=30 * 86_400.0)]


class SetQuota(DirectoryVerb[None], tag="set_quota", frozen=True):
    tenant: Name
    quota_bytes: Count


class RegisterWorker(DirectoryVerb[None], tag="register_worker", frozen=True):
    info: WorkerInfo


class ReportWorker(DirectoryVerb[bool], tag="worker_report", frozen=True):
    report: WorkerReport


class DeregisterWorker(DirectoryVerb[bool], tag="deregister_worker", frozen=True):
    worker_id: Name
    incarnation: Name


class NoteRouted(DirectoryVerb[None], tag="note_routed", frozen=True):
    frontend: Name
    number: Count
    notes: Annotated[bytes, msgspec.Meta(max_length=NOTES_BYTES_MAX)]


class Nodes(DirectoryVerb[list[NodeInfo]], tag="nodes", frozen=True):
    pass


class Workers(DirectoryVerb[list[WorkerInfo]], tag="workers", frozen=True):
    pass


class TakeSnapshot(DirectoryVerb[Snapshot], tag="snapshot", frozen=True):
    with_blocks: bool = True


class IndexPage(DirectoryVerb[BlockPage], tag="index_page", frozen=True):
    first: Count
    blocks_max: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)]


class Stats(DirectoryVerb[DirectoryStats], tag="stats", frozen=True):
    pass


AnyRequest = DirectoryVerb[Any]
VERBS = DirectoryVerb.__subclasses__()


EVENTS: dict[str, type[Event]] = {
    "added": BlockAdded,
    "removed": BlockRemoved,
    "node_up": NodeUp,
    "node_down": NodeDown,
    "worker_up": WorkerUp,
    "worker_down": WorkerDown,
    "reported": WorkerReported,
    "noted": FrontendNoted,
}


def _message_type(tag: str, event: type[Event]) -> type[msgspec.Struct]:
    """A struct with the fields of this event, encoded as [tag, field, ...]. The events themselves
    are dataclasses without msgspec, and msgspec cannot decode a union of dataclasses."""
    types = get_type_hints(event) | ({"key": Key} if "key" in event.__match_args__ else {})
    defined = [
        (each.name, types[each.name], *(() if each.default is MISSING else (each.default,)))
        for each in fields(event)
    ]
    name = f"{event.__name__}Message"
    return msgspec.defstruct(name, defined, tag=tag, array_like=True, frozen=True)


_MESSAGE_OF = {event: _message_type(tag, event) for tag, event in EVENTS.items()}
_EVENT_OF = {message: event for event, message in _MESSAGE_OF.items()}
if TYPE_CHECKING:
    EventMessage = msgspec.Struct
else:
    EventMessage = reduce(or_, _EVENT_OF)


class Events(msgspec.Struct, frozen=True):
    """The body of an EVENTS message: the events of `epoch` with consecutive numbers, the first of
    which is first_sequence."""

    epoch: int
    first_sequence: int
    events: list[EventMessage]


class EventHeartbeat(msgspec.Struct, frozen=True):
    """The body of a HEARTBEAT message: `sequence` is the number of the latest event."""

    epoch: int
    sequence: int


def to_messages(events: Iterable[Event]) -> list[EventMessage]:
    return [_convert(event, _MESSAGE_OF[type(event)]) for event in events]


def from_messages(messages: Iterable[EventMessage]) -> list[Event]:
    return [_convert(message, _EVENT_OF[type(message)]) for message in messages]


def _convert(source: object, target: type[T]) -> T:
    names = target.__match_args__  # type: ignore[attr-defined]
    return target(*[getattr(source, name) for name in names])
