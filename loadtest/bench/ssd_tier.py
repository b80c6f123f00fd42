"""Blocks from the SSD tier into memory, verified, beside raw reads of the same file.

    python -m loadtest.bench.ssd_tier [--folder FOLDER] [--rounds 25]

`raw` is NIXL's POSIX plugin asked for the whole batch at once, polled without a pause, nothing
verified: the most that the disk gives. `nixl` and `threads` are SsdTier.load with either way of
asking the disk, xxh3 of every block included; their CPU is what a second of reading takes. Ways
take turns in every round, because the machine may be busy now and idle a second later.

Not here: the node and the client around it (loadtest/bench/store/), the tier itself.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from loadtest.bench.result import Cell, Result
from mooncake_store.memory.segment import ByteArray
from mooncake_store.ssd.block_io import NixlLane
from mooncake_store.ssd.records import Entry, Shape
from mooncake_store.ssd.ssd_tier import Job, Outcome, SsdTier

MIB = 2**20
FILE_BYTES, MEMORY_BYTES = 512 * MIB, 256 * MIB
BATCHES = ((64 * 1024, 16), (64 * 1024, 128), (256 * 1024, 16), (MIB, 4), (MIB, 16), (4 * MIB, 8))
WAYS = ("nixl", "threads")
Timed = tuple[float, float]  # seconds, CPU seconds


class Disk:
    """One block size: the same blocks in a tier of each kind."""

    def __init__(self, folder: Path, memory: ByteArray, block_bytes: int, seed: int) -> None:
        self.block_bytes, self.memory = block_bytes, memory
        self.chance = np.random.default_rng(seed)
        shape = Shape(64 * 1024, FILE_BYTES)
        self.tiers = {way: SsdTier(str(folder), way, shape, memory, True, way) for way in WAYS}
        self.jobs: list[Job] = []
        for block in range(FILE_BYTES // block_bytes):
            start = block * block_bytes % MEMORY_BYTES
            digest = self.tiers["nixl"].checksum(start, block_bytes)
            slot = block * block_bytes // shape.unit_bytes
            entry = Entry(block.to_bytes(16, "big"), slot, block + 1, digest, block_bytes)
            self.jobs.append(Job(entry, start))
        for tier in self.tiers.values():
            for start in range(0, len(self.jobs), 64):
                part = self.jobs[start : start + 64]
                assert all(tier.write(part)) and tier.keep([job.entry for job in part])

    def chosen(self, blocks: int) -> list[Job]:
        """Random blocks of the file, to random places in the memory."""
        places = MEMORY_BYTES // self.block_bytes
        return [
            self.jobs[block]._replace(memory_bytes=int(place) * self.block_bytes)
            for block, place in zip(
                self.chance.choice(len(self.jobs), blocks, replace=False),
                self.chance.choice(places, blocks, replace=False),
                strict=True,
            )
        ]

    def raw(self, jobs: list[Job]) -> None:
        tier = self.tiers["nixl"]
        with tier._lanes.lane(time.monotonic() + 10) as lane:
            assert isinstance(lane, NixlLane), "NIXL's POSIX plugin does not work here"
            batch = lane.post(False, [tier._row(job) for job in jobs])
            while not lane._agent.is_done(batch):
                pass

    def load(self, way: str, jobs: list[Job]) -> None:
        outcomes = self.tiers[way].load(jobs, time.monotonic() + 60)
        assert all(outcome is Outcome.WHOLE for outcome in outcomes), outcomes

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()


def timed(call: Callable[[], None]) -> Timed:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def measure(disk: Disk, blocks: int, rounds: int) -> list[dict[str, Cell]]:
    times: dict[str, list[Timed]] = {"raw": [], **{way: [] for way in WAYS}}
    for _ in range(rounds):
        times["raw"].append(timed(partial(disk.raw, disk.chosen(blocks))))
        for way in WAYS:
            times[way].append(timed(partial(disk.load, way, disk.chosen(blocks))))
    median_s = {way: statistics.median(wall for wall, _ in found) for way, found in times.items()}
    return [
        {
            "block_bytes": disk.block_bytes,
            "blocks": blocks,
            "way": way,
            "gb_per_s": round(disk.block_bytes * blocks / median_s[way] / 1e9, 3),
            "over_raw": round(median_s["raw"] / median_s[way], 3),
            "cpu": round(sum(cpu for _, cpu in found) / sum(wall for wall, _ in found), 2),
        }
        for way, found in times.items()
    ]


@contextlib.contextmanager
def memory() -> Iterator[ByteArray]:
    """Shared memory of known bytes, as a segment is."""
    chance = np.random.default_rng(1)
    view = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), np.uint8)
    view[:] = chance.integers(0, 256, MEMORY_BYTES, np.uint8)
    yield view


def main(
    folder: Annotated[Path, typer.Option(help="On the disk to be measured.")] = Path(".mooncake"),
    rounds: Annotated[int, typer.Option(min=5, help="Batches of each kind.")] = 25,
    seed: Annotated[int, typer.Option(help="Which blocks.")] = 1,
) -> None:
    """Measure reads of the SSD tier; the last line is JSON."""
    started_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Cell]] = []
    with memory() as view:
        for block_bytes in dict.fromkeys(size for size, _ in BATCHES):
            with tempfile.TemporaryDirectory(dir=folder, prefix="bench-ssd-") as place:
                disk = Disk(Path(place).resolve(), view, block_bytes, seed)
                for size, blocks in BATCHES:
                    if size == block_bytes:
                        rows += measure(disk, blocks, rounds)
                disk.close()
    Result("ssd_tier", time.monotonic() - started_s, rows, []).print(Console(highlight=False))


if __name__ == "__main__":
    typer.run(main)
