"""Lanes of NIXL's transport: what keeps one busy keeps neither memory nor other nodes.

Real agents over TCP and real target processes, some of them frozen.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.segment import Segment
from mooncake_store.records.membership import NicAgent, NodeInfo
from mooncake_store.transports import nixl_lane, nixl_transport
from mooncake_store.transports.nic_transport import MultiNicTransport
from mooncake_store.transports.nixl_agent import AgentDevices, NixlUnavailable
from mooncake_store.transports.nixl_lane import AgentLane, is_reached
from mooncake_store.transports.nixl_transport import LaneFrozen, NixlTransport
from mooncake_store.transports.paths import nic_paths
from mooncake_store.transports.paths.nic_choice import DataNetwork, Interface
from mooncake_store.transports.transport import ByteSpan, TransferBatch, Transport
from tests.mooncake_store.targets import TARGET_BYTES, Target, TargetPool

LOOPBACK = AgentDevices("lo", is_tcp_only=True)
PATIENCE_S = 20.0
SMALL = ByteSpan(0, 4096)
WHOLE = ByteSpan(0, TARGET_BYTES)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlTransport]:
    monkeypatch.setattr(nixl_transport, "_frozen", [])
    try:
        made = NixlTransport(LOOPBACK)
    except NixlUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def start(targets: TargetPool) -> Iterator[Callable[[str], Target]]:
    """Targets that hold sevens."""
    started: list[Target] = []

    def start_one(node_id: str) -> Target:
        target = targets.take(node_id)
        started.append(target)
        with Segment.open(target.path) as segment:
            segment.view[:] = 7
        return target

    yield start_one
    for target in started:
        target.thaw()
        targets.give_back(target)


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        threading.Event().wait(0.005)


def read(transport: Transport, node: NodeInfo, buffer: np.ndarray, deadline_s: float) -> None:
    span = ByteSpan(0, min(buffer.nbytes, TARGET_BYTES))
    transport.read(node, [span], [(buffer, span)], deadline_s)


def registered(transport: NixlTransport, address: int) -> int:
    """How many lanes, those that were given up too, have this memory registered."""
    lanes = [*transport._lanes, *nixl_transport._frozen]
    return sum(region.address == address for lane in lanes for region in lane._registered)


def unread_bytes() -> int:
    """Of all connections of this process, in the kernel."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in own)


def test_nothing_arrives_from_a_lane_that_was_given_up_and_it_keeps_no_memory(
    transport: NixlTransport, start: Callable[[str], Target]
) -> None:
    target, buffer = start("t0"), np.zeros(TARGET_BYTES, np.uint8)
    transport.register(buffer)
    read(transport, target.info, buffer[:4096], PATIENCE_S)
    buffer[:] = 0
    target.freeze()
    until_s = time.monotonic() + PATIENCE_S
    posted = transport.begin(TransferBatch(target.info, [WHOLE], [(buffer, WHOLE)], until_s, True))
    transport.poll(posted)  # so that the request is on its way
    assert transport.freeze("t0")
    with pytest.raises(LaneFrozen):
        transport.poll(posted)
    target.thaw()
    wait_until(lambda: unread_bytes() > 0)
    del posted
    gc.collect()
    assert not buffer.any(), "it arrived when the last reference to the transfer went"
    assert registered(transport, buffer.ctypes.data) == 0
    transport.unregister(buffer)
    transport.check()
    memory = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert memory() is None
    again = np.zeros(4096, np.uint8)
    transport.register(again)
    read(transport, target.info, again, PATIENCE_S)
    assert (again == 7).all()


def test_memory_that_is_unregistered_while_a_lane_is_busy_is_let_go_when_it_is_free(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kept, gone = start("t0"), np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    transport.register(kept)
    transport.register(gone)
    is_in, go_on, real = threading.Event(), threading.Event(), AgentLane._add

    def slow(self: AgentLane, node: NodeInfo) -> str:
        is_in.set()
        assert go_on.wait(PATIENCE_S)
        return real(self, node)

    monkeypatch.setattr(AgentLane, "_add", slow)
    monkeypatch.setattr(nixl_transport, "CONNECT_S_MAX", PATIENCE_S)
    reader = threading.Thread(target=read, args=(transport, target.info, kept, PATIENCE_S))
    reader.start()
    assert is_in.wait(PATIENCE_S)
    transport.unregister(gone)
    assert registered(transport, gone.ctypes.data) == 1, "its lane connects at this moment"
    go_on.set()
    reader.join()
    transport._take_lane(time.monotonic() + PATIENCE_S).release()
    assert (kept == 7).all() and registered(transport, gone.ctypes.data) == 0
    transport.check()


def test_memory_with_a_transfer_in_it_is_let_go_when_that_ends(
    transport: NixlTransport, start: Callable[[str], Target]
) -> None:
    target, buffer = start("t0"), np.zeros(TARGET_BYTES, np.uint8)
    transport.register(buffer)
    read(transport, target.info, buffer[:4096], PATIENCE_S)
    target.freeze()
    with pytest.raises(TransferTimeout):
        read(transport, target.info, buffer, 0.2)
    transport.unregister(buffer)
    transport.check()
    assert registered(transport, buffer.ctypes.data) == 1
    target.thaw()
    wait_until(lambda: not transport.pending_targets())
    assert registered(transport, buffer.ctypes.data) == 0
    transport.check()


def test_a_lane_in_the_middle_of_a_poll_is_not_given_up_before_it_has_ended(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes may arrive until then, however long the machine takes for it."""
    target, buffer = start("t0"), np.zeros(TARGET_BYTES, np.uint8)
    transport.register(buffer)
    read(transport, target.info, buffer[:4096], PATIENCE_S)
    target.freeze()
    until_s = time.monotonic() + PATIENCE_S
    posted = transport.begin(TransferBatch(target.info, [WHOLE], [(buffer, WHOLE)], until_s, True))
    is_in, go_on, real = threading.Event(), threading.Event(), AgentLane.poll

    def slow(self: AgentLane, transfer: nixl_lane.Transfer) -> None:
        is_in.set()
        assert go_on.wait(PATIENCE_S)
        real(self, transfer)

    monkeypatch.setattr(AgentLane, "poll", slow)
    poller = threading.Thread(target=transport.poll, args=(posted,))
    poller.start()
    assert is_in.wait(PATIENCE_S)
    frozen: list[bool] = []
    freezer = threading.Thread(target=lambda: frozen.append(transport.freeze("t0")))
    freezer.start()
    freezer.join(4 * nixl_transport.LOCK_S_MAX)
    assert not posted.lane.is_frozen and not frozen
    go_on.set()
    for thread in (poller, freezer):
        thread.join()
    assert frozen == [True] and posted.lane.is_frozen


def test_a_lane_that_connects_is_given_up_at_once_and_lets_its_memory_go_afterwards(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other, buffer = start("t0"), start("t1"), np.zeros(TARGET_BYTES, np.uint8)
    transport.register(buffer)
    read(transport, silent.info, buffer[:4096], PATIENCE_S)
    buffer[:] = 0
    silent.freeze()
    until_s = time.monotonic() + PATIENCE_S
    batch = TransferBatch(silent.info, [WHOLE], [(buffer, WHOLE)], until_s, True)
    posted = transport.begin(batch)
    is_in, go_on, agent = threading.Event(), threading.Event(), posted.lane._agent

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(agent, name)

        def add_remote_agent(self, metadata: bytes) -> object:
            is_in.set()
            assert go_on.wait(PATIENCE_S)
            return agent.add_remote_agent(metadata)

        def make_connection(self, name: object) -> None:
            raise AssertionError("a call of a frozen agent reads its connections")

    monkeypatch.setattr(posted.lane, "_agent", Slow())
    assert posted.lane.lock.acquire(timeout=PATIENCE_S)

    refusals: list[TransferFailed] = []

    def connect() -> None:
        try:
            posted.lane.connect(other.info)
        except TransferFailed as error:
            refusals.append(error)
        finally:
            posted.lane.release()

    connector = threading.Thread(target=connect)
    connector.start()
    assert is_in.wait(PATIENCE_S)
    assert transport.freeze("t0") and posted.lane.is_frozen
    assert registered(transport, buffer.ctypes.data) == 1, "nobody may call its agent now"
    silent.thaw()
    wait_until(lambda: unread_bytes() > 0)
    go_on.set()
    connector.join()
    assert "t1: its NIXL agent was abandoned" in str(refusals)
    assert registered(transport, buffer.ctypes.data) == 0 and not buffer.any()


def test_a_lane_with_rdma_is_not_frozen_while_another_node_may_write_here(
    transport: NixlTransport, start: Callable[[str], Target]
) -> None:
    """Its card writes without the agent, so a frozen lane would not stop the read."""
    stuck, other = start("t0"), start("t1")
    stuck_buffer, buffer = [np.zeros(TARGET_BYTES, np.uint8) for _ in range(2)]
    posted = []
    for target, each in ((stuck, stuck_buffer), (other, buffer)):
        transport.register(each)
        read(transport, target.info, each[:4096], PATIENCE_S)
    until_s = time.monotonic() + PATIENCE_S
    for target, each in ((stuck, stuck_buffer), (other, buffer)):
        target.freeze()
        batch = TransferBatch(target.info, [WHOLE], [(each, WHOLE)], until_s, True)
        posted.append(transport.begin(batch))
    [lane] = {each.lane for each in posted}
    lane.devices = AgentDevices("lo", is_tcp_only=False)  # as of a card with RDMA
    assert not transport.freeze("t0") and not lane.is_frozen
    other.thaw()
    wait_until(lambda: transport.poll(posted[1]))
    assert (buffer == 7).all()
    assert transport.freeze("t0") and lane.is_frozen


def test_a_lane_knows_transfers_with_an_earlier_incarnation_of_a_node(
    transport: NixlTransport, start: Callable[[str], Target]
) -> None:
    target, buffer = start("t0"), np.zeros(TARGET_BYTES, np.uint8)
    transport.register(buffer)
    read(transport, target.info, buffer[:4096], PATIENCE_S)
    buffer[:] = 0
    target.freeze()
    batch = TransferBatch(
        target.info, [WHOLE], [(buffer, WHOLE)], time.monotonic() + PATIENCE_S, True
    )
    posted = transport.begin(batch)
    assert transport.disconnect("t0")  # as when another incarnation registers
    assert transport.freeze("t0") and posted.lane.is_frozen
    target.thaw()
    wait_until(lambda: unread_bytes() > 0)
    assert not buffer.any()


def test_reads_from_a_healthy_node_go_on_while_others_are_frozen(
    transport: NixlTransport, start: Callable[[str], Target]
) -> None:
    silent, healthy = [start("t0"), start("t1")], start("t2")
    buffers = [np.zeros(TARGET_BYTES, np.uint8) for _ in range(8)]
    mine = np.zeros(TARGET_BYTES, np.uint8)
    for buffer in (*buffers, mine):
        transport.register(buffer)
    read(transport, silent[0].info, mine[:4096], PATIENCE_S)  # the other one is not connected yet
    for target in silent:
        target.freeze()
    ended: list[Exception] = []

    def wait_for(number: int) -> None:
        try:
            read(transport, silent[number % 2].info, buffers[number], 3.0)
        except TransferFailed as error:
            ended.append(error)

    readers = [threading.Thread(target=wait_for, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    reads = 0
    while any(reader.is_alive() for reader in readers):
        mine[:] = 0
        read(transport, healthy.info, mine, PATIENCE_S)
        assert (mine == 7).all()
        reads += 1
    assert reads > 3 and len(ended) == 8
    assert len(transport._lanes) <= nixl_transport.LANES_MAX
    for target in silent:
        target.thaw()
    wait_until(lambda: not transport.pending_targets())
    transport.check()


def read_when_connected(transport: NixlTransport, target: Target, buffer: np.ndarray) -> None:
    """Again when a busy machine took longer than CONNECT_S_MAX to connect."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read(transport, target.info, buffer, PATIENCE_S)
        except TransferFailed as error:
            if "no connection within" not in str(error) or time.monotonic() > until_s:
                raise


def test_a_node_that_is_never_connected_takes_one_lane_and_that_one_is_replaced(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NIXL does for two minutes, when a host swallows what is sent to it."""
    monkeypatch.setattr(nixl_transport, "CONNECT_S_MAX", 0.3)
    silent, healthy = [start(f"t{number}") for number in range(2)], start("t2")
    buffer, go_on, real = np.zeros(4096, np.uint8), threading.Event(), AgentLane._add
    transport.register(buffer)

    def slow(self: AgentLane, node: NodeInfo) -> str:
        if node.node_id == "t2":
            return real(self, node)
        self.adding_since_s = time.monotonic()
        assert go_on.wait(PATIENCE_S)
        self.adding_since_s = float("inf")
        raise TransferFailed("nothing answers")

    monkeypatch.setattr(AgentLane, "_add", slow)
    monkeypatch.setattr(nixl_transport, "LANES_MAX", 2)
    try:
        for _ in range(3):
            for target in silent:
                with pytest.raises(TransferFailed, match=f"{target.node_id}: no connection within"):
                    read(transport, target.info, np.zeros(64, np.uint8), 0.4)
            read_when_connected(transport, healthy, buffer)
            assert (buffer == 7).all()
            buffer[:] = 0
        busy = [lane for lane in transport._lanes if lane.lock.locked()]
        assert len(busy) == 2, "one for each silent node"
    finally:
        go_on.set()
    wait_until(lambda: not any(lane.lock.locked() for lane in transport._lanes))
    transport.check()


def test_a_host_that_does_not_answer_takes_no_lane(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, buffer = start("t0"), np.zeros(4096, np.uint8)
    transport.register(buffer)
    with socket.create_server(("127.0.0.1", 0)) as answering:
        assert is_reached(f"127.0.0.1:{answering.getsockname()[1]}")
    is_in, go_on = threading.Event(), threading.Event()

    def look(address: str, source: str = "") -> bool:
        is_in.set()
        assert go_on.wait(PATIENCE_S)
        return False

    monkeypatch.setattr(nixl_transport, "is_reached", look)
    problems: list[Exception] = []

    def work() -> None:
        try:
            read(transport, target.info, buffer, PATIENCE_S)
        except TransferFailed as error:
            problems.append(error)

    reader = threading.Thread(target=work)
    reader.start()
    assert is_in.wait(PATIENCE_S)
    assert not any(lane.lock.locked() for lane in transport._lanes)
    go_on.set()
    reader.join()
    assert "nothing answers at" in str(problems[0])


def test_a_process_without_room_for_threads_connects_when_it_has_some(
    transport: NixlTransport, start: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, buffer = start("t0"), np.zeros(4096, np.uint8)
    transport.register(buffer)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferFailed, match="t0: cannot connect: can't start"):
            read(transport, target.info, buffer, PATIENCE_S)
    read(transport, target.info, buffer, PATIENCE_S)
    assert (buffer == 7).all()


def test_a_probe_of_a_frozen_node_has_a_deadline_and_is_not_repeated_on_top_of_itself(
    start: Callable[[str], Target], transport: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic_paths, "COOL_DOWN_S", 0.05)
    monkeypatch.setattr(nic_paths, "COOL_DOWN_S_MAX", 0.05)
    target, buffer = start("t0"), np.zeros(4096, np.uint8)
    nic = Interface("lo", ("127.0.0.1",), ("127.0.0.0/8",))
    agent = NicAgent(
        nic="lo",
        agent_name=target.info.agent_name,
        agent_metadata=target.info.agent_metadata,
        addresses=nic.addresses,
        networks=nic.networks,
        port=int(target.info.data_address.rpartition(":")[2]),
    )
    node = replace(target.info, nics=(agent,))
    cards = MultiNicTransport(DataNetwork((nic,)), lambda node: False)
    try:
        cards.register(buffer)
        read(cards, node, buffer, PATIENCE_S)
        target.freeze()
        [route], card = cards.routes(node), cards.card(nic)
        with cards.lock:
            route.path.failed(time.monotonic())
        cards.note_cool_down(route, "its connection broke")
        wait_until(lambda: card.has_late_reads(route.node, cards.scratch))
        due_s = set()

        def has_failed_again() -> bool:
            due_s.add(route.path.probe_s)
            return len(due_s) > 4

        wait_until(has_failed_again)
        assert sum(len(lane.orphans) for lane in card._lanes) == 1
        target.thaw()
        wait_until(lambda: not route.path.is_cooling_down)
        card.check()
    finally:
        target.thaw()
        cards.close()
