"""Pins and quotas that wait for a journal, while the directory serves everybody else.

Not here: the journal in a real etcd (test_journal.py), a change of leader (test_elected_directory).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core import durable_log, leases
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.durable_log import DurableLog, LogChange, PinRecord
from mooncake_store.directory.core.tenants import TENANTS_MAX
from mooncake_store.directory.durable_verbs import DurableVerbs, restore
from mooncake_store.directory.journal import SavedState, StateJournal
from mooncake_store.errors import StateNotSaved, StoreError, StoreFull, StoreUnavailable
from tests.mooncake_store.directory_thread import DirectoryThread

KEYS = [bytes([number]) * 16 for number in range(8)]


class GatedJournal:
    """Stands where a StateJournal would; each write waits for what becomes of it."""

    def __init__(self) -> None:
        self.asked: queue.Queue[LogChange] = queue.Queue()
        self.outcomes: queue.Queue[StoreError | None] = queue.Queue()
        self.is_closed = False

    def write(self, change: LogChange) -> None:
        self.asked.put(change)
        if (error := self.outcomes.get(timeout=30.0)) is not None:
            raise error

    def close(self) -> None:
        self.is_closed = True
        self.outcomes.put(StoreUnavailable("closed"))


class Served:
    def __init__(self, address: str) -> None:
        self.journal, self.directory = GatedJournal(), Directory(5)
        self.durable = DurableVerbs(
            self.directory, cast(StateJournal, self.journal), DurableLog(), now_ms=lambda: 1_000_000
        )
        events = "tcp://127.0.0.1:*" if address.startswith("tcp") else f"{address}-events"
        self.thread = DirectoryThread(self.directory, address, events, durable=self.durable)
        self.server, self.address = self.thread.server, self.thread.address
        self.pool = ThreadPoolExecutor(4)

    def later(self, verb: str, *arguments: object) -> Future[object]:
        """Asked by a client of its own."""

        def ask() -> object:
            with DirectoryClient(self.address, timeout_s=30.0) as client:
                return getattr(client, verb)(*arguments)

        return self.pool.submit(ask)

    def written(self) -> LogChange:
        """The next change, which is written at once."""
        change = self.journal.asked.get(timeout=30.0)
        self.journal.outcomes.put(None)
        return change

    def close(self) -> None:
        self.thread.close()
        self.pool.shutdown()


@pytest.fixture(params=["unix socket", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    is_tcp = request.param == "tcp"
    made = Served("tcp://127.0.0.1:*" if is_tcp else f"ipc://{tmp_path}/d")
    yield made
    made.close()


def test_a_pin_waits_for_its_write_and_nobody_else_does(served: Served) -> None:
    pin = served.later("pin", KEYS[:2], "soft", 60.0)
    change = served.journal.asked.get(timeout=30.0)
    assert change.pins == PinRecord("soft", (1_060_000,), b"".join(KEYS[:2]))
    with DirectoryClient(served.address, timeout_s=30.0) as client:
        assert client.stats().pins == 0, "carried out before it was saved"
        assert client.lookup(KEYS, "r", 5.0) == []
        quota = served.later("set_quota", "acme", 5)
        assert not pin.done() and not quota.done()
        served.journal.outcomes.put(None)
        assert pin.result(30.0) == [True, True]
        assert served.written().tenant == "acme"
        assert quota.result(30.0) is None
        stats = client.stats()
        assert (stats.pins, stats.tenants) == (2, (("acme", 0, 5),))


def test_what_cannot_be_saved_is_a_typed_error_and_changes_nothing(served: Served) -> None:
    pin = served.later("pin", KEYS, "hard", 0.0)
    served.journal.asked.get(timeout=30.0)
    served.journal.outcomes.put(StateNotSaved("etcd is full"))
    with pytest.raises(StateNotSaved, match="etcd is full"):
        pin.result(30.0)
    assert len(served.directory.pins) == 0
    assert served.durable.records.entries == 0


def test_what_waits_is_checked_again_when_its_turn_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PINS_MAX", 3)
    first = served.later("pin", KEYS[:2], "hard", 0.0)
    served.journal.asked.get(timeout=30.0)
    second = served.later("pin", KEYS[2:4], "hard", 0.0)
    while len(served.durable._waiting) < 2:
        threading.Event().wait(0.01)  # poll
    served.journal.outcomes.put(None)
    assert first.result(30.0) == [True, True]
    with pytest.raises(StoreFull):
        second.result(30.0)
    assert served.journal.asked.empty(), "what is refused was saved"


def test_taking_pins_away_where_there_are_none_is_not_written(served: Served) -> None:
    with DirectoryClient(served.address, timeout_s=30.0) as client:
        assert client.pin(KEYS, "none") == [True] * 8
    assert served.journal.asked.empty()


def test_a_bug_in_a_saved_verb_is_answered_and_stops_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Directory, "set_quota", lambda *_: 1 // 0)
    quota = served.later("set_quota", "acme", 5)
    served.written()
    with pytest.raises(StoreError, match="bug in the directory: ZeroDivisionError"):
        quota.result(30.0)
    pin = served.later("pin", KEYS, "hard", 0.0)
    served.written()
    assert pin.result(30.0) == [True] * 8


def test_who_still_waits_when_the_directory_ends_is_told(served: Served) -> None:
    pin = served.later("pin", KEYS, "hard", 0.0)
    served.journal.asked.get(timeout=30.0)
    served.thread.close()
    with pytest.raises(StoreUnavailable):
        pin.result(60.0)
    assert served.journal.is_closed


def test_a_log_that_is_mostly_out_of_date_is_written_anew_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "SLACK_ENTRIES", 8)
    with DirectoryClient(served.address, timeout_s=30.0) as client:
        for kind in ("soft", "hard"):
            asked = served.later("pin", KEYS[:4], kind, 60.0)
            served.written()
            asked.result(30.0)
        asked = served.later("pin", KEYS[1:4], "none", 0.0)
        last = served.written()
        rewritten = served.journal.asked.get(timeout=30.0)
        assert rewritten.pins == PinRecord("hard", (), KEYS[0])
        assert rewritten.drops_older == rewritten.number == last.number + 1
        assert asked.result(30.0) == [True] * 3 and client.stats().pins == 1
        served.journal.outcomes.put(StateNotSaved("not now"))
        asked = served.later("set_quota", "acme", 5)  # goes on, and tries it again afterwards
        assert served.written().tenant == "acme"
        asked.result(30.0)
        assert served.written().drops_older
        asked = served.later("set_quota", "acme", 0)
        assert served.written().tenant == "acme"
        asked.result(30.0)
    assert served.journal.asked.empty() and served.durable.records.entries == 1


def test_a_new_directory_pins_what_was_left_for_as_long_as_was_left() -> None:
    directory = Directory(5)
    state = SavedState(
        pins=[
            (1, PinRecord("hard", (), KEYS[0] + KEYS[1])),
            (4, PinRecord("soft", (1_000_000, 1_050_000), KEYS[2] + KEYS[3])),
            (5, PinRecord("none", (), KEYS[1])),
            (9, PinRecord("soft", (1_070_000,), KEYS[4] + KEYS[5])),
        ],
        quotas={"acme": 5},
        number=12,
    )
    log = restore(directory, state, now_s=0.0, now_ms=lambda: 1_020_000)
    assert log.pin([KEYS[7]], "hard", 0).number == 13
    directory.tick(0.0)
    directory.check()
    assert directory.stats(0.0).tenants == (("acme", 0, 5),)
    assert [key in directory.pins for key in KEYS[:6]] == [True, False, False, True, True, True]
    directory.tick(30.0)
    assert [key in directory.pins for key in KEYS[:6]] == [True, False, False, False, True, True]
    directory.tick(50.0)
    assert len(directory.pins) == 1
    directory.check()


def test_more_quotas_in_etcd_than_a_directory_takes_do_not_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = Directory(5)
    caplog.set_level("INFO")
    restore(directory, SavedState(quotas={f"t{n}": 1 for n in range(TENANTS_MAX + 1)}), 0.0)
    assert len(directory.stats(0.0).tenants) == TENANTS_MAX
    assert f"t{TENANTS_MAX} in etcd is left out" in caplog.text
    assert f"restored 0 pins and {TENANTS_MAX} quotas" in caplog.text
    directory.check()
