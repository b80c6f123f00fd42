"""A disk that hangs: what it still works on is kept until it ends, or NIXL aborts the process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mooncake_store.errors import TransferTimeout
from mooncake_store.ssd import ssd_tier
from mooncake_store.ssd.block_file import NixlLane, Row, ThreadLane, Unfinished
from mooncake_store.ssd.ssd_tier import LoadOutcome
from tests.mooncake_store.site import pause
from tests.mooncake_store.ssd.test_ssd_tier import KINDS, UNIT, Bench

PATIENCE_S = 20.0


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> Unfinished:
    made = Unfinished()
    monkeypatch.setattr(ssd_tier, "unfinished", made)
    monkeypatch.setattr("mooncake_store.ssd.block_file.unfinished", made)
    monkeypatch.setattr(ssd_tier, "PART_BYTES", UNIT)  # so that several parts are under way
    return made


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> Iterator[Bench]:
    made = Bench(tmp_path / "ssd", seed, io=getattr(request, "param", "threads"))
    yield made
    made.tier.close()


class Disk:
    def __init__(self) -> None:
        self.hangs = True
        self.posted = 0
        self.destroyed_under_way = 0


class OfDisk:
    """What NIXL has in C++: to destroy it while the kernel works on it is the end."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def __del__(self) -> None:
        self.disk.destroyed_under_way += self.disk.hangs


class HungLane(OfDisk):
    name = "hung"

    def post(self, is_write: bool, rows: Sequence[Row]) -> OfDisk:
        self.disk.posted += 1
        return OfDisk(self.disk)

    def wait(self, batch: OfDisk, until_s: float) -> None:
        raise TransferTimeout("the SSD did not answer in time")

    def has_ended(self, batch: OfDisk) -> bool:
        return not self.disk.hangs

    def close(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("is_write", [True, False])
def test_all_that_was_posted_to_a_disk_that_hangs_outlives_the_hang(
    bench: Bench, unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch, is_write: bool
) -> None:
    jobs, disk = [bench.job(i, i) for i in range(8)], Disk()
    assert all(bench.store(*jobs))
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier._lanes, "_free", [])
        patch.setattr(bench.tier._lanes, "_make", lambda: HungLane(disk))
        if is_write:
            assert bench.store(*[bench.job(10 + i, i) for i in range(8)]) == [False] * 8
        else:
            with pytest.raises(TransferTimeout):
                bench.load(*jobs)
        gc.collect()
        assert len(unfinished) == disk.posted == ssd_tier.PARTS_AHEAD
        assert disk.destroyed_under_way == 0
    assert bench.load(*jobs) == [True] * 8, "by another lane"
    assert len(unfinished) == ssd_tier.PARTS_AHEAD and disk.destroyed_under_way == 0
    disk.hangs = False
    assert bench.load(*jobs) == [True] * 8
    assert len(unfinished) == 0


def test_whoever_stops_asking_in_the_middle_leaves_nothing_behind_that_is_under_way(
    bench: Bench, unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, disk = [bench.job(i, i) for i in range(8)], Disk()
    monkeypatch.setattr(bench.tier._lanes, "_free", [])
    monkeypatch.setattr(bench.tier._lanes, "_make", lambda: HungLane(disk))
    monkeypatch.setattr(HungLane, "wait", lambda lane, batch, until_s: None)
    moving = bench.tier._move(True, jobs, range(8), time.monotonic() + PATIENCE_S)
    next(moving)
    disk.destroyed_under_way = 0  # the first part, which was waited for
    moving.close()  # type: ignore[attr-defined]
    del moving
    gc.collect()
    assert len(unfinished) == disk.posted - 1 > 0 and disk.destroyed_under_way == 0
    disk.hangs = False
    unfinished.drop_ended()


@pytest.mark.parametrize("bench", KINDS, indirect=True)
def test_real_batches_that_nobody_waited_for_are_let_go_when_they_have_ended(
    bench: Bench, unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [bench.job(i, i) for i in range(8)]
    assert all(bench.store(*jobs))

    def hangs(lane: object, batch: object, until_s: float) -> None:
        raise TransferTimeout("the SSD did not answer in time")

    with monkeypatch.context() as patch:
        for lane in (NixlLane, ThreadLane):
            patch.setattr(lane, "wait", hangs)
        with pytest.raises(TransferTimeout):
            bench.load(*jobs)
    assert len(unfinished) == ssd_tier.PARTS_AHEAD
    until_s = time.monotonic() + PATIENCE_S
    while len(unfinished):
        assert time.monotonic() < until_s
        unfinished.drop_ended()
        pause()
    there = [job._replace(memory_bytes=(400 + i) * UNIT) for i, job in enumerate(jobs)]
    assert bench.tier.load(there, time.monotonic() + PATIENCE_S) == [LoadOutcome.WHOLE] * 8
