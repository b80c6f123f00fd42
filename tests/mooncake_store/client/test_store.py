"""The worker's door: put, read, fetch; corrupt copies and dead nodes are misses, never errors."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import NodeUnknown, StoreUnavailable
from mooncake_store.layout import HEADER_BYTES, STATE_READY, geometry
from mooncake_store.memory.buffers import checksum
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.node.registration import Registration
from mooncake_store.records.blocks import Copy
from tests.mooncake_store.client.world import (
    BLOCK,
    DEADLINE_S,
    LAYOUT,
    PAGES,
    SEGMENT_BYTES,
    World,
    choose,
    content,
    keys_of,
    put,
)


def pages(chance: random.Random, count: int) -> list[int]:
    return [page * BLOCK for page in chance.sample(range(PAGES), count)]


def test_blocks_put_on_one_node_are_read_bytewise_equal_from_both(world: World, seed: int) -> None:
    keys, chance = keys_of(20, seed), random.Random(seed)
    writer, pool = world.store("s0")
    reader, other_pool = world.store("s1")
    put(writer, keys)
    for store, buffer in ((writer, pool), (reader, other_pool)):
        found = store.lookup(keys, "reader", 60.0)
        assert len(found) == len(keys)
        offsets = pages(chance, len(keys))
        assert all(store.read(choose(found, "s0"), buffer, offsets, DEADLINE_S))
        for key, offset in zip(keys, offsets, strict=True):
            assert np.array_equal(buffer[offset : offset + BLOCK], content(key))
    remote = "nixl" if world.transports == "auto" else world.transports
    assert reader.counters()[remote].read_bytes == len(keys) * BLOCK
    own = "mapped" if world.transports == "auto" else world.transports
    assert writer.counters()[own].read_bytes == len(keys) * BLOCK


def test_single_layers_land_in_their_place_and_are_verified(world: World, seed: int) -> None:
    keys = keys_of(4, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    size = LAYOUT.layer_bytes
    digests = [checksum(content(key)[at * size :][:size]) for key in keys for at in (1, 2)]
    offsets = [2 * BLOCK, 0, 5 * BLOCK, 3 * BLOCK]
    arrived = reader.read(copies, pool, offsets, DEADLINE_S, range(1, 3), digests)
    assert arrived == [True] * 4
    for key, offset in zip(keys, offsets, strict=True):
        assert np.array_equal(pool[offset + size : offset + BLOCK], content(key)[size:])
        assert not pool[offset : offset + size].any()
    assert not pool[BLOCK : 2 * BLOCK].any()
    digests[3] ^= 1  # layer 2 of block 1
    arrived = reader.read(copies, pool, offsets, DEADLINE_S, range(1, 3), digests)
    assert arrived == [True, False, True, True]


def test_a_corrupt_copy_is_a_miss_and_the_directory_drops_it(world: World, seed: int) -> None:
    keys = keys_of(5, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    with Segment.open(world.nodes["s0"].info.segment_path) as segment:
        shape = world.directory.attach("s0", "f" * 32, BLOCK)
        segment.view[shape.slot_offset_bytes(copies[2].slot) + 7] ^= 1
    offsets = [page * BLOCK for page in range(5)]
    assert reader.read(copies, pool, offsets, DEADLINE_S) == [True, True, False, True, True]
    assert len(reader.lookup(keys, "reader", 60.0)) == 2
    stranger, its_pool = world.store("s1")  # was told of the copies and never looked them up
    with Segment.open(world.nodes["s0"].info.segment_path) as segment:
        segment.view[shape.slot_offset_bytes(copies[1].slot)] ^= 1
    assert stranger.read(copies[:2], its_pool, offsets[:2], DEADLINE_S) == [True, False]
    assert len(reader.lookup(keys, "reader", 60.0)) == 1


def test_fetch_makes_a_local_copy_and_counts_the_leading_run(world: World, seed: int) -> None:
    keys = keys_of(8, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    assert reader.fetch(keys[:5], copies[:5], "reader", 60.0, DEADLINE_S).blocks == 5
    found = reader.lookup(keys, "reader", 60.0)
    assert [len(places) for places in found] == [2] * 5 + [1] * 3
    own = choose(found[:5], "s1")
    offsets = [page * BLOCK for page in range(5)]
    assert all(reader.read(own, pool, offsets, DEADLINE_S))
    for key, offset in zip(keys[:5], offsets, strict=True):
        assert np.array_equal(pool[offset : offset + BLOCK], content(key))
    before = reader.counters()
    assert reader.fetch(keys[:5], own, "reader", 60.0, DEADLINE_S).blocks == 5  # nothing to do
    assert reader.counters() == before
    with Segment.open(world.nodes["s0"].info.segment_path) as segment:
        shape = world.directory.attach("s0", "f" * 32, BLOCK)
        segment.view[shape.slot_offset_bytes(copies[6].slot)] ^= 1
    assert reader.fetch(keys, copies, "reader", 60.0, DEADLINE_S).blocks == 6  # block 6 is corrupt
    world.directory.directory.check()
    assert world.directory.stats().ephemeral == 0
    writing = [node.writing_blocks for node in world.directory.stats().nodes]
    assert writing == [0, 0]  # what did not arrive was given up


def test_a_dead_node_is_misses_and_left_alone_for_a_moment(world: World, seed: int) -> None:
    keys = keys_of(6, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys[:4])
    put(reader, keys[4:])
    found = reader.lookup(keys, "reader", 60.0)
    copies = [places[0] for places in found]
    offsets = [page * BLOCK for page in range(6)]
    assert reader.read(copies, pool, offsets, DEADLINE_S) == [True] * 6
    world.nodes["s0"].kill()
    started_s = time.monotonic()
    assert reader.read(copies, pool, offsets, DEADLINE_S) == [False] * 4 + [True] * 2
    failures = sum(counters.failures for counters in reader.counters().values())
    assert reader.read(copies, pool, offsets, DEADLINE_S) == [False] * 4 + [True] * 2
    assert time.monotonic() - started_s < DEADLINE_S / 2
    assert sum(counters.failures for counters in reader.counters().values()) == failures
    assert len(reader.lookup(keys, "reader", 60.0)) == 6  # dead is not corrupt: no drop_copy
    assert reader.fetch(keys, copies, "reader", 60.0, DEADLINE_S).blocks == 0


def test_a_restarted_node_serves_again_at_once(world: World, seed: int) -> None:
    keys, more = keys_of(3, seed), keys_of(3, seed + 1)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    offsets = [0, BLOCK, 2 * BLOCK]
    assert all(reader.read(copies, pool, offsets, DEADLINE_S))
    world.nodes["s0"].kill()
    assert not any(reader.read(copies, pool, offsets, DEADLINE_S))
    world.start("s0")
    assert reader.lookup(keys, "reader", 60.0) == []
    put(writer, more)  # attaches again, to the new segment
    copies = choose(reader.lookup(more, "reader", 60.0), "s0")
    until_s = time.monotonic() + 0.5  # far less than the moment for which a bad node is left alone
    while not all(reader.read(copies, pool, offsets, DEADLINE_S)):
        assert time.monotonic() < until_s
    for key, offset in zip(more, offsets, strict=True):
        assert np.array_equal(pool[offset : offset + BLOCK], content(key))


def test_threads_read_side_by_side(world: World, seed: int) -> None:
    keys = keys_of(24, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    wrong: list[str] = []

    def work(number: int) -> None:
        chance, mine = random.Random(seed + number), range(number * 8, number * 8 + 8)
        for _ in range(20):
            chosen = chance.sample(range(len(keys)), 8)
            found = reader.lookup([keys[i] for i in chosen], f"reader-{number}", 60.0)
            offsets = [page * BLOCK for page in mine]
            if not all(reader.read(choose(found, "s0"), pool, offsets, DEADLINE_S)):
                wrong.append(f"thread {number} missed")
            for index, offset in zip(chosen, offsets, strict=True):
                if not np.array_equal(pool[offset : offset + BLOCK], content(keys[index])):
                    wrong.append(f"thread {number}: block {index}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(c.read_bytes for c in reader.counters().values()) == 3 * 20 * 8 * BLOCK


def test_rates_are_measured_for_every_node_that_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_store.transports.rates.PROBE_S_MAX", DEADLINE_S)
    store, _ = world.store("s0")
    rates = store.measure_rates()
    assert set(store.latencies_s()) == {"s0", "s1"}
    assert set(rates) == {"s0", "s1"} and min(rates.values()) > 1e6
    remote = "nixl" if world.transports == "auto" else world.transports
    assert {path.node_id: path.transport for path in store.paths()}["s1"] == remote
    assert {path.node_id: path.bytes_per_s for path in store.paths()} == rates
    world.nodes["s1"].kill()
    assert set(store.measure_rates()) == {"s0"}


def test_the_header_of_a_committed_slot_names_its_block(mapped: World, seed: int) -> None:
    [key], (store, _) = keys_of(1, seed), mapped.store("s0")
    put(store, [key])
    [(copy,)] = store.lookup([key], "reader", 60.0)
    shape = mapped.directory.attach("s0", "f" * 32, BLOCK)
    with Segment.open(mapped.nodes["s0"].info.segment_path) as segment:
        at = shape.header_offset_bytes(copy.slot)
        header = SlotHeader.unpack(segment.view[at : at + HEADER_BYTES].tobytes())
    assert header == SlotHeader(
        STATE_READY, copy.generation, key, copy.checksum, BLOCK, False, LAYOUT.layers
    )


def test_a_worker_whose_node_is_not_registered_is_told_what_to_start(mapped: World) -> None:
    with pytest.raises(NodeUnknown, match=r"mooncake_store\.node --node-id s7"):
        mapped.store("s7")


def test_a_worker_whose_node_is_on_another_host_is_not_given_a_file_of_that_name(
    mapped: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces of one kernel have one /dev/shm, so the path would be there."""
    monkeypatch.setenv("MOONCAKE_HOST_IDENTITY", "b")
    with pytest.raises(NodeUnknown, match="s0 is on another host"):
        mapped.store("s0")


def test_an_unknown_transport_is_refused_by_name(mapped: World) -> None:
    with pytest.raises(ValueError, match="auto, mapped, nixl, tcp"):
        mapped.store("s0", "rdma")


def test_allocating_on_a_node_that_is_down_says_full_and_recovers(mapped: World, seed: int) -> None:
    keys, (store, _) = keys_of(2, seed), mapped.store("s0")
    info = mapped.nodes["s0"].info
    mapped.directory.deregister_node("s0", info.incarnation)
    given = store.allocate(keys, "writer", 60.0)
    assert given.full and given.slots == (None, None)
    mapped.nodes["s0"].kill()
    mapped.start("s0")
    put(store, keys)
    assert len(store.lookup(keys, "reader", 60.0)) == 2


def test_a_restarted_directory_costs_the_blocks_but_not_the_mapping(
    mapped: World, seed: int
) -> None:
    keys, (store, pool) = keys_of(3, seed), mapped.store("s0")
    put(store, keys)
    [slot, *_] = store.allocate(keys_of(1, seed + 1), "writer", 60.0).slots
    assert slot is not None
    segment = store._local.segment
    mapped.directory.directory = Directory(epoch=2)
    for node in mapped.nodes.values():
        mapped.directory.up(node.info)
    assert store.lookup(keys, "reader", 60.0) == []
    put(store, keys)
    copies = choose(store.lookup(keys, "reader", 60.0), "s0")
    assert all(store.read(copies, pool, [0, BLOCK, 2 * BLOCK], DEADLINE_S))
    assert store._local.segment is segment, "mapped once more for nothing"
    row = (keys[0], slot, [1] * LAYOUT.layers)
    assert store.commit([row], "writer", 60.0) == [False], "of an earlier epoch"


@pytest.mark.parametrize("is_released", [False, True], ids=["under way", "arrived"])
def test_what_was_on_its_way_to_decode_is_no_block_of_the_next_directory(
    mapped: World, seed: int, is_released: bool
) -> None:
    (kept, tail), (store, pool) = keys_of(2, seed), mapped.store("s0")
    put(store, [kept])
    put(store, [tail], "hand-over", is_ephemeral=True)
    ((copy,),) = store.lookup([tail], "decode", 60.0)
    if is_released:
        store.release("hand-over")
        store.release("decode")
        assert store.lookup([tail], "decode", 60.0) == []
    later, info = Directory(epoch=2), replace(mapped.nodes["s0"].info, has_inventory=True)
    mapped.directory.directory = later
    shape = geometry(SEGMENT_BYTES, info.unit_bytes)
    with Segment.open(info.segment_path) as segment:
        client = cast(DirectoryClient, mapped.directory)
        memory = SlotMemory(segment.view, shape)
        Registration(info, client, client, memory.blocks).report()
    later.check()
    found = mapped.directory.snapshot()
    assert found.holders == ((kept, ("s0",)),), "a request's own object was announced"
    assert store.lookup([tail], "decode", 60.0) == []
    (node,) = mapped.directory.stats().nodes
    assert (node.ready_blocks, node.quarantined_units) == (1, BLOCK // info.unit_bytes)
    assert store.read([copy], pool, [0], DEADLINE_S) == [True], "who was about to read it may"


def test_only_a_silent_directory_is_an_error(mapped: World, seed: int) -> None:
    keys, (store, _) = keys_of(2, seed), mapped.store("s0")
    mapped.directory.is_down = True
    for call in (
        lambda: store.lookup(keys, "reader", 60.0),
        lambda: store.allocate(keys, "writer", 60.0),
        lambda: store.release("writer"),
    ):
        with pytest.raises(StoreUnavailable):
            call()


def test_a_slot_past_the_segment_is_a_miss(mapped: World) -> None:
    store, pool = mapped.store("s0")
    assert store.read([Copy("s1", 10**6, 1, 0, BLOCK)], pool, [0], DEADLINE_S) == [False]
    assert store.read([Copy("nobody", 0, 1, 0, BLOCK)], pool, [0], DEADLINE_S) == [False]


def test_a_passed_deadline_misses_without_blaming_the_node(mapped: World, seed: int) -> None:
    keys = keys_of(3, seed)
    writer, _ = mapped.store("s0")
    reader, pool = mapped.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    offsets = [0, BLOCK, 2 * BLOCK]
    assert not any(reader.read(copies, pool, offsets, 0.0))
    assert all(reader.read(copies, pool, offsets, DEADLINE_S))


def test_nothing_is_pending_when_nothing_timed_out(world: World) -> None:
    store, pool = world.store("s0")
    assert store.pending_offsets() == []
    assert store.pending_offsets(pool) == []
