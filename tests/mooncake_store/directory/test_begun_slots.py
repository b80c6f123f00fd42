"""When a client may write what it was granted: in time, or after it has asked once more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.records.blocks import Allocation
from tests.mooncake_store.directory_thread import DirectoryThread
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info

BEGIN_S = 1_000.0  # whoever begins in a test is in time, unless the test makes it late


class ServedDirectory:
    def __init__(self) -> None:
        self.thread = DirectoryThread(Directory(5, begin_s=BEGIN_S))
        self.stop = self.thread.stop
        self.client = DirectoryClient(self.thread.address, timeout_s=30.0)
        self.client.register_node(node_info("s0"))
        self.client.attach("s0", "print", BLOCK_BYTES)

    def granted(self, is_late: bool) -> Allocation:
        given = self.client.allocate("s0", chain(2), "w", 60.0)
        assert given.begin_s == BEGIN_S and given.asked_s > 0.0
        return replace(given, asked_s=given.asked_s - 2 * BEGIN_S) if is_late else given

    def close(self) -> None:
        self.thread.close()
        self.client.close()


@pytest.fixture
def served() -> Iterator[ServedDirectory]:
    made = ServedDirectory()
    yield made
    made.close()


def test_who_is_in_time_asks_nobody(served: ServedDirectory) -> None:
    given = served.granted(is_late=False)
    served.stop()
    assert served.client.may_write(given, "w", 60.0)


def test_who_slept_is_late_however_little_the_monotonic_clock_saw(
    served: ServedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, clock = served.granted(is_late=False), time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 2 * BEGIN_S)
    assert served.client.may_write(given, "w", 60.0), "it asks, and the same directory leads"
    served.stop()
    served.client.timeout_s = 0.2
    assert not served.client.may_write(given, "w", 60.0)


def test_who_is_late_goes_on_where_the_same_directory_leads(served: ServedDirectory) -> None:
    given = served.granted(is_late=True)
    assert served.client.may_write(given, "w", 60.0)
    served.client.release("w")  # or the lease ran out
    assert not served.client.may_write(given, "w", 60.0)


def test_who_is_late_and_finds_another_epoch_writes_nothing(served: ServedDirectory) -> None:
    given = served.granted(is_late=True)
    served.thread.server.directory.epoch = 6
    assert not served.client.may_write(given, "w", 60.0)
    slot = given.slots[0]
    assert slot is not None and slot.epoch == 5
    rows = [(chain(1)[0], slot.slot, slot.generation, 1)]
    assert served.client.commit("s0", rows, "w", 60.0, epoch=slot.epoch) == [False]


def test_who_is_late_and_hears_nothing_writes_nothing(served: ServedDirectory) -> None:
    given = served.granted(is_late=True)
    served.stop()
    served.client.timeout_s = 0.2
    assert not served.client.may_write(given, "w", 60.0)


def test_where_nobody_is_elected_there_is_no_hurry(served: ServedDirectory) -> None:
    served.thread.server.directory.begin_s = 0.0
    given = served.client.allocate("s0", chain(2), "w", 60.0)
    assert (given.begin_s, given.asked_s) == (0.0, 0.0)
    served.stop()
    assert served.client.may_write(given, "w", 60.0)
