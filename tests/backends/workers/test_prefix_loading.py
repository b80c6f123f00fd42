"""The prefix comes from the nodes that the conductor named, in its order; from others if they fail.

Real stores on real target processes, over plain TCP; the pages are none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backends.workers.prefix_loading import Fetching, LoadedPrefix, PrefixLoading
from mooncake_store.client.store import Fetched
from mooncake_store.memory.segment import Segment
from mooncake_store.records.blocks import Copy
from tests.mooncake_store.client.world import BLOCK, DEADLINE_S, World, choose, keys_of, put
from tests.mooncake_store.targets import TargetPool

NODES = ("s0", "s1", "s2", "s3")
BLOCKS = 6


class AllArrive:
    """In place of a KvLoader."""

    def load_copies(self, copies: list[Copy], pages: list[int]) -> int:
        return len(copies)


@pytest.fixture(scope="module")
def targets() -> Iterator[TargetPool]:
    pool = TargetPool()
    yield pool
    pool.close()


@pytest.fixture
def world(targets: TargetPool) -> Iterator[World]:
    made = World("tcp", targets)
    for node_id in NODES[2:]:
        made.start(node_id)
    yield made
    made.close()


def fill(world: World, keys: list[bytes], blocks: dict[str, int]) -> None:
    """So many leading blocks on each of these nodes, put in this order."""
    for node_id, count in blocks.items():
        put(world.store(node_id)[0], keys[:count], f"writer on {node_id}")


def load(world: World, keys: list[bytes], *nodes: str, blocks: int = BLOCKS) -> LoadedPrefix:
    """By a prefill worker of s3."""
    loader: Any = AllArrive()
    prefixes = PrefixLoading(world.store("s3")[0], loader.load_copies, "s3", 60.0, DEADLINE_S)
    found = prefixes.find(keys, "r1")
    return prefixes.load(keys, found, list(range(BLOCKS)), Fetching(blocks, nodes), "r1")


@pytest.mark.parametrize("order", [("s0", "s1", "s2"), ("s2", "s1", "s0")])
@pytest.mark.parametrize("named", ["s0", "s1", "s2"])
def test_all_bytes_leave_the_named_node_whoever_got_its_copy_first(
    world: World, seed: int, named: str, order: tuple[str, ...]
) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, dict.fromkeys(order, BLOCKS))
    loaded = load(world, keys, named)
    assert loaded.fetched_from == {named: BLOCKS * BLOCK}
    assert (len(loaded.copies), loaded.fetched_blocks) == (BLOCKS, BLOCKS)


def test_what_the_named_node_lacks_comes_from_the_second_choice_and_then_from_anybody(
    world: World, seed: int
) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, {"s0": BLOCKS, "s1": 4, "s2": 1})
    loaded = load(world, keys, "s2", "s1")
    assert loaded.fetched_from == {"s2": BLOCK, "s1": 3 * BLOCK, "s0": 2 * BLOCK}
    assert loaded.fetched_blocks == BLOCKS


@pytest.mark.parametrize("nodes", [("s1", "s2"), ("s1",)])
def test_a_node_that_died_is_replaced_by_the_second_choice_or_by_anybody(
    world: World, seed: int, nodes: tuple[str, ...]
) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, {"s1": BLOCKS, "s2": BLOCKS})
    target = world.nodes["s1"]
    target.kill()
    loaded = load(world, keys, *nodes)
    assert loaded.fetched_from == {"s2": BLOCKS * BLOCK}
    assert (len(loaded.copies), loaded.fetched_blocks) == (BLOCKS, BLOCKS)


def test_a_damaged_block_comes_from_another_node_and_the_others_are_not_read_twice(
    world: World, seed: int
) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, {"s0": BLOCKS, "s1": BLOCKS})
    copies = choose(world.directory.lookup(keys, "test", 0.0), "s1")
    with Segment.open(world.nodes["s1"].info.segment_path) as segment:
        shape = world.directory.attach("s1", "f" * 32, BLOCK)
        segment.view[shape.slot_offset_bytes(copies[2].slot)] ^= 1
    loaded = load(world, keys, "s1")
    assert loaded.fetched_from == {"s1": (BLOCKS - 1) * BLOCK, "s0": BLOCK}
    assert len(loaded.copies) == BLOCKS


def test_no_more_blocks_are_fetched_than_the_conductor_allowed_however_often_a_node_fails(
    world: World, seed: int
) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, {"s3": 1, "s1": BLOCKS, "s2": BLOCKS})
    world.nodes["s1"].kill()
    loaded = load(world, keys, "s1", "s2", blocks=3)
    assert loaded.fetched_from == {"s2": 3 * BLOCK}
    assert (len(loaded.copies), loaded.fetched_blocks) == (4, 3)
    assert load(world, keys, "s2", blocks=0).fetched_from == {}


def test_blocks_that_no_living_node_has_are_a_shorter_prefix(world: World, seed: int) -> None:
    keys = keys_of(BLOCKS, seed)
    fill(world, keys, {"s1": BLOCKS, "s2": 2})
    world.nodes["s1"].kill()
    loaded = load(world, keys, "s1")
    assert loaded.fetched_from == {"s2": 2 * BLOCK}
    assert (len(loaded.copies), loaded.fetched_blocks) == (2, 2)


class CopiesStore:
    """In place of a Store: whatever is asked for is on the own node afterwards."""

    def __init__(self, copies: list[tuple[Copy, ...]]) -> None:
        self.copies = copies
        self.asked: list[Copy] = []

    def lookup(self, keys: list[bytes], owner: str, lease_s: float) -> list[tuple[Copy, ...]]:
        return self.copies

    def choose(self, found: list[list[Copy]], first: tuple[str, ...]) -> list[Copy]:
        return [copies[0] for copies in found]

    def fetch(
        self, keys: list[bytes], wanted: list[Copy], owner: str, lease_s: float, left_s: float
    ) -> Fetched:
        self.asked += wanted
        here = [Copy("s3", each.slot, 1, 1, 1) for each in wanted]
        start = next(i for i, copies in enumerate(self.copies) if wanted[0] in copies)
        for at, copy in enumerate(here, start):
            self.copies[at] = (copy, *self.copies[at])
        return Fetched(len(wanted), {})


@pytest.mark.parametrize(("allowed", "fetched"), [(0, 0), (2, 2), (9, 3)])
def test_what_the_own_ssd_has_does_not_count_for_what_may_be_fetched(
    allowed: int, fetched: int
) -> None:
    """One block in memory, two on the own SSD, three more on another node."""
    holders = ["s3", "s3/ssd", "s3/ssd", "s1", "s1", "s1"]
    store: Any = CopiesStore([(Copy(name, at, 1, 1, 1),) for at, name in enumerate(holders)])
    loader: Any = AllArrive()
    prefixes = PrefixLoading(store, loader.load_copies, "s3", 60.0, DEADLINE_S)
    keys = keys_of(BLOCKS, 1)
    found = prefixes.find(keys, "r1")
    got = prefixes.load(keys, found, list(range(BLOCKS)), Fetching(allowed, ("s1",)), "r1")
    assert [copy.node_id for copy in store.asked] == ["s3/ssd"] * 2 + ["s1"] * fetched
    assert len(got.copies) == 3 + fetched
