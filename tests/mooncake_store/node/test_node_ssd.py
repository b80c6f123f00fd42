"""A storage node with an SSD, as a process: what it spilled survives it, and comes back whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import NodeUnknown, RequestInvalid, StoreUnavailable
from mooncake_store.layout import STATE_READY, STATE_WRITING, geometry
from mooncake_store.records.blocks import Copy
from mooncake_store.wire.node_protocol import NodeClient, NodeStats, Restore
from tests.mooncake_store.block_writer import BLOCK, BlockWriter
from tests.mooncake_store.site import PATIENCE_S, SIZE, Site, pause, ready_line

pytestmark = pytest.mark.servers

SSD_BYTES = 8 * SIZE
KEYS = [bytes([i]) * 16 for i in range(40)]


class Writer(BlockWriter):
    """Stores blocks in node s0, and reads what is on its SSD."""

    def __init__(self, site: Site, seed: int) -> None:
        [dram] = [info for info in site.nodes(two) if info.node_id == "s0"]
        super().__init__(site, dram, seed)
        self.node = NodeClient(dram.control)

    def close(self) -> None:
        self.node.close()
        super().close()

    def on_ssd(self, keys: list[bytes]) -> dict[bytes, Copy]:
        found = self.directory.lookup(keys, "looking", 0.0, prefix_only=False)
        return {
            key: copy
            for key, copies in zip(keys, found, strict=True)
            for copy in copies
            if copy.node_id == "s0/ssd"
        }

    def restore(self, keys: list[bytes]) -> list[bool]:
        """Back into DRAM; what the node calls whole is compared with what was stored."""
        owner, there = f"r{next(self.owners)}", self.on_ssd(keys)
        given = self.directory.allocate("s0", list(there), owner, 60.0, size_bytes=BLOCK).slots
        blocks = []
        for (key, copy), slot in zip(there.items(), given, strict=True):
            assert slot is not None, "it is in DRAM already"
            blocks.append(
                Restore(
                    key,
                    copy.slot,
                    copy.generation,
                    slot.slot,
                    slot.generation,
                    copy.checksum,
                    copy.size_bytes,
                )
            )
        loaded = dict(zip(there, self.node.load(blocks, 20.0), strict=True))
        for block in blocks:
            if loaded[block.key]:
                start = self.memory.shape.slot_offset_bytes(block.slot)
                payload = self.memory.view[start : start + BLOCK]
                assert np.array_equal(payload, self.payloads[block.key]), (
                    "wrong bytes, called whole"
                )
                assert self.memory.is_ready(block.slot, block.generation, block.key)
        rows = [(b.key, b.slot, b.generation, b.checksum) for b in blocks if loaded[b.key]]
        assert all(self.directory.commit("s0", rows, owner, 0.0))
        self.directory.release(owner)
        return [loaded.get(key, False) for key in keys]


def two(found: list[object]) -> bool:
    return len(found) == 2


def none(found: list[object]) -> bool:
    return not found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def start(site: Site, folder: Path, *more: str) -> str:
    process = site.start_node(
        "s0", "--mapped-only", "--ssd-path", str(folder), "--ssd-bytes", str(SSD_BYTES), *more
    )
    line = ready_line(process)
    assert line.startswith("ready"), process.communicate()[1]
    return line


def start_all(site: Site, folder: Path, seed: int, *more: str) -> Writer:
    site.start_directory("--spill-fraction", "0.001")
    start(site, folder, *more)
    return Writer(site, seed)


def until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        pause()


def stats_when(writer: Writer, condition: Callable[[NodeStats], bool]) -> NodeStats:
    until(lambda: condition(writer.node.stats()))
    return writer.node.stats()


def kill(site: Site) -> None:
    site.processes[-1].kill()
    site.processes[-1].wait()


def test_spilled_blocks_survive_a_killed_node_and_come_back_whole(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path / "ssd", seed)
    writer.store(KEYS)
    stats = stats_when(writer, lambda stats: stats.spilled_blocks == len(KEYS))
    assert stats.ssd_blocks == len(KEYS) and stats.spilled_bytes == len(KEYS) * BLOCK
    assert stats.ssd == "direct, nixl" and stats.spills_given_up == 0
    writer.close()
    kill(site)
    start(site, tmp_path / "ssd")  # at once: its new incarnation replaces the old one
    payloads, writer = writer.payloads, Writer(site, seed)
    writer.payloads = payloads
    found = site.client.lookup(KEYS, "x", 0.0, prefix_only=False)
    assert [[copy.node_id for copy in copies] for copies in found] == [["s0/ssd"]] * len(KEYS)
    assert writer.restore(KEYS) == [True] * len(KEYS)
    assert writer.node.stats().restored_bytes == len(KEYS) * BLOCK
    writer.close()


def test_a_byte_that_changed_on_the_disk_makes_one_block_a_miss_and_the_directory_learns_it(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path / "ssd", seed)
    writer.store(KEYS[:3])
    stats_when(writer, lambda stats: stats.spilled_blocks == 3)
    where = writer.on_ssd(KEYS[:3])[KEYS[1]]
    with open(tmp_path / "ssd" / "s0.blocks", "r+b") as file:
        file.seek(where.slot * 4096 + BLOCK - 1)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 128]))
    site.client.remove(KEYS[:3], "s0")
    assert writer.restore(KEYS[:3]) == [True, False, True]
    assert set(writer.on_ssd(KEYS[:3])) == {KEYS[0], KEYS[2]}
    stats = writer.node.stats()
    assert stats.checksum_failures == 1 and stats.ssd_blocks == 2 and stats.restores_missed == 1
    writer.close()


def test_a_directory_that_restarts_learns_from_headers_and_manifest_what_there_is(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path / "ssd", seed)
    writer.store(KEYS)
    stats_when(writer, lambda stats: stats.spilled_blocks == len(KEYS))
    before = site.client.lookup(KEYS, "x", 0.0, prefix_only=False)
    [directory, _] = site.processes
    directory.kill()
    directory.wait()
    site.start_directory("--spill-fraction", "0.001")
    site.nodes(two)
    until(lambda: len(writer.on_ssd(KEYS)) == len(KEYS))
    assert site.client.lookup(KEYS, "x", 0.0, prefix_only=False) == before
    writer.attach()
    writer.store([b"after that is ok"])  # the nodes are open again
    writer.close()


def test_a_block_that_was_being_written_when_the_directory_died_is_not_adopted(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path / "ssd", seed)
    writer.store(KEYS[:2])
    [slot] = site.client.allocate("s0", [KEYS[5]], "busy", 60.0, size_bytes=BLOCK).slots
    assert slot is not None
    writer.write_header(KEYS[5], slot.slot, slot.generation, 0, STATE_WRITING)
    [directory, _] = site.processes
    directory.kill()
    directory.wait()
    site.start_directory()
    site.nodes(two)
    until(lambda: all(site.client.exist(KEYS[:2])))
    assert site.client.exist([KEYS[5]]) == [False]
    writer.attach()
    given = site.client.allocate("s0", KEYS[10:], "new", 60.0, size_bytes=BLOCK).slots
    assert slot.slot not in {each.slot for each in given if each is not None}
    writer.close()


def test_a_node_without_room_on_its_disk_serves_from_dram(
    site: Site, tmp_path: Path, seed: int
) -> None:
    site.start_directory("--spill-fraction", "0.001")
    process = site.start(
        "node",
        "--node-id",
        "s0",
        "--directory",
        site.address,
        "--segment-bytes",
        str(SIZE),
        "--segment-path",
        f"{site.prefix}-s0",
        "--mapped-only",
        "--ssd-path",
        str(tmp_path),
        "--ssd-bytes",
        str(2**60),
    )
    assert ready_line(process).startswith("ready")
    [info] = site.nodes(lambda found: len(found) == 1)
    with NodeClient(info.control) as node:
        assert node.stats().ssd == "not available" and node.ping() == info.incarnation
    assert (tmp_path / "s0.blocks").stat().st_blocks == 0
    site.client.attach("s0", "print", BLOCK)
    assert site.client.allocate("s0", KEYS[:1], "w", 9.0, size_bytes=BLOCK).covered == 1
    process.terminate()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert "serves without its SSD" in said and process.returncode == 0


def test_a_manifest_of_another_release_stops_the_node_until_it_is_told_to_reset(
    site: Site, tmp_path: Path
) -> None:
    from mooncake_store.ssd.entries import SsdShape, pack_header

    (tmp_path / "s0.manifest").write_bytes(pack_header(SsdShape(4096, SSD_BYTES), version=9))
    site.start_directory()
    more = ("--mapped-only", "--ssd-path", str(tmp_path), "--ssd-bytes", str(SSD_BYTES))
    process = site.start_node("s0", *more)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "has version 9" in said and "--ssd-reset" in said
    assert site.segments() == []
    start(site, tmp_path, "--ssd-reset")
    site.nodes(two)


def test_a_node_leaves_when_it_is_asked_to_and_keeps_its_blocks(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path, seed)
    writer.store(KEYS[:4])
    stats_when(writer, lambda stats: stats.spilled_blocks == 4)
    writer.node.leave()
    assert site.processes[-1].wait(timeout=PATIENCE_S) == 0
    assert site.client.nodes() == [] and site.segments() == []
    with pytest.raises(StoreUnavailable, match="did not answer ping"):
        writer.node.ping(timeout_s=0.1)
    writer.close()
    start(site, tmp_path)
    site.nodes(two)
    assert site.client.exist(KEYS[:5]) == [True] * 4 + [False]


def test_load_refuses_places_outside_and_slots_that_have_a_newer_owner(
    site: Site, tmp_path: Path, seed: int
) -> None:
    writer = start_all(site, tmp_path, seed)
    writer.store(KEYS[:1])
    stats_when(writer, lambda stats: stats.spilled_blocks == 1)
    [copy] = writer.on_ssd(KEYS[:1]).values()
    restore = Restore(
        KEYS[0], copy.slot, copy.generation, 100, copy.generation + 9, copy.checksum, BLOCK
    )
    units = geometry(SIZE, 4096).units
    with pytest.raises(RequestInvalid, match=f"slot {units - 1} with 10000 bytes exceeds"):
        writer.node.load([restore._replace(slot=units - 1)], 5.0)
    writer.write_header(KEYS[9], 100, copy.generation + 10, 5, STATE_READY)
    assert writer.node.load([restore], 5.0) == [False]
    assert writer.memory.is_ready(100, copy.generation + 10, KEYS[9]), "it was taken from its owner"
    assert writer.node.load([restore._replace(slot=50)], 5.0) == [True]
    assert writer.node.load([restore._replace(slot=50, ssd_generation=1)], 5.0) == [False]
    assert writer.node.load([], 5.0) == []
    writer.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_any_end_leaves_a_manifest_that_proves_itself(
    site: Site, tmp_path: Path, seed: int, number: int
) -> None:
    """Ended in the midst of spilling: what the manifest lists is what the file holds."""
    writer = start_all(site, tmp_path, seed)
    writer.store(KEYS)
    stats_when(writer, lambda stats: stats.spilled_blocks > 0)
    writer.close()
    site.processes[-1].send_signal(number)
    site.processes[-1].wait()
    start(site, tmp_path)
    again = Writer(site, seed)
    again.payloads = writer.payloads
    listed = list(again.on_ssd(KEYS))
    assert listed and again.restore(listed) == [True] * len(listed)
    again.close()


def test_spilling_goes_on_while_the_ssd_is_smaller_than_what_is_cold(
    site: Site, tmp_path: Path, seed: int
) -> None:
    """The SSD holds 10 blocks, 40 are spilled through it: old ones give way, none is ever wrong.

    Four at a time: at most half an SSD is spilled ahead of need.
    """
    site.start_directory("--spill-fraction", "0.001")
    process = site.start_node(
        "s0", "--mapped-only", "--ssd-path", str(tmp_path), "--ssd-bytes", str(30 * 4096)
    )
    assert ready_line(process).startswith("ready")
    writer = Writer(site, seed)
    for step in range(0, len(KEYS), 4):
        writer.store(KEYS[step : step + 4])
        stats_when(writer, lambda stats, step=step: stats.spilled_blocks >= step + 4)  # type: ignore[misc]
        site.client.remove(KEYS[step : step + 4], "s0")
    there = list(writer.on_ssd(KEYS))
    assert len(there) == 10 and writer.restore(there) == [True] * 10
    writer.close()


def test_an_unknown_node_is_told_from_a_silent_one() -> None:
    node = NodeClient("ipc:///dev/shm/mooncake-test-nobody")
    with pytest.raises(StoreUnavailable, match="is it running"):
        node.ping(timeout_s=0.05)
    node.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        node.ping()


def test_spills_without_an_ssd_are_refused_by_the_directory(site: Site, tmp_path: Path) -> None:
    site.start_directory()
    ready_line(site.start_node("s0", "--mapped-only"))
    site.nodes(lambda found: len(found) == 1)
    with DirectoryClient(site.address) as client, pytest.raises(NodeUnknown, match="s0/ssd"):
        client.take_spills("s0", "me", 4, 5.0)
