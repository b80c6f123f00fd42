"""A directory that restarted learns what nodes hold, and believes only what can be true."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.inventory import InventoryBlock, consistent, sound
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.errors import NodeUnknown, RequestInvalid
from mooncake_store.layout import STATE_EPHEMERAL, STATE_READY, STATE_WRITING
from mooncake_store.records.blocks import GENERATION_MAX
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info

KEYS = chain(8)


def restarted(slots: int = 8, epoch: int = 9) -> Directory:
    """A directory to which s0 will say what it holds."""
    directory = Directory(epoch)
    directory.register_node(replace(node_info(slots=slots), has_inventory=True), 0.0)
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    return directory


def held(
    key: bytes, slot: int, generation: int, units: int = 1, state: int = STATE_READY
) -> InventoryBlock:
    return InventoryBlock(key, slot, generation, 77, units * BLOCK_BYTES, state)


def adopted(directory: Directory, *blocks: InventoryBlock, now_s: float = 0.0) -> list[bytes]:
    """The keys that are found afterwards."""
    count = directory.adopt("s0", "n1", blocks, True, now_s)
    directory.check()
    found = dict(directory.blocks_on("s0", 100, False, now_s))
    assert len(found) == count
    return sorted(found)


def test_what_a_node_holds_is_found_again_where_it_was() -> None:
    directory = restarted()
    assert adopted(directory, held(KEYS[0], 3, 11), held(KEYS[1], 5, 12, units=2)) == KEYS[:2]
    ((copy,), (large,)) = directory.lookup(KEYS[:2], "r", 0.0, 0.0)
    assert copy == ("s0", 3, 11, 77, BLOCK_BYTES) and large == ("s0", 5, 12, 77, 2 * BLOCK_BYTES)
    slots = directory.allocate("s0", chain(8, "b"), "w", 5.0, False, 0.0).slots
    taken = [slot.slot for slot in slots[:5] if slot]
    assert sorted(taken) == [0, 1, 2, 4, 7], "the free ones first"


def test_of_two_that_overlap_the_later_generation_is_kept() -> None:
    assert adopted(restarted(), held(KEYS[0], 0, 11, units=3), held(KEYS[1], 2, 15)) == [KEYS[1]]
    assert adopted(restarted(), held(KEYS[0], 2, 11), held(KEYS[1], 0, 15, units=3)) == [KEYS[1]]


def test_what_a_later_block_overwrote_is_torn_even_when_that_one_is_overwritten_too() -> None:
    oldest, middle, latest = held(KEYS[0], 0, 1, 3), held(KEYS[1], 2, 2, 3), held(KEYS[2], 4, 3)
    assert adopted(restarted(), oldest, middle, latest) == [KEYS[2]]


def test_of_two_copies_of_a_key_the_later_one_is_kept() -> None:
    directory = restarted()
    assert adopted(directory, held(KEYS[0], 1, 20), held(KEYS[0], 6, 10)) == [KEYS[0]]
    assert directory.lookup(KEYS[:1], "r", 0.0, 0.0)[0][0].slot == 1
    assert directory.stats(0.0).nodes[0].free_units == 7


def test_blocks_that_cannot_be_true_are_left_out() -> None:
    impossible = [
        held(KEYS[0], 8, 1),
        held(KEYS[1], 7, 2, units=2),
        held(KEYS[2], 0, 3, units=0),
        held(KEYS[3], 1, 4, state=7),
        held(KEYS[5], 6, GENERATION_MAX, units=2),
    ]
    assert adopted(restarted(), *impossible, held(KEYS[4], 7, 5)) == [KEYS[4]]


def test_a_slot_that_was_being_written_rests_before_it_is_used() -> None:
    directory = restarted(slots=2)
    writing = held(KEYS[0], 0, 5, state=STATE_WRITING)
    lease_s = 40.0  # of its writer, who may have got it a moment ago
    assert adopted(directory, (*writing[:3], int(lease_s * 1_000), *writing[4:])) == []
    assert directory.allocate("s0", KEYS, "w", 60.0, False, 0.0).covered == 1
    rest_s = directory.config.quarantine_s + lease_s
    directory.node_report("s0", "n1", rest_s - 1.0)
    assert directory.allocate("s0", [KEYS[5]], "w", 60.0, False, rest_s - 1.0).covered == 0
    directory.node_report("s0", "n1", rest_s)
    given = directory.allocate("s0", [KEYS[5]], "w", 60.0, False, rest_s)
    assert given.slots[0] is not None and given.slots[0].slot == 0


def test_an_ephemeral_block_is_not_found_again_and_rests_for_a_while() -> None:
    directory = restarted(slots=1)
    before = directory.sequence
    assert adopted(directory, held(KEYS[0], 0, 2**50, state=STATE_EPHEMERAL)) == []
    assert directory.lookup(KEYS[:1], "r", 0.0, 0.0) == [] and directory.sequence == before
    rest_s = directory.config.quarantine_s
    directory.node_report("s0", "n1", rest_s - 1.0)
    assert directory.allocate("s0", [KEYS[1]], "w", 60.0, False, rest_s - 1.0).covered == 0
    directory.node_report("s0", "n1", rest_s)
    (slot,) = directory.allocate("s0", [KEYS[1]], "w", 60.0, False, rest_s).slots
    assert slot is not None and slot.slot == 0 and slot.generation > 2**50


def test_an_ephemeral_block_over_an_older_one_shows_that_one_torn() -> None:
    later = held(KEYS[1], 2, 15, state=STATE_EPHEMERAL)
    assert adopted(restarted(), held(KEYS[0], 0, 11, units=3), later) == []


def test_nothing_is_allocated_until_a_node_has_said_everything() -> None:
    directory = restarted()
    assert directory.adopt("s0", "n1", [held(KEYS[0], 0, 5)], False, 0.0) == 0
    assert directory.lookup(KEYS[:1], "r", 0.0, 0.0) == []
    assert directory.allocate("s0", [KEYS[1]], "w", 5.0, False, 0.0).covered == 0
    assert directory.place([KEYS[1]], [], 0.0) == [""]
    assert directory.adopt("s0", "n1", [], True, 0.0) == 1
    assert directory.allocate("s0", [KEYS[1]], "w", 5.0, False, 0.0).covered == 1


def test_an_inventory_is_refused_from_an_open_node_and_from_another_life_of_it() -> None:
    directory = restarted()
    with pytest.raises(NodeUnknown, match="another incarnation"):
        directory.adopt("s0", "n0", [], True, 0.0)
    directory.adopt("s0", "n1", [], True, 0.0)
    with pytest.raises(RequestInvalid, match="is complete"):
        directory.adopt("s0", "n1", [], True, 0.0)


def test_more_blocks_than_memory_are_refused_and_the_inventory_can_begin_again() -> None:
    directory = restarted(slots=2)
    with pytest.raises(RequestInvalid, match="begin the inventory again"):
        directory.adopt("s0", "n1", [held(key, 0, 1) for key in KEYS[:3]], False, 0.0)
    assert adopted(directory, held(KEYS[0], 1, 4)) == [KEYS[0]]


def test_a_block_that_is_pinned_before_it_is_found_again_is_pinned() -> None:
    directory = restarted()
    directory.pin(KEYS[:1], "soft", 60.0, 0.0)
    directory.pin(KEYS[1:2], "hard", 0.0, 0.0)
    assert adopted(directory, held(KEYS[0], 0, 5), held(KEYS[1], 1, 6)) == KEYS[:2]
    assert directory.stats(0.0).nodes[0].pinned_units == 1


def test_a_writer_that_commits_to_the_next_directory_came_late_and_made_no_mistake() -> None:
    directory = restarted()
    done = held(KEYS[0], 3, 11)
    assert adopted(directory, done) == [KEYS[0]], "its header was complete, its commit under way"
    block = (KEYS[0], done.slot, done.generation, done.checksum)
    assert directory.commit("s0", [block], "w", 5.0, 0.0) == [False]


def test_the_new_directorys_generations_are_above_all_that_it_adopted() -> None:
    directory = restarted()
    adopted(directory, held(KEYS[0], 0, (9 << 20) - 1))
    slot = directory.allocate("s0", [KEYS[1]], "w", 5.0, False, 0.0).slots[0]
    assert slot is not None and slot.generation >= 9 << 20


@pytest.mark.parametrize("epoch", [0, 8, 9])
def test_generations_grow_past_all_that_is_adopted_though_the_clock_was_set_back(
    epoch: int,
) -> None:
    earlier = restarted(epoch=9)
    adopted(earlier)
    old = earlier.allocate("s0", [KEYS[0]], "w", 5.0, False, 0.0).slots[0]
    assert old is not None
    later = restarted(epoch=epoch)
    adopted(
        later,
        held(KEYS[0], old.slot, old.generation, state=STATE_WRITING),
        held(KEYS[2], 6, old.generation - 1),
    )
    new = later.allocate("s0", [KEYS[1]], "w", 5.0, False, 0.0).slots[0]
    assert new is not None and new.generation > old.generation
    late = [(KEYS[0], old.slot, old.generation, 5)]
    assert later.commit("s0", late, "w", 5.0, 0.0) == [False], "late, and no mistake of its writer"


def test_an_absurd_generation_neither_counts_nor_uses_the_others_up() -> None:
    for absurd in (GENERATION_MAX, 2**63, 2**64 - 1):
        directory = restarted()
        damaged = held(KEYS[0], 0, absurd, units=8)
        assert adopted(directory, damaged, held(KEYS[1], 3, 77)) == [KEYS[1]]
        slot = directory.allocate("s0", [KEYS[2]], "w", 5.0, False, 0.0).slots[0]
        assert slot is not None and 9 << 20 <= slot.generation < 10 << 20


def test_a_clock_in_another_century_leaves_generations_to_those_who_come_after() -> None:
    directory = restarted(epoch=2**43)
    adopted(directory)
    slot = directory.allocate("s0", [KEYS[0]], "w", 5.0, False, 0.0).slots[0]
    assert slot is not None and slot.generation < GENERATION_MAX - 2**59
    after = restarted(epoch=2**43)
    assert adopted(after, held(KEYS[0], slot.slot, slot.generation)) == [KEYS[0]]
    again = after.allocate("s0", [KEYS[1]], "w", 5.0, False, 0.0).slots[0]
    assert again is not None and again.generation > slot.generation


def test_whatever_the_clock_does_each_use_of_a_slot_has_a_larger_generation(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        headers: dict[int, InventoryBlock] = {}  # by slot, as the segment keeps them
        for life in range(6):
            directory = restarted(epoch=rng.choice([0, 1, 1, 5, 2**41, 2**60]))
            if headers and rng.random() < 0.5:  # one of them is damaged, and nobody's any more
                headers[rng.choice(list(headers))] = held(KEYS[7], 7, 2**64 - 1)
            adopted(directory, *headers.values())
            now_s = directory.config.quarantine_s
            directory.node_report("s0", "n1", now_s)
            for number in range(rng.randint(0, 12)):
                key = rng.choice(KEYS)
                owner = f"w{life}/{number}"
                slot = directory.allocate("s0", [key], owner, 5.0, False, now_s).slots[0]
                if slot is None:
                    continue
                before = headers.get(slot.slot)
                is_sound = before is not None and before.generation < GENERATION_MAX
                assert before is None or not is_sound or slot.generation > before.generation
                headers[slot.slot] = held(key, slot.slot, slot.generation)
                if rng.random() < 0.8:
                    row = (key, slot.slot, slot.generation, 77)
                    assert directory.commit("s0", [row], owner, 0.0, now_s) == [True]


def test_random_inventories_keep_every_block_that_nothing_contradicts_and_no_overlap(
    seed: int,
) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        pool = SlotPool(rng.randint(1, 24), BLOCK_BYTES)
        blocks = [
            held(
                rng.choice(KEYS),
                rng.randint(0, 24),
                generation,
                rng.randint(1, 4),
                rng.choice([STATE_READY, STATE_READY, STATE_WRITING, STATE_EPHEMERAL]),
            )
            for generation in rng.sample(range(100), rng.randint(0, 12))
        ]
        kept = consistent(sound(blocks, pool), pool)

        def units(one: InventoryBlock) -> set[int]:
            return set(range(one.slot, one.slot + one.size_bytes // BLOCK_BYTES))

        fits = [one for one in blocks if max(units(one)) < pool.units]
        whole = [
            one
            for one in fits
            if not any(
                other.generation > one.generation and units(one) & units(other) for other in fits
            )
        ]
        expected = [
            one
            for one in whole
            if one.state != STATE_READY
            or not any(
                other.key == one.key
                and other.state == STATE_READY
                and other.generation > one.generation
                for other in whole
            )
        ]
        assert kept == sorted(expected, key=lambda one: one.slot)
        assert all(pool.adopt(one.slot, len(units(one))) for one in kept)
        pool.check()
