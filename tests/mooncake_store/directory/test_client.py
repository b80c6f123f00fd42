"""The client: every verb over the wire, typed errors, deadlines, restarts, threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import FingerprintMismatch, NodeUnknown, RequestInvalid, StoreUnavailable
from mooncake_store.layout import geometry
from mooncake_store.records.blocks import Allocation, Copy, Slot
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info, report, worker_info
from tests.mooncake_store.processes import DirectoryProcess

pytestmark = pytest.mark.servers


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DirectoryProcess]:
    with DirectoryProcess(tmp_path) as started:
        yield started


@pytest.fixture
def client(process: DirectoryProcess) -> Iterator[DirectoryClient]:
    with DirectoryClient(process.address, timeout_s=10.0) as made:
        yield made


def test_the_life_of_blocks_over_the_wire(client: DirectoryClient) -> None:
    info = node_info("s0", slots=4)
    client.register_node(info)
    assert client.node_report("s0", "n1")
    assert client.nodes() == [info]
    assert client.attach("s0", "print", BLOCK_BYTES) == geometry(
        info.segment_bytes, info.unit_bytes
    )
    keys = chain(6)
    allocation = client.allocate("s0", keys, "writer", 30.0)
    assert isinstance(allocation, Allocation) and allocation.full and allocation.covered == 4
    slots = [slot for slot in allocation.slots if slot is not None]
    assert all(isinstance(slot, Slot) for slot in slots) and len(slots) == 4
    blocks = [
        (key, slot.slot, slot.generation, 2**64 - 1)
        for key, slot in zip(keys, slots[:3], strict=False)
    ]
    assert client.commit("s0", blocks, "writer", 30.0) == [True] * 3
    assert client.abandon(slots[3:], "writer") == 1
    found = client.lookup(keys, "reader", 30.0)
    assert found == [
        (Copy(*slot[:3], checksum=2**64 - 1, size_bytes=BLOCK_BYTES),) for slot in slots[:3]
    ]
    assert isinstance(found[0][0], Copy)
    assert len(client.lookup(keys, "reader", 0.0, prefix_only=False)) == 6
    assert client.renew("reader", 30.0)
    assert client.release("writer") and not client.release("writer")
    assert client.drop_copy(keys[2], "s0", slots[2].generation)
    stats = client.stats()
    assert (stats.blocks, stats.leases, stats.nodes[0].ready_blocks) == (2, 3, 2)
    snapshot = client.snapshot()
    assert snapshot.holders == ((keys[0], ("s0",)), (keys[1], ("s0",)))
    assert (snapshot.epoch, snapshot.sequence) == (stats.epoch, stats.sequence)
    assert client.deregister_node("s0", "n1")
    assert client.nodes() == []


def test_the_life_of_a_worker_over_the_wire(client: DirectoryClient) -> None:
    info = worker_info()
    assert not client.worker_report(report())
    client.register_worker(info)
    assert client.worker_report(report())
    assert client.workers() == [info]
    assert client.snapshot().workers == (info,)
    assert client.snapshot().reports == (report(),)
    assert client.deregister_worker("prefill_0", "w1")


def test_errors_arrive_as_the_class_they_were(client: DirectoryClient) -> None:
    with pytest.raises(NodeUnknown, match="storage node s9 is not registered"):
        client.attach("s9", "print", BLOCK_BYTES)
    client.register_worker(worker_info("a"))
    with pytest.raises(FingerprintMismatch, match="weights_id is v2, theirs is v1"):
        client.register_worker(worker_info("b", weights_id="v2"))
    with pytest.raises(RequestInvalid, match="lease_s"):
        client.renew("reader", -1.0)
    with pytest.raises(RequestInvalid, match="length >= 16"):
        client.lookup([b"short"], "reader", 1.0)


def test_a_silent_directory_is_named_with_the_time_that_was_waited(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody"
    with DirectoryClient(address, timeout_s=0.2) as client:
        start_s = time.monotonic()
        with pytest.raises(StoreUnavailable) as refusal:
            client.lookup(chain(1), "reader", 1.0)
        assert time.monotonic() - start_s < 20.0
    assert str(refusal.value) == (
        f"the directory at {address} did not answer lookup within 0.2 s; "
        "is it running, and is the address right?"
    )


def test_a_hung_directory_does_not_hang_its_clients(process: DirectoryProcess) -> None:
    with DirectoryClient(process.address, timeout_s=10.0) as client:
        assert client.nodes() == []
        process.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.process.pid, os.WSTOPPED | os.WNOWAIT)
        client.timeout_s = 0.3
        with pytest.raises(StoreUnavailable):
            client.nodes()
        process.process.send_signal(signal.SIGCONT)
        client.timeout_s = 10.0
        assert client.nodes() == []


def test_a_client_outlives_the_directory(process: DirectoryProcess) -> None:
    with DirectoryClient(process.address, timeout_s=10.0) as client:
        client.register_node(node_info("s0"))
        first_epoch = client.stats().epoch
        process.end(signal.SIGKILL)
        process.start()
        assert client.stats().epoch > first_epoch
        assert not client.node_report("s0", "n1"), "it must register again"


def test_a_request_that_nobody_waits_for_is_not_carried_out_later(tmp_path: Path) -> None:
    with DirectoryClient(f"ipc://{tmp_path}/directory", timeout_s=0.2) as client:
        with pytest.raises(StoreUnavailable):
            client.lookup(chain(1), "reader", 1.0)
        with DirectoryProcess(tmp_path):
            client.timeout_s = 10.0
            assert client.stats().lookups == 0


def test_threads_share_a_client_and_get_their_own_answers(client: DirectoryClient) -> None:
    client.register_node(node_info("s0", slots=40))
    client.attach("s0", "print", BLOCK_BYTES)
    keys = chain(40)
    slots = client.allocate("s0", keys, "writer", 60.0).slots
    client.commit(
        "s0",
        [
            (key, slot.slot, slot.generation, 1)
            for key, slot in zip(keys, slots, strict=True)
            if slot
        ],
        "writer",
        60.0,
    )
    wrong: list[int] = []

    def ask(own: int) -> None:
        for _ in range(50):
            if len(client.lookup(keys[:own], f"reader{own}", 5.0)) != own:
                wrong.append(own)

    threads = [threading.Thread(target=ask, args=(count,)) for count in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_client_says_so(process: DirectoryProcess) -> None:
    client = DirectoryClient(process.address)
    client.close()
    client.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        client.nodes()
