"""Spilling: what reaches the SSD is the block that was meant, or nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import StoreUnavailable
from mooncake_store.layout import STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.node import spiller as spiller_module
from mooncake_store.node.spiller import DELAY_S_MAX, IDLE_S, Spiller
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.ssd.entries import SsdShape
from mooncake_store.ssd.ssd_tier import BlockJob, LoadOutcome, SsdTier
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.pages import pages

BLOCK = 5_000
SEGMENT_BYTES, SSD_BYTES = 64 * 4096, 256 * 4096
KEYS = [bytes([i]) * 16 for i in range(12)]


class World:
    """A directory, a segment with blocks, an SSD tier and the spiller between them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.directory = InProcessDirectory()
        self.directory.directory = Directory(epoch=1, config=DirectoryConfig(spill_fraction=0.001))
        self.directory.up(NodeInfo("s0", "a", "h", "", SEGMENT_BYTES, "", b"", 0))
        self.directory.up(NodeInfo("s0/ssd", "a", "h", "", SSD_BYTES, "", b"", 0, tier="ssd"))
        self.directory.attach("s0", "print", BLOCK)
        self.chance = np.random.default_rng(seed)
        shape = geometry(SEGMENT_BYTES, 4096)
        self.memory = SlotMemory(pages(SEGMENT_BYTES), shape)
        self.tier = SsdTier(str(folder), "s0", SsdShape(4096, SSD_BYTES), self.memory.view)
        self.spiller = Spiller(
            "s0",
            "a",
            self.directory,
            self.memory,
            lambda: self.tier,  # type: ignore[arg-type]
        )

    def store(self, keys: Sequence[bytes], has_checksum: bool = True) -> list[int]:
        """Blocks as a writer stores them; their slots."""
        given = self.directory.allocate("s0", keys, "w", 60.0, size_bytes=BLOCK)
        places = []
        for key, slot in zip(keys, given.slots, strict=True):
            assert slot is not None
            digest = self.fill(slot.slot, slot.generation, key, has_checksum)
            row = (key, slot.slot, slot.generation, digest)
            assert self.directory.commit("s0", [row], "w", 0.0) == [True]
            places.append(slot.slot)
        return places

    def fill(self, slot: int, generation: int, key: bytes, has_checksum: bool = True) -> int:
        self.memory.write_header(slot, SlotHeader(STATE_WRITING, generation, key, 0, BLOCK))
        start = self.memory.shape.slot_offset_bytes(slot)
        payload = self.chance.integers(0, 256, BLOCK, np.uint8)
        self.memory.view[start : start + BLOCK] = payload
        digest = xxhash.xxh3_64_intdigest(payload.data) if has_checksum else 0
        self.memory.write_header(slot, SlotHeader(STATE_READY, generation, key, digest, BLOCK))
        return digest

    def on_ssd(self) -> dict[bytes, Copy]:
        found = self.directory.lookup(KEYS, "x", 0.0, prefix_only=False)
        return {
            key: copy
            for key, copies in zip(KEYS, found, strict=True)
            for copy in copies
            if copy.node_id == "s0/ssd"
        }

    def check(self) -> None:
        """The directory lists what the manifest lists, and nothing is left leased."""
        self.directory.directory.check()
        self.tier.manifest.check()
        listed = {(copy.slot, copy.generation, copy.checksum) for copy in self.on_ssd().values()}
        entries = self.tier.manifest.table.entries()
        assert listed <= {(e.slot, e.generation, e.checksum) for e in entries}
        assert self.directory.stats().leases == 0
        jobs = [BlockJob(entry, self.memory.shape.slot_offset_bytes(60)) for entry in entries]
        for job in jobs:  # one after the other to one place
            assert self.tier.load([job], time.monotonic() + 20) == [LoadOutcome.WHOLE]


@pytest.fixture
def world(tmp_path: Path, seed: int) -> Iterator[World]:
    made = World(tmp_path, seed)
    yield made
    made.spiller.close()
    made.tier.close()


def test_cold_blocks_get_a_copy_on_the_ssd_and_nothing_stays_leased(world: World) -> None:
    world.store(KEYS)
    assert world.spiller.step() is False, "fewer than a batch: nothing more to do now"
    assert set(world.on_ssd()) == set(KEYS) and world.spiller.counters.spilled_blocks == len(KEYS)
    asked = len(world.directory.asked)
    assert world.spiller.step() is False
    assert world.directory.asked[asked:] == ["take_spills"], "nothing is spilled twice"
    world.check()


def test_a_block_that_is_corrupt_in_dram_is_not_spilled(world: World) -> None:
    slots = world.store(KEYS[:3])
    world.memory.view[world.memory.shape.slot_offset_bytes(slots[1])] ^= 1
    world.spiller.step()
    assert set(world.on_ssd()) == {KEYS[0], KEYS[2]} and world.spiller.counters.spills_given_up == 1
    world.check()


def test_a_block_that_was_stored_without_a_checksum_gets_one(world: World) -> None:
    world.store(KEYS[:2], has_checksum=False)
    world.spiller.step()
    assert all(copy.checksum for copy in world.on_ssd().values()) and len(world.on_ssd()) == 2
    world.check()


def test_a_slot_that_gets_a_new_owner_while_the_disk_reads_it_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = world.store(KEYS[:3])
    really_write = world.tier.write

    def overtaken(jobs: Sequence[BlockJob]) -> list[bool]:
        written = really_write(jobs)
        world.fill(slots[2], 10**15, b"somebody else's.")
        return written

    monkeypatch.setattr(world.tier, "write", overtaken)
    world.spiller.step()
    assert set(world.on_ssd()) == {KEYS[0], KEYS[1]}
    assert len(world.tier.manifest.table) == 2 and world.spiller.counters.spills_given_up == 1
    world.check()


def test_a_slot_that_had_a_new_owner_before_is_not_even_written(world: World) -> None:
    slots = world.store(KEYS[:3])
    world.memory.write_header(slots[0], SlotHeader(STATE_WRITING, 10**15, KEYS[9], 0, BLOCK))
    world.spiller.step()
    assert set(world.on_ssd()) == {KEYS[1], KEYS[2]}
    world.check()


def test_a_full_disk_gives_all_slots_back_and_asks_for_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(KEYS[:3])
    with monkeypatch.context() as patch:
        patch.setattr(world.tier, "write", lambda jobs: [False] * len(jobs))
        world.spiller.step()
    assert world.on_ssd() == {} and world.spiller.counters.spills_given_up == 3
    world.check()
    world.tier._close_for_writing(OSError("full"))
    asked = len(world.directory.asked)
    assert world.spiller.step() is False and len(world.directory.asked) == asked
    world.tier._closed_until_s = 0.0
    world.spiller.step()
    assert len(world.on_ssd()) == 3
    world.check()


def test_a_commit_that_is_refused_counts_as_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(KEYS[:3])
    monkeypatch.setattr(
        world.directory.directory, "commit", lambda *a, **k: [False] * len(a[1]), raising=True
    )
    world.spiller.step()
    assert world.on_ssd() == {} and world.spiller.counters.spills_given_up == 3


def test_a_spiller_whose_offers_are_all_refused_rests_longer_and_longer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spiller_module, "BLOCKS_MAX", 4)
    world.store(KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(world.tier.manifest, "make_room", lambda slots: [False for _ in slots])
        delays_s = []
        for _ in range(10):
            assert world.spiller.step() is False, "a full batch, but in vain"
            delays_s.append(world.spiller.delay_s)
    assert delays_s[:3] == [2 * IDLE_S, 4 * IDLE_S, 8 * IDLE_S] and delays_s[-1] == DELAY_S_MAX
    assert world.spiller.step() is True and world.spiller.delay_s == IDLE_S
    while world.spiller.step():
        pass
    assert set(world.on_ssd()) == set(KEYS)
    world.check()


def test_a_directory_that_dies_midway_costs_nothing_that_an_inventory_does_not_bring_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(KEYS[:3])
    really_keep = world.tier.keep

    def dies(entries: Sequence[object]) -> bool:
        world.directory.is_down = True
        return really_keep(entries)  # type: ignore[arg-type]

    monkeypatch.setattr(world.tier, "keep", dies)
    with pytest.raises(StoreUnavailable):
        world.spiller.step()
    assert {entry.key for entry in world.tier.manifest.table.entries()} == set(KEYS[:3])


def test_its_thread_ends_when_told(world: World) -> None:
    world.store(KEYS)
    world.spiller.start()
    until_s = time.monotonic() + 30
    while len(world.on_ssd()) < len(KEYS):
        assert time.monotonic() < until_s
    world.spiller.close()
    world.spiller.close()
    world.check()
