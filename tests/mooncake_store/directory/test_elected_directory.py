"""Directories that are elected through a real etcd: killed, frozen, and found again by clients.

Not here: the election alone (test_election.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.directory.__main__ import main
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import NoLeader, leader_at, parse_address
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.errors import StoreUnavailable
from mooncake_store.records.events import Event, NodeUp, Snapshot
from tests.mooncake_store.elected import PATIENCE_S, TTL_S, Elected, until_answered, when_led
from tests.mooncake_store.etcd_process import EtcdProcess
from tests.mooncake_store.makers import node_info
from tests.mooncake_store.processes import NodeProcess

LATE = 2_000_000_000_000  # an epoch of the year 2033


class Heard:
    """A feed's listener: which nodes it knows."""

    def __init__(self) -> None:
        self.epoch = -1
        self.nodes: set[str] = set()
        self._changed = threading.Condition()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        with self._changed:
            self.epoch, self.nodes = snapshot.epoch, {info.node_id for info in snapshot.nodes}
            self._changed.notify_all()

    def on_events(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.nodes |= {event.info.node_id for event in events if isinstance(event, NodeUp)}
            self._changed.notify_all()

    def wait(self, epoch: int, nodes: set[str]) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: (self.epoch, self.nodes) == (epoch, nodes), PATIENCE_S
            )


def test_a_killed_leader_is_replaced_and_clients_and_feeds_find_the_next(
    start: Callable[[str], Elected], election: str
) -> None:
    first = start("a")
    epoch = first.wait_ready()
    second = start("b")
    heard = Heard()
    with DirectoryClient(election, timeout_s=5.0) as client:
        when_led(lambda: client.register_node(node_info("s0")))
        feed = EventFeed(election, "", heard.on_snapshot, heard.on_events, timeout_s=0.5)
        try:
            assert heard.wait(epoch, {"s0"})
            first.process.send_signal(signal.SIGKILL)
            later = second.wait_ready()
            assert later > epoch
            assert until_answered(client) == later
            is_known = when_led(lambda: client.node_report("s0", "n1"))
            assert not is_known, "the new one must ask nodes to register"
            when_led(lambda: client.register_node(node_info("s0")))
            assert heard.wait(later, {"s0"})
        finally:
            feed.close()
    assert leader_at(election).address == second.address


@pytest.mark.parametrize("is_lost", [False, True], ids=["etcd counts on", "etcd lost its count"])
def test_blocks_outlive_the_leader_that_stored_them(
    start: Callable[[str], Elected], election: str, tmp_path: Path, is_lost: bool
) -> None:
    etcd, prefix = parse_address(election)
    if is_lost:
        etcd.write_unless_changed({}, {f"{prefix}/epoch": b"%d" % LATE}, {}, [])
    first = start("a")
    epoch = first.wait_ready()
    assert (epoch == LATE + 1) == is_lost
    second = start("b")
    node = NodeProcess(tmp_path, election, "s0", 8, "--mapped-only")
    try:
        keys = [bytes([number]) * 16 for number in range(8)]
        blocks = [np.full(4096 * (i + 1), i + 1, np.uint8) for i in range(8)]
        with StoreClient(election, "s0", transports="mapped") as client:
            assert client.put(keys, blocks) == [True] * 8
            if is_lost:
                etcd.write_unless_changed({}, {}, {}, [(f"{prefix}/epoch", f"{prefix}/epoci")])
            first.process.send_signal(signal.SIGKILL)
            assert (second.wait_ready() < epoch) == is_lost
            until_s = time.monotonic() + PATIENCE_S
            found: list[np.ndarray | None] = []
            while len(found) != 8 or any(block is None for block in found):
                assert time.monotonic() < until_s, "the next leader does not know the blocks"
                with contextlib.suppress(StoreUnavailable):
                    found = client.get(keys)
                time.sleep(0.02)  # poll
        for block, wanted in zip(found, blocks, strict=True):
            assert block is not None and np.array_equal(block, wanted)
    finally:
        node.close()


def test_pins_and_quotas_outlive_the_leader_that_was_told_of_them(
    start: Callable[[str], Elected], election: str
) -> None:
    hard, soft, taken_back = (bytes([number]) * 16 for number in range(3))
    first = start("a")
    epoch = first.wait_ready()
    second = start("b")
    with DirectoryClient(election, timeout_s=5.0) as client:
        assert client.pin([hard, taken_back], "hard") == [True, True]
        assert client.pin([soft], "soft", 600.0) == [True]
        assert client.pin([taken_back], "none") == [True]
        client.set_quota("acme", 5_000_000)
        client.set_quota("gone", 1_000)
        client.set_quota("gone", 0)
        for one, _ in ((first, second), (second, first)):
            one.process.send_signal(signal.SIGKILL)
            epoch = until_answered(client, epoch)
            stats = client.stats()
            assert stats.pins == 2 and stats.tenants == (("acme", 0, 5_000_000),)
            start(f"c{epoch}")
        client.pin([hard, soft], "none")
        client.set_quota("acme", 0)
        stats = client.stats()
        assert stats.pins == 0 and stats.tenants == ()


def test_a_leader_that_ends_cleanly_hands_over_at_once(
    start: Callable[[str], Elected], election: str
) -> None:
    first = start("a")
    first.wait_ready()
    second = start("b")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(timeout=PATIENCE_S) == 0
    second.wait_ready()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=PATIENCE_S) == 0
    with pytest.raises(NoLeader):
        leader_at(election)


def test_a_frozen_leader_that_thaws_answers_nothing_and_waits_its_turn(
    start: Callable[[str], Elected], election: str
) -> None:
    first = start("a")
    epoch = first.wait_ready()
    second = start("b")
    with (
        DirectoryClient(first.address, timeout_s=PATIENCE_S) as stubborn,
        DirectoryClient(election, timeout_s=0.5) as client,
    ):
        stubborn.register_node(node_info("s0"))
        first.freeze()
        said: list[object] = []

        def ask() -> None:  # waits in the frozen leader's socket
            try:
                said.append(stubborn.node_report("s0", "n1"))
            except StoreUnavailable as error:
                said.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        later = second.wait_ready()
        assert later > epoch and until_answered(client) == later
        first.thaw()
        asking.join(timeout=2 * PATIENCE_S)
        assert [type(answer) for answer in said] == [StoreUnavailable], said
        assert "does not lead any more" in str(said[0])
        second.process.send_signal(signal.SIGKILL)  # and it can lead again, under a new epoch
        assert first.wait_ready() > later


def test_a_hung_etcd_ends_service_and_a_later_epoch_resumes_it(
    start: Callable[[str], Elected], election: str, etcd: EtcdProcess
) -> None:
    only = start("a")
    epoch = only.wait_ready()
    with DirectoryClient(only.address, timeout_s=0.2) as stubborn:
        etcd.freeze()
        frozen_s = time.monotonic()
        try:
            until_s = frozen_s + PATIENCE_S
            while True:  # it answers at first, for less than its TTL, or is late
                try:
                    stubborn.stats()
                except StoreUnavailable:
                    if time.monotonic() > frozen_s + TTL_S:
                        break
                assert time.monotonic() < until_s, "it serves without its lease"
        finally:
            etcd.thaw()
        assert only.wait_ready() > epoch
        assert until_answered(stubborn) > epoch


def test_an_address_that_clients_cannot_reach_must_be_replaced(
    capsys: pytest.CaptureFixture[str], election: str
) -> None:
    arguments = ["--address", "tcp://0.0.0.0:7001", "--events", "tcp://0.0.0.0:7002"]
    assert main([*arguments, "--etcd", election]) == 1
    assert "set --advertise ADDRESS,EVENTS" in capsys.readouterr().err
    assert main([*arguments, "--etcd", "127.0.0.1:2379"]) == 1
    assert "use etcd://HOST:PORT" in capsys.readouterr().err
