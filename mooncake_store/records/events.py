"""Numbered events of changes in the directory, and the bounded log that keeps them.

Events are numbered 1, 2, 3, ... without gaps within an epoch (one start of the directory). A
replica that applies them in order is a copy of the directory's index. A replica with a gap, or with
another epoch, takes a snapshot. Until the next event or snapshot arrives, a replica may miss a new
copy or list a removed copy.

When a storage node leaves, one BlockRemoved for each of its announced copies comes first, then
NodeDown. To drop the node's copies, a replica may rely on either. Ephemeral copies (of a single
request) are never announced.

Not here: sending events (mooncake_store/directory/server.py), subscribing (event_feed.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

# Most bytes of FrontendNoted.notes in the log: 16 KiB for each of the 1,024 ZeroMQ requests that
# the server answers between two publications. Beyond this, subscribers must take a snapshot.
NOTES_BYTES_KEPT_MAX = 16 * 2**20


@dataclass(frozen=True, slots=True)
class BlockAdded:
    """A block became readable on a node. `copy`: its location; the directory always gives it."""

    key: bytes
    node_id: str
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    key: bytes
    node_id: str


@dataclass(frozen=True, slots=True)
class NodeUp:
    info: NodeInfo


@dataclass(frozen=True, slots=True)
class NodeDown:
    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerUp:
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerDown:
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerReported:
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class FrontendNoted:
    """The requests that a frontend routed, in its message `number` to the other frontends. Only
    frontends decode `notes` (backends/frontend/routing_notes.py). No snapshot contains them."""

    frontend: str
    number: int
    notes: bytes


Event = (
    BlockAdded
    | BlockRemoved
    | NodeUp
    | NodeDown
    | WorkerUp
    | WorkerDown
    | WorkerReported
    | FrontendNoted
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a replica needs, as of event number `sequence` of `epoch`."""

    epoch: int
    sequence: int
    nodes: tuple[NodeInfo, ...]
    workers: tuple[WorkerInfo, ...]  # of two incarnations of a worker_id, the older one is first
    reports: tuple[WorkerReport, ...]  # the latest of each worker that has reported
    holders: tuple[tuple[bytes, tuple[str, ...]], ...]  # (key, node ids); () if not requested


class EventLog:
    """The last `events_max` events, with at most NOTES_BYTES_KEPT_MAX bytes of notes."""

    def __init__(self, events_max: int) -> None:
        assert events_max > 0
        self._events: deque[Event] = deque(maxlen=events_max)
        self._notes: deque[tuple[int, int]] = deque()  # (number, bytes) of each FrontendNoted
        self._notes_bytes = 0
        self.sequence = 0  # number of the latest event; 0 before the first

    def append(self, event: Event) -> None:
        self.sequence += 1
        self._events.append(event)
        if isinstance(event, FrontendNoted):
            self._notes.append((self.sequence, len(event.notes)))
            self._notes_bytes += len(event.notes)
            self._bound_notes()

    def _bound_notes(self) -> None:
        """Drop the oldest events until the notes of the rest fit."""
        first = self.sequence - len(self._events) + 1
        while self._notes[0][0] < first or self._notes_bytes > NOTES_BYTES_KEPT_MAX:
            number, length_bytes = self._notes.popleft()
            self._notes_bytes -= length_bytes
            for _ in range(first, number + 1):
                self._events.popleft()
            first = max(first, number + 1)

    def extend(self, events: Sequence[Event]) -> None:
        """`append` for several events without notes."""
        self.sequence += len(events)
        self._events.extend(events)

    def since(self, sequence: int) -> list[Event] | None:
        """The events after number `sequence`, perhaps []; None: some of them are dropped."""
        assert 0 <= sequence <= self.sequence, f"{sequence} is after {self.sequence}"
        missed = self.sequence - sequence
        kept = len(self._events)
        if missed > kept:
            return None
        latest = list(islice(reversed(self._events), missed))  # from the end: usually few
        latest.reverse()
        return latest

    def check(self) -> None:
        maxlen = self._events.maxlen
        assert maxlen is not None
        first = self.sequence - len(self._events) + 1
        notes = [
            (number, len(event.notes))
            for number, event in enumerate(self._events, first)
            if isinstance(event, FrontendNoted)
        ]
        assert [note for note in self._notes if note[0] >= first] == notes, "notes are miscounted"
        assert sum(length for _, length in notes) <= NOTES_BYTES_KEPT_MAX, "too many notes are kept"
        is_full = len(self._events) == min(self.sequence, maxlen)
        assert is_full or self._notes, "the log lost or duplicated events"
