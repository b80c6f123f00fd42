"""Routing notes to the other frontends: their wire format, and the thread that sends them.

A note reports a routed, prefilled or ended request, so that the other frontends reserve the same
work. A UsageNote reports a tenant's use of its limits. The sender's thread looks for notes every
NOTES_S. A routing decision wakes the thread earlier if the last batch is NOTES_S old or NOTES_MAX
notes wait. While no other frontend is known, the thread wakes only every ALIVE_S and at routing
decisions. Without notes, the thread sends an empty batch every ALIVE_S as a heartbeat.

Requests never wait for notes. If the directory does not accept a batch within SEND_S_MAX, the
sender drops it, and the other frontends detect the gap in the batch numbers.

Not here: the contents of notes and their use (conductor/notes.py), reading the events
(cluster_view.py).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Annotated, Protocol, TypeVar

import msgspec

from conductor.notes import EndedNote, Note, NoteBatch, PrefilledNote, RoutedNote, UsageNote
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreError
from mooncake_store.records.events import FrontendNoted

NOTES_S = 0.02  # period of batches in seconds, unless NOTES_MAX notes wait
NOTES_MAX = 64  # most notes in a batch
SEND_S_MAX = 0.5  # timeout of sending a batch, in seconds
ALIVE_S = 1.0  # period of heartbeats without notes, in seconds; below frontend_silent_s_max

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)

Text = Annotated[str, msgspec.Meta(max_length=256)]
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # time on the sender's monotonic clock
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class RoutedMessage(msgspec.Struct, array_like=True, frozen=True):
    """RoutedNote (conductor/notes.py) on the wire. Decoding checks the bounds of its values."""

    number: Number
    at_s: Moment
    prefill: tuple[Text, Text]
    decode: tuple[Text, Text]
    new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    cached_tokens: Tokens
    output_tokens_max: Tokens
    order_key_s: Moment
    queue_s: Seconds
    transfer_s: Seconds
    prefill_s: Seconds
    tbt_s: Seconds
    send_s: Seconds
    fetch_node: Text
    tenant: Text


class PrefilledMessage(msgspec.Struct, array_like=True, frozen=True):
    number: Number
    at_s: Moment
    cached_tokens: Tokens
    seconds: Seconds


class EndedMessage(msgspec.Struct, array_like=True, frozen=True):
    number: Number
    at_s: Moment
    output_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]  # -1: unknown


class UsageMessage(msgspec.Struct, array_like=True, frozen=True):
    at_s: Moment
    tenant: Text
    requests: Annotated[int, msgspec.Meta(ge=0, le=1)]
    tokens: Annotated[int, msgspec.Meta(ge=-(2**32), le=2**32)]  # charged; below 0: given back


class NotesMessage(msgspec.Struct, array_like=True, frozen=True):
    """A NoteBatch without `frontend` and `number`, which FrontendNoted carries."""

    sent_s: Moment
    routed: list[RoutedMessage]
    prefilled: list[PrefilledMessage]
    ended: list[EndedMessage]
    is_last: bool
    wanted_per_s: Seconds  # seconds of prefill work that arrived per second
    # Older releases do not send the next two fields.
    wanted_of: dict[Text, Seconds] = {}
    usage: list[UsageMessage] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NotesMessage).decode


def pack_notes(batch: NoteBatch) -> bytes:
    return _encode(
        NotesMessage(
            sent_s=batch.sent_s,
            routed=[_message(note, RoutedMessage) for note in batch.routed],
            prefilled=[_message(note, PrefilledMessage) for note in batch.prefilled],
            ended=[_message(note, EndedMessage) for note in batch.ended],
            is_last=batch.is_last,
            wanted_per_s=batch.wanted_per_s,
            wanted_of=dict(batch.wanted_of),
            usage=[_message(note, UsageMessage) for note in batch.usage],
        )
    )


def unpack_notes(event: FrontendNoted) -> NoteBatch | None:
    """The batch of an event; None if it is invalid, which counts as a missed batch."""
    try:
        message = _decode(event.notes)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        log.warning("unreadable notes of frontend %s: %s", event.frontend, error)
        return None
    return NoteBatch(
        frontend=event.frontend,
        number=event.number,
        sent_s=message.sent_s,
        routed=tuple(_note(one, RoutedNote) for one in message.routed),
        prefilled=tuple(_note(one, PrefilledNote) for one in message.prefilled),
        ended=tuple(_note(one, EndedNote) for one in message.ended),
        is_last=message.is_last,
        wanted_per_s=message.wanted_per_s,
        wanted_of=message.wanted_of,
        usage=tuple(_note(one, UsageNote) for one in message.usage),
    )


def _message(note: Note, kind: type[M]) -> M:
    return kind(*[getattr(note, name) for name in kind.__struct_fields__])


def _note(message: msgspec.Struct, kind: type[T]) -> T:
    return kind(*msgspec.structs.astuple(message))


class NoteSource(Protocol):
    """Where the sender takes its notes from (cluster_view.ClusterView)."""

    # Returns (number of notes not yet taken, number of other frontends known).
    def notes_waiting(self) -> tuple[int, int]: ...
    def take_notes(self, count_max: int, is_last: bool = False) -> NoteBatch: ...


class NoteSender:
    """Sends one batch after the other, in its own thread."""

    def __init__(self, directory: str, source: NoteSource) -> None:
        self._client, self._source = DirectoryClient(directory, SEND_S_MAX), source
        self.batches_sent = self.batches_unsent = 0
        self._is_closing = False
        self._sent_s = 0.0  # monotonic time of the latest batch, sent or dropped
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="routing-notes", daemon=True)
        self._thread.start()

    def on_routed(self, waiting: int) -> None:
        """Wake the thread if a batch is due. Called after a decision that left `waiting` notes."""
        if waiting >= NOTES_MAX or (waiting and time.monotonic() >= self._sent_s + NOTES_S):
            self._wake.set()

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout=self._client.timeout_s + 1.0)
        self._client.close()

    def _run(self) -> None:
        alive_due_s, others = time.monotonic(), 0
        while not self._is_closing:
            waiting, others = self._source.notes_waiting()
            now_s = time.monotonic()
            if waiting or now_s >= alive_due_s:
                alive_due_s, self._sent_s = now_s + ALIVE_S, now_s
                self._send()
            if waiting <= NOTES_MAX:  # otherwise the batch was full, and the next follows at once
                self._wake.wait(NOTES_S if others else max(0.0, alive_due_s - time.monotonic()))
                self._wake.clear()
        if others:
            self._send(is_last=True)

    def _send(self, is_last: bool = False) -> None:
        try:
            batch = self._source.take_notes(NOTES_MAX, is_last)
            self._client.note_routed(batch.frontend, batch.number, pack_notes(batch))
            self.batches_sent += 1
        except StoreError as error:
            self.batches_unsent += 1
            log.debug("dropped notes to the other frontends: %s", error)
        except Exception:  # Catch all: one bad batch must not end the thread
            self.batches_unsent += 1
            log.exception("dropped notes to the other frontends")
