"""KV on its way into pages: what is announced, what is read again, what pages may be reused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from backends.engine.batching.pages import PagePool
from backends.workers.arrivals import Arrival, Arrivals
from backends.workers.kv_loader import KvLoader, PageGuard
from backends.workers.prefix_loading import SingleFlight
from backends.workers.protocol import BlockRef, LayersReady
from mooncake_store.layout import PageLayout
from mooncake_store.memory.buffers import checksum
from mooncake_store.memory.digests import checksum_of
from mooncake_store.records.blocks import Copy
from tests.backends.stepped_store import LAYOUT, NODE, SteppedStore

LAYERS, BLOCK = LAYOUT.layers, LAYOUT.block_bytes


class Source:
    """Blocks in a store, and a loader with pages of its own; counts what is read."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.store = SteppedStore(random.Random(seed))
        self.store.memory[:] = np.random.default_rng(seed).integers(0, 256, (400, BLOCK))
        self.pool = np.zeros(8 * BLOCK, np.uint8)
        self.loader = KvLoader(self.store, PageLayout.whole(LAYOUT), self.pool, 1.0)  # type: ignore[arg-type]
        self.arrival = Arrival([5, 2, 7, 0][:blocks])
        self.refs = [self.ref(index) for index in range(blocks)]
        self.read_blocks = 0
        read = self.store.read

        def counted(copies: list[Copy], *rest: Any) -> list[bool]:
            self.read_blocks += len(copies)
            return read(copies, *rest)

        self.store.read = counted  # type: ignore[method-assign,assignment]

    def ref(self, index: int, slot: int | None = None, generation: int = 1) -> BlockRef:
        slot = index if slot is None else slot
        digest = checksum_of(self.store.memory[slot], LAYERS)
        return BlockRef(index, NODE, slot, generation, digest)

    def layer(self, layer: int, *refs: BlockRef) -> LayersReady:
        start = LAYOUT.layer_offset_bytes(layer)
        span = slice(start, start + LAYOUT.layer_bytes)
        sums = [checksum(np.ascontiguousarray(self.store.memory[ref.slot][span])) for ref in refs]
        return LayersReady("r", 8, 9, layer, list(refs), sums)

    def page(self, index: int) -> np.ndarray:
        start = self.arrival.pages[index] * BLOCK
        return self.pool[start : start + BLOCK]

    def is_right(self) -> bool:
        return all(np.array_equal(self.page(r.index), self.store.memory[r.slot]) for r in self.refs)


def test_layers_make_a_block_whole_in_any_order_and_nothing_is_read_twice(seed: int) -> None:
    announced = list(itertools.product(range(LAYERS), range(3)))
    for number, order in enumerate(itertools.islice(itertools.permutations(announced), 0, 720, 24)):
        source = Source(seed + number, 3)
        for layer, index in order:
            source.loader.load_announced(source.arrival, source.layer(layer, source.refs[index]))
        assert source.arrival.whole_blocks(LAYERS) == 3
        source.read_blocks = 0
        assert source.loader.load_rest(source.arrival, source.refs) == []
        assert source.read_blocks == 0 and source.is_right()


def test_what_was_not_announced_is_read_with_the_request(seed: int) -> None:
    source = Source(seed, 3)
    for layer in range(LAYERS):
        source.loader.load_announced(source.arrival, source.layer(layer, source.refs[1]))
    source.loader.load_announced(source.arrival, source.layer(0, source.refs[2]))
    source.read_blocks = 0
    assert source.loader.load_rest(source.arrival, source.refs) == []
    assert source.read_blocks == 2, "a block of which a layer lacks is read as a whole"
    assert source.is_right()


@pytest.mark.parametrize("changed", [{"slot": 9}, {"generation": 2}])
def test_layers_of_another_use_of_a_slot_do_not_count(seed: int, changed: dict[str, int]) -> None:
    """Prefill failed and another attempt put the block elsewhere, or there again."""
    source = Source(seed, 1)
    for layer in range(LAYERS):
        source.loader.load_announced(source.arrival, source.layer(layer, source.refs[0]))
    source.refs = [source.ref(0, **changed)]
    source.loader.load_announced(source.arrival, source.layer(0, source.refs[0]))
    assert source.arrival.whole_blocks(LAYERS) == 0
    assert source.loader.load_rest(source.arrival, source.refs) == []
    assert source.is_right()


def test_a_damaged_layer_does_not_count_and_a_damaged_block_is_named(seed: int) -> None:
    source = Source(seed, 2)
    messages = [source.layer(layer, *source.refs) for layer in range(LAYERS)]
    source.store.memory[1][0] ^= 1  # of the first layer
    for message in messages:
        source.loader.load_announced(source.arrival, message)
    assert source.arrival.whole_blocks(LAYERS) == 1
    assert source.loader.load_rest(source.arrival, source.refs) == [1]


def test_blocks_behind_the_reserved_pages_are_not_read(seed: int) -> None:
    source = Source(seed, 1)
    source.loader.load_announced(source.arrival, source.layer(0, source.ref(0), source.ref(1)))
    assert source.read_blocks == 1 and set(source.arrival.layers_of) == {0}


# -- expected requests


def test_an_expected_request_that_comes_is_not_reaped_and_one_that_does_not_is() -> None:
    arrivals = Arrivals(ttl_s=10.0)
    for name in "abc":
        arrivals.expect(name, 0.0)
        arrivals.give_pages(name, [ord(name)])
    assert arrivals.reap(10.0, []) == []
    assert arrivals.pop("a").pages == [ord("a")]  # type: ignore[union-attr]
    assert arrivals.reap(10.1, ["b"]) == [("c", [ord("c")])], "b is submitted, and waits for pages"
    assert len(arrivals) == 1 and arrivals.get("c") is None


def test_a_refused_request_is_reaped_at_once_but_not_while_a_layer_is_read() -> None:
    arrivals = Arrivals(ttl_s=10.0)
    arrivals.expect("a", 0.0)
    arrivals.give_pages("a", [1])
    arrivals.get("a").is_loading = True  # type: ignore[union-attr]
    arrivals.refuse("a", 1.0)
    assert arrivals.get("a").is_loading and arrivals.reap(1.0, []) == []
    arrivals.get("a").is_loading = False  # type: ignore[union-attr]
    assert arrivals.reap(1.0, []) == [("a", [1])]


def test_refusals_are_remembered_as_long_as_messages_may_be_late_and_no_longer() -> None:
    arrivals = Arrivals(ttl_s=10.0)
    arrivals.refuse("a", 0.0)
    arrivals.refuse("b", 5.0)
    arrivals.refuse("a", 6.0)  # again: remembered from now on
    arrivals.reap(12.0, [])
    assert arrivals.is_refused("a") and arrivals.is_refused("b")
    arrivals.reap(15.5, [])
    assert arrivals.is_refused("a") and not arrivals.is_refused("b")
    for number in range(Arrivals.REFUSED_MAX):
        arrivals.refuse(str(number), 16.0)
    assert not arrivals.is_refused("a"), "the memory is bounded"


# -- pages and blocks that others are at


def test_a_page_goes_back_when_the_late_read_into_it_is_over() -> None:
    pool, pending = PagePool(4), {1}
    guard = PageGuard(pool, lambda: pending)
    pages = pool.take(3)
    assert pages == [0, 1, 2]
    guard.release(pages)
    assert guard.used_pages == 1
    assert pool.take(4) is None
    pending.clear()
    guard.settle()
    assert guard.used_pages == 0 and pool.take(4) is not None


def test_a_page_that_its_request_has_left_is_used_and_not_held_until_it_is_back() -> None:
    pool = PagePool(4)
    guard = PageGuard(pool, lambda: set())
    pages = pool.take(3)
    assert pages is not None
    guard.leave(pages[:2])
    assert (guard.used_pages, guard.held_pages) == (3, 1)
    guard.release(pages)
    assert (guard.used_pages, guard.held_pages) == (0, 0)
    assert pool.take(2) is not None and guard.held_pages == 2, "they are somebody else's now"
    guard.check()


def test_who_lacks_a_block_that_another_brings_is_blocked_until_it_is_there() -> None:
    flights = SingleFlight()
    assert flights.lead([b"1", b"2"], "a")
    assert not flights.lead([b"1", b"2", b"3"], "b")
    assert flights.lead([b"0", b"1"], "c"), "what it lacks first is nobody's"
    flights.settle([b"1"], "c")  # it did not bring that one
    assert not flights.lead([b"1", b"2"], "b")
    flights.settle([b"1"], "a")
    assert not flights.lead([b"2", b"3"], "b"), "a still brings the next one"
    flights.settle(None, "a")
    assert flights.lead([b"2", b"3"], "b") and flights.lead([b"2"], "b"), "its own"
    flights.check()
    for owner in "bc":
        flights.settle(None, owner)
    assert len(flights) == 0
