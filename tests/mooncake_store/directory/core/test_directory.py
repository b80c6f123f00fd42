"""The life of a block: written, ready, leased, idle, evicted; and what goes wrong on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.copies import BAD_QUARANTINE_S
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.slots import LATE_S
from mooncake_store.errors import (
    LayoutMismatch,
    NodeNotAttached,
    NodeUnknown,
    RequestInvalid,
    StoreFull,
)
from mooncake_store.layout import STATE_READY
from mooncake_store.records.blocks import Slot
from mooncake_store.records.events import (
    NOTES_BYTES_KEPT_MAX,
    BlockAdded,
    BlockRemoved,
    Event,
    EventLog,
    FrontendNoted,
    NodeDown,
    NodeUp,
)
from mooncake_store.wire.directory_protocol import NOTES_BYTES_MAX
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put


def allocated(directory: Directory, key: bytes, owner: str = "w", now_s: float = 0.0) -> Slot:
    slot = directory.allocate("s0", [key], owner, 10.0, False, now_s).slots[0]
    assert slot is not None
    return slot


def commit(directory: Directory, key: bytes, slot: Slot, owner: str, now_s: float) -> bool:
    blocks = [(key, slot.slot, slot.generation, 99)]
    done = directory.commit(slot.node_id, blocks, owner, 10.0, now_s)
    directory.check()
    return done[0]


def free_slots(directory: Directory, now_s: float) -> int:
    return directory.stats(now_s).nodes[0].free_units


def test_a_key_that_is_asked_for_twice_gets_one_slot() -> None:
    directory = directory_with("s0")
    first, second = chain(2)
    asked = directory.allocate("s0", [first, second, first], "w", 10.0, False, 0.0)
    assert asked.covered == 3 and asked.slots[2] is None
    assert asked.slots[0] is not None and asked.slots[1] is not None
    assert asked.slots[0].slot != asked.slots[1].slot
    directory.check()
    blocks = [(first, asked.slots[0].slot, asked.slots[0].generation, 99)] * 2
    assert directory.commit("s0", blocks, "w", 10.0, 0.0) == [True, False]
    directory.check()


def test_a_block_is_found_only_after_its_commit() -> None:
    directory = directory_with("s0")
    key = chain(1)[0]
    slot = allocated(directory, key)
    assert directory.lookup([key], "r", 5.0, 0.0) == []
    assert commit(directory, key, slot, "w", 0.0)
    places = directory.lookup([key], "r", 5.0, 0.0)
    assert places == [((*slot[:3], 99, BLOCK_BYTES),)]
    assert places[0][0].checksum == 99


def test_a_lookup_ends_at_the_first_missing_block_unless_told_otherwise() -> None:
    directory = directory_with("s0")
    keys = chain(3)
    put(directory, [keys[0], keys[2]])
    assert len(directory.lookup(keys, "r", 0.0, 0.0)) == 1
    found = directory.lookup(keys, "r", 0.0, 0.0, prefix_only=False)
    assert [bool(places) for places in found] == [True, False, True]


def test_a_key_that_is_there_or_being_written_needs_no_slot() -> None:
    directory = directory_with("s0", slots=8)
    ready, writing, fresh = chain(3)
    put(directory, [ready])
    allocated(directory, writing, "other")
    allocation = directory.allocate("s0", [ready, writing, fresh, fresh], "w", 5.0, False, 0.0)
    assert [slot is not None for slot in allocation.slots] == [False, False, True, False]
    assert not allocation.full


def test_the_answer_tells_already_there_from_full() -> None:
    directory = directory_with("s0", slots=2)
    keys = chain(4)
    put(directory, keys[:1], is_released=False)
    allocation = directory.allocate("s0", keys, "w", 5.0, False, 0.0)
    assert [slot is not None for slot in allocation.slots] == [False, True, False, False]
    assert allocation.full and allocation.covered == 2


def test_a_block_may_have_a_copy_on_each_node() -> None:
    directory = directory_with("s0", "s1")
    keys = chain(2)
    put(directory, keys, "s0")
    put(directory, keys[:1], "s1")
    found = directory.lookup(keys, "r", 0.0, 0.0)
    assert [[copy.node_id for copy in places] for places in found] == [["s0", "s1"], ["s0"]]


@pytest.mark.parametrize("late", ["other owner", "old generation", "lease ran out", "node died"])
def test_a_late_or_wrong_commit_changes_nothing(late: str) -> None:
    directory = directory_with("s0")
    key = chain(1)[0]
    slot, owner, now_s = allocated(directory, key), "w", 1.0
    if late == "other owner":
        owner = "x"
    elif late == "old generation":
        slot = slot._replace(generation=slot.generation - 1)
    elif late == "lease ran out":
        now_s = 10.0
    else:
        directory.register_node(node_info("s0", "n2"), 1.0)
    before = directory.sequence
    assert not commit(directory, key, slot, owner, now_s)
    assert directory.lookup([key], "r", 0.0, now_s) == []
    assert directory.sequence == before


def test_the_slot_of_a_dead_writer_rests_before_it_is_used_under_a_new_generation() -> None:
    directory = directory_with("s0", slots=1)
    first, second = chain(2)
    slot = allocated(directory, first)
    directory.node_report("s0", "n1", 10.0)
    directory.tick(10.0)  # the lease of 10 s is over
    directory.check()
    assert directory.stats(10.0).nodes[0].quarantined_units == 1
    assert directory.allocate("s0", [second], "x", 5.0, False, 10.0).full
    quarantine_end_s = 10.0 + directory.config.quarantine_s
    directory.node_report("s0", "n1", quarantine_end_s)
    directory.tick(quarantine_end_s)
    again = allocated(directory, second, "x", quarantine_end_s)
    assert (again.slot, slot.slot) == (0, 0)
    assert again.generation > slot.generation
    assert not commit(directory, first, slot, "w", quarantine_end_s)


def test_a_released_slot_that_was_never_committed_rests_too() -> None:
    directory = directory_with("s0", slots=1)
    allocated(directory, chain(1)[0])
    assert directory.release("w", 1.0)
    directory.check()
    assert directory.stats(1.0).nodes[0].quarantined_units == 1


def test_an_abandoned_slot_is_free_at_once() -> None:
    directory = directory_with("s0", slots=1)
    key = chain(1)[0]
    slot = allocated(directory, key)
    assert directory.abandon([slot], "somebody else", 0.0) == 0
    assert directory.abandon([slot], "w", 0.0) == 1
    directory.check()
    assert free_slots(directory, 0.0) == 1
    assert directory.abandon([slot], "w", 0.0) == 0


def test_leases_end_at_their_time_and_are_renewed_together() -> None:
    directory = directory_with("s0", slots=2)
    keys = chain(2)
    put(directory, keys)
    directory.lookup(keys, "r", 5.0, 0.0)
    assert directory.renew("r", 5.0, 4.0)
    assert directory.allocate("s0", chain(1, "b"), "w", 1.0, False, 8.9).full
    assert not directory.allocate("s0", chain(1, "b"), "w", 1.0, False, 9.0).full
    assert not directory.renew("r", 5.0, 9.0), "a lease that ran out cannot be renewed"
    directory.check()


def test_a_shorter_lease_never_shortens_a_longer_one() -> None:
    directory = directory_with("s0", slots=1)
    key = chain(1)[0]
    put(directory, [key])
    directory.lookup([key], "r", 100.0, 0.0)
    directory.lookup([key], "r", 1.0, 1.0)
    directory.renew("r", 1.0, 1.0)
    directory.node_report("s0", "n1", 99.0)
    directory.tick(99.0)
    assert directory.stats(99.0).leases == 1
    directory.tick(100.0)
    assert directory.stats(100.0).leases == 0


def test_a_copy_stays_leased_until_its_last_reader_is_done() -> None:
    directory = directory_with("s0", slots=1)
    key = chain(1)[0]
    put(directory, [key], owner="w", is_released=False)
    directory.lookup([key], "r", 10.0, 0.0)
    directory.release("w", 1.0)
    assert directory.allocate("s0", chain(1, "b"), "x", 1.0, False, 1.0).full
    directory.release("r", 2.0)
    assert not directory.allocate("s0", chain(1, "b"), "x", 1.0, False, 2.0).full


def test_a_commit_without_a_lease_leaves_the_block_idle() -> None:
    directory = directory_with("s0", slots=1)
    key = chain(1)[0]
    slot = allocated(directory, key)
    assert directory.commit("s0", [(key, slot.slot, slot.generation, 1)], "w", 0.0, 0.0) == [True]
    directory.check()
    assert directory.stats(0.0).leases == 0
    assert directory.stats(0.0).nodes[0].idle_blocks == 1


def test_an_ephemeral_object_is_found_but_never_announced() -> None:
    directory = directory_with("s0")
    key = chain(1, "tail")[0]
    before = directory.sequence
    put(directory, [key], owner="prefill", ephemeral=True, is_released=False)
    assert len(directory.lookup([key], "decode", 5.0, 0.0)) == 1
    assert directory.sequence == before
    assert directory.snapshot(0.0).holders == ()
    assert directory.stats(0.0).ephemeral == 1
    assert directory.stats(0.0).blocks == 0


def test_an_ephemeral_object_is_freed_with_its_last_lease() -> None:
    directory = directory_with("s0", slots=1)
    key = chain(1, "tail")[0]
    put(directory, [key], owner="prefill", ephemeral=True, is_released=False)
    directory.lookup([key], "decode", 5.0, 0.0)
    directory.release("prefill", 1.0)
    directory.check()
    assert len(directory.lookup([key], "decode", 5.0, 1.0)) == 1
    directory.release("decode", 2.0)
    directory.check()
    assert directory.lookup([key], "decode", 5.0, 2.0) == []
    assert free_slots(directory, 2.0) == 1


def test_a_forgotten_ephemeral_object_is_freed_when_its_lease_runs_out() -> None:
    directory = directory_with("s0", slots=1)
    put(directory, chain(1, "tail"), owner="prefill", ephemeral=True, is_released=False)
    directory.node_report("s0", "n1", 10.0)
    directory.tick(10.0)
    directory.check()
    assert free_slots(directory, 10.0) == 1


def test_a_copy_that_proved_bad_is_dropped_once() -> None:
    directory = directory_with("s0", "s1", slots=1)
    key = chain(1)[0]
    slot = put(directory, [key], "s0")[0]
    put(directory, [key], "s1")
    assert slot is not None
    assert not directory.drop_copy(key, "s0", slot.generation - 1, 0.0), "another generation"
    assert directory.drop_copy(key, "s0", slot.generation, 0.0)
    directory.check()
    assert not directory.drop_copy(key, "s0", slot.generation, 0.0)
    assert [copy.node_id for copy in directory.lookup([key], "r", 0.0, 0.0)[0]] == ["s1"]
    assert directory.events_since(directory.sequence - 1) == [BlockRemoved(key, "s0")]


@pytest.mark.parametrize("is_ephemeral", [False, True])
def test_the_slot_of_a_bad_copy_is_free_soon_after_its_last_lease_and_not_before(
    is_ephemeral: bool,
) -> None:
    directory = directory_with("s0", slots=1)
    key, other = chain(2)
    slot = put(directory, [key], is_released=False, ephemeral=is_ephemeral)[0]
    assert slot is not None
    assert len(directory.lookup([key], "reader", 10.0, 0.0)) == 1
    assert directory.drop_copy(key, "s0", slot.generation, 0.0)
    directory.check()
    assert not directory.drop_copy(key, "s0", slot.generation, 0.0)
    assert directory.lookup([key], "late", 10.0, 0.0) == []
    for ended in ("writer", "reader"):
        assert directory.allocate("s0", [other], "x", 5.0, False, 1.0).full, f"before {ended} ended"
        directory.release(ended, 1.0)
        directory.check()
    free_s = 1.0 + BAD_QUARANTINE_S
    assert directory.allocate("s0", [other], "x", 5.0, False, free_s - 0.1).full, "it is being left"
    again = allocated(directory, other, "x", free_s)
    assert again.slot == slot.slot and again.generation > slot.generation


def test_a_block_comes_back_beside_its_bad_copy_and_outlives_it() -> None:
    directory = directory_with("s0", slots=2)
    key = chain(1)[0]
    slot = put(directory, [key], is_released=False)[0]
    assert slot is not None
    directory.pin([key], "hard", 0.0, 0.0)
    assert directory.drop_copy(key, "s0", slot.generation, 0.0)
    directory.check()
    anew = put(directory, [key], owner="second")[0]
    assert anew is not None
    directory.check()
    directory.release("writer", 1.0)
    directory.check()
    assert [copy.generation for copy in directory.lookup([key], "", 0.0, 1.0)[0]] == [
        anew.generation
    ]
    assert directory.stats(1.0).nodes[0].used_units == 1


def test_damage_that_gives_two_blocks_one_generation_loses_no_slot_when_both_prove_bad() -> None:
    directory, keys = Directory(epoch=7), chain(2)
    info = replace(node_info("s0"), has_inventory=True)
    directory.register_node(info, 0.0)
    said = [(key, slot, 5, 99, BLOCK_BYTES, STATE_READY) for slot, key in enumerate(keys)]
    directory.adopt("s0", info.incarnation, said, True, 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    assert len(directory.lookup(keys, "reader", 10.0, 0.0)) == 2
    assert all(directory.drop_copy(key, "s0", 5, 0.0) for key in keys)
    directory.check()
    directory.release("reader", 0.0)
    directory.check()
    directory.node_report("s0", info.incarnation, BAD_QUARANTINE_S)
    directory.tick(BAD_QUARANTINE_S)
    assert free_slots(directory, BAD_QUARANTINE_S) == 8


def test_bad_copies_go_with_their_node() -> None:
    directory = directory_with("s0", "s1", slots=1)
    key = chain(1)[0]
    slot = put(directory, [key], is_released=False)[0]
    assert slot is not None
    assert directory.drop_copy(key, "s0", slot.generation, 0.0)
    directory.node_report("s1", "n1", 6.0)
    directory.tick(6.0)
    directory.check()
    assert [node.node_id for node in directory.stats(6.0).nodes] == ["s1"]
    directory.release("writer", 6.0)
    directory.check()


def test_evicting_and_committing_are_announced_in_order() -> None:
    directory = directory_with("s0", slots=1)
    first, second = chain(2)
    before = directory.sequence
    put(directory, [first])
    (place,) = directory.lookup([first], "", 0.0, 0.0)[0]
    put(directory, [second])
    (other,) = directory.lookup([second], "", 0.0, 0.0)[0]
    assert directory.events_since(before) == [
        BlockAdded(first, "s0", place),
        BlockRemoved(first, "s0"),
        BlockAdded(second, "s0", other),
    ]
    assert place.slot == other.slot and place.generation < other.generation


def test_a_node_that_stops_reporting_is_gone_with_its_copies() -> None:
    directory = directory_with("s0", "s1")
    key = chain(1)[0]
    put(directory, [key], "s0", is_released=False)
    assert directory.node_report("s1", "n1", 5.0)
    directory.tick(5.0)
    assert len(directory.nodes(5.0)) == 2, "5 s are within the lease"
    directory.tick(5.1)
    directory.check()
    assert [info.node_id for info in directory.nodes(5.1)] == ["s1"]
    assert directory.lookup([key], "r", 0.0, 5.1) == []
    assert directory.events_since(directory.sequence - 2) == [
        BlockRemoved(key, "s0"),
        NodeDown("s0", "n1"),
    ]
    assert not directory.node_report("s0", "n1", 5.2), "it must register again"
    directory.register_node(node_info("s0", "n1"), 5.2)
    directory.release("writer", 5.3)
    directory.check()


def test_a_restarted_node_starts_empty_and_its_old_process_cannot_come_back() -> None:
    directory = directory_with("s0")
    put(directory, chain(2))
    before = directory.sequence
    directory.register_node(node_info("s0", "n2"), 1.0)
    directory.check()
    kinds = [type(event) for event in directory.events_since(before) or []]
    assert kinds == [BlockRemoved, BlockRemoved, NodeDown, NodeUp]
    assert not directory.node_report("s0", "n1", 1.5)
    with pytest.raises(RequestInvalid, match="a newer process registered as storage node s0"):
        directory.register_node(node_info("s0", "n1"), 2.0)


def test_registering_twice_keeps_the_copies() -> None:
    directory = directory_with("s0")
    put(directory, chain(2))
    before = directory.sequence
    directory.register_node(node_info("s0"), 1.0)
    assert directory.sequence == before
    assert len(directory.lookup(chain(2), "r", 0.0, 1.0)) == 2


def test_a_node_that_deregisters_leaves_at_once() -> None:
    directory = directory_with("s0")
    assert not directory.deregister_node("s0", "another life", 1.0)
    assert directory.deregister_node("s0", "n1", 1.0)
    directory.check()
    with pytest.raises(NodeUnknown, match="storage node s0 is not registered; known: none"):
        directory.attach("s0", "print", BLOCK_BYTES, 1.0)


def test_slots_are_had_only_after_an_attach() -> None:
    directory = Directory(1)
    directory.register_node(node_info("s0"), 0.0)
    with pytest.raises(NodeNotAttached, match="attach to the node again"):
        directory.allocate("s0", chain(1), "w", 5.0, False, 0.0)


def test_blocks_of_several_sizes_share_a_memory() -> None:
    directory = directory_with("s0", slots=4)
    put(directory, chain(1))
    given = directory.allocate(
        "s0", chain(2, "b"), "w", 5.0, False, 0.0, size_bytes=BLOCK_BYTES + 1
    )
    assert [slot is not None for slot in given.slots] == [True, False], "three units of four"
    directory.check()
    blocks = [(chain(1, "b")[0], *given.slots[0][1:3], 5)]
    assert directory.commit("s0", blocks, "w", 5.0, 0.0) == [True]
    (copy,) = directory.lookup(chain(1, "b"), "r", 0.0, 0.0)[0]
    assert copy.size_bytes == BLOCK_BYTES + 1
    directory.check()


def test_a_block_larger_than_the_memory_is_refused_by_name() -> None:
    directory = directory_with("s0", slots=4)
    with pytest.raises(RequestInvalid, match="20000 bytes is larger than the memory of s0"):
        directory.allocate("s0", chain(1), "w", 5.0, False, 0.0, size_bytes=20_000)


def test_a_segment_too_small_for_one_slot_is_refused() -> None:
    directory = Directory(1)
    directory.register_node(node_info("s0", slots=2), 0.0)
    with pytest.raises(LayoutMismatch, match="less than one block of 16384 bytes"):
        directory.attach("s0", "print", 4 * BLOCK_BYTES, 0.0)


def test_owners_and_leases_are_bounded() -> None:
    directory = Directory(1, DirectoryConfig(owners_max=2, leases_max=3))
    directory.register_node(node_info("s0"), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    put(directory, chain(2))
    directory.lookup(chain(2), "a", 5.0, 0.0)
    with pytest.raises(StoreFull, match="1 owners hold 2 leases; the limits are 2 and 3"):
        directory.lookup(chain(2), "b", 5.0, 0.0)
    directory.lookup(chain(1), "b", 5.0, 0.0)
    directory.release("a", 0.0)
    directory.lookup(chain(1), "c", 5.0, 0.0)
    with pytest.raises(StoreFull, match="Are finished requests released"):
        directory.lookup(chain(1), "d", 5.0, 0.0)
    directory.check()


def test_the_first_generation_of_a_later_epoch_is_above_all_of_an_earlier_one() -> None:
    generations = []
    for epoch in (7, 8):
        directory = directory_with("s0", epoch=epoch)
        slots = [allocated(directory, key, f"w{i}") for i, key in enumerate(chain(8))]
        generations.append([slot.generation for slot in slots])
    assert max(generations[0]) < min(generations[1])


def test_notes_of_frontends_are_kept_by_their_bytes_and_the_oldest_events_go_for_them() -> None:
    directory = directory_with("s0")
    put(directory, chain(1))
    before, notes = directory.sequence, bytes(NOTES_BYTES_MAX)
    fitting = NOTES_BYTES_KEPT_MAX // NOTES_BYTES_MAX
    for number in range(fitting):
        directory.note_routed("f0", number, notes, 0.0)
    assert len(directory.events_since(0) or []) == before + fitting
    directory.note_routed("f0", fitting, b"x", 0.0)
    assert directory.events_since(before) is None, "whoever has not seen it takes a snapshot"
    kept = directory.events_since(before + 1) or []
    assert [each.number for each in kept if isinstance(each, FrontendNoted)] == [
        *range(1, fitting + 1)
    ]
    put(directory, chain(3, "b"))
    assert len(directory.events_since(before + 1) or []) == fitting + 3
    directory.check()


def test_events_and_notes_at_random_are_kept_within_both_bounds(seed: int) -> None:
    chance = random.Random(seed)
    log, said = EventLog(20), list[Event]()
    for number in range(2_000):
        size = chance.choice([0, NOTES_BYTES_MAX, NOTES_BYTES_KEPT_MAX // chance.randint(2, 30)])
        event: Event = FrontendNoted("f0", number, bytes(size))
        said.append(event if chance.random() < 0.5 else BlockAdded(bytes(16), "s0"))
        log.append(said[-1])
        log.check()
        missed = chance.randint(0, min(len(said), 25))
        latest = said[len(said) - missed :]
        weight = sum(len(each.notes) for each in latest if isinstance(each, FrontendNoted))
        is_kept = missed <= 20 and weight <= NOTES_BYTES_KEPT_MAX
        assert log.since(len(said) - missed) == (latest if is_kept else None)


def test_events_that_are_not_kept_any_more_ask_for_a_snapshot() -> None:
    directory = Directory(1, DirectoryConfig(events_max=4))
    directory.register_node(node_info("s0"), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    put(directory, chain(4))
    assert directory.sequence == 5
    assert directory.events_since(0) is None
    places = directory.lookup(chain(4), "", 0.0, 0.0)
    assert directory.events_since(1) == [
        BlockAdded(key, "s0", place) for key, (place,) in zip(chain(4), places, strict=True)
    ]
    assert directory.events_since(5) == []


def test_the_clock_may_not_go_backwards() -> None:
    directory = directory_with("s0")
    directory.tick(5.0)
    with pytest.raises(AssertionError, match=r"back from 5.0 to 4.0"):
        directory.tick(4.0)


def test_slots_of_a_vanished_writer_are_given_with_a_warning_of_late_bytes() -> None:
    directory = directory_with("s0", slots=4)
    (lost, *others) = chain(4)
    directory.allocate("s0", [lost], "w", 1.0, False, 0.0)
    rested_s = 2.0 + directory.config.quarantine_s
    for now_s in (2.0, rested_s):
        directory.node_report("s0", "n1", now_s)
        directory.tick(now_s)
    given = directory.allocate("s0", [*others, lost], "x", 10.0, False, rested_s)
    assert None not in given.slots and len(given.late) == 1
    late = given.slots[given.late[0]]
    assert late is not None and late.slot == 0
    directory.abandon([slot for slot in given.slots if slot is not None], "x", rested_s)
    over_s = rested_s + LATE_S
    directory.node_report("s0", "n1", over_s)
    assert not directory.allocate("s0", chain(4, "b"), "x", 10.0, False, over_s).late
