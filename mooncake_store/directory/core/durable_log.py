"""What of a directory outlives it, pins and quotas, as a log of changes. Pure.

Each verb that changes pins is one record of the log (its kind and its keys), whatever the number of
its keys, so that it can be written in one piece: 65,536 keys are a megabyte, and etcd takes one and
a half in a transaction, and 128 operations. Records have numbers; of two that name a key the later
one counts. A quota is one entry of its tenant, written over.

The log grows with every change, also when pins end. When less than half of it still counts, or it
has too many records, it is written anew: the pins that there are, in records at its end, and with
the last of them everything older goes. Old records and new ones together say the same, so it may be
interrupted anywhere. A million hard pins are 31 records, 16 MB; the log is never more than twice
that and SLACK_ENTRIES.

Times are milliseconds of the wall clock: the next directory may be on another host. A soft pin ends
as much earlier or later as their clocks differ.

Not here: etcd and the form of a record in it (directory/journal.py), what a pin does (holder.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mooncake_store.block_keys import KEY_BYTES

SLACK_ENTRIES = 65_536  # more keys than twice those that are pinned, before it is written anew
RECORDS_MAX = 4_096
REWRITTEN_KEYS = 32_768  # in one record of a rewritten log, each with a time of its own


@dataclass(frozen=True, slots=True)
class PinRecord:
    """These keys are pinned so from now on, or not at all ("none")."""

    kind: str  # "soft" | "hard" | "none"
    until_ms: tuple[int, ...]  # of soft pins: one for all keys, or one for each
    keys: bytes  # joined

    @property
    def entries(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def is_sound(self) -> bool:
        """Can a directory have written it?"""
        times = (1, self.entries) if self.kind == "soft" else (0,)
        return (
            self.kind in ("soft", "hard", "none")
            and len(self.keys) == self.entries * KEY_BYTES > 0
            and len(self.until_ms) in times
        )


@dataclass(frozen=True, slots=True)
class LogChange:
    """What is written in one piece, or not at all."""

    number: int  # of this change; also of its record of pins
    pins: PinRecord | None = None
    tenant: str = ""
    quota_bytes: int = 0  # of the tenant; 0: it has none any more
    drops_older: int = 0  # records below this number go


class DurableLog:
    """The log as far as it is written. A change counts once `written` has been told of it."""

    def __init__(self) -> None:
        self.next_number = 1
        self._entries: dict[int, int] = {}  # number of a record -> keys in it
        self.entries = 0

    def __len__(self) -> int:
        return len(self._entries)

    def found(self, number: int, record: PinRecord) -> None:
        """A record of an earlier directory, in order of their numbers."""
        self.outnumber(number)
        self._note(number, record.entries)

    def outnumber(self, number: int) -> None:
        """That number was used before."""
        self.next_number = max(self.next_number, number + 1)

    def pin(self, keys: Iterable[bytes], kind: str, until_ms: int) -> LogChange:
        until = (until_ms,) if kind == "soft" else ()
        return self._numbered(pins=PinRecord(kind, until, b"".join(keys)))

    def set_quota(self, tenant: str, quota_bytes: int) -> LogChange:
        return self._numbered(tenant=tenant, quota_bytes=quota_bytes)

    def is_too_long(self, pinned: int) -> bool:
        """Should it be written anew, now that so many keys are pinned?"""
        return self.entries > 2 * pinned + SLACK_ENTRIES or len(self) > RECORDS_MAX

    def rewritten(self, pins: Mapping[str, Iterable[tuple[bytes, int]]]) -> Iterator[LogChange]:
        """(key, until_ms) of all pins there are, by kind, as changes in order.

        Nothing else may be written between the first and the last of them.
        """
        first = self.next_number
        chunk: list[tuple[bytes, int]] = []
        waiting: PinRecord | None = None
        for kind, found in pins.items():
            for pin in found:
                chunk.append(pin)
                if len(chunk) == REWRITTEN_KEYS:
                    if waiting is not None:
                        yield self._numbered(pins=waiting)
                    waiting, chunk = _record(kind, chunk), []
            if chunk:
                if waiting is not None:
                    yield self._numbered(pins=waiting)
                waiting, chunk = _record(kind, chunk), []
        yield self._numbered(pins=waiting, drops_older=first)

    def written(self, change: LogChange) -> None:
        """It is in etcd, for certain."""
        if change.drops_older:
            for number in [number for number in self._entries if number < change.drops_older]:
                self.entries -= self._entries.pop(number)
        if change.pins is not None:
            self._note(change.number, change.pins.entries)

    def _numbered(
        self,
        pins: PinRecord | None = None,
        tenant: str = "",
        quota_bytes: int = 0,
        drops_older: int = 0,
    ) -> LogChange:
        number, self.next_number = self.next_number, self.next_number + 1
        return LogChange(number, pins, tenant, quota_bytes, drops_older)

    def _note(self, number: int, entries: int) -> None:
        self._entries[number] = entries
        self.entries += entries

    def check(self) -> None:
        """Prove the invariants."""
        assert self.entries == sum(self._entries.values()), "the keys are miscounted"
        assert all(number < self.next_number for number in self._entries)


def _record(kind: str, pins: list[tuple[bytes, int]]) -> PinRecord:
    until_ms = tuple(until for _, until in pins) if kind == "soft" else ()
    return PinRecord(kind, until_ms, b"".join(key for key, _ in pins))
