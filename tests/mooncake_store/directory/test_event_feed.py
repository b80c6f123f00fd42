"""The feed: whatever is lost on the way, a replica ends up equal to the directory."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.errors import StoreError
from mooncake_store.prefix_index.prefix_index import PrefixIndex
from mooncake_store.records.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    NodeDown,
    Snapshot,
    WorkerDown,
)
from mooncake_store.wire.framing import MessageKind, pack_header
from tests.mooncake_store.directory_thread import DirectoryThread
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info, worker_info
from tests.mooncake_store.processes import DirectoryProcess

pytestmark = pytest.mark.servers

WAIT_S = 20.0


class Replica:
    """A PrefixIndex that follows a feed, as the conductor's does."""

    def __init__(self, address: str, events_address: str) -> None:
        self.index = PrefixIndex()
        self.snapshots = 0
        self.heard: list[Event] = []
        self.changed = threading.Condition()
        self.fails_next = False
        self.feed = EventFeed(address, events_address, self.on_snapshot, self.on_events)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.index.clear()
        for key, nodes in snapshot.holders:
            for node_id in nodes:
                self.index.add_many([key], node_id)
        self.snapshots += 1

    def on_events(self, events: Sequence[Event]) -> None:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("this listener is broken for a moment")
        for event in events:
            if isinstance(event, BlockAdded):
                self.index.add_many([event.key], event.node_id)
            elif isinstance(event, BlockRemoved):
                self.index.remove_many([event.key], event.node_id)
            elif isinstance(event, NodeDown):
                self.index.drop_holder(event.node_id)
        with self.changed:
            self.heard.extend(events)
            self.changed.notify_all()

    def wait_for_event(self, kind: type[Event]) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(isinstance(event, kind) for event in self.heard), WAIT_S
            ), f"no {kind.__name__} in {WAIT_S} s"

    def assert_equal(self, client: DirectoryClient, keys: list[bytes]) -> None:
        """When nothing changes any more, the replica has exactly what the directory has."""
        truth = client.snapshot()
        until_s = time.monotonic() + WAIT_S
        with self.changed:
            while self.feed.position < (truth.epoch, truth.sequence):
                assert time.monotonic() < until_s, self.feed.position
                self.changed.wait(0.01)  # the position moves after the listener was called
        self.index.check()
        known = {key: tuple(self.index.holders(key)) for key in keys if key in self.index}
        assert known == {key: tuple(sorted(nodes)) for key, nodes in truth.holders}
        assert len(self.index) == len(truth.holders)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DirectoryProcess]:
    with DirectoryProcess(tmp_path) as started:
        yield started


def put(client: DirectoryClient, node_id: str, keys: list[bytes], owner: str) -> None:
    slots = client.allocate(node_id, keys, owner, 30.0).slots
    client.commit(
        node_id,
        [
            (key, slot.slot, slot.generation, 1)
            for key, slot in zip(keys, slots, strict=True)
            if slot
        ],
        owner,
        30.0,
    )


def add_node(client: DirectoryClient, node_id: str, incarnation: str, slots: int = 9) -> None:
    client.register_node(node_info(node_id, incarnation, slots))
    client.attach(node_id, "print", BLOCK_BYTES)


def random_step(client: DirectoryClient, rng: random.Random, chains: list[list[bytes]]) -> None:
    node_id, keys = rng.choice(["s0", "s1"]), rng.choice(chains)[: rng.randint(1, 8)]
    chance = rng.random()
    try:
        if chance < 0.55:
            put(client, node_id, keys, "writer")
            client.release("writer")
        elif chance < 0.75:
            client.lookup(keys, "reader", 0.0)
        elif chance < 0.9:
            for places in client.lookup(keys, "reader", 0.0):
                client.drop_copy(keys[0], places[0].node_id, places[0].generation)
        elif chance < 0.97:
            add_node(client, node_id, f"n{rng.randrange(10**9)}")
        else:
            client.deregister_node(node_id, client.nodes()[0].incarnation)
    except (StoreError, IndexError):
        add_node(client, node_id, f"n{rng.randrange(10**9)}")


def test_a_replica_equals_the_directory_when_things_are_quiet(
    process: DirectoryProcess, seed: int
) -> None:
    rng = random.Random(seed)
    chains = [chain(8, name) for name in "abcd"]
    keys = [key for each in chains for key in each]
    with DirectoryClient(process.address, timeout_s=10.0) as client:
        early = Replica(process.address, process.events_address)
        assert early.feed.wait_ready(WAIT_S)
        late = None
        for step in range(600):
            random_step(client, rng, chains)
            if step == 200:
                late = Replica(process.address, process.events_address)
            if step % 100 == 99:
                early.assert_equal(client, keys)
        assert late is not None
        late.assert_equal(client, keys)
        assert early.snapshots < 3, "it lives on events, not on snapshots"
        assert any(isinstance(event, BlockRemoved) for event in early.heard)
        early.feed.close()
        late.feed.close()


def test_a_restarted_directory_is_followed_and_old_blocks_are_forgotten(
    process: DirectoryProcess,
) -> None:
    replica = Replica(process.address, process.events_address)
    keys = chain(5)
    with DirectoryClient(process.address, timeout_s=10.0) as client:
        add_node(client, "s0", "n1")
        put(client, "s0", keys, "writer")
        replica.assert_equal(client, keys)
        assert len(replica.index) == 5
        process.end(signal.SIGKILL)
        process.start()
        replica.assert_equal(client, keys)
        assert len(replica.index) == 0
        add_node(client, "s0", "n1")
        put(client, "s0", keys[:2], "writer")
        replica.assert_equal(client, keys)
        assert len(replica.index) == 2
    replica.feed.close()


def test_a_feed_may_start_before_the_directory(tmp_path: Path) -> None:
    replica = Replica(f"ipc://{tmp_path}/directory", f"ipc://{tmp_path}/events")
    assert not replica.feed.is_current
    assert not replica.feed.wait_ready(0.05)
    with DirectoryProcess(tmp_path):
        assert replica.feed.wait_ready(WAIT_S)
        assert replica.feed.position[0] > 0
        replica.feed.close()


def test_events_that_were_lost_are_noticed_at_the_next_heartbeat(tmp_path: Path) -> None:
    directory = Directory(1, DirectoryConfig(events_max=4))
    thread = DirectoryThread(directory, f"ipc://{tmp_path}/d", f"ipc://{tmp_path}/e")
    server = thread.server
    replica = Replica(server.address, server.events_address)
    assert replica.feed.wait_ready(WAIT_S)
    keys = chain(9)
    with DirectoryClient(server.address) as client:
        add_node(client, "s0", "n1")
        put(client, "s0", keys, "writer")  # nine events at once, and the log keeps four
        replica.assert_equal(client, keys)
    assert len(replica.index) == 9
    assert replica.snapshots >= 2
    replica.feed.close()
    thread.close()


def test_a_listener_that_fails_gets_a_snapshot(process: DirectoryProcess) -> None:
    replica = Replica(process.address, process.events_address)
    assert replica.feed.wait_ready(WAIT_S)
    keys = chain(3)
    with DirectoryClient(process.address) as client:
        replica.fails_next = True
        add_node(client, "s0", "n1")
        put(client, "s0", keys, "writer")
        replica.assert_equal(client, keys)
    assert replica.snapshots >= 2
    replica.feed.close()


def test_garbage_in_the_stream_costs_a_snapshot_and_nothing_else(
    process: DirectoryProcess, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as stream:
        stream.linger = 0
        stream.bind(f"ipc://{tmp_path}/stream")
        replica = Replica(process.address, f"ipc://{tmp_path}/stream")
        assert stream.recv() == b"\x01", "the subscription arrived"
        with DirectoryClient(process.address) as client:
            add_node(client, "s0", "n1")
            for frames in (
                [b"x"],
                [bytes(16), b""],
                [pack_header(MessageKind.EVENTS, 0, version=2), b"\xc0"],
                [pack_header(MessageKind.EVENTS, 0), b"\xc0"],
                [pack_header(MessageKind.HEARTBEAT, 0)],
            ):
                stream.send_multipart(frames)
            put(client, "s0", chain(2), "writer")
            replica.assert_equal(client, chain(2))
        replica.feed.close()


def test_silence_is_announced_after_the_time_that_the_operator_set(tmp_path: Path) -> None:
    with DirectoryProcess(tmp_path, "--node-ttl-s", "0.2", "--worker-ttl-s", "0.2") as process:
        replica = Replica(process.address, process.events_address)
        assert replica.feed.wait_ready(WAIT_S)
        with DirectoryClient(process.address) as client:
            client.register_node(node_info("s0"))
            client.register_worker(worker_info())
            replica.wait_for_event(NodeDown)
            replica.wait_for_event(WorkerDown)
            assert client.nodes() == [] and client.workers() == []
        replica.feed.close()
