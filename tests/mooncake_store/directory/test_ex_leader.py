"""What an ex-leader granted: one that was frozen over its TTL, one that believes in itself still.

Real directories, a real node, its real memory. Readers get the right bytes or a miss.

Not here: who leads (test_election.py), being found again (test_elected_directory.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import EpochPassed, StoreUnavailable
from mooncake_store.layout import STATE_READY
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.wire.node_protocol import NodeClient, Restore
from tests.mooncake_store.elected import PATIENCE_S, TTL_S, Elected
from tests.mooncake_store.processes import DirectoryProcess, NodeProcess

BLOCK_BYTES = 64 * 1024
MIB = 2**20
DOOR_S = 5.0  # that a client waits for one that may have closed


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> np.ndarray:
    return np.full(BLOCK_BYTES, number % 251, np.uint8)


class OpenPut:
    """A writer, step by step: what Putter does, with anything in between."""

    def __init__(self, client: DirectoryClient, numbers: range, memory: SlotMemory) -> None:
        self.client, self.numbers, self.memory = client, numbers, memory
        keys = [key(number) for number in numbers]
        client.attach("s0", "store", BLOCK_BYTES)
        self.given = client.allocate("s0", keys, "late", 30.0, size_bytes=BLOCK_BYTES)
        assert None not in self.given.slots, self.given
        self.slots = [slot for slot in self.given.slots if slot is not None]

    def mark(self) -> None:
        for number, slot in zip(self.numbers, self.slots, strict=True):
            header = SlotHeader.writing(slot.generation, key(number), BLOCK_BYTES, 30.0)
            self.memory.write_header(slot.slot, header)

    def fill(self, share: slice) -> None:
        for number, slot in zip(self.numbers, self.slots, strict=True):
            self.memory.payload(slot.slot, BLOCK_BYTES)[share] = content(number)[share]

    def finish(self) -> list[bool]:
        rows = []
        for number, slot in zip(self.numbers, self.slots, strict=True):
            digest = self.memory.checksum(slot.slot, BLOCK_BYTES)
            header = SlotHeader(STATE_READY, slot.generation, key(number), digest, BLOCK_BYTES)
            self.memory.write_header(slot.slot, header)
            rows.append((key(number), slot.slot, slot.generation, digest))
        return self.client.commit("s0", rows, "late", 5.0, epoch=self.slots[0].epoch)


class ElectedSite:
    """Two directories, of which `leader` leads, and a node with little memory."""

    def __init__(
        self, folder: Path, address: str, start: Callable[[str], Elected], *node_options: str
    ) -> None:
        self.address = address
        self.leader = start("a")
        self.leader.wait_ready()
        self.next = start("b")
        self.node = NodeProcess(folder, address, "s0", 4, *node_options)
        self.client = DirectoryClient(address, timeout_s=5.0)
        self.segment = Segment.open(self.node.path)
        shape = self.client.attach("s0", "store", BLOCK_BYTES)
        self.memory = SlotMemory(self.segment.view, shape)

    def change_leader(self) -> int:
        """Freeze the one that leads over its TTL; the epoch of the next, once the node is there."""
        self.leader.freeze()
        epoch = self.next.wait_ready()
        until_s = time.monotonic() + PATIENCE_S
        while not self._is_node_open():
            assert time.monotonic() < until_s, "the next leader does not know the node"
            time.sleep(0.02)  # poll
        return epoch

    def _is_node_open(self) -> bool:
        try:
            nodes = self.client.stats().nodes
        except StoreUnavailable:
            return False
        return bool(nodes) and all(each.is_open for each in nodes)

    def close(self) -> None:
        self.leader.thaw()
        self.client.close()
        self.node.close()
        self.segment.close()


@pytest.fixture
def site(tmp_path: Path, election: str, start: Callable[[str], Elected]) -> Iterator[ElectedSite]:
    made = ElectedSite(tmp_path, election, start, "--mapped-only")
    yield made
    made.close()


def put_all(store: StoreClient, numbers: range) -> dict[int, bool]:
    blocks = [content(number) for number in numbers]
    done = store.put([key(number) for number in numbers], blocks, node_id="s0")
    return dict(zip(numbers, done, strict=True))


def check_reads(store: StoreClient, numbers: range) -> int:
    """Right bytes or a miss; how many were there."""
    found = store.get([key(number) for number in numbers])
    for number, block in zip(numbers, found, strict=True):
        assert block is None or np.array_equal(block, content(number)), f"{number}: wrong bytes"
    return sum(block is not None for block in found)


def test_a_put_that_a_frozen_leader_let_begin_is_refused_and_hurts_nobody(
    site: ElectedSite,
) -> None:
    put = OpenPut(site.client, range(4), site.memory)
    put.mark()
    put.fill(slice(0, BLOCK_BYTES // 2))
    later = site.change_leader()
    assert later > put.slots[0].epoch
    with (
        StoreClient(site.address, "s0", transports="mapped") as store,
        StoreClient(site.address, "s0", transports="mapped", is_verified=False) as unverified,
    ):
        stored = put_all(store, range(100, 180))  # more than fits
        found = [copy for copies in store.stat([key(n) for n in stored]) for copy in copies]
        resting = {slot.slot for slot in put.slots}
        assert len(found) > 20, "the rest of the memory is used"
        assert not resting & {copy.slot for copy in found}, "a slot that rests was given away"
        put.fill(slice(BLOCK_BYTES // 2, BLOCK_BYTES))  # the late writer goes on
        assert put.finish() == [False] * 4
        with pytest.raises(EpochPassed, match=f"{later} leads by now"):
            site.client.renew("late", 5.0, put.slots[0].epoch)
        for reader in (store, unverified):
            assert check_reads(reader, range(100, 180)) == len(found)
            assert check_reads(reader, range(4)) == 0, "a refused commit is found"
    # It says so to whoever asked before it noticed, and has closed its door to who asks later.
    with DirectoryClient(site.leader.address, timeout_s=DOOR_S) as stubborn:
        site.leader.thaw()
        with pytest.raises(StoreUnavailable, match=r"does not lead any more|did not answer"):
            stubborn.lookup([key(0)], "", 0.0)


def test_a_writer_that_did_not_begin_in_time_writes_no_byte(site: ElectedSite) -> None:
    put = OpenPut(site.client, range(4), site.memory)
    assert put.given.begin_s == pytest.approx(TTL_S / 5), "a fifth of the TTL"
    assert site.client.may_write(put.given, "late", 30.0)  # it still leads, however late it is
    site.change_leader()
    put.mark()
    assert not site.client.may_write(put.given, "late", 30.0)
    assert site.client.commit("s0", [(key(0), put.slots[0].slot, 1, 1)], "late", 5.0) == [False]


def test_a_node_restores_nothing_into_slots_of_an_earlier_epoch(
    tmp_path: Path, election: str, start: Callable[[str], Elected]
) -> None:
    options = ("--mapped-only", "--ssd-path", str(tmp_path), "--ssd-bytes", str(16 * MIB))
    site = ElectedSite(tmp_path, election, start, *options, "--ssd-io", "threads")
    try:
        put = OpenPut(site.client, range(1), site.memory)
        (slot,) = put.slots
        restore = Restore(key(0), 0, 1, slot.slot, slot.generation, 1, BLOCK_BYTES)
        (control,) = {info.control for info in site.client.nodes()}
        with NodeClient(control) as node:
            assert node.load([restore], 5.0, slot.epoch) == [False]  # not there, but not refused
            epoch = site.change_leader()
            before = site.memory.header(slot.slot)
            with pytest.raises(EpochPassed, match=f"registered with epoch {epoch}"):
                node.load([restore], 5.0, slot.epoch)
            assert site.memory.header(slot.slot) == before
            assert node.load([restore], 5.0, epoch) == [False]
    finally:
        site.close()


@pytest.mark.servers
def test_two_directories_that_both_believe_to_lead_cost_misses_and_never_wrong_bytes(
    tmp_path: Path, seed: int
) -> None:
    """A machine that was paused, its clocks too: nothing tells it that another leads by now."""
    chance = random.Random(seed)
    (tmp_path / "later").mkdir()
    there = listed = refused = 0
    with (
        DirectoryProcess(tmp_path, "--node-ttl-s", "1000") as paused,
        NodeProcess(tmp_path, paused.address, "s0", 4, "--mapped-only") as node,
        DirectoryProcess(tmp_path / "later") as later,
        DirectoryClient(later.address) as client,
        DirectoryClient(paused.address) as believer,
        Segment.open(node.path) as segment,
    ):
        (info,) = believer.nodes()
        epoch = client.register_node(info)
        shape = client.attach("s0", "store", BLOCK_BYTES)
        memory = SlotMemory(segment.view, shape)
        client.adopt("s0", info.incarnation, memory.blocks(), True, epoch=epoch)
        with (
            StoreClient(paused.address, "s0", transports="mapped") as one,
            StoreClient(later.address, "s0", transports="mapped") as two,
        ):
            for turn in range(40):
                client.node_report("s0", info.incarnation, epoch=epoch)
                store = chance.choice([one, two])
                done = put_all(store, range(turn * 5, turn * 5 + chance.randint(1, 20)))
                refused += not all(done.values())  # its slots hold what the other one wrote
                for reader in (one, two):
                    start = chance.randrange(turn * 5 + 1)
                    numbers = range(start, start + 20)
                    listed += sum(map(bool, reader.stat([key(number) for number in numbers])))
                    there += check_reads(reader, numbers)
        assert believer.stats().epoch < epoch
    assert there > 100 and (there < listed or refused), "they never met in one slot"
