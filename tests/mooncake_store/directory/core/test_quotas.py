"""Quotas: a tenant makes room by losing its own coldest blocks, never another's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import QuotaExceeded
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info


def store(
    directory: Directory,
    keys: list[bytes],
    tenant: str,
    now_s: float,
    node_id: str = "s0",
    is_released: bool = True,
) -> int:
    """How many of them got a place."""
    given = directory.allocate(node_id, keys, "w", 50.0, False, now_s, BLOCK_BYTES, tenant)
    blocks = [
        (key, slot.slot, slot.generation, 1)
        for key, slot in zip(keys, given.slots, strict=True)
        if slot
    ]
    assert all(directory.commit(node_id, blocks, "w", 50.0, now_s))
    if is_released:
        directory.release("w", now_s)
    directory.check()
    return len(blocks)


def used_blocks(directory: Directory, now_s: float) -> int:
    """Of the only tenant."""
    ((_, used_bytes, _),) = directory.stats(now_s).tenants
    return used_bytes // BLOCK_BYTES


def test_a_tenant_over_its_quota_loses_its_own_coldest_blocks_only() -> None:
    directory = directory_with("s0", slots=20)
    directory.set_quota("small", 3 * BLOCK_BYTES, 0.0)
    others, first, second = chain(6, "o"), chain(3, "a"), chain(2, "b")
    store(directory, others, "", 0.0)
    store(directory, first, "small", 1.0)
    store(directory, second, "small", 2.0)
    assert used_blocks(directory, 2.0) == 3
    assert len(directory.lookup(others, "r", 0.0, 3.0)) == 6, "somebody else's, and colder"
    assert len(directory.lookup(second, "r", 0.0, 3.0)) == 2
    assert len(directory.lookup(first, "r", 0.0, 3.0)) == 1, "of the coldest chain its start"


def test_a_quota_counts_over_all_nodes() -> None:
    directory = directory_with("s0", "s1")
    directory.set_quota("t", 2 * BLOCK_BYTES, 0.0)
    store(directory, chain(2), "t", 0.0)
    store(directory, chain(1, "b"), "t", 1.0, node_id="s1")
    assert used_blocks(directory, 1.0) == 2
    assert len(directory.lookup(chain(2), "r", 0.0, 2.0)) == 1


def test_a_tenant_whose_blocks_are_all_in_use_is_told_so() -> None:
    directory = directory_with("s0")
    directory.set_quota("t", 2 * BLOCK_BYTES, 0.0)
    assert store(directory, chain(3), "t", 0.0, is_released=False) == 2, "as far as it goes"
    with pytest.raises(QuotaExceeded, match="t stores 8192 bytes of its 8192"):
        store(directory, chain(1, "b"), "t", 1.0)
    directory.release("w", 2.0)
    assert store(directory, chain(1, "b"), "t", 3.0) == 1


def test_a_use_makes_a_block_the_tenants_youngest() -> None:
    directory = directory_with("s0")
    directory.set_quota("t", 2 * BLOCK_BYTES, 0.0)
    old, new = chain(1, "old"), chain(1, "new")
    store(directory, old, "t", 0.0)
    store(directory, new, "t", 1.0)
    directory.lookup(old, "r", 0.0, 2.0)
    store(directory, chain(1, "next"), "t", 3.0)
    assert directory.lookup(old, "r", 0.0, 4.0) and not directory.lookup(new, "r", 0.0, 4.0)


def test_a_tenants_hard_pinned_block_is_no_victim() -> None:
    directory = directory_with("s0")
    directory.set_quota("t", BLOCK_BYTES, 0.0)
    store(directory, chain(1), "t", 0.0)
    directory.pin(chain(1), "hard", 0.0, 0.0)
    with pytest.raises(QuotaExceeded):
        store(directory, chain(1, "b"), "t", 1.0)


def test_what_goes_any_way_is_not_counted_any_more() -> None:
    directory = directory_with("s0", "s1", slots=4)
    directory.set_quota("t", 4 * BLOCK_BYTES, 0.0)
    removed, evicted, lost, abandoned = chain(1, "a"), chain(1, "b"), chain(1, "c"), chain(1, "d")
    store(directory, removed, "t", 0.0)
    directory.remove(removed, 0.0)
    store(directory, evicted, "t", 0.0)
    store(directory, chain(4, "o"), "", 1.0)
    store(directory, lost, "t", 1.0, node_id="s1")
    directory.deregister_node("s1", "n1", 1.0)
    given = directory.allocate("s0", abandoned, "w", 5.0, False, 1.0, 0, "t")
    assert used_blocks(directory, 1.0) == 1
    assert given.slots[0] is not None
    directory.abandon([given.slots[0]], "w", 1.0)
    directory.check()
    assert used_blocks(directory, 1.0) == 0


def test_a_further_copy_that_nobody_names_a_tenant_for_counts_for_the_same_one() -> None:
    directory = directory_with("s0", "s1")
    directory.set_quota("t", 3 * BLOCK_BYTES, 0.0)
    old, hot = chain(1, "old"), chain(2, "hot")
    store(directory, old, "t", 0.0)
    store(directory, hot, "t", 1.0)
    directory.lookup(hot, "r", 50.0, 2.0)  # as whoever copies them does
    made = store(directory, hot, "", 2.0, node_id="s1", is_released=False)
    assert made == 1, "the oldest block made room for one"
    assert not directory.lookup(old, "r", 0.0, 3.0) and used_blocks(directory, 3.0) == 3
    with pytest.raises(QuotaExceeded):
        store(directory, hot[1:], "", 4.0, node_id="s1")
    tail = directory.allocate("s1", hot[1:], "w", 5.0, True, 4.0)
    assert tail.covered == 1, "an object of one request, gone with it, counts for nobody"


def test_copies_on_an_ssd_count_and_push_nothing_out() -> None:
    config = DirectoryConfig(spill_fraction=0.001)
    directory = Directory(1, config)
    for info in (node_info(slots=20), replace(node_info("s0/ssd", slots=20), tier="ssd")):
        directory.register_node(info, 0.0)
        directory.attach(info.node_id, "print", BLOCK_BYTES, 0.0)
    directory.set_quota("t", 4 * BLOCK_BYTES, 0.0)
    store(directory, chain(3, "a"), "t", 0.0)
    store(directory, chain(3, "b"), "", 1.0)
    spills = directory.take_spills("s0", "spill", 64, 5.0, 2.0)
    directory.check()
    assert sum(spill.key in chain(3, "a") for spill in spills) == 1, "as many as the quota has room"
    assert sum(spill.key in chain(3, "b") for spill in spills) == 3
    assert used_blocks(directory, 2.0) == 4
    assert len(directory.lookup(chain(3, "a"), "r", 0.0, 3.0)) == 3


def test_a_quota_that_is_taken_away_counts_nothing() -> None:
    directory = directory_with("s0")
    directory.set_quota("t", BLOCK_BYTES, 0.0)
    store(directory, chain(1), "t", 0.0)
    directory.set_quota("t", 0, 1.0)
    directory.check()
    assert directory.stats(1.0).tenants == ()
    assert store(directory, chain(4, "b"), "t", 2.0) == 4
