"""Slots reserved ahead: they name their blocks when they are committed, and are bounded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import EpochPassed
from mooncake_store.layout import STATE_WRITING
from mooncake_store.records.blocks import REFUSED, STORED, THERE, ReservedCommit, Slot
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put

Use = tuple[int, int]
LEASE_S = 60.0


def ask(
    directory: Directory,
    rows: list[tuple[bytes, int, int, int]],
    wished: int,
    now_s: float = 0.0,
    owner: str = "w",
    size_bytes: int = BLOCK_BYTES,
    tenant: str = "",
    epoch: int = 0,
) -> ReservedCommit:
    answer = directory.commit_reserved(
        "s0", rows, owner, size_bytes, wished, LEASE_S, now_s, epoch, tenant
    )
    directory.check()
    return answer


def rows(keys: list[bytes], uses: tuple[Use, ...]) -> list[tuple[bytes, int, int, int]]:
    return [(key, *use, 9) for key, use in zip(keys, uses, strict=True)]


def test_a_reserved_slot_names_its_block_when_it_is_committed() -> None:
    directory = directory_with("s0", slots=32)
    given = ask(directory, [], 3)
    assert len(given.slots) == 3 and given.epoch == directory.epoch
    (node,) = directory.stats(0.0).nodes
    assert (node.reserved_units, node.used_units, node.used_bytes, node.writing_blocks) == (
        3,
        3,
        0,
        0,
    )
    keys = chain(3)
    answer = ask(directory, rows(keys[:2], given.slots[:2]), 0)
    assert answer.verdicts == (STORED, STORED) and answer.is_held
    found = directory.lookup(keys, "", 0.0, 0.0)
    assert [(c.slot, c.generation, c.checksum, c.size_bytes) for (c,) in found] == [
        (*use, 9, BLOCK_BYTES) for use in given.slots[:2]
    ]
    (node,) = directory.stats(0.0).nodes
    assert (node.reserved_units, node.ready_blocks, node.idle_blocks) == (1, 2, 2)
    assert directory.remove(keys[:2], 0.0) == [True, True], "nobody leases what was committed"


def test_a_commit_brings_as_many_slots_again() -> None:
    directory = directory_with("s0", slots=64)
    given = ask(directory, [], 4)
    for turn in range(20):
        keys = chain(2, f"k{turn}")
        answer = ask(directory, rows(keys, given.slots[:2]), 2, float(turn))
        assert answer.verdicts == (STORED, STORED) and len(answer.slots) == 2
        given = replace(given, slots=(*given.slots[2:], *answer.slots))
    assert directory.stats(20.0).nodes[0].reserved_units == 4


def test_a_block_that_is_there_is_not_stored_twice_and_counts_as_used() -> None:
    directory = directory_with("s0", slots=32)
    old, new = chain(1, "a"), chain(1, "b")
    put(directory, old)
    given = ask(directory, [], 3)
    again = [*old, *new, *new]
    assert ask(directory, rows(again, given.slots), 0).verdicts == (THERE, STORED, THERE)
    assert directory.stats(0.0).nodes[0].reserved_units == 2, "both slots are still the writer's"
    slots = [Slot("s0", *given.slots[0]), Slot("s0", *given.slots[2])]
    assert directory.abandon(slots, "w", 0.0) == 2
    (node,) = directory.stats(0.0).nodes
    assert (node.reserved_units, node.quarantined_units) == (0, 0)
    directory.check()


def test_a_block_that_another_owner_is_still_writing_is_refused() -> None:
    """That owner may die, and then the block has no copy: THERE would be wrong."""
    directory = directory_with("s0", slots=32)
    (key,) = chain(1)
    given = ask(directory, [], 1)
    directory.allocate("s0", [key], "other", 5.0, False, 0.0)
    assert ask(directory, rows([key], given.slots), 0).verdicts == (REFUSED,)
    directory.release("other", 1.0)
    assert ask(directory, rows([key], given.slots), 0, 1.0).verdicts == (STORED,)
    assert directory.lookup([key], "", 0.0, 1.0)


def test_slots_of_a_writer_that_vanished_rest_before_they_are_used_again() -> None:
    directory = directory_with("s0", slots=32)
    given = ask(directory, [], 2)
    late_s = LEASE_S + 1.0
    answer = ask(directory, rows(chain(2), given.slots), 1, late_s)
    assert answer.verdicts == (REFUSED, REFUSED) and not answer.is_held
    (node,) = directory.stats(late_s).nodes
    assert (node.quarantined_units, node.reserved_units) == (2, 1)
    assert directory.lookup(chain(2), "", 0.0, late_s) == []


def test_a_commit_renews_the_lease_of_what_is_left() -> None:
    directory = directory_with("s0", slots=64)
    given = ask(directory, [], 4)
    ask(directory, rows(chain(1), given.slots[:1]), 0, LEASE_S - 1.0)
    later = rows(chain(1, "b"), given.slots[1:2])
    assert ask(directory, later, 0, 2 * LEASE_S - 2.0).verdicts == (STORED,)


def test_nobody_else_can_commit_or_take_a_reserved_slot() -> None:
    directory = directory_with("s0", slots=32)
    (use,) = ask(directory, [], 1).slots
    (key,) = chain(1)
    assert ask(directory, rows([key], (use,)), 0, owner="thief").verdicts == (REFUSED,)
    assert directory.commit("s0", [(key, *use, 9)], "w", 0.0, 0.0) == [False]
    assert ask(directory, rows([key], ((use[0], use[1] + 1),)), 0).verdicts == (REFUSED,)
    assert ask(directory, rows([key], (use,)), 0).verdicts == (STORED,)


def test_reservations_take_a_quarter_of_what_is_free_or_idle_and_one_owner_an_eighth() -> None:
    directory = directory_with("s0", slots=32)
    assert len(ask(directory, [], 99, owner="a").slots) == 4
    assert len(ask(directory, [], 99, owner="b").slots) == 4
    assert len(ask(directory, [], 99, owner="c").slots) == 0
    assert ask(directory, [], 99, owner="a").most == 4
    keys = chain(24)
    given = directory.allocate("s0", keys, "r", 50.0, False, 0.0)
    assert given.covered == 24, "all that is not reserved can be had"
    assert ask(directory, [], 99, owner="a").most < 4, "little is left: some is to be given back"


def test_a_full_memory_gives_slots_by_eviction_but_never_what_is_leased() -> None:
    directory = directory_with("s0", slots=32)
    put(directory, chain(32))
    assert len(ask(directory, [], 4, 1.0).slots) == 4
    assert directory.stats(1.0).evictions == 4
    directory = directory_with("s0", slots=32)
    directory.allocate("s0", chain(32), "r", 50.0, False, 0.0)
    assert ask(directory, [], 4, 1.0).slots == ()


def test_a_small_memory_reserves_nothing() -> None:
    assert ask(directory_with("s0", slots=7), [], 4).slots == ()


def test_a_node_that_drains_takes_no_new_block_and_reserves_none() -> None:
    directory = directory_with("s0", slots=32)
    given = ask(directory, [], 2)
    directory.drain("s0", True, 0.0)
    answer = ask(directory, rows(chain(2), given.slots), 2)
    assert answer.verdicts == (REFUSED, REFUSED) and answer.slots == ()


def test_a_node_that_came_back_does_not_know_its_reservations() -> None:
    directory = directory_with("s0", slots=32)
    given = ask(directory, [], 2)
    directory.register_node(node_info("s0", "n2", slots=32), 1.0)
    directory.attach("s0", "print", BLOCK_BYTES, 1.0)
    answer = ask(directory, rows(chain(2), given.slots), 1, 1.0)
    assert answer.verdicts == (REFUSED, REFUSED) and not answer.is_held
    assert len(answer.slots) == 1


def test_an_earlier_epoch_is_refused_and_changes_nothing() -> None:
    directory = directory_with("s0", slots=32)
    given = ask(directory, [], 2)
    with pytest.raises(EpochPassed):
        ask(directory, rows(chain(2), given.slots), 1, epoch=directory.epoch - 1)
    assert ask(directory, rows(chain(2), given.slots), 0).verdicts == (STORED, STORED)


def test_a_marked_slot_rests_for_its_lease_after_the_directory_restarted() -> None:
    info = replace(node_info("s0", slots=32), has_inventory=True)
    directory = Directory(9)
    directory.register_node(info, 0.0)
    marked = (bytes(16), 3, 8 << 20, int(LEASE_S * 1_000), BLOCK_BYTES, STATE_WRITING)
    assert directory.adopt("s0", "n1", [marked], True, 0.0) == 0
    directory.attach("s0", "print", BLOCK_BYTES, 0.0)
    rests_s = LEASE_S + DirectoryConfig().quarantine_s
    for now_s, resting in ((rests_s - 1.0, 1), (rests_s + 1.0, 0)):
        directory.node_report("s0", "n1", now_s)
        directory.tick(now_s)
        assert directory.stats(now_s).nodes[0].quarantined_units == resting


def test_a_named_block_counts_for_its_tenant_and_makes_room_in_its_quota() -> None:
    directory = directory_with("s0", slots=64)
    directory.set_quota("t", 2 * BLOCK_BYTES, 0.0)
    given = ask(directory, [], 4)
    assert directory.stats(0.0).tenants == (("t", 0, 2 * BLOCK_BYTES),)
    first = chain(2, "a")
    assert ask(directory, rows(first, given.slots[:2]), 0, tenant="t").verdicts == (STORED, STORED)
    assert directory.stats(0.0).tenants == (("t", 2 * BLOCK_BYTES, 2 * BLOCK_BYTES),)
    second = rows(chain(1, "b"), given.slots[2:3])
    assert ask(directory, second, 0, 1.0, tenant="t").verdicts == (STORED,)
    assert len(directory.lookup(first, "", 0.0, 1.0)) == 1, "its own oldest one went"
    directory.lookup([*chain(1, "b"), *first], "r", 50.0, 2.0, prefix_only=False)
    third = rows(chain(1, "c"), given.slots[3:])
    assert ask(directory, third, 0, 2.0, tenant="t").verdicts == (REFUSED,)


@pytest.mark.slow
def test_anything_at_random_keeps_the_books_in_order(seed: int) -> None:
    """Every call checks the invariants; what was stored is found where it was written."""
    chance = random.Random(seed)
    directory, now_s = directory_with("s0", slots=64), 0.0
    held_by: dict[str, list[Use]] = {owner: [] for owner in "abc"}
    keys = chain(40)
    seen = dict.fromkeys((STORED, THERE, REFUSED), 0)
    for _ in range(2_000):
        now_s += LEASE_S + 40.0 if chance.random() < 0.01 else chance.random()
        if chance.random() < 0.01:
            directory.deregister_node("s0", "n1", now_s)
            directory.register_node(node_info("s0", slots=64), now_s)
            directory.attach("s0", "print", BLOCK_BYTES, now_s)
        directory.node_report("s0", "n1", now_s)
        directory.tick(now_s)
        owner = chance.choice("abc")
        size = {"a": 1, "b": 2, "c": 4}[owner] * BLOCK_BYTES
        step = chance.random()
        if step < 0.7:
            held = held_by[owner]
            count = chance.randint(0, min(len(held), 4))
            chosen = [held.pop(chance.randrange(len(held))) for _ in range(count)]
            named = chance.sample(keys, count)
            answer = ask(
                directory, rows(named, tuple(chosen)), chance.randint(0, 5), now_s, owner, size
            )
            for key, use, verdict in zip(named, chosen, answer.verdicts, strict=True):
                seen[verdict] += 1
                found = directory.lookup([key], "", 0.0, now_s)
                assert verdict == REFUSED or found or answer.slots, "only for room it may be gone"
                if verdict == STORED and found:
                    assert (found[0][0].slot, found[0][0].generation) == use
                elif verdict == THERE:
                    directory.abandon([Slot("s0", *use)], owner, now_s)
            held += answer.slots
        elif step < 0.72:
            directory.release(owner, now_s)
            held_by[owner] = []
        elif step < 0.85:
            directory.remove(chance.sample(keys, 5), now_s)
        else:
            put(directory, chance.sample(keys, 2), now_s=now_s)
        directory.check()
    assert min(seen.values()) > 20, f"seed {seed}: {seen}"
