"""Two workers with a share of the layers each write and load the same blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backends.errors import WorkerUnavailable
from backends.workers.kv_loader import KvLoader
from backends.workers.kv_writer import BlockPut, KvWriter
from backends.workers.protocol import LayersReady
from mooncake_store.layout import LayerRange, PageLayout
from mooncake_store.memory.digests import checksum_of
from mooncake_store.records.blocks import Copy
from tests.mooncake_store.client.test_layers import SHARES, Stage
from tests.mooncake_store.client.world import LAYOUT, World, choose, content, keys_of
from tests.mooncake_store.targets import TargetPool

DEADLINE_S = LEASE_S = 10.0
KV_TOKENS = 3 * LAYOUT.block_tokens


class Outbox:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, inbox: str, message: Any) -> None:
        self.sent.append(message)


class Worker:
    """The store's side of a stage, with blocks in pages 2, 0 and 1."""

    PAGES = (2, 0, 1)

    def __init__(self, world: World, node_id: str, layers: LayerRange) -> None:
        self.stage = Stage(world, node_id, layers)
        self.outbox = Outbox()
        pages = PageLayout(LAYOUT, layers)
        self.writer = KvWriter(
            self.stage.store,
            pages,
            self.stage.pool,
            self.outbox,
            LEASE_S,
            DEADLINE_S,  # type: ignore[arg-type]
            lambda pages: None,
        )
        self.loader = KvLoader(self.stage.store, pages, self.stage.pool, DEADLINE_S)

    def compute(self, put: BlockPut, blocks: range) -> None:
        for block in blocks:
            self.stage.page(self.PAGES[block])[:] = self.stage.part_of(put.keys[block])
        for layer in self.stage.layers.indices:
            self.writer.layer_done(put, blocks, layer)

    def settle(self) -> None:
        """Until the writer has done all that it was given."""
        done = threading.Event()
        self.writer._tasks.put(done.set)
        assert done.wait(DEADLINE_S)


@pytest.fixture
def world() -> Iterator[World]:
    made = World("mapped", TargetPool())
    yield made
    made.close()


@pytest.fixture
def group(world: World) -> Iterator[list[Worker]]:
    workers = [Worker(world, node, part) for node, part in zip(("s0", "s1"), SHARES, strict=True)]
    yield workers
    for worker in workers:
        worker.writer.close()


def begin(group: list[Worker], keys: list[bytes]) -> list[BlockPut]:
    """The first worker allocates, the other hears which slots."""
    put = BlockPut("r", KV_TOKENS, Worker.PAGES, keys, first_block=0, decode_inbox="decode")
    group[0].writer.allocate(put, range(3))
    group[0].settle()
    assert put.error is None and len(put.slots) == 3
    other = BlockPut(
        "r",
        KV_TOKENS,
        Worker.PAGES,
        keys,
        first_block=0,
        decode_inbox="decode",
        slots=dict(put.slots),
        slot_keys=dict(put.slot_keys),
    )
    return [put, other]


@pytest.mark.parametrize("last", [0, 1], ids=["the first commits", "the last commits"])
def test_blocks_of_a_group_are_committed_by_whoever_has_all_digests(
    group: list[Worker], seed: int, last: int
) -> None:
    keys = keys_of(3, seed)
    puts = begin(group, keys)
    for worker, put in zip(group, puts, strict=True):
        worker.compute(put, range(3))
        worker.settle()
    group[last].writer.add_digests(puts[last], puts[1 - last].digests)
    group[last].writer.blocks_done(puts[last], range(3))
    group[last].settle()
    assert [put.error for put in puts] == [None, None]
    found = choose(group[0].stage.store.lookup(keys, "reader", LEASE_S), "s0")
    checksums = [checksum_of(content(key), LAYOUT.layers) for key in keys]
    assert [copy.checksum for copy in found] == checksums
    assert [puts[last].refs[block].checksum for block in range(3)] == checksums
    for worker in group:
        worker.stage.pool[:] = 0
        assert worker.loader.load_copies(found, Worker.PAGES) == 3
        for block, key in enumerate(keys):
            page = worker.stage.page(Worker.PAGES[block])
            assert np.array_equal(page, worker.stage.part_of(key))


def test_decode_hears_of_every_layer_from_the_worker_that_has_it(
    group: list[Worker], world: World, seed: int
) -> None:
    keys = keys_of(3, seed)
    puts = begin(group, keys)
    whole, pool = world.store("s1")
    for worker, put in zip(group, puts, strict=True):
        worker.compute(put, range(3))
        worker.settle()
        assert [each.layer for each in worker.outbox.sent] == list(worker.stage.layers.indices)
        for message in worker.outbox.sent:
            assert isinstance(message, LayersReady)
            slots = [put.slots[ref.index] for ref in message.blocks]
            copies = [Copy(*slot[:3], 0, LAYOUT.block_bytes) for slot in slots]
            offsets = [block * LAYOUT.block_bytes for block in range(3)]
            layers = range(message.layer, message.layer + 1)
            arrived = whole.read(copies, pool, offsets, DEADLINE_S, layers, message.checksums)
            assert arrived == [True] * 3
    blocks = pool[: 3 * LAYOUT.block_bytes].reshape(3, -1)
    assert all(np.array_equal(a, content(key)) for a, key in zip(blocks, keys, strict=True))


def test_a_block_is_not_committed_while_a_layer_of_it_is_not_heard_of(
    group: list[Worker], seed: int
) -> None:
    keys = keys_of(3, seed)
    puts = begin(group, keys)
    group[0].compute(puts[0], range(3))
    group[1].compute(puts[1], range(2))
    for worker in group:
        worker.settle()
    group[0].writer.add_digests(puts[0], puts[1].digests)
    group[0].writer.blocks_done(puts[0], range(3))
    group[0].settle()
    assert isinstance(puts[0].error, WorkerUnavailable)
    assert "layers [1, 2] of block 2" in str(puts[0].error)
    assert group[0].stage.store.lookup(keys, "reader", LEASE_S) == []


def test_a_worker_that_only_helps_does_not_end_the_leases_of_the_request(
    group: list[Worker], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(3, seed)
    puts = begin(group, keys)
    monkeypatch.setattr(group[1].stage.store, "write", lambda *_: [None] * 3)
    group[1].compute(puts[1], range(3))
    group[1].settle()
    assert isinstance(puts[1].error, WorkerUnavailable) and "reclaimed" in str(puts[1].error)
    monkeypatch.undo()
    puts[1].error = None  # it was told to go on, with the leases that are there still
    for worker, put in zip(group, puts, strict=True):
        worker.compute(put, range(3))
        worker.settle()
    group[0].writer.add_digests(puts[0], puts[1].digests)
    group[0].writer.blocks_done(puts[0], range(3))
    group[0].settle()
    assert puts[0].error is None
    assert len(group[0].stage.store.lookup(keys, "reader", LEASE_S)) == 3
