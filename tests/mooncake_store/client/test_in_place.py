"""Blocks that are used where they lie: whole when they are named, and recognised afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_store.client.in_place import is_still
from mooncake_store.errors import NodeUnknown
from mooncake_store.records.blocks import Copy
from tests.mooncake_store.client.world import (
    BLOCK,
    DEADLINE_S,
    SEGMENT_BYTES,
    World,
    choose,
    content,
    keys_of,
    put,
)
from tests.mooncake_store.targets import TargetPool


@pytest.fixture
def world() -> Iterator[World]:
    world = World("mapped", TargetPool())
    yield world
    world.close()


def held(world: World, count: int = 3) -> tuple[list[bytes], list[Copy]]:
    store, _ = world.store("s0")
    keys = keys_of(count, 1)
    put(store, keys)
    return keys, choose(store.lookup(keys, "reader", 60.0), "s0")


def test_whole_blocks_of_the_own_node_are_named_with_their_places(world: World) -> None:
    keys, copies = held(world)
    store = world.stores[0]
    elsewhere = copies[0]._replace(node_id="s1")
    incarnation, blocks = store.verify_in_place([*copies, elsewhere], DEADLINE_S)
    assert incarnation == world.nodes["s0"].info.incarnation and blocks[-1] is None
    view = world.nodes["s0"].segment.view  # type: ignore[union-attr]
    for key, block in zip(keys, blocks, strict=False):
        assert block is not None and is_still(view, block)
        assert (view[block.offset_bytes : block.offset_bytes + BLOCK] == content(key)).all()
    assert store.mapped_node == world.nodes["s0"].info


@pytest.mark.parametrize("what", ["payload", "generation", "checksum", "late", "unverifiable"])
def test_what_is_not_whole_is_not_named(world: World, what: str) -> None:
    _, copies = held(world, 1)
    store, view = world.stores[0], world.nodes["s0"].segment.view  # type: ignore[union-attr]
    [copy], deadline_s = copies, DEADLINE_S
    if what == "payload":
        (block,) = store.verify_in_place(copies, DEADLINE_S).blocks
        assert block is not None
        view[block.offset_bytes + BLOCK - 1] ^= 1
    elif what == "generation":
        copy = copy._replace(generation=copy.generation + 1)
    elif what == "checksum":
        copy = copy._replace(checksum=copy.checksum ^ 1)
    elif what == "unverifiable":
        copy = copy._replace(checksum=0)
    else:
        deadline_s = -1.0
    assert store.verify_in_place([copy], deadline_s).blocks == [None]


def test_a_slot_that_is_given_away_is_recognised_before_its_payload_changes(world: World) -> None:
    keys, copies = held(world, 1)
    store, view = world.stores[0], world.nodes["s0"].segment.view  # type: ignore[union-attr]
    (block,) = store.verify_in_place(copies, DEADLINE_S).blocks
    assert block is not None
    before = view[block.offset_bytes : block.offset_bytes + BLOCK].copy()
    store.release("reader")
    store.release("writer")
    world.directory.remove(keys)
    used = set[int]()
    for number in range(10_000):  # the freed slot rests for a while, and others are free
        given = store.allocate([np.random.default_rng(number).bytes(16)], "next", 60.0)
        if given.slots[0] is None:
            break
        used.add(given.slots[0].slot)
        if given.slots[0].slot == copies[0].slot:
            assert not is_still(view, block)
            assert (view[block.offset_bytes : block.offset_bytes + BLOCK] == before).all()
            return
    pytest.fail(f"the slot was not given away among {len(used)}")


def test_nothing_is_named_in_the_memory_of_a_dead_node(world: World) -> None:
    _, copies = held(world)
    store = world.stores[0]
    world.nodes["s0"].kill()
    assert store.mapped_node is None
    assert not any(store.verify_in_place(copies, DEADLINE_S).blocks)
    with pytest.raises(NodeUnknown):
        world.directory.deregister_node("s0", world.nodes["s0"].info.incarnation)
        world.store("s0")


def test_slots_that_others_fill_get_the_digests_of_what_lies_there(world: World) -> None:
    store, _ = world.store("s0")
    view = world.nodes["s0"].segment.view  # type: ignore[union-attr]
    keys = keys_of(2, 3)
    slots = [slot for slot in store.allocate(keys, "writer", 60.0).slots if slot is not None]
    incarnation, blocks = store.slots_in_place(slots)
    assert incarnation == world.nodes["s0"].info.incarnation
    for key, block in zip(keys, blocks, strict=True):
        assert block is not None and is_still(view, block)
        view[block.offset_bytes : block.offset_bytes + BLOCK] = content(key)
    digests = store.digest(slots)
    assert None not in digests
    rows = [(key, slot, each or ()) for key, slot, each in zip(keys, slots, digests, strict=True)]
    assert store.commit(rows, "writer", 60.0) == [True, True]
    assert store.digest(slots) == [None, None], "they are complete"
    assert not any(is_still(view, block) for block in blocks if block is not None)
    copies = choose(store.lookup(keys, "reader", 60.0), "s0")
    assert all(store.verify_in_place(copies, DEADLINE_S).blocks)


def test_block_of_an_unmapped_dead_node_counts_as_unchanged(world: World) -> None:
    _, copies = held(world, 1)
    store = world.stores[0]
    incarnation, (block,) = store.verify_in_place(copies, DEADLINE_S)
    assert block is not None
    world.nodes["s0"].kill()
    store._nodes.mapped.drop_dead()
    assert store._local.segment.view_if_open() is None
    assert store.is_in_place(incarnation, block)


def test_slots_that_late_bytes_may_reach_are_not_filled_in_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late byte before the digest would be part of a block that passes for whole."""
    store, _ = world.store("s0")
    vanished = [slot for slot in store.allocate(keys_of(2, 4), "vanished", 5.0).slots if slot]
    world.directory.release("vanished")
    moved_s = [world.directory.directory.config.quarantine_s + 1.0]
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + moved_s[0])
    world.directory.node_report("s0", world.nodes["s0"].info.incarnation)
    world.directory.tick()
    given = store.allocate(keys_of(SEGMENT_BYTES // BLOCK - 8, 5), "writer", 60.0)
    slots = [slot for slot in given.slots if slot is not None]
    assert {slot.slot for slot in vanished} <= {slot.slot for slot in slots}
    placed = store.slots_in_place(slots).blocks
    unsafe = {slot.slot for slot, block in zip(slots, placed, strict=True) if block is None}
    assert unsafe == {slot.slot for slot in vanished}
