"""Notes that frontends exchange about the requests that they routed.

Each frontend decides about its own requests with its own Conductor. Worker reports also show the
work that other frontends have sent to the same workers, but up to 0.5 s late. Each frontend
therefore notes three events of a request, and sends its notes in numbered batches:

    routed      its workers and predictions: the other frontends reserve the same work
    prefilled   its prefill ended: the work moves from the prefill queue to the decode batch
    ended       done, failed or cancelled: its reservations are dropped

For tenants with limits, notes also carry used and returned tokens (admission/tenant_quotas.py).

Times are on the clock of the sending frontend. A batch has its time of sending on that clock, so a
receiver can compute the age of each event. An empty batch is a heartbeat.

Notes may be lost. Batches are numbered without gaps, so a receiver detects a missing batch. It then
drops the requests noted before the gap, and relies on worker reports (load/other_frontends.py).

Not here: bytes (backends/frontend/routing_notes.py), what is done with the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest

TENANTS_NOTED = 16  # largest tenants whose demand a batch names
NOTES_WAITING_MAX = 4_096  # adding one more drops all waiting notes, the new one too


@dataclass(frozen=True, slots=True)
class RoutedNote:
    number: int  # of the request: unique per frontend, increasing, and the same in its later notes
    at_s: float  # time of the event on the clock of the sending frontend, as in the other notes
    prefill: tuple[str, str]  # (worker_id, incarnation)
    decode: tuple[str, str]
    new_tokens: int  # prompt tokens to compute, > 0
    cached_tokens: int  # the other prompt tokens
    output_tokens_max: int
    order_key_s: float  # queue_order.py; on the clock of the sending frontend
    queue_s: float  # this and the next three: as in messages.Prediction
    transfer_s: float
    prefill_s: float
    tbt_s: float
    send_s: float  # predicted seconds in which `fetch_node` restores and sends blocks
    fetch_node: str = ""  # "": nothing is fetched
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PrefilledNote:
    number: int
    at_s: float
    cached_tokens: int
    seconds: float = 0.0  # prefill time; 0: unknown


@dataclass(frozen=True, slots=True)
class EndedNote:
    number: int
    at_s: float
    output_tokens: int = -1  # -1: unknown


@dataclass(frozen=True, slots=True)
class UsageNote:
    """Usage of a tenant's limits by a request, an invalid request or /tokenize."""

    at_s: float  # time of admission, also in the note that returns tokens at the request's end
    tenant: str
    requests: int  # 1; 0 in the note that returns tokens
    tokens: int  # below 0: returned


@dataclass(frozen=True, slots=True)
class NoteBatch:
    """Notes in order: an earlier event of a request is in an earlier tuple or batch."""

    frontend: str  # name of the frontend's incarnation
    number: int  # 1, 2, 3, ...
    sent_s: float
    routed: tuple[RoutedNote, ...] = ()
    prefilled: tuple[PrefilledNote, ...] = ()
    ended: tuple[EndedNote, ...] = ()
    is_last: bool = False  # the frontend shuts down after this batch
    wanted_per_s: float = 0.0  # recent demand at the frontend, in prefill seconds per second
    wanted_of: Mapping[str, float] = field(default_factory=dict)  # demand of its largest tenants
    usage: tuple[UsageNote, ...] = ()


Note = RoutedNote | PrefilledNote | EndedNote | UsageNote


class OutgoingNotes:
    """Notes for other frontends, until the caller of the Conductor takes them."""

    def __init__(self, frontend: str) -> None:
        self.frontend = frontend
        self._notes: list[Note] = []
        self._number = 0  # of the latest batch

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, note: Note) -> None:
        self._notes.append(note)
        if len(self._notes) > NOTES_WAITING_MAX:
            self._notes.clear()
            self._number += 1  # counts as a lost batch, so that the receivers detect the gap

    def take(
        self, now_s: float, count_max: int, wanted_of: Mapping[str, float], is_last: bool = False
    ) -> NoteBatch:
        """The next batch: the `count_max` oldest notes, or fewer. It may be empty."""
        notes, self._notes = self._notes[:count_max], self._notes[count_max:]
        self._number += 1
        return NoteBatch(
            frontend=self.frontend,
            number=self._number,
            sent_s=now_s,
            routed=tuple(note for note in notes if isinstance(note, RoutedNote)),
            prefilled=tuple(note for note in notes if isinstance(note, PrefilledNote)),
            ended=tuple(note for note in notes if isinstance(note, EndedNote)),
            is_last=is_last,
            wanted_per_s=sum(wanted_of.values()),
            wanted_of=dict(nlargest(TENANTS_NOTED, wanted_of.items(), key=lambda one: one[1])),
            usage=tuple(note for note in notes if isinstance(note, UsageNote)),
        )

    def check(self) -> None:
        assert len(self._notes) <= NOTES_WAITING_MAX
