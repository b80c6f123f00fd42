"""Pins and quotas of an elected directory: written to etcd, then executed, then answered.

A separate thread writes one verb after another, while the directory answers all other requests. A
verb that cannot be written is rejected with StateNotSaved and changes nothing. If this directory
loses the lead during a write, the verb is rejected with StoreUnavailable. This verb may still take
effect in the next directory, which is harmless, because pins and quotas can be set again.

Without an election this module is not used, and pins and quotas end with the directory.

Not here: the records (core/durable_log.py), etcd (journal.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.durable_log import DurableLog, LogChange
from mooncake_store.directory.core.holder import Pin
from mooncake_store.directory.journal import SavedState, StateJournal
from mooncake_store.errors import RequestInvalid, StoreError, StoreUnavailable
from mooncake_store.wire.directory_protocol import PinKeys, SetQuota
from mooncake_store.wire.request_reply import Later, Responder

log = logging.getLogger("mooncake_store.directory")
WAITING_MAX = 1_024  # verbs that wait to be written
DurableVerb = PinKeys | SetQuota


class Waiting(NamedTuple):
    verb: DurableVerb
    later: Later


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def restore(
    directory: Directory, state: SavedState, now_s: float, now_ms: Callable[[], int] = wall_ms
) -> DurableLog:
    """Load the state of the earlier directories. Returns the log with their records."""
    known, at_ms = DurableLog(), now_ms()
    for number, record in state.pins:
        known.found(number, record)
    directory.pins.restore(
        (
            struct.unpack(f"{KEY_BYTES}s" * record.entries, record.keys),
            Pin(record.kind),
            [now_s + (until - at_ms) / 1_000 for until in record.until_ms],
        )
        for _, record in state.pins
    )
    for tenant, quota_bytes in state.quotas.items():
        try:
            directory.set_quota(tenant, quota_bytes, now_s)
        except RequestInvalid as error:  # one bad value must not stop every directory
            log.warning("the quota of tenant %s in etcd is left out: %s", tenant, error)
    known.outnumber(state.number)
    if state.pins or state.quotas:
        log.info(
            "restored %d pins and %d quotas of the earlier directory",
            len(directory.pins),
            len(directory.tenants.usage()),
        )
    return known


class DurableVerbs:
    """For one thread, which polls `wakeup` and calls `turn` when `wakeup` is readable."""

    def __init__(
        self,
        directory: Directory,
        journal: StateJournal,
        known: DurableLog,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self.records = known
        self._directory, self._journal, self._now_ms = directory, journal, now_ms
        self._waiting: deque[Waiting] = deque()
        self._rewriting: Iterator[LogChange] | None = None  # the rest of a rewrite of the log
        self._is_rewriting_in_vain = False  # a rewrite failed, and no verb was written since
        self._writing: LogChange | None = None  # the change that the thread is writing
        self._is_verb = False  # True: _writing is the first waiting verb; False: a rewrite
        self._changes: SimpleQueue[LogChange | None] = SimpleQueue()
        self._outcomes: SimpleQueue[StoreError | None] = SimpleQueue()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def take(self, verb: DurableVerb, now_s: float) -> object:
        """The result of the verb, or Later if it must be written first. Raises StoreError."""
        if len(self._waiting) >= WAITING_MAX:
            raise StoreUnavailable(f"{WAITING_MAX} pins and quotas wait to be saved: retry later")
        if not self._waiting:
            self._check(verb)
            if self._writing is None and not self._changes_anything(verb):
                return self._carry_out(verb, now_s)
        later = Later()
        self._waiting.append(Waiting(verb, later))
        if self._writing is None:
            self._write(self._change(verb), is_verb=True)
        return later

    def turn(self, responder: Responder[Any], now_s: float) -> None:
        """Handle finished writes, successful or not, and begin the next write."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        while not self._outcomes.empty():
            error, change, self._writing = self._outcomes.get(), self._writing, None
            assert change is not None
            if error is None:
                self.records.written(change)
            if self._is_verb:
                self._answer(self._waiting.popleft(), error, responder, now_s)
            if error is None:
                self._is_rewriting_in_vain &= not self._is_verb
            elif not self._is_verb:  # harmless, because the written records agree with the old log
                log.warning("the log of pins is not rewritten: %s", error)
                self._rewriting, self._is_rewriting_in_vain = None, True
            self._write_next(responder, now_s)

    def _answer(
        self, waiting: Waiting, error: StoreError | None, responder: Responder[Any], now_s: float
    ) -> None:
        number = waiting.later.number
        try:
            if error is not None:
                raise error
            reply = responder.answered(number, self._carry_out(waiting.verb, now_s))
        except StoreError as refused:
            reply = responder.refused(number, refused)
        except Exception as failed:  # Catch all: one verb must not stop the server
            log.exception("a saved verb failed inside the directory")
            reply = responder.refused(number, StoreError(f"bug in the directory: {failed!r}"))
        waiting.later.resolve(reply)

    def _write_next(self, responder: Responder[Any], now_s: float) -> None:
        """Begin to write the next change of a rewrite. Without a rewrite, begin to write the first
        waiting verb that is still valid."""
        is_too_long = self.records.is_too_long(len(self._directory.pins))
        if self._rewriting is None and is_too_long and not self._is_rewriting_in_vain:
            self._rewriting = self.records.rewritten(self._all_pins(now_s))
        if self._rewriting is not None:
            change = next(self._rewriting, None)
            if change is not None:
                self._write(change, is_verb=False)
                return
            self._rewriting = None
        while self._waiting:
            verb, later = self._waiting[0]
            try:  # earlier verbs may have exhausted the limits
                self._check(verb)
            except StoreError as refused:
                self._waiting.popleft()
                later.resolve(responder.refused(later.number, refused))
            else:
                self._write(self._change(verb), is_verb=True)
                return

    def _write(self, change: LogChange, is_verb: bool) -> None:
        assert self._writing is None, "one change at a time"
        self._writing, self._is_verb = change, is_verb
        self._changes.put(change)

    def _change(self, verb: DurableVerb) -> LogChange:
        if isinstance(verb, SetQuota):
            return self.records.set_quota(verb.tenant, verb.quota_bytes)
        return self.records.pin(verb.keys, verb.kind, self._now_ms() + int(verb.ttl_s * 1_000))

    def _all_pins(self, now_s: float) -> dict[str, Iterable[tuple[bytes, int]]]:
        offset_ms = self._now_ms() - int(now_s * 1_000)
        pins = self._directory.pins
        # Lists, because soft pins may expire before the rewrite is complete.
        hard, soft = list(pins.of(Pin.HARD)), list(pins.of(Pin.SOFT))
        return {
            Pin.HARD.value: ((key, 0) for key, _ in hard),
            Pin.SOFT.value: ((key, offset_ms + int(until_s * 1_000)) for key, until_s in soft),
        }

    def _check(self, verb: DurableVerb) -> None:
        """Raise the error that the directory would raise for this verb."""
        if isinstance(verb, SetQuota):
            self._directory.tenants.check_quota(verb.tenant, verb.quota_bytes)
        else:
            self._directory.pins.checked(verb.keys, verb.kind, verb.ttl_s)

    def _changes_anything(self, verb: DurableVerb) -> bool:
        """False if the verb only removes pins from keys that have none."""
        if isinstance(verb, SetQuota) or verb.kind != Pin.NONE.value:
            return True
        return any(key in self._directory.pins for key in verb.keys)

    def _carry_out(self, verb: DurableVerb, now_s: float) -> object:
        if isinstance(verb, SetQuota):
            self._directory.set_quota(verb.tenant, verb.quota_bytes, now_s)
            return None
        return self._directory.pin(verb.keys, verb.kind, verb.ttl_s, now_s)

    # ---- the thread that waits for etcd

    def _run(self) -> None:
        while (change := self._changes.get()) is not None:
            error: StoreError | None = None
            try:
                self._journal.write(change)
            except StoreError as failed:
                error = failed
            except Exception as failed:  # Catch all: waiting verbs need an answer
                log.exception("writing the log of pins failed")
                error = StoreUnavailable(f"bug in the directory: {failed!r}")
            self._outcomes.put(error)
            os.eventfd_write(self.wakeup, 1)

    def close(self, responder: Responder[Any]) -> None:
        """Reject the waiting verbs, and wait for the write in progress, which may still succeed. No
        other call may follow."""
        self._journal.close()
        gone = StoreUnavailable("this directory does not lead any more: find the leader")
        while self._waiting:
            later = self._waiting.popleft().later
            later.resolve(responder.refused(later.number, gone))
        self._changes.put(None)
        self._thread.join()
        os.close(self.wakeup)
