"""Log of pins and quotas in etcd: written by the leader, read by the next leader.

    PREFIX/state/head          epoch and number of the latest change, written with every change
    PREFIX/state/pins/NUMBER   a record of pins in MessagePack; NUMBER has 16 hexadecimal digits
    PREFIX/state/quota/TENANT  the tenant's quota in bytes

Each write is conditional on the mod_revisions (etcd's version of a key) of the head and of this
leader's key, so a directory that no longer leads changes nothing. A leader first writes the head.
So no write of an earlier leader can succeed after the new leader has read the log.

After a write without an answer, the leader first reads the head, which shows whether the write
succeeded. If not, the leader writes the head again (a seal), so that the earlier write fails if it
arrives late.

All calls wait for etcd. Not here: the records (core/durable_log.py), when a change is written
(durable_verbs.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from mooncake_store.directory.core.durable_log import LogChange, PinRecord
from mooncake_store.directory.etcd import (
    EtcdClient,
    EtcdExhausted,
    EtcdFailed,
    EtcdRefused,
    KeyValue,
    decimal,
)
from mooncake_store.errors import StateNotSaved, StoreUnavailable

log = logging.getLogger("mooncake_store.directory")
RETRY_S = 0.05  # seconds between two attempts to reach etcd
NUMBER_MAX = 2**62  # upper bound of a change's number; a larger one is damaged
T = TypeVar("T")
PAGE_KEYS = 8  # records per answer of etcd, at most 1 MB each


class Head(msgspec.Struct, frozen=True):
    epoch: int  # of the leader that wrote this head
    # Number of the latest change, which a new leader's first head repeats; 0: no change yet.
    number: int
    seal: int = 0  # number of seals that this leader has tried to write


@dataclass
class SavedState:
    # (number of the change, record), by ascending number
    pins: list[tuple[int, PinRecord]] = field(default_factory=list)
    quotas: dict[str, int] = field(default_factory=dict)  # tenant -> bytes
    number: int = 0  # of the latest change; 0: no change yet


class LeadLost(StoreUnavailable):
    """This directory no longer leads; the change may or may not have been written."""


class StateJournal:
    """For one thread at a time, except `close`. A call raises LeadLost if it finds the head of
    another leader, or if it must wait for etcd while `may_serve` is false."""

    def __init__(
        self,
        etcd: EtcdClient,
        prefix: str,
        epoch: int,
        leader_revision: int,
        may_serve: Callable[[], bool],
    ) -> None:
        """`prefix`: PREFIX of the election. `leader_revision`: mod_revision of PREFIX/leader."""
        self._etcd, self._epoch, self._may_serve = etcd, epoch, may_serve
        self._prefix = f"{prefix}/state"
        self._leader_key, self._leader_revision = f"{prefix}/leader", leader_revision
        self._head_key = f"{self._prefix}/head"
        self._revision = 0  # last known mod_revision of the head
        self._seals = 0  # seals tried so far; makes each head unique
        self._is_closed = False

    def begin(self) -> SavedState:
        """Exclude writes of earlier leaders, and read the log."""
        state = SavedState()
        while True:
            found = self._find_head()
            self._revision = found.mod_revision
            if found.mod_revision:
                state.number = (head := _head(found)).number
                if head.epoch == self._epoch:  # written by this leader, whose answer was lost
                    break
            if self._seal(state.number):
                break
            self._wait()
        self._patiently(lambda: self._read(state))
        return state

    def close(self) -> None:
        """Make every call that waits for etcd raise LeadLost soon."""
        self._is_closed = True

    def _read(self, state: SavedState) -> None:
        state.pins.clear()
        for key, found in self._etcd.under(f"{self._prefix}/pins/", PAGE_KEYS):
            try:
                record = msgspec.msgpack.decode(found.value, type=PinRecord)
                number = int(key.rpartition("/")[2], 16)
                if not record.is_sound or not 0 < number < NUMBER_MAX:
                    raise ValueError("no directory writes such a record")
                state.pins.append((number, record))
            except (msgspec.DecodeError, ValueError) as error:
                log.error("%s in etcd is damaged; its pins are lost: %s", key, error)
        quotas = f"{self._prefix}/quota/"
        state.quotas.clear()
        for key, found in self._etcd.under(quotas, 1_000):
            if quota_bytes := decimal(found.value):
                state.quotas[key.removeprefix(quotas)] = quota_bytes
            else:
                log.error("%s in etcd is damaged; the quota is lost", key)

    def write(self, change: LogChange) -> None:
        """Write the change to etcd. After StateNotSaved, it is not and will not be written."""
        head = Head(self._epoch, change.number, self._seals)
        values = {self._head_key: msgspec.json.encode(head)}
        gone: list[tuple[str, str]] = []
        if change.pins is not None:
            values[self._record_key(change.number)] = msgspec.msgpack.encode(change.pins)
        if change.tenant:
            key = f"{self._prefix}/quota/{change.tenant}"
            if change.quota_bytes:
                values[key] = str(change.quota_bytes).encode()
            else:
                gone.append((key, key + "\0"))
        if change.drops_older:
            gone.append((self._record_key(0), self._record_key(change.drops_older)))
        try:
            self._change(values, gone)
            return
        except EtcdRefused as error:
            raise StateNotSaved(f"not saved, and nothing changed: {error}") from error
        except EtcdFailed as error:
            why, is_over = str(error), isinstance(error, EtcdExhausted)
        if not self._was_written(values[self._head_key], change.number, is_over):
            raise StateNotSaved(f"not saved, and nothing changed: {why}")

    def _change(self, values: Mapping[str, bytes], gone: list[tuple[str, str]]) -> None:
        """Write if the head and the leader's key are unchanged; else raise EtcdFailed."""
        expected = {self._head_key: self._revision, self._leader_key: self._leader_revision}
        revision = self._etcd.write_unless_changed(expected, values, {}, gone)
        if not revision:
            raise EtcdFailed("the state in etcd was changed by another process")
        self._revision = revision

    def _was_written(self, head: bytes, number: int, is_over: bool) -> bool:
        """Whether a write without an answer succeeded. If False, the write cannot succeed later.
        `is_over`: etcd reported that it is full, so no seal is needed for this."""
        while True:
            found = self._find_head()
            if found.value == head or found.mod_revision != self._revision:
                self._revision = found.mod_revision
                if _head(found).epoch != self._epoch:
                    raise LeadLost("another directory leads by now: find the leader")
                # A different head is an earlier seal of this leader, whose answer was lost.
                return found.value == head
            if is_over or self._seal(number):
                return False
            self._wait()

    def _seal(self, number: int) -> bool:
        """Write the head, so that a write that compares the earlier head can no longer succeed.
        False: the result is unknown."""
        self._seals += 1
        head = Head(self._epoch, number, self._seals)
        try:
            self._change({self._head_key: msgspec.json.encode(head)}, [])
        except EtcdFailed as error:
            log.warning("result of writing the log's head is unknown, reading it again: %s", error)
            return False
        return True

    def _find_head(self) -> KeyValue:
        return self._patiently(lambda: self._etcd.get(self._head_key))

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Call `ask` until etcd answers. LeadLost: this directory no longer leads."""
        while True:
            try:
                return ask()
            except EtcdFailed as error:
                log.warning("cannot read the log of pins and quotas, retrying: %s", error)
                self._wait()

    def _wait(self) -> None:
        if self._is_closed or not self._may_serve():
            raise LeadLost("this directory does not lead any more: find the leader")
        time.sleep(RETRY_S)

    def _record_key(self, number: int) -> str:
        return f"{self._prefix}/pins/{number:016x}"


def _head(found: KeyValue) -> Head:
    try:
        head = msgspec.json.decode(found.value, type=Head)
    except (msgspec.DecodeError, ValueError) as error:
        log.error("the head of the log in etcd is damaged: %s", error)
        return Head(0, 0)
    return head if 0 <= head.number < NUMBER_MAX else Head(0, 0)
