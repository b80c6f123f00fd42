"""The client of the store, against a real directory and real storage nodes."""

from __future__ import annotations

import mmap
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.errors import (
    LayoutMismatch,
    NodeUnknown,
    QuotaExceeded,
    RequestInvalid,
    StoreUnavailable,
)
from mooncake_store.memory.segment import Segment
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers

SIZE = 300_000  # not a whole number of units


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"))
    made.node("a", 32)
    made.node("b", 32, "--data", "127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture(params=["near", "nixl", "tcp", "unverified"])
def store(site: SiteProcesses, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    """A client that reaches node `b` mapped, by NIXL or by TCP; and one without checksums."""
    node_id, mode = {"near": ("b", "auto"), "nixl": ("a", "auto"), "tcp": ("a", "tcp")}.get(
        request.param, ("b", "auto")
    )
    is_verified = request.param != "unverified"
    with StoreClient(site.address, node_id, mode, is_verified=is_verified) as made:
        yield made


def values(count: int, seed: int, size: int = SIZE) -> tuple[list[bytes], list[np.ndarray]]:
    chance = np.random.default_rng(seed)
    blocks = [chance.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]
    return [secrets.token_bytes(16) for _ in range(count)], blocks


def test_what_was_put_is_got_bytewise_equal(store: StoreClient, seed: int) -> None:
    keys, blocks = values(5, seed)
    assert store.put(keys, blocks, "b") == [True] * 5
    found = store.get([*keys, key_of("nothing")])
    assert found[5] is None
    for block, array in zip(blocks, found, strict=False):
        assert array is not None and np.array_equal(block, array)
    assert store.exist([*keys, key_of("nothing")]) == [True] * 5 + [False]
    assert store.remove(keys) == [True] * 5
    assert store.exist(keys) == [False] * 5
    assert store.get(keys) == [None] * 5


def test_blocks_of_many_sizes_go_in_one_call(store: StoreClient, seed: int) -> None:
    sizes = [1, 63, 4096, 4097, 70_000, 300_000]
    chance = np.random.default_rng(seed)
    blocks = [chance.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    keys = [secrets.token_bytes(16) for _ in sizes]
    assert all(store.put(keys, blocks, "b"))
    for block, array in zip(blocks, store.get(keys), strict=True):
        assert array is not None and np.array_equal(block, array)
    assert [places[0].size_bytes for places in store.stat(keys)] == sizes
    assert all(store.remove(keys))


def test_every_kind_of_memory_is_taken_by_address(store: StoreClient, seed: int) -> None:
    chance = np.random.default_rng(seed)
    source = torch.from_numpy(chance.standard_normal((3, 5, 64)).astype(np.float32)).bfloat16()
    mapped = mmap.mmap(-1, 8192)
    mapped[:5] = b"hello"
    keys = [secrets.token_bytes(16) for _ in range(4)]
    whole = np.arange(4096, dtype=np.int64)
    assert all(store.put(keys, [source, mapped, whole, b"bytes"], "b"))
    tensor = torch.zeros_like(source)
    row = np.zeros((2, 4096), np.int64)
    assert store.get_into(keys[:1], [tensor]) == [True]
    assert torch.equal(tensor, source)
    assert store.get_into([keys[2]], [row[1]]) == [True]
    assert np.array_equal(row[1], whole) and not row[0].any()
    text = store.get([keys[3], keys[1]])
    assert text[0] is not None and text[0].tobytes() == b"bytes"
    assert text[1] is not None and text[1].tobytes()[:5] == b"hello"
    assert all(store.remove(keys))


def test_a_part_of_a_block_is_read_from_its_middle(store: StoreClient, seed: int) -> None:
    keys, blocks = values(3, seed)
    assert all(store.put(keys, blocks, "b"))
    parts = [np.zeros(1_000, np.uint8) for _ in keys]
    assert store.get_into(keys, parts, offset_bytes=100_000) == [True] * 3
    for block, part in zip(blocks, parts, strict=True):
        assert np.array_equal(block[100_000:101_000], part)
    with pytest.raises(RequestInvalid, match="reach past its end: ask stat"):
        store.get_into(keys, parts, offset_bytes=SIZE - 999)
    with pytest.raises(RequestInvalid, match="offset_bytes is -1"):
        store.get_into(keys, parts, offset_bytes=-1)
    assert all(store.remove(keys))


def test_a_key_that_is_there_is_not_written_again(store: StoreClient, seed: int) -> None:
    keys, blocks = values(2, seed)
    assert store.put(keys[:1], blocks[:1], "b") == [True]
    assert store.put(keys, blocks, "b") == [True, True]
    assert [len(places) for places in store.stat(keys)] == [1, 1]
    assert all(store.remove(keys))


def test_futures_do_the_same(store: StoreClient, seed: int) -> None:
    keys, blocks = values(4, seed)
    puts = [store.put_async([k], [b], "b") for k, b in zip(keys, blocks, strict=True)]
    assert [put.result(30) for put in puts] == [[True]] * 4
    gets = [store.get_async([key]) for key in keys]
    for get, block in zip(gets, blocks, strict=True):
        (array,) = get.result(30)
        assert array is not None and np.array_equal(array, block)
    assert all(store.remove(keys))


def test_nothing_stays_leased_after_a_call(store: StoreClient, seed: int) -> None:
    keys, blocks = values(3, seed)
    store.put(keys, blocks, "b")
    store.put(keys, blocks, "b")
    store.get([*keys, key_of("nothing")])
    wait_until(lambda: store.directory.stats().leases == 0, "the leases to end")
    assert store.directory.stats().owners == 0
    assert all(store.remove(keys))


def test_threads_of_one_client_share_their_memory(site: SiteProcesses, seed: int) -> None:
    """Each call registers the same unregistered array, and none takes it from another."""
    keys, blocks = values(1, seed, 200_000)
    with StoreClient(site.address, "a", threads=1) as store:
        assert store.put(keys, blocks, "b") == [True]
        target = np.zeros(200_000, np.uint8)

        def work(number: int) -> list[bool]:
            done = []
            for round in range(40):
                key = key_of(f"{seed}/{number}/{round}")
                done += store.put([key], [blocks[0]], "b") + store.get_into(keys, [target])
                done += store.remove([key])
            return done

        with ThreadPoolExecutor(3) as pool:
            assert all(all(done) for done in pool.map(work, range(3)))
        store.register(target)
        assert store.get_into(keys, [target[:1_000]]) == [True]
        store.remove(keys)


def test_memory_registered_during_a_call_stays_registered(
    site: SiteProcesses, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, blocks = values(2, seed)
    with StoreClient(site.address, "a") as store:
        write = store._putter._fill

        def registering(*arguments: Any) -> list[int]:
            store.register(blocks[0])
            return write(*arguments)

        monkeypatch.setattr(store._putter, "_fill", registering)
        assert store.put(keys[:1], blocks[:1], "b") == [True]
        monkeypatch.undo()
        assert store.put(keys[1:], [blocks[0][:1_000]], "b") == [True]
        store.remove(keys)


def test_wrong_arguments_are_refused_by_name(site: SiteProcesses, seed: int) -> None:
    keys, blocks = values(2, seed)
    with StoreClient(site.address) as store:
        with pytest.raises(RequestInvalid, match="a key has 16 bytes, 6162 has 2"):
            store.put([b"ab"], blocks[:1])
        with pytest.raises(RequestInvalid, match="2 keys and 1 buffers"):
            store.put(keys, blocks[:1])
        with pytest.raises(RequestInvalid, match="0 bytes cannot be stored"):
            store.put(keys[:1], [b""])
        with pytest.raises(RequestInvalid, match="not contiguous"):
            store.put(keys[:1], [np.zeros((4, 4), np.uint8)[:, 1]])
        with pytest.raises(RequestInvalid, match="not contiguous"):
            store.put(keys[:1], [torch.zeros(4, 4).t()])
        with pytest.raises(RequestInvalid, match="read-only"):
            store.get_into(keys[:1], [b"constant"])
        with pytest.raises(RequestInvalid, match="list has no memory that can be used"):
            store.put(keys[:1], [[1, 2]])
        with pytest.raises(LayoutMismatch, match="a has 33554432 bytes, less than one block"):
            store.put(keys[:1], [np.zeros(64 * 2**20, np.uint8)], "a")
        with pytest.raises(NodeUnknown, match="nowhere is not registered; known: a, b"):
            store.put(keys, blocks, "nowhere")
        with pytest.raises(RequestInvalid, match="a key has 16 bytes"):
            store.exist([b"abc", b"d" * 29])
        with pytest.raises(RequestInvalid, match="not str 'name': key_of"):
            store.put(["name"], blocks[:1])  # type: ignore[list-item]
        with pytest.raises(RequestInvalid, match="keys come in a list"):
            store.exist(keys[0])  # type: ignore[arg-type]
        for deadline_s in (0, -1, float("nan"), None):
            with pytest.raises(RequestInvalid, match=r"deadline_s is .*; give seconds"):
                store.get(keys, deadline_s=deadline_s)  # type: ignore[arg-type]
        assert store.put(keys[:1], blocks[:1], deadline_s=float("inf")) == [True]
        store.remove(keys[:1])
    with pytest.raises(RequestInvalid, match="threads is 0"):
        StoreClient(site.address, threads=0)
    with pytest.raises(ValueError, match="transports is 'pigeon'"):
        StoreClient(site.address, transports="pigeon")


@pytest.mark.parametrize("address", ["", "foo", "http://x", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(RequestInvalid, match="is no address of a directory"):
        StoreClient(address)


def test_no_directory_is_a_typed_error_within_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is it running"):
        StoreClient(f"ipc://{tmp_path}/nobody")


def test_a_tenant_over_its_quota_is_refused_while_its_blocks_are_in_use(
    site: SiteProcesses, seed: int
) -> None:
    keys, blocks = values(3, seed)
    with StoreClient(site.address, "a", tenant="guest") as store:
        store.directory.set_quota("guest", 2 * SIZE)
        assert store.put(keys[:2], blocks[:2]) == [True, True]
        store.directory.lookup(keys[:2], "reader", 30.0)
        with pytest.raises(QuotaExceeded, match="tenant guest stores 600000 bytes of its 600000"):
            store.put(keys[2:], blocks[2:])
        store.directory.release("reader")
        assert store.put(keys[2:], blocks[2:]) == [True], "its own oldest block makes room"
        there = store.directory.exist(keys)  # a replica hears of an eviction a moment later
        assert there == [True, False, True], "the end of a chain goes first"
        store.directory.set_quota("guest", 0)
        store.remove(keys)


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_damaged_block_is_a_miss_with_checksums_only(
    site: SiteProcesses, seed: int, is_verified: bool
) -> None:
    keys, blocks = values(2, seed)
    with StoreClient(site.address, "a", is_verified=is_verified) as store:
        assert all(store.put(keys, blocks, "b"))
        copy = store.stat(keys[:1])[0][0]
        info = next(info for info in store.directory.nodes() if info.node_id == "b")
        shape = store.directory.attach("b", "x", SIZE)
        with Segment.open(info.segment_path) as segment:
            segment.view[shape.slot_offset_bytes(copy.slot) + SIZE - 1] ^= 1
        found = store.get(keys)
        assert (found[0] is None) == is_verified
        assert found[1] is not None
        assert store.exist(keys) == [not is_verified, True], "a corrupt copy is dropped"
        store.remove(keys)


def test_a_slot_with_another_owner_is_a_miss_even_without_checksums(
    site: SiteProcesses, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is evicted and its slot filled again between the lookup and the read."""
    keys, blocks = values(2, seed)
    with StoreClient(site.address, "b", is_verified=False) as store:
        assert all(store.put(keys[:1], blocks[:1]))
        stale = store._getter.find(keys[:1])
        assert store.remove(keys[:1]) == [True]
        assert store.put(keys[1:], blocks[1:]) == [True]
        assert store.stat(keys[1:])[0][0].slot == stale[0][0].slot, "the slot was used again"
        monkeypatch.setattr(store._getter, "find", lambda _: stale)
        assert store.get(keys[:1]) == [None]
        monkeypatch.undo()
        store.remove(keys)


def test_copies_are_added_moved_and_dropped(site: SiteProcesses, seed: int) -> None:
    keys, blocks = values(4, seed)
    with StoreClient(site.address, "a") as store:
        assert all(store.put(keys, blocks, "a"))

        def homes() -> list[set[str]]:
            return [{copy.node_id for copy in places} for places in store.stat(keys)]

        assert store.change_replica(keys, add=["b"]) == [True] * 4
        assert homes() == [{"a", "b"}] * 4
        assert store.change_replica(keys[:2], drop=["a"]) == [True] * 2
        assert homes() == [{"b"}, {"b"}, {"a", "b"}, {"a", "b"}]
        assert store.change_replica(keys[:1], drop=["b"]) == [False], "the last copy stays"
        assert store.change_replica(keys[:1], add=["a"], drop=["b"]) == [True]
        assert homes()[0] == {"a"}
        assert store.change_replica([key_of("nothing")], add=["b"]) == [False]
        with pytest.raises(NodeUnknown, match="moon is not registered"):
            store.change_replica(keys, add=["moon"])
        for block, array in zip(blocks, store.get(keys), strict=True):
            assert array is not None and np.array_equal(array, block)
        store.remove(keys)


def test_a_dead_node_costs_its_own_copies_only(tmp_path: Path, seed: int) -> None:
    site = SiteProcesses(tmp_path, "--node-ttl-s", "1")
    try:
        site.node("a", 16)
        site.node("b", 16)
        keys, blocks = values(8, seed)
        with StoreClient(site.address, "a") as store:
            assert all(store.put(keys[:4], blocks[:4], "a"))
            assert all(store.put(keys[4:], blocks[4:], "b"))
            assert store.change_replica(keys[4:6], add=["a"]) == [True, True]
            site.nodes["b"].end(signal.SIGKILL)
            found = store.get(keys)
            assert [array is not None for array in found] == [True] * 6 + [False] * 2
            for block, array in zip(blocks[:6], found, strict=False):
                assert array is not None and np.array_equal(array, block)
            wait_until(lambda: store.exist(keys) == [True] * 6 + [False] * 2, "the loss to show")
            site.nodes["b"].start()
            assert all(store.put(keys[6:], blocks[6:], "b")), "its next life takes blocks"
    finally:
        site.close()


@pytest.mark.parametrize("clock_ms", [0, 1_000_000_000], ids=["goes on", "was set back to 1970"])
def test_a_restarted_directory_finds_every_block_again(
    tmp_path: Path, seed: int, clock_ms: int
) -> None:
    site = SiteProcesses(tmp_path)
    try:
        site.node("a", 16)
        site.node("b", 16)
        keys, blocks = values(12, seed)
        with StoreClient(site.address, "a") as store:
            for number, (key, block) in enumerate(zip(keys, blocks, strict=True)):
                assert store.put([key], [block], "ab"[number % 2]) == [True]
            epoch = store.directory.stats().epoch
            site.directory.end(signal.SIGKILL)
            site.directory.start(clock_ms)
            # The replica of the host knows them all the time; the directory has to hear of them.
            wait_until(lambda: all(store.directory.exist(keys)), "the nodes to say what they have")
            later = store.directory.stats().epoch
            assert later == clock_ms if clock_ms else later > epoch
            for block, array in zip(blocks, store.get(keys), strict=True):
                assert array is not None and np.array_equal(array, block)
            more, other = values(2, seed + 1)
            assert all(store.put(more, other, "a")), "clients go on"
            assert len(store.stat(more)[0]) == 1
    finally:
        site.close()


def test_a_drained_node_has_nothing_that_others_lack(tmp_path: Path, seed: int) -> None:
    site = SiteProcesses(tmp_path, "--slow-start-s", "0.001")
    try:
        for node_id in "abc":
            site.node(node_id, 16)
        keys, blocks = values(9, seed)
        with StoreClient(site.address, "a") as store:
            assert all(store.put(keys, blocks, "c"))
            steps: list[tuple[int, int]] = []
            left = store.replicas.drain("c", "drainer", lambda *step: steps.append(step))
            assert left == 0 and steps[-1] == (9, 0)
            assert store.put([key_of("new")], [b"new"], "c") == [False], "it takes no new blocks"
            site.nodes["c"].end(signal.SIGTERM)
            for block, array in zip(blocks, store.get(keys), strict=True):
                assert array is not None and np.array_equal(array, block)
    finally:
        site.close()
