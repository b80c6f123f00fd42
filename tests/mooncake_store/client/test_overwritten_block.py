"""Blocks of several sizes share a memory: an untouched header must not vouch for overwritten bytes.

Clients without checksums, and reads of parts, have nothing but the headers to go by.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_store.client import replicas
from mooncake_store.client.client import StoreClient
from mooncake_store.errors import EpochPassed
from mooncake_store.layout import HEADER_BYTES, STATE_WRITING, geometry
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import Copy
from mooncake_store.wire.node_protocol import NodeClient
from tests.e2e.server import wait_until
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


def reuse_slot(store: StoreClient, keys: list[bytes], copy: Copy) -> None:
    """Remove the block and put another one into its slot."""
    assert store.remove(keys) == [True]
    _, (other,) = put(store, units=2)
    assert (other.node_id, other.slot) == (copy.node_id, copy.slot)


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_pull_whose_source_slot_was_reused_stores_nothing(
    store: StoreClient, site: SiteProcesses, is_verified: bool
) -> None:
    with StoreClient(site.address, "a", is_verified=is_verified) as writer:
        keys, (copy,) = put(writer, units=2)
        assert (copy.checksum != 0) is is_verified
        reuse_slot(writer, keys, copy)
    (target,) = [info for info in store.directory.nodes() if info.node_id == "a"]
    with NodeClient(target.control) as node:
        assert node.fetch(keys, [copy], 10.0) == [False]
    assert store.get(keys) == [None]


def test_a_pull_of_copies_that_an_earlier_directory_leased_is_refused(tmp_path: Path) -> None:
    site = SiteProcesses(tmp_path)
    try:
        site.node("a", 1, "--data", "127.0.0.1:0")
        site.node("b", 1, "--data", "127.0.0.1:0")
        with StoreClient(site.address, "b", is_verified=False) as store:
            keys, (copy,) = put(store, units=2)
            epoch = store.directory.stats().epoch
            (target,) = [info for info in store.directory.nodes() if info.node_id == "a"]
            site.directory.end(signal.SIGKILL)
            site.directory.start()
            wait_until(lambda: store.directory.exist(keys) == [True], "the node's inventory")
            reuse_slot(store, keys, copy)
            with NodeClient(target.control) as node:
                with pytest.raises(EpochPassed, match=f"epoch {epoch}"):
                    node.fetch(keys, [copy], 10.0, epoch)
                assert node.fetch(keys, [copy], 10.0) == [False]
            assert store.get(keys) == [None]
    finally:
        site.close()


def test_a_replica_whose_source_slot_is_reused_between_grant_and_pull_is_not_made(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the lease is lost with the directory that granted it."""
    keys, (copy,) = put(store, units=2)
    fetch = NodeClient.fetch

    def late(node: NodeClient, *arguments: Any) -> list[bool]:
        monkeypatch.undo()
        store.directory.release(owners[-1])
        reuse_slot(store, keys, copy)
        return fetch(node, *arguments)

    lookup, owners = store.directory.lookup, list[str]()

    def leased(keys: Any, owner: str, *rest: Any, **named: Any) -> Any:
        owners.append(owner)
        return lookup(keys, owner, *rest, **named)

    monkeypatch.setattr(store.directory, "lookup", leased)
    monkeypatch.setattr(NodeClient, "fetch", late)
    assert store.change_replica(keys, ["a"]) == [False]
    assert store.get(keys) == [None]


def test_a_pull_is_asked_again_when_the_directory_changed(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = put(store, units=2)
    fetch, epochs = NodeClient.fetch, list[int]()

    def once_refused(node: NodeClient, *arguments: Any) -> list[bool]:
        epochs.append(arguments[3])
        if len(epochs) == 1:
            raise EpochPassed("another directory leads")
        return fetch(node, *arguments)

    monkeypatch.setattr(NodeClient, "fetch", once_refused)
    monkeypatch.setattr(replicas, "EPOCH_WAIT_S", 0.0)
    assert store.change_replica(keys, ["a"]) == [True]
    assert epochs == [store.directory.stats().epoch] * 2
