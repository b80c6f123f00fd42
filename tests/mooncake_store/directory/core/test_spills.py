"""What is copied to SSD: the coldest first, nothing twice, and no more than is of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import NodeUnknown
from mooncake_store.records.blocks import Spill
from mooncake_store.records.membership import SSD_SUFFIX
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, put

SSD = "s0" + SSD_SUFFIX


def with_ssd(dram_slots: int = 8, ssd_slots: int = 32) -> Directory:
    directory = directory_with("s0", slots=dram_slots)
    (info,) = directory.nodes(0.0)
    ssd_bytes = ssd_slots * BLOCK_BYTES
    directory.register_node(replace(info, node_id=SSD, tier="ssd", segment_bytes=ssd_bytes), 0.0)
    return directory


def spill(directory: Directory, blocks_max: int = 64, now_s: float = 1.0) -> list[bytes]:
    """Do what a node does; the keys that were copied."""
    spills = directory.take_spills("s0", "spiller", blocks_max, 10.0, now_s)
    directory.check()
    rows = [(each.key, each.ssd_slot, each.ssd_generation, each.checksum) for each in spills]
    assert all(directory.commit(SSD, rows, "spiller", 0.0, now_s))
    directory.check()
    return [each.key for each in spills]


def test_nothing_is_spilled_while_there_is_room() -> None:
    directory = with_ssd(dram_slots=8)
    put(directory, chain(5))
    assert spill(directory) == []
    put(directory, chain(1, "b"), now_s=1.0)
    assert spill(directory) != []


def test_the_coldest_blocks_go_to_the_ssd_first_and_none_twice() -> None:
    directory = with_ssd(dram_slots=8)
    old, new = chain(4, "old"), chain(4, "new")
    put(directory, old, now_s=0.0)
    put(directory, new, now_s=0.5)
    assert sorted(spill(directory, blocks_max=4)) == old
    assert sorted(spill(directory, blocks_max=4)) == new
    assert spill(directory) == []
    assert directory.stats(1.0).spills == 8


def test_what_is_on_its_way_to_the_ssd_is_not_given_out_again() -> None:
    directory = with_ssd(dram_slots=8)
    put(directory, chain(8))
    first = directory.take_spills("s0", "one", 5, 10.0, 1.0)
    second = directory.take_spills("s0", "two", 5, 10.0, 1.0)
    assert sorted(each.key for each in (*first, *second)) == chain(8)


def test_a_spill_says_where_the_block_is_and_where_to() -> None:
    directory = with_ssd(dram_slots=2)
    put(directory, chain(2))
    ((copy,), _) = directory.lookup(chain(2), "r", 0.0, 0.5)
    spills = {each.key: each for each in directory.take_spills("s0", "one", 2, 10.0, 1.0)}
    each = spills[chain(1)[0]]
    assert each == Spill(
        chain(1)[0], *copy[1:], each.ssd_slot, each.ssd_generation, directory.epoch
    )


def test_what_is_in_use_or_pinned_is_not_spilled() -> None:
    directory = with_ssd(dram_slots=4)
    keys = chain(4)
    put(directory, keys)
    directory.lookup(keys[:1], "reader", 10.0, 0.5)
    directory.pin(keys[1:2], "hard", 0.0, 0.5)
    assert sorted(spill(directory)) == keys[2:]


def test_a_spilled_block_is_found_on_the_ssd_after_it_left_dram() -> None:
    directory = with_ssd(dram_slots=2)
    keys = chain(2)
    put(directory, keys)
    spill(directory)
    put(directory, chain(2, "b"), now_s=2.0)
    found = directory.lookup(keys, "r", 5.0, 3.0)
    assert [[copy.node_id for copy in places] for places in found] == [[SSD], [SSD]]
    stats = directory.stats(3.0)
    assert (stats.hit_blocks, stats.hit_ssd_blocks) == (2, 2)


def test_in_dram_comes_before_on_ssd() -> None:
    directory = with_ssd(dram_slots=2)
    put(directory, chain(2))
    spill(directory)
    found = directory.lookup(chain(2), "r", 0.0, 2.0)
    assert [[copy.node_id for copy in places] for places in found] == [["s0", SSD]] * 2


def test_a_small_ssd_is_not_written_over_and_over_while_nothing_changes() -> None:
    directory = with_ssd(dram_slots=12, ssd_slots=4)
    put(directory, chain(12))
    written = [key for _ in range(50) for key in spill(directory)]
    assert 0 < len(written) <= 4


def test_an_ssd_that_drains_or_has_not_said_what_it_holds_gets_nothing() -> None:
    directory = with_ssd(dram_slots=2)
    put(directory, chain(2))
    directory.drain(SSD, True, 0.5)
    assert spill(directory) == []
    directory.drain(SSD, False, 1.0)
    assert len(spill(directory)) == 2


def test_a_node_without_ssd_is_told_so() -> None:
    with pytest.raises(NodeUnknown, match="s0/ssd is not registered"):
        directory_with("s0").take_spills("s0", "one", 1, 10.0, 1.0)


def test_a_spill_that_is_given_up_frees_its_place_on_the_ssd() -> None:
    directory = with_ssd(dram_slots=2)
    put(directory, chain(2))
    directory.take_spills("s0", "one", 2, 10.0, 1.0)
    directory.release("one", 1.0)  # the disk may still be writing
    ssd = directory.stats(1.0).nodes[1]
    assert (ssd.used_units, ssd.quarantined_units) == (0, 2)
