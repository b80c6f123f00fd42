"""Blocks of several sizes share a memory: an untouched header must not vouch for overwritten bytes.

Clients without checksums, and reads of parts, have nothing but the headers to go by.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.layout import HEADER_BYTES, STATE_WRITING, geometry
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import Copy
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers

UNIT = 4096


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    made = SiteProcesses(tmp_path_factory.mktemp("site"))
    made.node("a", 1, "--data", "127.0.0.1:0")
    made.node("b", 1, "--data", "127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture(params=["mapped", "nixl", "tcp"])
def store(site: SiteProcesses, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    """A client without checksums that reaches node `b` in each way."""
    node_id = "b" if request.param == "mapped" else "a"
    mode = "auto" if request.param != "tcp" else "tcp"
    with StoreClient(site.address, node_id, mode, is_verified=False) as made:
        yield made


@pytest.fixture
def memory(store: StoreClient) -> Iterator[SlotMemory]:
    """What lies in node `b`."""
    (info,) = [info for info in store.directory.nodes() if info.node_id == "b"]
    with Segment.open(info.segment_path, info.segment_bytes) as segment:
        yield SlotMemory(segment.view, geometry(info.segment_bytes, info.unit_bytes))


def put(store: StoreClient, units: int, count: int = 1) -> tuple[list[bytes], list[Copy]]:
    keys = [secrets.token_bytes(16) for _ in range(count)]
    block = np.frombuffer(secrets.token_bytes(units * UNIT - 100), np.uint8)
    assert store.put(keys, [block] * count, "b") == [True] * count
    return keys, [places[0] for places in store.stat(keys)]


@pytest.mark.parametrize("unit", [1, 2])
def test_a_smaller_block_written_into_a_larger_one_is_noticed(
    store: StoreClient, memory: SlotMemory, unit: int
) -> None:
    keys, (copy,) = put(store, units=3)
    assert store.get(keys)[0] is not None
    part = np.zeros(500, np.uint8)
    assert store.get_into(keys, [part], 10) == [True]
    memory.write_header(
        copy.slot + unit, SlotHeader(STATE_WRITING, copy.generation + 1, b"x" * 16, 0, UNIT)
    )
    assert store.get_into(keys, [part], 10) == [False]
    assert store.get(keys) == [None]
    assert not memory.is_ready(copy.slot, copy.generation, keys[0])


def test_a_larger_block_leaves_no_header_of_smaller_ones_inside(
    store: StoreClient, memory: SlotMemory
) -> None:
    small, _ = put(store, units=1, count=200)
    assert all(store.remove(small))
    large, copies = put(store, units=7, count=20)
    for key, copy in zip(large, copies, strict=True):
        heads = memory.view[memory.shape.headers(copy.slot, copy.size_bytes)]
        assert heads.nbytes == 7 * HEADER_BYTES and not heads[HEADER_BYTES:].any()
        assert memory.is_ready(copy.slot, copy.generation, key)


def test_a_block_stored_without_a_checksum_is_copied_and_then_has_one(store: StoreClient) -> None:
    keys, (copy,) = put(store, units=2)
    assert copy.checksum == 0
    assert store.change_replica(keys, ["a"]) == [True]
    (places,) = store.stat(keys)
    assert {place.node_id: place.checksum != 0 for place in places} == {"a": True, "b": False}
    assert store.change_replica(keys, [], ["b"]) == [True]
    assert store.get(keys)[0] is not None
