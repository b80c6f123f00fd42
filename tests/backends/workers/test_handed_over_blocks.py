"""Decode takes exactly the blocks that its engine hands over; a put that broke ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.errors import KvMissing, WorkerUnavailable
from backends.workers.connected.decode import ConnectedDecode
from backends.workers.kv_loader import Arrival, KvLoader
from backends.workers.kv_writer import BlockPut
from backends.workers.protocol import BlockRef, LayersReady
from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.layout import PageLayout
from mooncake_store.transports.transport import ByteSpan
from tests.backends.stepped_site import Client, Outbox, Site, SteppedWriter
from tests.backends.stepped_store import FINGERPRINT, LAYOUT, NODE, SteppedStore

BLOCK_TOKENS = 64


@pytest.mark.parametrize(("kv_tokens", "blocks"), [(1, 0), (31, 0), (32, 1), (95, 1), (96, 2)])
def test_tensorrt_llm_hands_over_whole_pages_or_nothing(kv_tokens: int, blocks: int) -> None:
    driver: Any = object.__new__(ConnectedDecode)
    driver.engine, driver._block_tokens = SimpleNamespace(handover_tokens=32), BLOCK_TOKENS
    driver.is_native = False
    assert driver.blocks_due(5, kv_tokens) == blocks
    assert driver.blocks_due(0, kv_tokens) == 0
    driver.is_native = True
    assert driver.blocks_due(5, kv_tokens) == 0


def refs(*indices: int) -> list[BlockRef]:
    return [BlockRef(index, NODE, index, 1, 0) for index in indices]


@pytest.mark.parametrize("given", [(), (0,), (0, 0), (0, 2), (1,), (0, 1, 2), (0, 1, 1)])
def test_a_request_without_exactly_its_blocks_is_refused_and_leaves_nothing(
    given: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(0, monkeypatch)
    client = Client(site, "r", [1, 2, 3, 4, 5], 3)  # 5 tokens of KV: block 0, and a part of 1
    site.decode._on_message(LayersReady("r", 5, 8, 0, [], []))
    site.turn(site.decode)
    assert site.decode._pages.used_pages
    monkeypatch.setattr(site, "handed_over", lambda reply: refs(*given))
    client.prefilled(6, SimpleNamespace())  # type: ignore[arg-type]
    assert isinstance(client.error, KvMissing)
    site.turn(site.decode)
    assert site.decode._pages.used_pages == 0


def test_a_message_that_comes_after_its_request_is_over_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(0, monkeypatch)
    client = site.ask([1, 2, 3, 4, 5], 3)
    site.settle()
    assert client.error is None and len(client.answer) == 3
    site.decode._on_message(LayersReady("r0", 5, 8, 0, [], []))
    site.turn(site.decode)
    site.check_empty()


def test_a_request_that_is_stopped_keeps_its_pages_while_a_layer_is_read_into_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(0, monkeypatch)
    client = Client(site, "r", [1, 2, 3, 4, 5], 3)
    site.decode._on_message(LayersReady("r", 5, 8, 0, refs(0), [0]))
    site.turn(site.decode)
    used_pages = site.decode._pages.used_pages
    used_meanwhile: list[int] = []

    def stop() -> None:
        monkeypatch.setattr(site, "handed_over", lambda reply: refs(0, 1))
        client.prefilled(6, SimpleNamespace())  # type: ignore[arg-type]
        site.decode.stop("r")
        site.turn(site.decode)
        while not site.decode.writer.is_idle:  # type: ignore[attr-defined]
            site.decode.writer.step()  # type: ignore[attr-defined]
        used_meanwhile.append(site.decode._pages.used_pages)

    site.store.meanwhile = stop
    site.decode._loading.step()  # type: ignore[attr-defined]
    assert used_meanwhile == [used_pages] != [0]
    site.turn(site.decode)
    site.settle()
    assert client.is_over
    site.check_empty()


@pytest.fixture
def store() -> SteppedStore:
    return SteppedStore(random.Random(0))


def loader(store: SteppedStore) -> tuple[KvLoader, np.ndarray]:
    pool = np.zeros(4 * LAYOUT.block_bytes, np.uint8)
    return KvLoader(store, PageLayout.whole(LAYOUT), pool, 1.0), pool  # type: ignore[arg-type]


def test_a_page_that_a_late_read_may_still_write_is_not_read_into_again(
    store: SteppedStore,
) -> None:
    ours, pool = loader(store)
    arrival = Arrival([2, 3])
    late = ByteSpan(3 * LAYOUT.block_bytes, LAYOUT.layer_bytes)
    store.late.append((pool, late, np.zeros(LAYOUT.layer_bytes, np.uint8)))
    reads: list[Any] = []
    store.read = lambda copies, *_: reads.append(copies) or [True]  # type: ignore
    ours.load_announced(arrival, LayersReady("r", 8, 9, 0, refs(0, 1), [0, 0]))
    assert len(reads) == 1 and set(arrival.layers_of) == {0}
    assert ours.load_rest(arrival, refs(0, 1)) == [1]
    with pytest.raises(WorkerUnavailable, match="past its deadline"):
        ours.refuse_late([0, 3])
    ours.refuse_late([0, 1])


def a_writer(store: SteppedStore) -> SteppedWriter:
    pool = np.zeros(LAYOUT.block_bytes, np.uint8)
    return SteppedWriter(
        store,
        PageLayout.whole(LAYOUT),
        pool,
        Outbox(),
        1.0,
        1.0,  # type: ignore[arg-type]
        lambda pages: None,
    )


def test_whatever_goes_wrong_in_the_writer_ends_the_put(
    store: SteppedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = a_writer(store)
    keys = block_keys(np.arange(4), 4, chain_seed(FINGERPRINT))
    put = BlockPut("r", 4, [0], keys, first_block=0)
    monkeypatch.setattr(store, "write", lambda *_: 1 / 0)
    writer.layer_done(put, [0], 0)
    writer.step()
    monkeypatch.undo()
    assert isinstance(put.error, WorkerUnavailable)
    writer.layer_done(put, [0], 1)
    writer.blocks_done(put, [0])
    while not writer.is_idle:
        writer.step()
    store.release("r")  # as its worker does when the job leaves
    assert store.commits == 0 and not store._writing


def test_nothing_is_written_for_a_put_that_ended(store: SteppedStore) -> None:
    writer = a_writer(store)
    put = BlockPut("r", 4, [0], block_keys(np.arange(4), 4, chain_seed(FINGERPRINT)), 0)
    for layer in range(LAYOUT.layers):
        writer.layer_done(put, [0], layer)
    writer.blocks_done(put, [0])
    writer.step()
    put.is_ended = True
    while not writer.is_idle:
        writer.step()
    assert store.commits == 0


def test_a_prompt_whose_put_failed_is_not_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(0, monkeypatch)
    client = site.ask(list(range(32)), 2)  # four chunks of 8 tokens
    steps: list[int] = []
    monkeypatch.setattr(site, "meanwhile", lambda: None)
    monkeypatch.setattr(site.prefill.driver.engine, "_meanwhile", lambda: steps.append(0))
    site.turn(site.prefill)
    while todo := site.things_to_do():
        todo[0]()
    site.turn(site.prefill)  # the first chunk
    site.store.fault_share = 1.0
    while todo := site.things_to_do():
        todo[0]()
    site.store.fault_share = 0.0
    assert len(steps) == LAYOUT.layers
    site.settle()
    assert isinstance(client.error, WorkerUnavailable)
    assert len(steps) == LAYOUT.layers
    site.check_empty()


def test_a_worker_that_closes_answers_what_is_left_and_releases_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(0, monkeypatch)
    clients = [site.ask(list(range(start, start + 9)), 4) for start in (0, 20)]
    for _ in range(3):
        site.turn(site.prefill)
        site.meanwhile()
    left = site.prefill
    left.is_closing = True
    for job in list(left.jobs.values()):
        left.fail(job, WorkerUnavailable("closing"))
    while left._turn():
        pass
    site.settle()
    assert all(isinstance(client.error, WorkerUnavailable) for client in clients)
    site.check_empty()
