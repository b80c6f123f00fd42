"""A drained host has nothing that others lack: over a real directory and real storage nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from backends.cluster.cluster_file import parse
from backends.cluster.drain import HostDrain, Left, move_requests
from backends.workers.protocol import DrainWorker, WorkerInbox, WorkerMessage, decode_message
from mooncake_store.cli.serving import StoreProcesses
from mooncake_store.client.client import StoreClient, key_of
from tests.backends.cluster.fleet_text import THREE_HOSTS
from tests.e2e.server import wait_until
from tests.mooncake_store.makers import worker_info

pytestmark = pytest.mark.servers
KIB = 1 << 10
BLOCKS = 40
THREE_NODES = ("a0", "a1", "b0")  # two of them on host a


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, 64 * KIB, np.uint8)


def key(number: int) -> bytes:
    return key_of(f"block {number}")


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreProcesses]:
    ssd_bytes = getattr(request, "param", 0)
    processes = StoreProcesses(
        tmp_path / "s",
        list(THREE_NODES),
        16 << 20,
        tmp_path / "ssd",
        ssd_bytes,
        [],
        ["--mapped-only"] if not ssd_bytes else ["--mapped-only", "--ssd-io", "threads"],
    )
    try:
        processes.start()
        yield processes
    finally:
        processes.stop()


def drained(address: str, deadline_s: float = 60.0) -> tuple[Left, list[str]]:
    said: list[str] = []
    deployment = parse(THREE_HOSTS)
    with closing(HostDrain(deployment, "a", address)) as draining:
        return draining.run(0.0, deadline_s, said.append), said


def test_blocks_that_only_this_host_has_are_copied_to_another_one(store: StoreProcesses) -> None:
    with StoreClient(store.address) as client:
        for number in range(BLOCKS):
            client.put([key(number)], [content(number)], THREE_NODES[number % 3])
        both = [key(number) for number in range(0, BLOCKS, 3)]  # on both nodes of the host
        assert all(client.change_replica(both, add=["a1"]))
        left, said = drained(store.address)
        assert left.is_empty and "blocks are on a alone" in said[0]
        with closing(HostDrain(parse(THREE_HOSTS), "a", store.address)) as draining:
            assert draining.requests() == 0
        for child in store.children:
            if child.name in ("a0", "a1"):
                child.terminate()
                assert child.finish(20.0)
        found = client.get([key(number) for number in range(BLOCKS)])
        for number, array in enumerate(found):
            assert array is not None, f"block {number} is lost"
            assert (array == content(number)).all(), f"block {number} is another one"


def test_a_drained_host_gets_no_new_blocks_until_that_is_undone(store: StoreProcesses) -> None:
    with StoreClient(store.address) as client:
        drained(store.address)
        assert client.put([key(1), key(2)], [content(1)] * 2, "a0") == [False, False]
        assert set(client.directory.place([key(n) for n in range(50)])) == {"b0"}
        with closing(HostDrain(parse(THREE_HOSTS), "a", store.address)) as draining:
            draining.undo()
        assert client.put([key(99)], [content(99)], "a0") == [True]


def test_workers_that_are_about_to_end_are_told_to_move_their_requests_and_no_others(
    store: StoreProcesses, tmp_path: Path
) -> None:
    heard: SimpleQueue[tuple[str, WorkerMessage]] = SimpleQueue()

    def hear(name: str, messages: list[WorkerMessage]) -> None:
        for message in messages:
            heard.put((name, message))

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(StoreClient(store.address))
        for name in ("prefill_a_0", "prefill_b_0"):
            inbox = WorkerInbox(
                f"ipc://{tmp_path}/{name}", decode_message, partial(hear, name), "of this launch"
            )
            stack.callback(inbox.close)
            known = replace(worker_info(), worker_id=name, inbox=inbox.address)
            client.directory.register_worker(known)
        moved = DrainWorker(is_on=True, moves=True)
        move_requests(store.address, {"prefill_a_0"}, "of this launch")
        assert heard.get(timeout=60.0) == ("prefill_a_0", moved)
        move_requests(store.address, {"prefill_a_0"}, "of another launch")
        move_requests(store.address, {"prefill_b_0"}, "of this launch")
        assert heard.get(timeout=60.0) == ("prefill_b_0", moved)
        assert heard.empty(), "who does not know the secret is not heard"


def test_where_no_directory_answers_nobody_waits_to_be_told(tmp_path: Path) -> None:
    move_requests(f"ipc://{tmp_path}/directory", {"prefill_a_0"}, "")


def test_what_others_have_no_room_for_is_counted(store: StoreProcesses) -> None:
    with StoreClient(store.address) as client:
        many = list(range(2, 200))
        client.directory.pin([key(number) for number in many], "hard")
        for number in many:
            client.put([key(number)], [content(number)], "b0")
        pinned = sum(client.exist([key(number) for number in many]))
        assert pinned > 100
        for number in range(1_000, 1_150):
            client.put([key(number)], [content(number)], "a0")
        left, _ = drained(store.address, 10.0)
        assert left.blocks > 0 and not left.is_empty


@pytest.mark.parametrize("store", [32 << 20], indirect=True)
def test_blocks_that_are_on_its_ssd_only_are_copied_too(store: StoreProcesses) -> None:
    """Restored by its node, and from there pulled."""

    def nodes_of(client: StoreClient, number: int) -> set[str]:
        return {copy.node_id for copy in client.stat([key(number)])[0]}

    with StoreClient(store.address) as client:
        numbers = list(range(240))  # 15 of the 16 MiB of its DRAM: the oldest go to the SSD ahead
        for number in numbers:
            client.put([key(number)], [content(number)], "a0")
        spilled = wait_until(
            lambda: [n for n in numbers if nodes_of(client, n) == {"a0", "a0/ssd"}],
            "blocks on the SSD",
        )
        assert all(client.change_replica([key(number) for number in spilled], drop=["a0"]))
        assert nodes_of(client, spilled[0]) == {"a0/ssd"}
        left, _ = drained(store.address)
        assert left.blocks == sum("b0" not in nodes_of(client, number) for number in numbers)
        lost = [number for number in spilled if "b0" not in nodes_of(client, number)]
        assert not lost, left
