"""What frontends tell each other of the requests that they routed.

Each frontend decides alone, with its own Conductor, about its own requests. What it cannot see is
the work that the others have just sent to the same workers: reports show it, but up to a second
late. So each of them notes three things about a request, and sends its notes in numbered batches:

    routed      where it went and what was predicted: the others reserve the same work
    prefilled   its prefill ended: the work moves from the prefill queue to the decode batch
    ended       done, failed or cancelled: nothing of it is left

and, where tenants have limits, what of them was used or given back (admission/tenant_quotas.py).

Moments are on the clock of the frontend that noted them, and a batch says when it was sent on that
clock; whoever gets it knows only how long before the sending each thing happened. A batch without
notes says that the frontend lives.

Notes may be lost. Batches are numbered without gaps, so whoever misses one notices, and from then
on knows that frontend's requests from worker reports only (load/other_frontends.py).

Not here: bytes (backends/frontend/routing_notes.py), what is done with the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest

TENANTS_NOTED = 16
NOTES_WAITING_MAX = 4_096  # nobody fetched them for seconds: they are of no use any more


@dataclass(frozen=True, slots=True)
class RoutedNote:
    number: int  # of this routing; a frontend uses each once
    at_s: float
    prefill: tuple[str, str]  # (worker_id, incarnation)
    decode: tuple[str, str]
    new_tokens: int
    cached_tokens: int
    output_tokens_max: int
    order_key_s: float
    queue_s: float
    transfer_s: float
    prefill_s: float
    tbt_s: float
    send_s: float
    fetch_node: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PrefilledNote:
    number: int
    at_s: float
    cached_tokens: int
    seconds: float = 0.0  # what computing took; 0: not known


@dataclass(frozen=True, slots=True)
class EndedNote:
    number: int
    at_s: float
    output_tokens: int = -1  # -1: not known


@dataclass(frozen=True, slots=True)
class UsageNote:
    """Of a tenant's limits, at the moment when the request was let in."""

    at_s: float
    tenant: str
    requests: int
    tokens: int  # below 0: not used after all


@dataclass(frozen=True, slots=True)
class NoteBatch:
    """Of one request, what was noted first stands in an earlier tuple or batch."""

    frontend: str  # one incarnation of it
    number: int  # 1, 2, 3, ...
    sent_s: float
    routed: tuple[RoutedNote, ...] = ()
    prefilled: tuple[PrefilledNote, ...] = ()
    ended: tuple[EndedNote, ...] = ()
    is_last: bool = False  # the frontend closes
    wanted_per_s: float = 0.0  # prefill seconds per second that it was asked for lately
    wanted_of: Mapping[str, float] = field(default_factory=dict)  # of those, its largest tenants'
    usage: tuple[UsageNote, ...] = ()


Note = RoutedNote | PrefilledNote | EndedNote | UsageNote


class OutgoingNotes:
    """What this frontend will tell the others, until the shell takes it."""

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
            self._number += 1  # a batch that is never sent: the others see the gap

    def take(
        self, now_s: float, count_max: int, wanted_of: Mapping[str, float], is_last: bool = False
    ) -> NoteBatch:
        """The next batch; it may be empty."""
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
        """Prove the invariants."""
        assert len(self._notes) <= NOTES_WAITING_MAX
