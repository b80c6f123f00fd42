"""A writer that stood still after it was given its slots, which are somebody else's by now."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.client.store import Store
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import TransferTimeout
from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import GENERATION_MAX, Allocation
from tests.mooncake_store.makers import LAYOUT
from tests.mooncake_store.processes import SiteProcesses

UNIT = 4096
NODE = "b"


def ready(generation: int, size_bytes: int = UNIT) -> SlotHeader:
    return SlotHeader(STATE_READY, generation, b"k" * 16, 77, size_bytes)


def test_a_newer_use_of_a_slot_is_known_by_a_whole_header_only() -> None:
    memory = SlotMemory(np.zeros(64 * UNIT, np.uint8), geometry(64 * UNIT, UNIT))
    assert not memory.is_newer(3, 0), "there is none"
    for there, is_newer in ((4, False), (5, False), (6, True), (GENERATION_MAX, False)):
        memory.write_header(3, ready(there))
        assert memory.is_newer(3, 5) is is_newer, there
    memory.write_header(3, ready(6))
    memory.view[3 * HEADER_BYTES + 40] ^= 1
    assert not memory.is_newer(3, 5), "it is torn"


# ---- with a real directory and nodes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"))
    made.node("a", 1, "--data", "127.0.0.1:0")
    made.node(NODE, 1, "--data", "127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture(params=["mapped", "nixl", "tcp"])
def store(site: SiteProcesses, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    """Reaches node `b` in each way."""
    node_id = NODE if request.param == "mapped" else "a"
    mode = "auto" if request.param != "tcp" else "tcp"
    with StoreClient(site.address, node_id, mode) as made:
        yield made


@pytest.fixture
def near(site: SiteProcesses) -> Iterator[StoreClient]:
    with StoreClient(site.address, NODE, "auto") as made:
        yield made


@pytest.fixture
def memory(near: StoreClient) -> Iterator[SlotMemory]:
    """What lies in node `b`."""
    (info,) = [info for info in near.directory.nodes() if info.node_id == NODE]
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        yield SlotMemory(segment.view, geometry(info.segment_bytes, info.unit_bytes))


def give_on(directory: Any, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch) -> list[ByteArray]:
    """Each slot that it gives is given to somebody else too, who has written it by now.

    The headers as that one left them.
    """
    headers: list[ByteArray] = []
    allocate = directory.allocate

    def late(*arguments: Any, **named: Any) -> Allocation:
        given: Allocation = allocate(*arguments, **named)
        for slot in filter(None, given.slots):
            memory.write_header(slot.slot, ready(slot.generation + 1, 3 * UNIT))
            memory.payload(slot.slot, 3 * UNIT)[:] = 7
        headers.append(heads(memory))
        return given

    monkeypatch.setattr(directory, "allocate", late)
    return headers


def heads(memory: SlotMemory) -> ByteArray:
    return memory.view[: memory.shape.units * HEADER_BYTES].copy()


@pytest.mark.servers
def test_a_mapped_put_leaves_a_newer_block_alone(
    near: StoreClient, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = give_on(near.directory, memory, monkeypatch)
    block = np.full(3 * UNIT - 100, 1, np.uint8)
    assert near.put([secrets.token_bytes(16)], [block], NODE) == [False]
    assert np.array_equal(heads(memory), headers[-1])
    assert not (memory.view[memory.shape.payload_offset_bytes :] == 1).any()


@pytest.mark.servers
def test_a_worker_gets_no_slot_that_has_a_newer_block(
    near: StoreClient, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Store(near.directory, NODE, "print", LAYOUT, "mapped")
    keys = [secrets.token_bytes(16)]
    headers = give_on(near.directory, memory, monkeypatch)
    given = made.allocate(keys, "late", 5.0)
    assert given.slots == (None,)
    assert np.array_equal(heads(memory), headers[-1])
    monkeypatch.undo()
    given = made.allocate([secrets.token_bytes(16)], "in time", 5.0)
    [slot] = given.slots
    assert slot is not None
    begun = memory.header(slot.slot)
    assert begun is not None and (begun.state, begun.generation) == (STATE_WRITING, slot.generation)
    near.directory.release("in time")
    made.close()


@pytest.mark.servers
def test_who_is_late_and_refused_writes_not_even_a_header(
    store: StoreClient, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each way, where directories are elected: there the clock tells."""
    asked: list[bool] = []
    allocate = store.directory.allocate

    def elected(*arguments: Any, **named: Any) -> Allocation:
        return replace(allocate(*arguments, **named), begin_s=1e-9, asked_s=1e-9)

    def renew(*_: Any) -> bool:
        asked.append(True)
        return False

    monkeypatch.setattr(store.directory, "allocate", elected)
    monkeypatch.setattr(store.directory, "renew", renew)
    before = heads(memory)
    block = np.ones(3 * UNIT - 100, np.uint8)
    assert store.put([secrets.token_bytes(16)], [block], NODE) == [False]
    assert asked and np.array_equal(heads(memory), before)


@pytest.mark.servers
def test_a_mark_is_given_up_before_another_directory_can_begin(
    site: SiteProcesses, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where directories are elected: a mark that lands later may be on another's block."""
    with StoreClient(site.address, "a", "tcp") as store:
        allocate, left = store.directory.allocate, list[float]()
        node = store.nodes.access(NODE)
        assert node is not None
        write = type(node.transport).write

        def elected(*arguments: Any, **named: Any) -> Allocation:
            return replace(allocate(*arguments, **named), begin_s=0.7, asked_s=boot_s() - 0.2)

        def noted(transport: Any, info: Any, sources: Any, targets: Any, left_s: float) -> None:
            left.append(left_s)
            write(transport, info, sources, targets, left_s)

        monkeypatch.setattr(store.directory, "allocate", elected)
        monkeypatch.setattr(type(node.transport), "write", noted)
        assert store.put([secrets.token_bytes(16)], [np.ones(UNIT - 100, np.uint8)], NODE) == [True]
        assert 0 < left[0] <= 0.5 < left[1], "the mark, then the payload"


@pytest.mark.servers
def test_a_put_whose_marks_time_out_writes_into_other_slots(
    site: SiteProcesses, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marks have less time than the put, so their timeout is not the end of the put."""
    with StoreClient(site.address, "a", "tcp") as store:
        node = store.nodes.access(NODE)
        assert node is not None
        allocate, granted = store.directory.allocate, list[int]()
        write, writes = type(node.transport).write, list[int]()

        def noted(*arguments: Any, **named: Any) -> Allocation:
            given: Allocation = allocate(*arguments, **named)
            granted.extend(slot.slot for slot in given.slots if slot is not None)
            return given

        def stalled_once(transport: Any, *arguments: Any) -> None:
            writes.append(1)
            if len(writes) == 1:
                raise TransferTimeout("a card got stuck")
            write(transport, *arguments)

        monkeypatch.setattr(store.directory, "allocate", noted)
        monkeypatch.setattr(type(node.transport), "write", stalled_once)
        assert store.put([secrets.token_bytes(16)], [np.ones(UNIT - 100, np.uint8)], NODE) == [True]
        first, second = granted
        header = memory.header(second)
        assert first != second and header is not None and header.state == STATE_READY


@pytest.mark.servers
def test_a_put_whose_marks_time_out_with_its_deadline_stores_nothing(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(site.address, "a", "tcp") as store:
        node = store.nodes.access(NODE)
        assert node is not None
        writes: list[float] = []

        def stalled(transport: Any, info: Any, sources: Any, targets: Any, left_s: float) -> None:
            writes.append(left_s)
            threading.Event().wait(left_s)
            raise TransferTimeout("a card got stuck")

        monkeypatch.setattr(type(node.transport), "write", stalled)
        block = [np.ones(UNIT - 100, np.uint8)]
        assert store.put([secrets.token_bytes(16)], block, NODE, 0.1) == [False]
        assert len(writes) == 1
