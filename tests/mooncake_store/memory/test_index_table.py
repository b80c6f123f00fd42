"""The table of the index replica: what is found was put, whoever writes meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import secrets
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.memory import index_table
from mooncake_store.memory.index_table import (
    BUCKET_BYTES,
    COPIES_MAX,
    NODES_MAX,
    STALE_S,
    IndexTable,
    IndexView,
    remove_dead_tables,
    table_path,
)
from mooncake_store.memory.segment_file import SegmentRefused
from mooncake_store.records.blocks import Copy

SMALL_BYTES = 16 * BUCKET_BYTES
TORTURE_KEYS = 300
LOOKS = 400
spawned = multiprocessing.get_context("spawn")


@pytest.fixture
def path() -> Iterator[str]:
    made = f"/dev/shm/mooncake-test-index-{os.getpid()}-{secrets.token_hex(4)}"
    yield made
    with contextlib.suppress(FileNotFoundError):
        os.unlink(made)


@pytest.fixture
def table(path: str) -> Iterator[IndexTable]:
    made = IndexTable(path, SMALL_BYTES)
    made.begin(7, 3)
    yield made
    made.close()


def copy_of(number: int, node_id: str = "s0") -> Copy:
    return Copy(node_id, number, number + 2**40, number * 0x9E3779B97F4A7C15 % 2**64, 4096)


def found(view: IndexView, keys: list[bytes]) -> list[tuple[Copy, ...]]:
    """What C says (where it is), and that numpy says the same."""
    joined = b"".join(keys)
    answer = view.find(joined)
    assert answer == view.find_in_python(joined)
    there = view.exist(joined)
    assert there == view.exist_in_python(joined) == bytes(bool(each) for each in answer)
    return answer


def test_what_was_put_is_found_until_it_is_dropped(table: IndexTable) -> None:
    view = IndexView(table.path)
    assert view.position == (7, 3)
    one, two, nothing = b"1" * 16, b"2" * 16, b"3" * 16
    table.put(one, copy_of(1), is_local=True)
    table.put(two, copy_of(2, "far"), is_local=False)
    table.put(two, copy_of(3), is_local=True)
    [first, second, third] = found(view, [one, two, nothing])
    assert first == (copy_of(1),) and set(second) == {copy_of(2, "far"), copy_of(3)} and not third
    table.put(one, copy_of(9), is_local=True)
    table.drop(two, "far")
    table.drop(two, "never heard of")
    table.drop(nothing, "s0")
    assert found(view, [one, two]) == [(copy_of(9),), (copy_of(3),)]
    table.check()
    table.begin(8, 1)
    assert found(view, [one, two]) == [(), ()] and view.position == (8, 1)
    assert found(view, []) == []
    table.check()


def test_keys_that_differ_in_few_bits_are_told_apart(table: IndexTable) -> None:
    """As of somebody who counts: half of each key is zeros."""
    view = IndexView(table.path)
    keys = [number.to_bytes(16, order) for number in range(20) for order in ("little", "big")]
    for number, key in enumerate(keys):
        assert table.put(key, copy_of(number), is_local=True)
    keys = list(dict(zip(keys, keys, strict=True)))
    assert all(found(view, keys)) and len(keys) == 39
    table.check()


def test_a_table_says_nothing_that_is_not_so_whatever_happens_to_it(
    table: IndexTable, seed: int
) -> None:
    """2,000 random steps with more copies than there is room for."""
    chance = random.Random(seed)
    view = IndexView(table.path)
    keys = [chance.randbytes(16) for _ in range(200)]
    nodes = {"s0": True, "s1": True, "far": False, "farther": False}
    true: dict[tuple[bytes, str], Copy] = {}
    for step in range(2_000):
        key, (node_id, is_local) = chance.choice(keys), chance.choice(list(nodes.items()))
        if chance.random() < 0.6:
            true[key, node_id] = copy_of(step, node_id)
            table.put(key, true[key, node_id], is_local)
        else:
            table.drop(key, node_id)
            true.pop((key, node_id), None)
        if step % 50 == 0:
            table.check()
            asked = chance.sample(keys, 70)
            for key, copies in zip(asked, found(view, asked), strict=True):
                assert len(copies) <= COPIES_MAX
                assert all(true.get((key, copy.node_id)) == copy for copy in copies)
    assert table.entries > 0.5 * table.capacity, "the test was of an empty table"


def test_a_full_table_keeps_what_is_on_this_host(table: IndexTable, seed: int) -> None:
    chance = random.Random(seed)
    view = IndexView(table.path)
    ours = [chance.randbytes(16) for _ in range(table.capacity // 2)]
    kept = [key for key in ours if table.put(key, copy_of(1), is_local=True)]
    assert kept == ours
    others = [chance.randbytes(16) for _ in range(5 * table.capacity)]
    for key in others:
        table.put(key, copy_of(2, "far"), is_local=False)
    table.check()
    assert table.entries > 0.95 * table.capacity
    assert found(view, ours) == [(copy_of(1),)] * len(ours)
    more = [chance.randbytes(16) for _ in range(table.capacity)]
    assert all(table.put(key, copy_of(3), is_local=True) for key in more)
    table.check()


def test_a_key_with_many_copies_has_those_of_this_host(table: IndexTable) -> None:
    view, key = IndexView(table.path), b"k" * 16
    for number in range(10):
        table.put(key, copy_of(number, f"far{number}"), is_local=False)
    assert len(found(view, [key])[0]) == COPIES_MAX
    table.put(key, copy_of(1, "s0"), is_local=True)
    table.put(key, copy_of(2, "s1"), is_local=True)
    assert not table.put(key, copy_of(3, "far"), is_local=False)
    assert {copy.node_id for copy in found(view, [key])[0]} == {"s0", "s1"}
    table.check()


def test_a_torn_entry_is_no_entry(table: IndexTable, seed: int) -> None:
    """Each single byte of it, changed, makes it nothing; the byte put right, it is there again."""
    view, key = IndexView(table.path), random.Random(seed).randbytes(16)
    table.put(key, copy_of(5), is_local=True)
    raw = bytearray(Path(table.path).read_bytes())
    start = raw.index(key)
    assert raw.count(key) == 1
    with open(table.path, "r+b") as file:
        for at in range(start, start + 64):
            file.seek(at)
            file.write(bytes([raw[at] ^ 0x10]))
            file.flush()
            assert found(view, [key]) == [()], f"byte {at - start} does not count"
            file.seek(at)
            file.write(bytes([raw[at]]))
            file.flush()
    assert found(view, [key]) == [(copy_of(5),)]


def test_more_nodes_than_there_are_names_for_have_no_entries(table: IndexTable) -> None:
    view = IndexView(table.path)
    for number in range(NODES_MAX + 5):
        key = number.to_bytes(16, "little")
        is_in = table.put(key, copy_of(number, f"node-{number}"), is_local=True)
        assert is_in == (number < NODES_MAX)
    assert not table.put(b"l" * 16, copy_of(1, "n" * 255), is_local=True)
    [copies] = found(view, [(NODES_MAX - 1).to_bytes(16, "little")])
    assert copies == (copy_of(NODES_MAX - 1, f"node-{NODES_MAX - 1}"),)


def test_only_a_writer_that_lives_is_believed(table: IndexTable) -> None:
    view = IndexView(table.path)
    now_s = boot_s()
    assert not view.is_current(now_s), "it has not stamped yet"
    table.stamp(now_s)
    assert view.is_current(now_s) and not view.is_current(now_s + STALE_S + 0.01)
    table.begin(7, 4)
    assert not view.is_current(now_s), "what is there now is not all of it"
    table.stamp(now_s)
    table.close()
    assert not view.is_current(now_s)


def test_the_next_writer_takes_over_and_nobody_before(table: IndexTable) -> None:
    with pytest.raises(SegmentRefused, match="another process writes"):
        IndexTable(table.path, SMALL_BYTES)
    table.put(b"k" * 16, copy_of(1), is_local=True)
    view = IndexView(table.path)
    table.close()
    after = IndexTable(table.path, SMALL_BYTES)
    try:
        assert found(IndexView(table.path), [b"k" * 16]) == [()]
        assert found(view, [b"k" * 16]) == [(copy_of(1),)], "the one before is mapped still"
    finally:
        after.close()
    assert not os.path.exists(table.path)


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    living = table_path(f"{tmp_path}/segment", "ipc:///living")
    dead, other = table_path(f"{tmp_path}/segment", "ipc:///dead"), tmp_path / "mooncake-segment"
    table = IndexTable(living, SMALL_BYTES)
    try:
        Path(dead).write_bytes(Path(living).read_bytes())
        other.write_bytes(b"a segment")
        remove_dead_tables(living)
        assert sorted(tmp_path.iterdir()) == sorted([Path(living), other])
    finally:
        table.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_table_that_others_may_read_or_write_is_not_believed(
    table: IndexTable, mode: int
) -> None:
    assert os.stat(table.path).st_mode & 0o777 == 0o600
    os.chmod(table.path, mode)
    with pytest.raises(SegmentRefused, match="other users"):
        IndexView(table.path)


def test_what_is_no_table_is_refused(path: str) -> None:
    with pytest.raises(SegmentRefused, match="No such file"):
        IndexView(path)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with pytest.raises(SegmentRefused, match="is being created"):
            IndexView(path)
        os.ftruncate(descriptor, index_table._BUCKETS_AT + SMALL_BYTES)
        with pytest.raises(SegmentRefused, match="another release"):
            IndexView(path)
        os.symlink(path, path + "-link")
        with pytest.raises(SegmentRefused):
            IndexView(path + "-link")
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + "-link")


# ---- a writer and readers at once


def torture_keys(seed: int) -> list[bytes]:
    return [random.Random(f"{seed}/{number}").randbytes(16) for number in range(TORTURE_KEYS)]


def promised(key: bytes, generation: int, node_id: str) -> Copy:
    """All of an entry follows from its key, node and generation."""
    mixed = int.from_bytes(key[:8], "little") * (generation | 1) % 2**64
    return Copy(node_id, mixed % 2**20, generation, mixed, mixed % 2**30 + 1)


def write_for_ever(path: str, seed: int, said: Connection) -> None:
    table = IndexTable(path, SMALL_BYTES)  # 112 entries: keys push each other out
    table.begin(1, 0)
    table.stamp(boot_s())
    said.send("ready")
    chance, keys, generation = random.Random(seed), torture_keys(seed), 2**40
    while True:
        key, node_id = chance.choice(keys), chance.choice(["s0", "s1", "far"])
        if chance.random() < 0.8:
            generation += 1
            table.put(key, promised(key, generation, node_id), node_id != "far")
        else:
            table.drop(key, node_id)
        table.stamp(boot_s())


def look(path: str, seed: int, is_native: bool, said: Connection) -> None:
    view, keys = IndexView(path), torture_keys(seed)
    find = view.find if is_native else view.find_in_python
    joined, hits, latest = b"".join(keys), 0, dict.fromkeys(keys, 0)
    for _ in range(LOOKS):
        for key, copies in zip(keys, find(joined), strict=True):
            for copy in copies:
                assert copy == promised(key, copy.generation, copy.node_id), "a torn entry"
            generation = max((copy.generation for copy in copies), default=0)
            hits += bool(copies)
            latest[key] = max(latest[key], generation)
    changed = sum(generation > 2**40 + TORTURE_KEYS for generation in latest.values())
    said.send((hits, changed))


@pytest.mark.slow
def test_readers_never_believe_a_torn_entry_and_notice_that_the_writer_was_killed(
    path: str, seed: int
) -> None:
    print(f"seed {seed}")
    here, there = spawned.Pipe()
    writer = spawned.Process(target=write_for_ever, args=(path, seed, there), daemon=True)
    writer.start()
    assert here.recv() == "ready"
    readers = []
    for is_native in (True, False):
        mine, theirs = spawned.Pipe()
        readers.append((spawned.Process(target=look, args=(path, seed, is_native, theirs)), mine))
    for reader, _ in readers:
        reader.start()
    try:
        for reader, said in readers:
            assert said.poll(120), "a reader found something wrong, see its words above"
            hits, changed = said.recv()
            assert hits > LOOKS and changed > TORTURE_KEYS // 2, (hits, changed)
            reader.join()
        view = IndexView(path)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert not view.is_current(boot_s() + STALE_S)
        joined = b"".join(torture_keys(seed))
        for key, copies in zip(torture_keys(seed), view.find(joined), strict=True):
            for copy in copies:  # what it was just writing reads as nothing
                assert copy == promised(key, copy.generation, copy.node_id)
        IndexTable(path, SMALL_BYTES).close()
    finally:
        writer.kill()
        for reader, _ in readers:
            reader.kill()
