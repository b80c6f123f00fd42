"""The SSD tier: what comes back is what was written, or nothing; a bad disk costs the tier only."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_store.errors import SsdRefused, TransferTimeout
from mooncake_store.ssd import block_file, ssd_tier
from mooncake_store.ssd.block_file import NixlLane, ThreadLane, move
from mooncake_store.ssd.entries import SsdEntry, SsdShape
from mooncake_store.ssd.ssd_tier import BlockJob, LoadOutcome, SsdTier
from mooncake_store.transports.nixl_agent import NixlUnavailable
from tests.mooncake_store.pages import pages

UNIT = 4096
SHAPE = SsdShape(UNIT, 256 * UNIT)
UNITS = 512  # of the memory: twice the file
KINDS = ("nixl", "threads")


class Bench:
    """A tier, and a memory of known bytes as the segment."""

    def __init__(self, folder: Path, seed: int, io: str = "nixl") -> None:
        self.folder, self.io = folder, io
        self.memory = pages(UNITS * UNIT)
        self.chance = np.random.default_rng(seed)
        self.memory[:] = self.chance.integers(0, 256, self.memory.nbytes, dtype=np.uint8)
        self.tier = self.open()
        self.generation = 0

    def open(self, shape: SsdShape = SHAPE, **options: bool) -> SsdTier:
        return SsdTier(str(self.folder), "s0", shape, self.memory, io=self.io, **options)

    def job(self, slot: int, unit: int, size_bytes: int = UNIT) -> BlockJob:
        """Block in `unit` of the memory, to be written to `slot`."""
        self.generation += 1
        key = self.generation.to_bytes(16, "big")
        digest = self.tier.checksum(unit * UNIT, size_bytes)
        return BlockJob(SsdEntry(key, slot, self.generation, digest, size_bytes), unit * UNIT)

    def store(self, *jobs: BlockJob) -> list[bool]:
        written = self.tier.write(jobs)
        self.tier.keep([job.entry for job, is_ in zip(jobs, written, strict=True) if is_])
        return written

    def load(self, *jobs: BlockJob, at_unit: int = 400) -> list[bool]:
        """Load them one behind the other from `at_unit` on, and compare with where they were."""
        there, unit = [], at_unit
        for job in jobs:
            there.append(job._replace(memory_bytes=unit * UNIT))
            unit += SHAPE.units_of(job.entry.size_bytes)
        self.memory[at_unit * UNIT : unit * UNIT] = 0
        outcomes = self.tier.load(there, time.monotonic() + 20)
        loaded = [outcome is LoadOutcome.WHOLE for outcome in outcomes]
        for was, now, is_loaded in zip(jobs, there, loaded, strict=True):
            if is_loaded:
                size_bytes = was.entry.size_bytes
                before = self.memory[was.memory_bytes : was.memory_bytes + size_bytes]
                after = self.memory[now.memory_bytes : now.memory_bytes + size_bytes]
                assert np.array_equal(before, after), "wrong bytes were called whole"
        return loaded

    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> Iterator[Bench]:
    made = Bench(tmp_path / "ssd", seed, io=request.param)
    yield made
    made.tier.close()
    made.tier.close()


def test_blocks_of_all_sizes_come_back_also_after_a_restart(bench: Bench) -> None:
    sizes = [1, 4095, 4096, 4097, 70_000, 300_001]
    jobs, slot = [], 0
    for size_bytes in sizes:
        jobs.append(bench.job(slot, slot, size_bytes))
        slot += SHAPE.units_of(size_bytes)
    assert bench.store(*jobs) == [True] * len(jobs)
    assert bench.load(*jobs) == [True] * len(jobs)
    bench.restart()
    assert bench.load(*jobs) == [True] * len(jobs)
    assert sorted(bench.tier.manifest.table.entries()) == sorted(job.entry for job in jobs)
    counters = bench.tier.counters
    assert counters.restored_blocks == len(jobs) and counters.restored_bytes == sum(sizes)
    bench.tier.manifest.check()


def test_more_than_one_part_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_tier, "PART_BYTES", 5 * UNIT)
    jobs = [bench.job(i, i) for i in range(63)]
    assert all(bench.store(*jobs))
    assert bench.load(*jobs) == [True] * 63
    assert bench.load() == [] and bench.store() == []


def test_the_plugin_is_really_used_and_blocks_bypass_the_page_cache(bench: Bench) -> None:
    kind = {"nixl": NixlLane, "threads": ThreadLane}[bench.io]
    with bench.tier._lanes.lane(time.monotonic() + 1) as lane:
        assert isinstance(lane, kind)
    assert bench.tier.state == f"direct, {bench.io}"
    assert fcntl.fcntl(bench.tier._file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_a_block_that_was_not_kept_is_not_found(bench: Bench) -> None:
    job = bench.job(0, 0)
    assert bench.tier.write([job]) == [True]
    assert bench.load(job) == [False]
    bench.restart()
    assert bench.load(job) == [False]


@pytest.mark.parametrize("position", [0, 1, 5_000, 69_999])
def test_a_flipped_bit_in_the_file_makes_that_block_a_miss_and_no_other(
    bench: Bench, position: int
) -> None:
    jobs = [bench.job(0, 0, 70_000), bench.job(20, 20)]
    bench.store(*jobs)
    with open(bench.tier.path, "r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 4]))
    assert bench.load(*jobs) == [False, True]
    assert bench.tier.counters.checksum_failures == 1
    bench.restart()
    assert [entry.slot for entry in bench.tier.manifest.table.entries()] == [20], "it was dropped"


def test_a_block_whose_place_was_written_again_is_not_found_even_if_that_write_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = bench.job(3, 0, 3 * UNIT)
    bench.store(old)
    new = bench.job(4, 10)
    assert bench.tier.write([new]) == [True]  # and then the node died
    bench.restart()
    assert bench.load(old, new) == [False, False]


def test_a_foreign_generation_or_key_is_not_loaded(bench: Bench) -> None:
    job = bench.job(0, 0)
    bench.store(job)
    for wrong in (
        job.entry._replace(generation=77),
        job.entry._replace(key=bytes(16)),
        job.entry._replace(checksum=1),
        job.entry._replace(slot=1),
        job.entry._replace(size_bytes=9),
    ):
        assert bench.load(BlockJob(wrong, job.memory_bytes)) == [False]
    assert bench.load(job) == [True], "none of these made it a bad block"


def test_a_place_beyond_the_file_takes_nothing(bench: Bench) -> None:
    assert bench.store(bench.job(255, 0, 2 * UNIT), bench.job(255, 0)) == [False, True]


def test_after_its_deadline_a_load_starts_nothing_more_but_ends_what_it_began(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_tier, "PART_BYTES", UNIT)
    monkeypatch.setattr(ssd_tier, "PARTS_AHEAD", 2)
    jobs = [bench.job(i, i) for i in range(5)]
    bench.store(*jobs)
    bench.memory[400 * UNIT :] = 0
    there = [job._replace(memory_bytes=(400 + i) * UNIT) for i, job in enumerate(jobs)]
    assert bench.tier.load(there, time.monotonic() - 1) == [LoadOutcome.LATE] * 5
    assert not bench.memory[400 * UNIT :].any()
    looks = iter([0.0, 0.0, 9.0])  # the deadline passes before the third part

    def clock() -> float:
        return next(looks, 9.0)

    monkeypatch.setattr(ssd_tier, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(NixlLane, "wait", waiting_for_ever(NixlLane.wait))
    monkeypatch.setattr(ThreadLane, "wait", waiting_for_ever(ThreadLane.wait))
    outcomes = bench.tier.load(there, 5.0)
    assert outcomes[:2] == [LoadOutcome.WHOLE] * 2 and outcomes[3:] == [LoadOutcome.LATE] * 2
    assert not bench.memory[403 * UNIT :].any()


def waiting_for_ever(wait: Any) -> Any:
    def wrapped(lane: object, batch: object, until_s: float) -> None:
        assert until_s == 5.5, "what is under way gets half a second more"
        wait(lane, batch, time.monotonic() + 20)

    return wrapped


def test_a_disk_that_hangs_is_a_timeout_because_bytes_may_still_arrive(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.job(0, 0)
    bench.store(job)

    def hangs(lane: object, batch: object, until_s: float) -> None:
        raise TransferTimeout("the SSD did not answer in time")

    for lane in (NixlLane, ThreadLane):
        monkeypatch.setattr(lane, "wait", hangs)
    with pytest.raises(TransferTimeout):
        bench.load(job)
    assert bench.store(bench.job(1, 1)) == [False] and not bench.tier.is_writable


def test_a_write_that_fails_closes_the_tier_for_a_while_and_reads_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = bench.job(0, 0), bench.job(1, 1)
    bench.store(first)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for lane in (NixlLane, ThreadLane):
            patch.setattr(lane, "wait", full)
        patch.setattr(ssd_tier, "move", full)
        assert bench.store(second) == [False]
    assert "accepts no blocks for 60 s, the node continues with DRAM" in caplog.text
    assert not bench.tier.is_writable and "closed for writing" in bench.tier.state
    assert bench.store(second) == [False] and bench.load(first) == [True]
    monkeypatch.setattr(bench.tier, "_closed_until_s", time.monotonic())
    assert bench.store(second) == [True] and bench.load(first, second) == [True, True]


def test_a_manifest_that_cannot_grow_closes_the_tier_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = bench.job(0, 0), bench.job(0, 1)
    bench.store(first)

    def full(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert bench.tier.write([second]) == [False], "the old block would be overwritten unnoted"
        assert not bench.tier.is_writable
        assert bench.tier.keep([second.entry]) is False
    bench.restart()
    assert bench.load(first) == [True]


def test_one_bad_row_of_a_batch_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [bench.job(i, i) for i in range(8)]
    bench.store(*jobs)

    def bad_sector(descriptor: int, memory: object, is_write: bool, row: block_file.Row) -> None:
        if row.file_bytes == 5 * UNIT:
            raise OSError(errno.EIO, "Input/output error")
        move(descriptor, memory, is_write, row)  # type: ignore[arg-type]

    def failed(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for lane in (NixlLane, ThreadLane):
        monkeypatch.setattr(lane, "wait", failed)
    monkeypatch.setattr(ssd_tier, "move", bad_sector)
    assert bench.load(*jobs) == [i != 5 for i in range(8)]
    assert bench.tier.counters.disk_errors == 1


def test_without_the_plugin_threads_do_it(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object) -> None:
        raise NixlUnavailable("no plugin")

    monkeypatch.setattr("mooncake_store.transports.nixl_agent.FileAgent", unavailable)
    bench = Bench(tmp_path, seed)
    assert "uses threads instead of NIXL: no plugin" in caplog.text
    job = bench.job(0, 0)
    assert bench.store(job) == [True] and bench.load(job) == [True]
    assert bench.tier.state == "direct, threads"
    bench.tier.close()


def test_a_filesystem_without_direct_io_is_used_with_a_warning(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_open = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    bench = Bench(tmp_path, seed)
    assert "rejects O_DIRECT" in caplog.text and bench.tier.state.startswith("buffered")
    job = bench.job(0, 0, 5000)
    assert bench.store(job) == [True] and bench.load(job) == [True]
    bench.tier.close()


def test_two_nodes_cannot_share_a_file(tmp_path: Path, seed: int) -> None:
    bench = Bench(tmp_path, seed)
    with pytest.raises(SsdRefused, match="living process"):
        bench.open()
    job = bench.job(0, 0)
    assert bench.store(job) == [True] and bench.load(job) == [True]
    bench.tier.close()


def test_a_folder_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SsdRefused, match="choose another --ssd-path"):
        SsdTier(str(tmp_path / "file"), "s0", SHAPE, pages(UNIT))


def test_a_disk_without_room_for_the_file_keeps_nothing_of_it(tmp_path: Path) -> None:
    """RLIMIT_FSIZE is a full disk that needs no root: the kernel refuses to grow the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * UNIT, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            SsdTier(str(tmp_path), "s0", SHAPE, pages(UNIT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "s0.blocks").stat().st_blocks == 0
    SsdTier(str(tmp_path), "s0", SHAPE, pages(UNIT)).close()


def test_a_file_of_another_capacity_keeps_its_blocks(tmp_path: Path, seed: int) -> None:
    bench = Bench(tmp_path, seed)
    low, high = bench.job(0, 0), bench.job(200, 1)
    bench.store(low, high)
    bench.tier.close()
    bench.tier = bench.open(SsdShape(UNIT, 1000 * UNIT))
    assert os.stat(bench.tier.path).st_size == 1000 * UNIT
    assert bench.load(low, high) == [True, True]
    bench.tier.close()
    bench.tier = bench.open(SsdShape(UNIT, 100 * UNIT))
    assert bench.load(low, high) == [True, False]
    bench.tier.close()


def test_a_disk_that_others_fill_stops_spilling_until_there_is_room_again(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real full filesystem: the file of blocks has its room, the manifest cannot grow."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        bench = Bench(tmp_path, seed, io="threads")
        filler = tmp_path / "of somebody else"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        jobs = [bench.job(i, i) for i in range(150)]
        stored = [job for job in jobs if bench.tier.is_writable and bench.store(job) == [True]]
        assert not bench.tier.is_writable and len(stored) < len(jobs)
        kept = [job for job in stored if bench.tier.manifest.table.find(job.entry.slot)]
        assert len(kept) > 30 and bench.load(*kept[:50]) == [True] * len(kept[:50])
        filler.unlink()
        monkeypatch.setattr(bench.tier, "_closed_until_s", 0.0)
        more = bench.job(200, 200)
        assert bench.store(more) == [True]
        bench.restart()
        assert bench.load(more, *kept[:50]) == [True] * (1 + len(kept[:50]))
        bench.tier.manifest.check()
        bench.tier.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
