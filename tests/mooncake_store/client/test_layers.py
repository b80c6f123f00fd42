"""Blocks whose layers several workers write and read, each its own, over every transport."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from mooncake_store.client.store import Store
from mooncake_store.errors import RequestInvalid, TransferFailed
from mooncake_store.layout import LayerRange
from mooncake_store.memory.buffers import checksum
from mooncake_store.memory.digests import block_checksum, checksum_of, pack_digests
from mooncake_store.memory.segment import Segment
from mooncake_store.records.blocks import Copy, Slot
from tests.mooncake_store.client.world import (
    BLOCK,
    DEADLINE_S,
    LAYOUT,
    PAGES,
    World,
    choose,
    content,
    keys_of,
    put,
)

LAYER = LAYOUT.layer_bytes
SHARES = (LayerRange(0, 1), LayerRange(1, LAYOUT.layers))


class Stage:
    """A worker with a share of the layers: pages with nothing else."""

    def __init__(self, world: World, node_id: str, layers: LayerRange) -> None:
        self.layers, self.page_bytes = layers, len(layers) * LAYER
        self.store = Store(
            world.directory,
            node_id,
            "f" * 32,
            LAYOUT,
            world.transports,
            layers,  # type: ignore[arg-type]
        )
        world.stores.append(self.store)
        self.pool = np.zeros(PAGES * self.page_bytes, np.uint8)
        self.store.register_buffer(self.pool)

    def part_of(self, key: bytes) -> np.ndarray:
        return content(key)[self.layers.first * LAYER : self.layers.stop * LAYER]

    def page(self, page: int) -> np.ndarray:
        return self.pool[page * self.page_bytes : (page + 1) * self.page_bytes]

    def write(self, keys: list[bytes], slots: list[Slot]) -> list[tuple[int, ...] | None]:
        pages = range(len(keys))
        for page, key in zip(pages, keys, strict=True):
            self.page(page)[:] = self.part_of(key)
        return self.store.write(slots, self.pool, [p * self.page_bytes for p in pages], DEADLINE_S)

    def read(self, copies: list[Copy]) -> list[bool]:
        self.pool[:] = 0
        offsets = [page * self.page_bytes for page in range(len(copies))]
        return self.store.read(copies, self.pool, offsets, DEADLINE_S)


def stages(world: World) -> list[Stage]:
    return [Stage(world, node_id, each) for node_id, each in zip(("s0", "s1"), SHARES, strict=True)]


def allocate(stage: Stage, keys: list[bytes], lease_s: float = 60.0) -> list[Slot]:
    slots = [slot for slot in stage.store.allocate(keys, "group", lease_s).slots if slot]
    assert len(slots) == len(keys)
    return slots


def joined(written: list[list[tuple[int, ...] | None]]) -> list[list[int]]:
    """The digests of all layers of each block, in order."""
    blocks = []
    for of_stages in zip(*written, strict=True):
        assert None not in of_stages
        blocks.append([digest for part in of_stages for digest in part or ()])
    return blocks


def write_together(world: World, keys: list[bytes], committer: int) -> list[Stage]:
    made = stages(world)
    slots = allocate(made[0], keys)
    digests = joined([stage.write(keys, slots) for stage in made])
    rows = list(zip(keys, slots, digests, strict=True))
    assert made[committer].store.commit(rows, "group", 60.0) == [True] * len(keys)
    return made


@pytest.mark.parametrize("committer", [0, 1], ids=["who allocated", "the last stage"])
def test_a_block_that_two_wrote_is_read_whole_and_in_parts(
    world: World, seed: int, committer: int
) -> None:
    keys = keys_of(6, seed)
    made = write_together(world, keys, committer)
    copies = choose(made[0].store.lookup(keys, "reader", 60.0), "s0")
    for key, copy in zip(keys, copies, strict=True):
        assert copy.checksum == checksum_of(content(key), LAYOUT.layers)
    for stage in made:
        assert stage.read(copies) == [True] * len(keys)
        for page, key in enumerate(keys):
            assert np.array_equal(stage.page(page), stage.part_of(key))
    whole, pool = world.store("s1")
    assert all(whole.read(copies, pool, [page * BLOCK for page in range(6)], DEADLINE_S))
    for page, key in enumerate(keys):
        assert np.array_equal(pool[page * BLOCK : (page + 1) * BLOCK], content(key))


def test_a_bit_that_falls_over_is_found_wherever_it_lies(world: World, seed: int) -> None:
    keys = keys_of(4, seed)
    made = write_together(world, keys, 1)
    copies = choose(made[0].store.lookup(keys, "reader", 60.0), "s0")
    chance = random.Random(seed)
    shape = world.directory.attach("s0", "f" * 32, BLOCK)
    with Segment.open(world.nodes["s0"].info.segment_path) as segment:
        first = shape.slot_offset_bytes(copies[0].slot) + chance.randrange(LAYER)
        later = shape.slot_offset_bytes(copies[1].slot) + chance.randrange(LAYER, BLOCK)
        cell = shape.digests(copies[2].slot, BLOCK, LAYOUT.layers)
        assert cell is not None
        for at in (first, later, chance.randrange(cell.start, cell.stop)):
            segment.view[at] ^= 1 << chance.randrange(8)
    assert made[0].read(copies) == [False, True, False, True], "its own layer, or any digest"
    copies[0:3:2] = choose(put_again(world, [keys[0], keys[2]]), "s0")
    assert made[1].read(copies) == [True, False, True, True]
    whole, pool = world.store("s1")
    left = whole.lookup(keys, "reader", 60.0)
    assert len(left) == 1, "what proved bad is dropped, by whoever found it"
    arrived = whole.read(copies, pool, [page * BLOCK for page in range(4)], DEADLINE_S)
    assert arrived == [True, False, True, True]


def put_again(world: World, keys: list[bytes]) -> list[tuple[Copy, ...]]:
    store, _ = world.store("s0")
    put(store, keys)
    return [store.lookup([key], "reader", 60.0)[0] for key in keys]


def test_single_layers_without_announced_digests_are_verified_by_those_that_are_kept(
    world: World, seed: int
) -> None:
    keys = keys_of(3, seed)
    writer, _ = world.store("s0")
    reader, pool = world.store("s1")
    put(writer, keys)
    copies = choose(reader.lookup(keys, "reader", 60.0), "s0")
    assert reader.read(copies, pool, [0, BLOCK, 2 * BLOCK], DEADLINE_S, range(1, 2)) == [True] * 3
    for page, key in enumerate(keys):
        near = pool[page * BLOCK : (page + 1) * BLOCK]
        assert np.array_equal(near[LAYER : 2 * LAYER], content(key)[LAYER : 2 * LAYER])
        assert not near[:LAYER].any() and not near[2 * LAYER :].any()


def test_a_share_that_is_missing_or_of_other_bytes_never_makes_a_block(
    world: World, seed: int
) -> None:
    keys = keys_of(2, seed)
    made = stages(world)
    slots = allocate(made[0], keys)
    mine = made[0].write(keys, slots)
    with pytest.raises(RequestInvalid, match="digests for a block"):
        made[0].store.commit([(keys[0], slots[0], mine[0] or ())], "group", 60.0)
    theirs = made[1].write(keys, slots)
    made[1].page(0)[5] ^= 1  # computed anew, and differently, after its digests were said
    assert made[1].store.write(slots[:1], made[1].pool, [0], DEADLINE_S) != theirs[:1]
    rows = list(zip(keys, slots, joined([mine, theirs]), strict=True))
    assert made[0].store.commit(rows, "group", 60.0) == [True, True]
    copies = choose(made[0].store.lookup(keys, "reader", 60.0), "s0")
    whole, pool = world.store("s1")
    assert made[1].read(copies) == [False, True]
    assert whole.read(copies, pool, [0, BLOCK], DEADLINE_S) == [False, True]


def test_a_writer_whose_slot_was_given_away_leaves_the_next_block_alone(
    world: World, seed: int
) -> None:
    keys, others = keys_of(3, seed), keys_of(3, seed + 1)
    made = stages(world)
    slots = allocate(made[0], keys)
    early = made[0].write(keys, slots)
    theirs = made[1].write(keys, slots)
    made[0].store.abandon(slots, "group")
    store, _ = world.store("s0")
    put(store, others, "another")
    copies = choose(store.lookup(others, "another", 60.0), "s0")
    assert {copy.slot for copy in copies} == {slot.slot for slot in slots}, "the same memory"
    assert [stage.write(keys, slots) for stage in made] == [[None] * 3] * 2
    rows = list(zip(keys, slots, joined([early, theirs]), strict=True))
    for stage in made:
        assert stage.store.commit(rows, "group", 60.0) == [False] * 3
    whole, pool = world.store("s1")
    assert whole.read(copies, pool, [0, BLOCK, 2 * BLOCK], DEADLINE_S) == [True] * 3


def test_a_node_that_dies_under_its_writers_fails_them_and_holds_nothing(
    world: World, seed: int
) -> None:
    keys = keys_of(2, seed)
    made = stages(world)
    slots = allocate(made[0], keys)
    mine = made[0].write(keys, slots)
    world.nodes["s0"].kill()
    with pytest.raises(TransferFailed):
        made[1].write(keys, slots)
    for stage in made:
        with pytest.raises(TransferFailed):
            digests = [[*(part or ()), 1, 2] for part in mine]
            stage.store.commit(list(zip(keys, slots, digests, strict=True)), "group", 60.0)


class Interleaved:
    """Requests whose blocks two stages fill in any order; some of it is late, lost or repeated."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.chance, self.made = chance, stages(world)
        self.names = itertools.count()
        self.open: list[tuple[str, bytes, Slot, dict[int, tuple[int, ...]]]] = []
        self.ended: list[tuple[str, bytes, Slot, dict[int, tuple[int, ...]]]] = []
        self.committed: set[bytes] = set()

    def begin(self) -> None:
        owner = f"request-{next(self.names)}"
        key = self.chance.randbytes(16)
        [slot] = self.made[0].store.allocate([key], owner, 60.0).slots
        if slot is not None:
            self.open.append((owner, key, slot, {}))

    def write(self) -> None:
        """A stage writes its share, or the digest of it gets lost, or it comes after the end."""
        late = self.ended and self.chance.random() < 0.3
        _, key, slot, digests = self.chance.choice(self.ended if late else self.open)
        number = self.chance.randrange(2)
        [written] = self.made[number].write([key], [slot])
        if written is not None and self.chance.random() < 0.8:
            digests[number] = written

    def end(self) -> None:
        owner, key, slot, digests = request = self.open.pop(self.chance.randrange(len(self.open)))
        self.ended.append(request)
        stage = self.chance.choice(self.made)
        if len(digests) == 2 and self.chance.random() < 0.8:
            row = (key, slot, [*digests[0], *digests[1]])
            assert stage.store.commit([row], owner, 60.0) == [True]
            assert stage.store.commit([row], owner, 60.0) == [False], "a commit is final"
            self.committed.add(key)
            stage.store.release(owner)
        else:  # it was given up while others may be about to write
            stage.store.abandon([slot], owner)
            stage.store.release(owner)

    def check(self) -> None:
        """Whatever can be found is what was to be stored."""
        for key in {key for _, key, _, _ in self.ended}:
            found = self.made[1].store.lookup([key], "check", 60.0)
            assert bool(found) <= (key in self.committed)
            for stage in self.made if found else ():
                [is_here] = stage.read([found[0][0]])
                assert not is_here or np.array_equal(stage.page(0), stage.part_of(key))
        self.made[1].store.release("check")


def test_whatever_comes_late_or_gets_lost_no_block_is_believed_that_is_not_whole(
    world: World, seed: int
) -> None:
    chance = random.Random(seed)
    bench = Interleaved(world, chance)
    for _ in range(300):
        step = chance.choice([bench.begin, bench.write, bench.write, bench.write, bench.end])
        if bench.open or step == bench.begin:
            step()
        if chance.random() < 0.05:
            bench.check()
    bench.check()
    assert bench.committed, "nothing was tried"


def test_the_digests_of_a_copy_that_was_fetched_are_kept_with_it(world: World, seed: int) -> None:
    keys = keys_of(3, seed)
    made = write_together(world, keys, 0)
    copies = choose(made[1].store.lookup(keys, "fetch", 60.0), "s0")
    assert made[1].store.fetch(keys, copies, "fetch", 60.0, DEADLINE_S).blocks == 3
    local = choose(made[1].store.lookup(keys, "fetch", 60.0), "s1")
    world.nodes["s0"].kill()
    assert made[1].read(local) == [True] * 3
    for page, key in enumerate(keys):
        assert np.array_equal(made[1].page(page), made[1].part_of(key))


def test_a_checksum_is_over_the_digests_of_the_layers_in_order(seed: int) -> None:
    block = content(keys_of(1, seed)[0])
    digests = [checksum(block[at : at + LAYER]) for at in range(0, BLOCK, LAYER)]
    assert checksum_of(block, LAYOUT.layers) == block_checksum(pack_digests(digests))
    assert checksum_of(block, LAYOUT.layers) != block_checksum(pack_digests(digests[::-1]))
    assert checksum_of(block, 0) == checksum(block)
