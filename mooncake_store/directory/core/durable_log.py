"""Log of changes to pins and quotas, which outlive the process of a directory. Pure.

A request that changes pins is one record (the kind of pin and the keys), whatever the number of
keys. A record must fit into one etcd transaction, which is limited to 1.5 MB and 128 operations;
65,536 block keys are 1 MB. Records are numbered. If two records name a block key, the later one
counts. The quota of a tenant is one key in etcd, which is overwritten.

The log grows with every change, also with the removal of a pin. It is rewritten when it has more
than RECORDS_MAX records, or more keys than twice the pinned ones plus SLACK_ENTRIES. A rewrite
appends records of all current pins, and its last change deletes all earlier records. Old and new
records agree, so a rewrite may be interrupted at any point. A million hard pins take 31 records and
16 MB, and about three times that at the end of a rewrite.

Times are milliseconds of the wall clock, because the next directory may run on another host. A soft
pin ends earlier or later by the difference of the two clocks.

Not here: etcd and the encoding of a record (directory/journal.py), the effect of a pin (holder.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from mooncake_store.block_keys import KEY_BYTES

SLACK_ENTRIES = 65_536
RECORDS_MAX = 4_096
REWRITTEN_KEYS = 32_768  # keys per record of a rewrite, each with its own expiry


@dataclass(frozen=True, slots=True)
class PinRecord:
    """The pin of these keys until a later record names them; kind "none": no pin."""

    kind: str  # "soft" | "hard" | "none"
    until_ms: tuple[int, ...]  # expiry of soft pins: one for all keys, or one per key; else ()
    keys: bytes  # joined block keys of KEY_BYTES each

    @property
    def entries(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether a directory can have written this record."""
        times = (1, self.entries) if self.kind == "soft" else (0,)
        return (
            self.kind in ("soft", "hard", "none")
            and len(self.keys) == self.entries * KEY_BYTES > 0
            and len(self.until_ms) in times
        )


@dataclass(frozen=True, slots=True)
class LogChange:
    """A change that is written atomically."""

    number: int  # of this change; also of its pin record
    pins: PinRecord | None = None
    tenant: str = ""  # the tenant whose quota changes; "": no quota changes
    quota_bytes: int = 0  # of the tenant; 0 removes the quota
    drops_older: int = 0  # pin records with lower numbers are deleted; 0: none


class DurableLog:
    """Numbers and sizes of the records in etcd. A change counts once `written` was called."""

    def __init__(self) -> None:
        self.next_number = 1
        self._entries: dict[int, int] = {}  # number of a record -> keys in it
        self.entries = 0  # keys in all records

    def __len__(self) -> int:
        return len(self._entries)

    def found(self, number: int, record: PinRecord) -> None:
        """Count a record that an earlier directory wrote."""
        self.outnumber(number)
        self._note(number, record.entries)

    def outnumber(self, number: int) -> None:
        """Make the numbers of later changes larger than this number."""
        self.next_number = max(self.next_number, number + 1)

    def pin(self, keys: Iterable[bytes], kind: str, until_ms: int) -> LogChange:
        until = (until_ms,) if kind == "soft" else ()
        return LogChange(self._taken(), PinRecord(kind, until, b"".join(keys)))

    def set_quota(self, tenant: str, quota_bytes: int) -> LogChange:
        return LogChange(self._taken(), tenant=tenant, quota_bytes=quota_bytes)

    def is_too_long(self, pinned: int) -> bool:
        """Whether the log should be rewritten, given the number of pinned keys."""
        return self.entries > 2 * pinned + SLACK_ENTRIES or len(self) > RECORDS_MAX

    def rewritten(self, pins: Mapping[str, Iterable[tuple[bytes, int]]]) -> Iterator[LogChange]:
        """The changes that rewrite the log, in order; `pins`: kind -> (key, until_ms) of each pin.
        No other change may be written between the first and the last change of a rewrite."""
        first = self.next_number
        waiting: PinRecord | None = None
        for record in _records(pins):
            if waiting is not None:
                yield LogChange(self._taken(), waiting)
            waiting = record
        yield LogChange(self._taken(), waiting, drops_older=first)

    def written(self, change: LogChange) -> None:
        """Count a change that is in etcd for certain."""
        if change.drops_older:
            for number in [number for number in self._entries if number < change.drops_older]:
                self.entries -= self._entries.pop(number)
        if change.pins is not None:
            self._note(change.number, change.pins.entries)

    def _taken(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def _note(self, number: int, entries: int) -> None:
        self._entries[number] = entries
        self.entries += entries

    def check(self) -> None:
        assert self.entries == sum(self._entries.values()), "the keys are miscounted"
        assert all(number < self.next_number for number in self._entries)


def _records(pins: Mapping[str, Iterable[tuple[bytes, int]]]) -> Iterator[PinRecord]:
    """Lazily split these pins into records of at most REWRITTEN_KEYS keys each."""
    for kind, found in pins.items():
        left = iter(found)
        while chunk := list(islice(left, REWRITTEN_KEYS)):
            until_ms = tuple(until for _, until in chunk) if kind == "soft" else ()
            yield PinRecord(kind, until_ms, b"".join(key for key, _ in chunk))
