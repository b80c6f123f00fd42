"""Reading by the replica of the index: without the directory where it is right, right where not.

The table is written by the test itself, so it says exactly what a test wants it to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client import index_reader
from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import RequestInvalid, StoreUnavailable
from mooncake_store.layout import geometry
from mooncake_store.memory import index_table
from mooncake_store.memory.index_table import IndexTable
from mooncake_store.memory.segment import Segment
from mooncake_store.records.blocks import Copy
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers

SIZE = 300_000
FAR_FUTURE_S = 1e6  # such a stamp is current for the whole test


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"), "--eviction", "lru")
    made.node("a", 32, "--events", "")  # the last one counts: they write no table
    made.node("b", 32, "--events", "", "--data", "127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture
def table() -> Iterator[IndexTable]:
    path = f"/dev/shm/mooncake-test-index-{os.getpid()}-{secrets.token_hex(4)}"
    made = IndexTable(path, index_table.BYTES_MIN)
    made.begin(1, 1)
    made.stamp(boot_s() + FAR_FUTURE_S)
    yield made
    made.close()


@pytest.fixture(params=["near", "nixl", "tcp", "unverified"])
def store(
    site: SiteProcesses,
    table: IndexTable,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[StoreClient]:
    """A client that has the test's table, and reaches node `b` in each of the ways."""
    monkeypatch.setattr(index_reader, "is_wanted", lambda: True)  # in runs without replica, too
    monkeypatch.setattr(index_reader.IndexReader, "_paths", lambda self: [table.path])
    node_id, mode = {"near": ("b", "auto"), "nixl": ("a", "auto"), "tcp": ("a", "tcp")}.get(
        request.param, ("b", "auto")
    )
    is_verified = request.param != "unverified"
    with StoreClient(site.address, node_id, mode, is_verified=is_verified) as made:
        yield made


@pytest.fixture
def other(site: SiteProcesses, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreClient]:
    """A client that knows of no table."""
    with StoreClient(site.address, "b") as made:
        monkeypatch.setattr(made._index, "_is_wanted", False)
        yield made


@contextlib.contextmanager
def stopped(site: SiteProcesses) -> Iterator[None]:
    site.directory.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        site.directory.process.send_signal(signal.SIGCONT)


def values(count: int, seed: int, size: int = SIZE) -> tuple[list[bytes], list[np.ndarray]]:
    chance = np.random.default_rng(seed)
    blocks = [chance.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]
    return [secrets.token_bytes(16) for _ in range(count)], blocks


def tell(table: IndexTable, keys: Sequence[bytes], found: Sequence[Sequence[Copy]]) -> None:
    for key, copies in zip(keys, found, strict=True):
        for copy in copies:
            assert table.put(key, copy, is_local=True)


def assert_equal(found: Sequence[np.ndarray | None], blocks: Sequence[np.ndarray]) -> None:
    for array, block in zip(found, blocks, strict=True):
        assert array is not None and np.array_equal(array, block)


def test_blocks_are_found_and_read_while_the_directory_stands_still(
    site: SiteProcesses, store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(5, seed)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    assert_equal(store.get(keys), blocks)  # now it is connected
    with stopped(site):
        assert store.exist(keys) == [True] * 5
        assert_equal(store.get(keys), blocks)
        targets = [np.zeros(SIZE, np.uint8) for _ in keys]
        assert store.get_into(keys, targets) == [True] * 5
        assert_equal(targets, blocks)
        parts = [np.zeros(999, np.uint8) for _ in keys]
        assert store.get_into(keys, parts, offset_bytes=1_000) == [True] * 5
        assert_equal(parts, [block[1_000:1_999] for block in blocks])
    assert all(store.remove(keys))


def test_what_the_table_does_not_know_is_asked_of_the_directory(
    site: SiteProcesses, store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(6, seed)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys[::2], store.stat(keys[::2]))
    absent = key_of("nothing")
    assert store.exist([*keys, absent]) == [True] * 6 + [False]
    found = store.get([*keys, absent])
    assert found[6] is None
    assert_equal(found[:6], blocks)
    targets = [np.zeros(SIZE, np.uint8) for _ in range(7)]
    assert store.get_into([absent, *keys], targets) == [False] + [True] * 6
    assert_equal(targets[1:], blocks)
    with stopped(site), pytest.raises(StoreUnavailable):
        store.exist([absent])
    wait_until(lambda: store.exist(keys) == [True] * 6, "what the directory heard")
    assert all(store.remove(keys))


WRONG = {
    "the past": lambda copy: copy._replace(generation=copy.generation - 1),
    "another checksum": lambda copy: copy._replace(checksum=copy.checksum ^ 1 or 1),
    "another slot": lambda copy: copy._replace(slot=copy.slot + 80),
    "no slot": lambda copy: copy._replace(slot=2**40),
    "no node": lambda copy: copy._replace(node_id="never heard of"),
    "another node": lambda copy: copy._replace(node_id="a"),
    "smaller": lambda copy: copy._replace(
        size_bytes=copy.size_bytes - 1_000, generation=copy.generation - 1
    ),
    "larger": lambda copy: copy._replace(
        size_bytes=copy.size_bytes + 1_000, generation=copy.generation - 1
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_entry_costs_a_look_and_nobody_a_copy(
    store: StoreClient, table: IndexTable, what: str, seed: int
) -> None:
    keys, blocks = values(3, seed)
    assert all(store.put(keys, blocks, "b"))
    before = store.directory.stats().bad_copies
    places = store.stat(keys)
    tell(table, keys, [[WRONG[what](copy) for copy in copies] for copies in places])
    assert_equal(store.get(keys), blocks)
    targets = [np.zeros(SIZE, np.uint8) for _ in keys]
    assert store.get_into(keys, targets) == [True] * 3
    assert_equal(targets, blocks)
    with pytest.raises(RequestInvalid, match="reach past its end"):
        store.get_into(keys, targets, offset_bytes=1)
    assert store.directory.stats().bad_copies == before
    assert store.stat(keys) == places
    assert all(store.remove(keys))


def test_a_slot_that_is_somebody_else_s_by_now_is_a_miss_and_no_bad_copy(
    store: StoreClient, other: StoreClient, table: IndexTable, seed: int
) -> None:
    """The table says what was true before the blocks were removed and their slots used again."""
    keys, blocks = values(4, seed)
    assert all(store.put(keys, blocks, "b"))
    places = store.stat(keys)
    tell(table, keys, places)
    assert all(other.remove(keys))
    others, contents = values(4, seed + 1)
    assert all(other.put(others, contents, "b"))
    assert {copies[0].slot for copies in other.stat(others)} == {
        copies[0].slot for copies in places
    }, "the test is of nothing"
    before = store.directory.stats().bad_copies
    assert store.get(keys) == [None] * 4
    assert store.get_into(keys, [np.zeros(SIZE, np.uint8) for _ in keys]) == [False] * 4
    assert store.directory.stats().bad_copies == before
    assert_equal(other.get(others), contents)
    assert all(other.remove(others))


def test_who_removed_a_block_does_not_find_it_again(
    store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(4, seed)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    assert store.remove(keys[:2]) == [True, True]
    assert store.exist(keys) == [False, False, True, True]
    assert store.get(keys)[:2] == [None, None]
    assert store.get_into(keys[:1], [np.zeros(SIZE, np.uint8)]) == [False]
    anew = blocks[2:]
    assert all(store.put(keys[:2], anew, "b"))  # other content under a name that it had
    assert_equal(store.get(keys[:2]), anew)
    assert store.exist(keys) == [True] * 4
    assert all(store.remove(keys))


def test_more_removals_than_can_be_remembered_are_not_forgotten(
    store: StoreClient, table: IndexTable, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reader, "REMOVED_MAX", 3)
    keys, blocks = values(4, seed, 1_000)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    assert all(store.remove(keys))
    assert store.exist(keys) == [False] * 4 and store.get(keys) == [None] * 4


def test_removals_are_remembered_for_longer_than_a_table_can_be_behind(
    store: StoreClient, table: IndexTable, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, blocks = values(1, seed, 1_000)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    assert store.remove(keys) == [True]
    now_s = index_reader.time.monotonic()
    monkeypatch.setattr(
        index_reader.time, "monotonic", lambda: now_s + index_reader.REMOVED_S - 0.5
    )
    assert store.exist(keys) == [False]
    monkeypatch.setattr(index_reader.time, "monotonic", lambda: now_s + index_reader.REMOVED_S + 1)
    assert store.exist(keys) == [True], "it is the table's word by then"
    assert not store._index._removed


def test_a_table_that_is_not_current_is_not_used(
    store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, _ = values(2, seed)
    tell(table, keys, [(Copy("b", 0, 1, 1, SIZE),)] * 2)
    assert store.exist(keys) == [True, True]
    table.stamp(boot_s() - index_table.STALE_S - 1)
    assert store.exist(keys) == [False, False] and store.get(keys) == [None, None]


def test_a_block_that_is_damaged_is_reported_as_before(
    site: SiteProcesses, store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(2, seed)
    assert all(store.put(keys, blocks, "b"))
    places = store.stat(keys)
    if not places[0][0].checksum:
        assert all(store.remove(keys))
        return  # a client that computes no checksums sees no damage
    tell(table, keys, places)
    before = store.directory.stats().bad_copies
    [info] = [info for info in store.directory.nodes() if info.node_id == "b"]
    shape = geometry(info.segment_bytes, info.unit_bytes)
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        segment.view[shape.slot_offset_bytes(places[0][0].slot) + 5] ^= 1
    found = store.get(keys)
    assert found[0] is None
    assert_equal(found[1:], blocks[1:])
    assert store.directory.stats().bad_copies == before + 1
    assert store.stat(keys)[0] == ()
    store.remove(keys)


def test_what_is_read_without_asking_is_not_evicted_before_what_is_not(
    site: SiteProcesses, store: StoreClient, table: IndexTable, seed: int
) -> None:
    """The directory forgets the blocks that were used least lately."""
    keys, blocks = values(20, seed, 1_000_000)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    before = store.directory.stats()
    assert_equal(store.get(keys[15:]), blocks[15:])  # without that the end of a chain goes first
    wait_until(
        lambda: store.directory.stats().hit_blocks >= before.hit_blocks + 5,
        "what the directory heard",
    )
    assert store.directory.stats().lookups == before.lookups, "they were looked up"
    more, others = values(20, seed + 1, 1_000_000)
    assert all(store.put(more, others, "b"))
    assert store.directory.exist(keys[15:]) == [True] * 5
    assert not any(store.directory.exist(keys[10:15]))
    store.remove([*keys, *more])


def test_a_client_that_ends_has_told_what_it_used(
    site: SiteProcesses, store: StoreClient, other: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(3, seed)
    assert all(store.put(keys, blocks, "b"))
    tell(table, keys, store.stat(keys))
    before = other.directory.stats().hit_blocks
    assert_equal(store.get(keys), blocks)
    store.close()
    wait_until(lambda: other.directory.stats().hit_blocks == before + 3, "what the directory heard")
    assert all(other.remove(keys))


def test_a_table_of_a_dead_writer_is_left_for_the_next_one(
    store: StoreClient, table: IndexTable, seed: int
) -> None:
    keys, blocks = values(1, seed, 1_000)
    assert all(store.put(keys, blocks, "b"))
    tell(table, [key_of("ghost")], store.stat(keys))
    assert store.exist([key_of("ghost")]) == [True]
    table.close()
    assert store.exist([key_of("ghost")]) == [False]
    after = IndexTable(table.path, index_table.BYTES_MIN)
    try:
        after.begin(1, 2)
        tell(after, [key_of("other ghost")], store.stat(keys))
        after.stamp(boot_s() + FAR_FUTURE_S)
        wait_until(
            lambda: store.exist([key_of("other ghost")]) == [True], "what the directory heard"
        )
    finally:
        after.close()
    assert all(store.remove(keys))
    assert not Path(table.path).exists()
