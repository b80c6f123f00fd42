"""Notes that frontends exchange about the requests that they routed.

Each frontend decides about its own requests with its own Conductor. Worker reports also show the
work that other frontends have sent to the same workers, but up to 0.5 s late. Each frontend
therefore notes three events of a request, and sends its notes in numbered batches:

    routed      has the workers and predictions, so that the other frontends reserve the same work
    prefilled   moves the work from the prefill queue to the decode batch
    ended       drops the reservations of a completed, failed or cancelled request

For tenants with limits, notes also have used and returned tokens (admission/tenant_quotas.py).

Times are on the clock of the sending frontend. A batch has its time of sending on that clock, so a
receiver can compute the age of each event. An empty batch is a heartbeat.

Notes may be lost. Batches are numbered without gaps, so a receiver detects a missing batch. It then
drops the requests noted before the gap, and relies on worker reports (load/other_frontends.py).

Not here: encoding (backends/frontend/routing_notes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest

TENANTS_NOTED = 16  # number of tenants, those of the largest demand, that a batch names
NOTES_WAITING_MAX = 4_096  # one more note drops all waiting notes, including the new note


@dataclass(frozen=True, slots=True)
class RoutedNote:
    number: int  # identifies the request in all of its notes; unique per frontend and increasing
    at_s: float  # time of the event, in all notes on the clock of the sending frontend
    prefill: tuple[str, str]  # (worker_id, incarnation)
    decode: tuple[str, str]
    new_tokens: int  # prompt tokens to compute, > 0
    cached_tokens: int  # the other prompt tokens
    output_tokens_max: int
    order_key_s: float  # order key (queue_order.py), on the clock of the sending frontend
    queue_s: float  # this field and the next three are those of messages.Prediction
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
    seconds: float = 0.0  # prefill time; 0 if unknown


@dataclass(frozen=True, slots=True)
class EndedNote:
    number: int
    at_s: float
    output_tokens: int = -1  # -1 if unknown


@dataclass(frozen=True, slots=True)
class UsageNote:
    """Usage of a tenant's limits by a request, an invalid request or /tokenize."""

    at_s: float  # time of admission, also in a note that returns tokens at the request's end
    tenant: str
    requests: int  # 1, or 0 in a note that returns tokens
    tokens: int  # charged tokens; negative if they are returned


@dataclass(frozen=True, slots=True)
class NoteBatch:
    """Notes of one frontend. The events of a request are in order: an earlier event is in an
    earlier field (routed, prefilled, ended) or in an earlier batch."""

    frontend: str  # name of the frontend's incarnation
    number: int  # 1, 2, 3, ...
    sent_s: float
    routed: tuple[RoutedNote, ...] = ()
    prefilled: tuple[PrefilledNote, ...] = ()
    ended: tuple[EndedNote, ...] = ()
    is_last: bool = False  # True if the frontend shuts down after this batch
    wanted_per_s: float = 0.0  # recent demand at the frontend, in prefill seconds per second
    wanted_of: Mapping[str, float] = field(default_factory=dict)  # the part of its largest tenants
    usage: tuple[UsageNote, ...] = ()


Note = RoutedNote | PrefilledNote | EndedNote | UsageNote


class OutgoingNotes:
    """Notes for other frontends that the caller of the Conductor has not taken yet."""

    def __init__(self, frontend: str) -> None:
        self.frontend = frontend
        self._notes: list[Note] = []
        self._number = 0  # number of the latest batch

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
        """The next batch, with at most `count_max` notes, the oldest ones. It may be empty."""
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
