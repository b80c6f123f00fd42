"""Puts into slots that the client reserved ahead, with a real directory and real nodes."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_store.client import reserved_slots
from mooncake_store.client.client import StoreClient
from mooncake_store.client.putter import Putter
from mooncake_store.client.reserved_slots import Reserve, ReservedSlots, Taken
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import StoreUnavailable, TransferFailed, TransferTimeout
from mooncake_store.layout import STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.status import HolderStats
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers
SIZE = 100_000
COUNT = 3
NODE = "b"


def started(folder: Path) -> SiteProcesses:
    made = SiteProcesses(folder)
    made.node("a", 8, "--data", "127.0.0.1:0")
    made.node(NODE, 16, "--data", "127.0.0.1:0")
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = started(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[SiteProcesses]:
    """For tests that kill what is in it, or leave slots that rest."""
    made = started(tmp_path)
    yield made
    made.close()


WAYS = {"mapped": (NODE, "auto"), "nixl": ("a", "auto"), "tcp": ("a", "tcp")}


@pytest.fixture(params=[*WAYS, "unverified"])
def store(site: SiteProcesses, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    """Reaches node `b` in each way."""
    verified = request.param != "unverified"
    way = WAYS[request.param if verified else "nixl"]
    with StoreClient(site.address, *way, is_verified=verified) as made:
        yield made


# Which way a payload takes makes no difference to what is reserved; tests of `store` take each way.
@pytest.fixture(params=[pytest.param("mapped", marks=pytest.mark.long), "nixl"])
def doomed_store(doomed: SiteProcesses, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(doomed.address, *WAYS[request.param]) as made:
        yield made


def blocks(count: int = COUNT, size: int = SIZE) -> tuple[list[bytes], list[np.ndarray]]:
    keys = [secrets.token_bytes(16) for _ in range(count)]
    chance = np.random.default_rng(list(keys[0]))
    return keys, [chance.integers(0, 256, size, dtype=np.uint8) for _ in keys]


def reserved(store: StoreClient) -> ReservedSlots:
    return store._putter._reserved


def reserve_of(store: StoreClient) -> Reserve:
    (reserve,) = reserved(store)._reserves.values()
    return reserve


def get_ready(store: StoreClient, count: int = COUNT) -> Reserve:
    """Put until so many slots are reserved for the next put."""

    def is_ready() -> bool:
        reserves = list(reserved(store)._reserves.values())
        if not reserves:
            assert all(store.put(*blocks(count), NODE))
        return bool(reserves) and len(reserves[0].ready) >= count

    wait_until(is_ready, "reserved slots")
    return reserve_of(store)


def node_stats(store: StoreClient) -> HolderStats:
    return next(node for node in store.directory.stats().nodes if node.node_id == NODE)


def refuse_to_ask(store: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> Any:
        raise AssertionError("a put asked for its slots")

    monkeypatch.setattr(store.directory, "allocate", ask)


def test_puts_go_into_slots_reserved_ahead_and_are_got_bytewise_equal(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_ready(store)
    refuse_to_ask(store, monkeypatch)
    put = []
    for _ in range(10):
        wait_until(lambda: len(reserve_of(store).ready) >= COUNT, "reserved slots")
        keys, arrays = blocks()
        assert store.put(keys, arrays, NODE) == [True] * COUNT
        put.append((keys, arrays))
        for keys, arrays in put:
            for array, found in zip(arrays, store.get(keys), strict=True):
                assert found is not None and np.array_equal(array, found)
    for keys, _ in put:
        assert store.remove(keys) == [True] * COUNT


def test_what_is_ready_is_marked_so_nobody_takes_it_for_the_block_before(
    store: StoreClient,
) -> None:
    reserve = get_ready(store)
    info = reserve.info
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        memory = SlotMemory(segment.view, geometry(info.segment_bytes, info.unit_bytes))
        for _ in range(5):
            keys, arrays = blocks()
            assert all(store.put(keys, arrays, NODE))
            wait_until(lambda: len(reserve.ready) >= COUNT, "reserved slots")
            for slot, generation in list(reserve.ready):
                header = memory.header(slot)
                assert header is not None and header.state == STATE_WRITING
                assert (header.generation, header.key) == (generation, bytes(16))
                assert header.checksum == reserved_slots.LEASE_S * 1_000
                heads = memory.view[memory.shape.headers(slot, SIZE)]
                assert not heads[64:].any(), "a header of another block lies inside"
            for (copy,), key in zip(store.stat(keys), keys, strict=True):
                assert memory.is_ready(copy.slot, copy.generation, key)


def test_a_client_that_closes_gives_everything_back_at_once(doomed: SiteProcesses) -> None:
    with StoreClient(doomed.address, "a") as watcher:
        with StoreClient(doomed.address, "a") as store:
            get_ready(store)
            assert node_stats(watcher).reserved_units > 0
        node = node_stats(watcher)
        assert (node.reserved_units, node.quarantined_units) == (0, 0)


def test_a_client_that_puts_no_more_gives_everything_back(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(site.address, "a") as store:
        get_ready(store)
        monkeypatch.setattr(reserved_slots, "IDLE_S", 0.1)
        before = node_stats(store).quarantined_units
        wait_until(lambda: node_stats(store).reserved_units == 0, "their return")
        assert node_stats(store).quarantined_units <= before


def test_one_put_alone_reserves_nothing(site: SiteProcesses) -> None:
    with StoreClient(site.address, "a") as store:
        assert all(store.put(*blocks(), NODE))
        assert not reserved(store)._reserves


def test_a_directory_that_restarts_finds_what_was_put_and_the_next_put_asks_anew(
    doomed: SiteProcesses, doomed_store: StoreClient
) -> None:
    store = doomed_store
    get_ready(store)
    keys, arrays = blocks()
    assert all(store.put(keys, arrays, NODE))
    wait_until(lambda: len(reserve_of(store).ready) >= COUNT, "reserved slots")
    doomed.directory.end(signal.SIGKILL)
    doomed.directory.start()
    wait_until(lambda: all(store.directory.exist(keys)), "the node to say what it holds")
    for array, found in zip(arrays, store.get(keys), strict=True):
        assert found is not None and np.array_equal(array, found)
    more, others = blocks()
    assert store.put(more, others, NODE) == [True] * COUNT
    for array, found in zip(others, store.get(more), strict=True):
        assert found is not None and np.array_equal(array, found)


def test_a_block_that_is_there_is_stored_and_the_next_puts_ask_first(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IDLE_S", "ASK_FIRST_S"):  # however slow this machine is
        monkeypatch.setattr(reserved_slots, name, 3600.0)
    keys, arrays = blocks()
    assert all(store.put(keys, arrays, NODE))
    get_ready(store)
    written = store.nodes.access(NODE)
    assert written is not None
    assert store.put(keys, arrays, NODE) == [True] * COUNT
    before = written.transport.counters.writes
    assert store.put(keys, arrays, NODE) == [True] * COUNT
    assert written.transport.counters.writes == before, "it was written though it was there"
    for array, found in zip(arrays, store.get(keys), strict=True):
        assert found is not None and np.array_equal(array, found)


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_put_of_a_block_that_a_dead_writer_began_is_true_only_once_it_is_stored(
    site: SiteProcesses, is_reserved: bool
) -> None:
    with StoreClient(site.address, "a") as store, StoreClient(site.address, "a") as dying:
        if is_reserved:
            get_ready(store)
        else:
            assert all(store.put(*blocks(), NODE))
        keys, arrays = blocks()
        began = dying.directory.allocate(NODE, keys[:1], "dying", 60.0, size_bytes=SIZE)
        assert began.slots[0] is not None
        assert store.put(keys, arrays, NODE, deadline_s=0.3) == [False, True, True]
        assert store.exist(keys) == [False, True, True]
        with ThreadPoolExecutor(1) as pool:
            allocate, asked = store.directory.allocate, threading.Event()

            def ask(*arguments: Any, **named: Any) -> Any:
                given = allocate(*arguments, **named)
                asked.set()
                return given

            store.directory.allocate = ask  # type: ignore[method-assign]
            putting = pool.submit(store.put, keys, arrays, NODE, deadline_s=30.0)
            assert asked.wait(30)
            dying.directory.release("dying")
            assert putting.result() == [True] * COUNT
        for array, found in zip(arrays, store.get(keys), strict=True):
            assert found is not None and np.array_equal(array, found)


def test_two_puts_of_one_block_at_once_both_wait_for_the_copy(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(site.address, "a") as store, StoreClient(site.address, "a") as other:
        keys, arrays = blocks()
        began, may_go_on, fill = threading.Event(), threading.Event(), Putter._fill

        def slow(putter: Putter, *arguments: Any) -> list[int]:
            if putter is other._putter:
                began.set()
                assert may_go_on.wait(30)
            return fill(putter, *arguments)

        monkeypatch.setattr(Putter, "_fill", slow)
        exist, polled = store.directory.exist, threading.Event()

        def poll(*arguments: Any) -> list[bool]:
            polled.set()
            return exist(*arguments)

        monkeypatch.setattr(store.directory, "exist", poll)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(other.put, keys, arrays, NODE)
            assert began.wait(30)
            second = pool.submit(store.put, keys, arrays, NODE)
            assert polled.wait(30) and not second.done()
            may_go_on.set()
            assert first.result() == second.result() == [True] * COUNT
        assert store.exist(keys) == [True] * COUNT


def test_commits_of_several_threads_go_as_one(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(site.address, "a") as store:
        reserve = get_ready(store, 1)
        threads = len(reserve.ready)
        assert threads >= 2
        commit, messages = store.directory.commit_reserved, []

        def counted(node_id: str, rows: list[Any], *rest: Any) -> Any:
            messages.append(len(rows))
            return commit(node_id, rows, *rest)

        with ThreadPoolExecutor(threads) as pool:
            with reserve.turn:  # somebody's message is under way
                monkeypatch.setattr(store.directory, "commit_reserved", counted)
                sets = [blocks(1) for _ in range(threads)]
                puts = [pool.submit(store.put, *each, NODE) for each in sets]
                wait_until(lambda: len(reserve.waiting) == threads, "all of them")
            assert all(put.result() == [True] for put in puts)
        assert threads in messages
        for keys, (array,) in sets:
            (found,) = store.get(keys)
            assert found is not None and np.array_equal(array, found)


@pytest.mark.parametrize("error", [TransferTimeout, TransferFailed])
def test_after_a_failed_write_everything_reserved_rests(
    doomed: SiteProcesses, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with StoreClient(doomed.address, "a") as store:
        reserve = get_ready(store)

        def fail(*_: Any) -> list[int]:
            raise error("the network is gone")

        monkeypatch.setattr(store._putter, "_fill_remote", fail)
        keys, arrays = blocks()
        assert store.put(keys, arrays, NODE) == [False] * COUNT
        monkeypatch.undo()
        wait_until(lambda: node_stats(store).reserved_units == 0, "their return")
        assert node_stats(store).quarantined_units > 0
        assert reserve.is_dropped and not any(store.exist(keys))
        wait_until(lambda: store.put(keys, arrays, NODE) == [True] * COUNT, "the node")


def test_a_failed_put_takes_no_slots_from_those_that_others_are_writing(
    doomed: SiteProcesses, doomed_store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would rest for so long only as a put that began then; this one may go on for longer."""
    store = doomed_store
    reserve = get_ready(store, 2 * COUNT)
    fill, is_writing, may_go_on = Putter._fill, threading.Event(), threading.Event()

    def slow_or_failed(self: Putter, info: Any, writes: Any, until_s: float) -> list[int]:
        if writes[0].key == failing[0]:
            raise TransferFailed("the network is gone")
        is_writing.set()
        assert may_go_on.wait(30)
        return fill(self, info, writes, until_s)

    (failing, lost), (keys, arrays) = blocks(), blocks()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Putter, "_fill", slow_or_failed)
        slow = pool.submit(store.put, keys, arrays, NODE)
        assert is_writing.wait(30)
        try:
            assert store.put(failing, lost, NODE) == [False] * COUNT
            store.directory.nodes()  # behind what the failed put sent
            node = node_stats(store)
            assert node.reserved_units > 0 and node.quarantined_units == 0
        finally:
            may_go_on.set()
        assert slow.result() == [True] * COUNT
    monkeypatch.undo()
    assert reserve.is_dropped and not reserve.puts
    wait_until(lambda: node_stats(store).reserved_units == 0, "what nobody writes any more")
    with StoreClient(doomed.address, "a") as reader:  # the node is bad for whoever failed there
        for array, found in zip(arrays, reader.get(keys), strict=True):
            assert found is not None and np.array_equal(array, found)


def test_slots_that_come_after_their_reserve_was_dropped_are_given_back(
    doomed: SiteProcesses, doomed_store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that takes longer than a reserve stays: its commit brings slots that nobody uses."""
    store = doomed_store
    reserve = get_ready(store)
    fill = Putter._fill

    def slow(self: Putter, info: Any, writes: Any, until_s: float) -> list[int]:
        wait_until(lambda: reserve.is_dropped, "the reserve to be too old")
        return fill(self, info, writes, until_s)

    monkeypatch.setattr(Putter, "_fill", slow)
    monkeypatch.setattr(reserved_slots, "IDLE_S", 0.1)
    keys, arrays = blocks()
    assert store.put(keys, arrays, NODE) == [True] * COUNT
    assert store.exist(keys) == [True] * COUNT
    wait_until(lambda: node_stats(store).reserved_units == 0, "their return")


def test_a_commit_that_is_interrupted_says_so_to_the_others_in_it(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(site.address, "a") as store:
        reserve = get_ready(store, 1)

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        with ThreadPoolExecutor(2) as pool:
            with reserve.turn:
                monkeypatch.setattr(store.directory, "commit_reserved", interrupted)
                puts = [pool.submit(store.put, *blocks(1), NODE) for _ in range(2)]
                wait_until(lambda: len(reserve.waiting) == 2, "both of them")
            errors = {type(put.exception()) for put in puts}
        assert errors == {KeyboardInterrupt, StoreUnavailable}


def test_a_put_whose_reservation_is_lost_is_written_once_more(store: StoreClient) -> None:
    reserve = get_ready(store)
    store.directory.release(reserve.owner)  # as when its lease ran out: somebody else may have them
    keys, arrays = blocks()
    assert store.put(keys, arrays, NODE) == [True] * COUNT
    assert reserve.is_dropped
    for array, found in zip(arrays, store.get(keys), strict=True):
        assert found is not None and np.array_equal(array, found)


def test_a_node_that_comes_back_is_put_on_anew(
    doomed: SiteProcesses, doomed_store: StoreClient
) -> None:
    store = doomed_store
    reserve = get_ready(store)
    doomed.nodes[NODE].end(signal.SIGKILL)
    doomed.nodes[NODE].start()
    keys, arrays = blocks()
    wait_until(lambda: store.put(keys, arrays, NODE) == [True] * COUNT, "the node")
    for array, found in zip(arrays, store.get(keys), strict=True):
        assert found is not None and np.array_equal(array, found)
    assert all(each is not reserve for each in reserved(store)._reserves.values())


def test_a_draining_node_takes_nothing_more(store: StoreClient) -> None:
    get_ready(store)
    store.directory.drain(NODE)
    keys, arrays = blocks()
    try:
        assert store.put(keys, arrays, NODE) == [False] * COUNT
        assert not any(store.exist(keys))
    finally:
        store.directory.drain(NODE, is_on=False)


def test_a_slot_that_was_granted_too_long_ago_is_given_back_and_not_marked(
    doomed: SiteProcesses,
) -> None:
    with StoreClient(doomed.address, "a") as store:
        reserve = get_ready(store)
        with reserved(store)._lock:
            at_once, _ = reserved(store)._take_raw(reserve, 0.0)
            reserve.marking -= len(at_once)
            granted = [(use, 100.0) for use in reserve.ready]
            reserve.ready, reserve.raw = [], granted
            too_late_s = 100.0 + reserved_slots.RAW_S_MAX + 0.01
            assert reserved(store)._take_raw(reserve, too_late_s)[0] == []
            assert reserve.late == [use for use, _ in granted] and not reserve.raw
        taken = Taken(reserve, [], [(1, 2)], [], boot_s() - 0.01)  # it stood still after that
        assert taken.markable() == [] and taken.late == [(1, 2)]
        wait_until(lambda: not reserve.late, "their return")
        wait_until(lambda: len(reserve.ready) >= COUNT, "others in their place")
        assert not {use for use, _ in granted} & set(reserve.ready)


@pytest.fixture(params=WAYS)
def raw_store(
    doomed: SiteProcesses, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreClient]:
    """Its next put has raw slots to mark."""
    with StoreClient(doomed.address, *WAYS[request.param]) as store:
        reserve = get_ready(store, 2 * COUNT)
        with reserved(store)._lock:
            monkeypatch.setattr(ReservedSlots, "_maintain", lambda *_: None)
        assert store.put(*blocks(), NODE) == [True] * COUNT
        assert reserve.raw and len(reserve.ready) >= COUNT
        yield store


def test_no_mark_lands_on_a_slot_that_was_given_away_while_the_payload_was_written(
    raw_store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that took over during the put may give the raw slots to another client."""
    store, reserve = raw_store, reserve_of(raw_store)
    raw, info = [use for use, _ in reserve.raw], reserve.info
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        memory = SlotMemory(segment.view, geometry(info.segment_bytes, info.unit_bytes))
        others = [SlotHeader(STATE_READY, each[1] + 1, b"k" * 16, 7, SIZE) for each in raw]
        delayed: list[bool] = []

        def give_away() -> None:
            if not delayed:
                delayed.append(True)
                memory.write_headers([slot for slot, _ in raw], others)

        node = store.nodes.access(NODE)
        assert node is not None
        write, copied = type(node.transport).write, Putter._copied

        def slow_write(transport: Any, info: Any, sources: Any, *rest: Any) -> None:
            if any(span.length_bytes == SIZE for _, span in sources):
                give_away()
            write(transport, info, sources, *rest)

        def slow_copy(*arguments: Any) -> list[int]:
            give_away()
            return copied(*arguments)

        monkeypatch.setattr(type(node.transport), "write", slow_write)
        monkeypatch.setattr(Putter, "_copied", slow_copy)
        keys, arrays = blocks()
        assert store.put(keys, arrays, NODE) == [True] * COUNT
        assert delayed
        found = [memory.header(slot) for slot, _ in raw]
        assert found == others, "a mark landed on a finished block of another client"


def test_a_mark_that_takes_too_long_costs_the_reserve_and_not_the_put(
    doomed: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(doomed.address, *WAYS["tcp"]) as store:
        reserve = get_ready(store, 2 * COUNT)
        with reserved(store)._lock:
            monkeypatch.setattr(ReservedSlots, "_maintain", lambda *_: None)
        assert store.put(*blocks(), NODE) == [True] * COUNT
        node = store.nodes.access(NODE)
        assert node is not None and reserve.raw
        write, deadlines_s = type(node.transport).write, list[float]()

        def stuck_mark(
            transport: Any, info: Any, sources: Any, targets: Any, left_s: float
        ) -> None:
            if not any(span.length_bytes == SIZE for _, span in sources) and not deadlines_s:
                deadlines_s.append(left_s)
                raise TransferTimeout("the mark is under way for too long")
            write(transport, info, sources, targets, left_s)

        monkeypatch.setattr(type(node.transport), "write", stuck_mark)
        keys, arrays = blocks()
        assert store.put(keys, arrays, NODE) == [True] * COUNT
        assert 0 < deadlines_s[0] <= reserved_slots.RAW_S_MAX
        assert reserve.is_dropped and not reserve.puts
        wait_until(lambda: node_stats(store).reserved_units == 0, "their return")
        assert node_stats(store).quarantined_units > 0, "a late mark may still land in these"
        for array, found in zip(arrays, store.get(keys), strict=True):
            assert found is not None and np.array_equal(array, found)
