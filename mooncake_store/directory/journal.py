"""Log of pins and quotas in etcd: written by the leader, read by the next leader.

    PREFIX/state/head          epoch and number of the latest change, written with every change
    PREFIX/state/pins/NUMBER   a record of pins (16 hexadecimal digits; MessagePack)
    PREFIX/state/quota/TENANT  its quota in bytes

A leader first writes the head, so that no write of an earlier leader can succeed after the new
leader has read the log. Every change compares the head and the leader's own key. A directory that
no longer leads therefore changes nothing.

A write without an answer is resolved before any other action. The head shows whether the write
succeeded. If it did not, another write of the head rules out that it succeeds later.

All calls wait for etcd. Not here: the records (core/durable_log.py), the time of each write
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
RETRY_S = 0.05
NUMBER_MAX = 2**62  # upper bound of a change's number; a larger one is damaged
T = TypeVar("T")
PAGE_KEYS = 8  # records per answer of etcd, at most 1 MB each


class Head(msgspec.Struct, frozen=True):
    epoch: int
    number: int  # of the change; 0 with a new epoch: a new leader begins
    seal: int = 0  # count of heads written to rule out a late change


@dataclass
class SavedState:
    """Pins and quotas of the earlier directories."""

    # (number, record), in order of the numbers.
    pins: list[tuple[int, PinRecord]] = field(default_factory=list)
    quotas: dict[str, int] = field(default_factory=dict)
    number: int = 0  # of the latest change


class LeadLost(StoreUnavailable):
    """This directory no longer leads; the change may or may not have been written."""


class StateJournal:
    """For one thread at a time. Raises LeadLost once `may_serve` is false."""

    def __init__(
        self,
        etcd: EtcdClient,
        prefix: str,
        epoch: int,
        leader_revision: int,
        may_serve: Callable[[], bool],
    ) -> None:
        """`prefix` of the election; `leader_revision` of the key that this leader wrote there."""
        self._etcd, self._epoch, self._may_serve = etcd, epoch, may_serve
        self._prefix = f"{prefix}/state"
        self._leader_key, self._leader_revision = f"{prefix}/leader", leader_revision
        self._head_key = f"{self._prefix}/head"
        self._revision = 0  # last known revision of the head
        self._seals = 0
        self._is_closed = False

    def begin(self) -> SavedState:
        """Take the log over from the earlier directory, and read it."""
        state = SavedState()
        while True:
            found = self._find_head()
            self._revision = found.mod_revision
            if found.mod_revision:
                state.number = (head := _head(found)).number
                if head.epoch == self._epoch:  # written by this leader, without an answer
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
        """Write the change to etcd. StateNotSaved: it is not written, and will never be."""
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
        """EtcdFailed also when another process changed the head or leads instead."""
        expected = {self._head_key: self._revision, self._leader_key: self._leader_revision}
        revision = self._etcd.change_unless_changed(expected, values, gone)
        if not revision:
            raise EtcdFailed("the state in etcd was changed by another process")
        self._revision = revision

    def _was_written(self, head: bytes, number: int, is_over: bool) -> bool:
        """Resolve a write without an answer: find out its result, and rule out a late success.
        `is_over`: the write cannot succeed later, and a full etcd would reject a new head."""
        while True:
            found = self._find_head()
            if found.value == head or found.mod_revision != self._revision:
                self._revision = found.mod_revision
                if _head(found).epoch != self._epoch:
                    raise LeadLost("another directory leads by now: find the leader")
                return found.value == head  # otherwise a seal of this leader that was written late
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
            log.warning("the state of the directory is not written: %s", error)
            return False
        return True

    def _find_head(self) -> KeyValue:
        return self._patiently(lambda: self._etcd.get(self._head_key))

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Call `ask` until etcd answers, while this directory leads."""
        while True:
            try:
                return ask()
            except EtcdFailed as error:
                log.warning("reading the state of the directory: %s", error)
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
