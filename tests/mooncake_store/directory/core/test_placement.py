"""Where a new block goes when nobody says: room, age, and neither draining nor silent nodes."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace

from mooncake_store.directory.core.directory import Directory
from mooncake_store.records.membership import SSD_SUFFIX
from tests.mooncake_store.makers import BLOCK_BYTES, chain, directory_with, node_info, put

MANY = [secrets.token_bytes(16) for _ in range(4_000)]


def shares(directory: Directory, now_s: float, *excluded: str) -> dict[str, float]:
    """Which part of many new chains each node would get."""
    counted = Counter(directory.place(MANY, excluded, now_s))
    return {name: count / len(MANY) for name, count in counted.items()}


def report(directory: Directory, now_s: float, *node_ids: str) -> None:
    for node_id in node_ids:
        assert directory.node_report(node_id, "n1", now_s)


def test_nodes_that_are_alike_share_new_blocks_equally() -> None:
    for share in shares(directory_with("s0", "s1", "s2"), 100.0).values():
        assert 0.28 < share < 0.39


def test_a_new_empty_node_fills_slowly_instead_of_taking_all_new_blocks() -> None:
    directory = directory_with("s0", "s1", slots=10)
    put(directory, chain(8), "s0")
    put(directory, chain(8), "s1")
    full_s = directory.config.slow_start_s
    report(directory, full_s, "s0", "s1")
    directory.register_node(node_info("new", slots=10), full_s)
    directory.attach("new", "print", BLOCK_BYTES, full_s)
    early = shares(directory, full_s + 0.6).get("new", 0.0)
    later = shares(directory, full_s + full_s / 4)["new"]
    at_last = shares(directory, 2 * full_s)["new"]
    assert early < 0.06 < later < at_last
    assert 0.6 < at_last < 0.8, "it has 10 free of 10, they have 2 of 10 each"


def test_a_full_node_still_takes_some_by_evicting() -> None:
    directory = directory_with("s0", "s1", slots=8)
    put(directory, chain(8), "s0")
    assert 0.01 < shares(directory, 100.0)["s0"] < 0.12


def test_the_same_chain_goes_to_the_same_node_whoever_asks() -> None:
    directory = directory_with("s0", "s1", "s2")
    assert directory.place(MANY, [], 50.0) == directory.place(MANY, [], 50.0)


def test_a_draining_node_takes_nothing_and_keeps_what_it_has_readable() -> None:
    directory = directory_with("s0", "s1")
    keys = chain(3)
    put(directory, keys, "s0")
    directory.drain("s0", True, 1.0)
    assert set(shares(directory, 1.0)) == {"s1"}
    assert directory.allocate("s0", chain(2, "b"), "w", 5.0, False, 1.0).covered == 0
    assert len(directory.lookup(keys, "r", 5.0, 1.0)) == 3
    assert directory.stats(1.0).nodes[0].is_draining
    directory.drain("s0", False, 2.0)
    assert set(shares(directory, 100.0)) == {"s0", "s1"}


def test_what_a_draining_node_alone_has_is_named_until_it_is_elsewhere() -> None:
    directory = directory_with("s0", "s1")
    keys = chain(4)
    put(directory, keys, "s0")
    put(directory, keys[:1], "s1")
    directory.drain("s0", True, 1.0)
    alone = [key for key, _ in directory.blocks_on("s0", 100, True, 1.0)]
    assert sorted(alone) == keys[1:]
    assert len(directory.blocks_on("s0", 2, True, 1.0)) == 2
    put(directory, keys, "s1", now_s=1.0)
    assert directory.blocks_on("s0", 100, True, 1.0) == []
    assert len(directory.blocks_on("s0", 100, False, 1.0)) == 4


def test_excluded_ssd_and_unknown_nodes_get_nothing() -> None:
    directory = directory_with("s0", "s1")
    ssd = replace(node_info("s0" + SSD_SUFFIX), tier="ssd")
    directory.register_node(ssd, 0.0)
    assert set(shares(directory, 100.0, "s1")) == {"s0"}
    assert directory.place(MANY[:2], ["s0", "s1"], 100.0) == ["", ""]
    assert Directory(epoch=1).place(MANY[:1], [], 0.0) == [""]
