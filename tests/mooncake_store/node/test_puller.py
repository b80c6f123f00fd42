"""A node that copies blocks of other nodes to itself, as processes, over each transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_store.errors import RequestInvalid
from mooncake_store.layout import geometry
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotMemory
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.wire.node_protocol import NodeClient
from tests.mooncake_store.block_writer import BLOCK, BlockWriter
from tests.mooncake_store.site import SIZE, Site, ready_line

pytestmark = pytest.mark.servers

KEYS = [bytes([i]) * 16 for i in range(8)]
NIXL, MAPPED = (), ("--mapped-only",)
TCP = ("--mapped-only", "--data", "127.0.0.1:0", "--unit-bytes", "16384")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.start_directory()
    yield made
    made.close()


def start(site: Site, *more: str) -> list[NodeInfo]:
    processes = [
        site.start_node(name, "--control", f"ipc://{site.prefix}-{name}.control", *more)
        for name in ("s0", "s1")
    ]
    for process in processes:
        assert ready_line(process).startswith("ready")
    return sorted(site.nodes(lambda found: len(found) == 2), key=lambda info: info.node_id)


def copies_on(site: Site, node_id: str) -> dict[bytes, Copy]:
    found = site.client.lookup(KEYS, "looking", 0.0, prefix_only=False)
    return {
        key: copy
        for key, copies in zip(KEYS, found, strict=True)
        for copy in copies
        if copy.node_id == node_id
    }


@pytest.mark.parametrize("more", [NIXL, MAPPED, TCP], ids=["nixl", "mapped", "tcp beside"])
def test_a_node_pulls_blocks_and_has_them_whole(
    site: Site, more: tuple[str, ...], seed: int
) -> None:
    [s0, s1] = start(site, *more)
    writer = BlockWriter(site, s0, seed)
    writer.store(KEYS)
    sources = copies_on(site, "s0")
    with NodeClient(s1.control) as node:
        assert node.fetch(list(sources), list(sources.values()), 20.0) == [True] * len(KEYS)
        assert node.fetch(list(sources), list(sources.values()), 20.0) == [True] * len(KEYS)
        assert node.stats().fetched_blocks == len(KEYS), "the second time nothing was to do"
    arrived = copies_on(site, "s1")
    with Segment.open(s1.segment_path) as segment:
        memory = SlotMemory(segment.view, geometry(SIZE, s1.unit_bytes))
        for key, copy in arrived.items():
            assert memory.is_ready(copy.slot, copy.generation, key)
            assert memory.checksum(copy.slot, BLOCK) == copy.checksum == sources[key].checksum
        del memory
    assert site.client.stats().leases == 0
    writer.close()


def test_a_copy_that_is_corrupt_or_gone_is_not_pulled_and_its_neighbours_are(
    site: Site, seed: int
) -> None:
    [s0, s1] = start(site, *MAPPED)
    writer = BlockWriter(site, s0, seed)
    writer.store(KEYS)
    sources = copies_on(site, "s0")
    writer.memory.view[writer.memory.shape.slot_offset_bytes(sources[KEYS[2]].slot)] ^= 1
    gone = [sources[KEYS[0]], sources[KEYS[2]], sources[KEYS[3]]._replace(node_id="s9")]
    with NodeClient(s1.control) as node:
        assert node.fetch([KEYS[0], KEYS[2], KEYS[3]], gone, 20.0) == [True, False, False]
        with pytest.raises(RequestInvalid, match="2 keys and 1 copies"):
            node.fetch(KEYS[:2], gone[:1], 5.0)
        assert node.fetch([], [], 5.0) == []
    assert KEYS[2] not in copies_on(site, "s0"), "the directory was not told"
    writer.close()


def test_a_dead_source_costs_its_blocks_and_not_the_node(site: Site, seed: int) -> None:
    [s0, s1] = start(site, *NIXL)
    writer = BlockWriter(site, s0, seed)
    writer.store(KEYS)
    sources = copies_on(site, "s0")
    with NodeClient(s1.control) as node:
        assert node.fetch(KEYS[:1], [sources[KEYS[0]]], 20.0) == [True]
        victim = next(p for p in site.processes if "s0" in p.args)  # type: ignore[operator]
        victim.kill()
        victim.wait()
        assert node.fetch(KEYS[1:], [sources[key] for key in KEYS[1:]], 3.0) == [False] * 7
        assert node.ping() == s1.incarnation
    writer.close()
