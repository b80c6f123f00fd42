"""Blocks from the SSD into memory, verified, beside raw reads of the same file.

    python -m bench.ssd_tier [--folder FOLDER] [--rounds 25]

The tier alone: `raw` reads the whole batch at once through NIXL's POSIX plugin, polled without a
pause and not verified, which is the disk's maximum. `nixl` and `threads` are SsdTier.load with
either way of reading the disk, xxh3 of every block included; their CPU is that of one second of
reading.

After a node, which `bench.store` measures: the node has 128 MiB of DRAM and gets several times
that, so cold blocks are spilled and then evicted. Each get restores its blocks into DRAM (evicting
others) and reads them from there. `raw` reads as many random blocks of that file with O_DIRECT into
aligned memory, by threads of preadv.

Not here: the tier itself (mooncake_store/ssd/), a client's other ways (store/ways.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.store.ways import BATCH, MB, Pattern, get_s, pages
from loadtest.harness.benchmark import BatchRounds, BlocksSeed, benchmark, in_turns, median_s, moved
from loadtest.harness.result import Cell
from loadtest.harness.server import CannotMeasure
from mooncake_store.client.client import StoreClient
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.ssd.block_file import NixlLane
from mooncake_store.ssd.entries import SsdEntry, SsdShape
from mooncake_store.ssd.ssd_tier import BlockJob, LoadOutcome, SsdTier

FILE_BYTES, MEMORY_BYTES = 512 * MB, 256 * MB
BATCHES = ((64 * 1024, 16), (64 * 1024, 128), (256 * 1024, 16), (MB, 4), (MB, 16), (4 * MB, 8))
WAYS = ("nixl", "threads")
UNIT_BYTES = 64 * 1024
NODE_FILLED_BYTES = 512 * MB
SPILLED_S_MAX = 60.0
RAW_READERS = 4
Timed = tuple[float, float]  # seconds, CPU seconds


class TierPair:
    """One block size: the same blocks in a tier of each kind."""

    def __init__(self, folder: Path, memory: ByteArray, block_bytes: int, seed: int) -> None:
        self.block_bytes, self.memory = block_bytes, memory
        self.rng = np.random.default_rng(seed)
        shape = SsdShape(UNIT_BYTES, FILE_BYTES)
        self.tiers = {way: SsdTier(str(folder), way, shape, memory, True, way) for way in WAYS}
        self.jobs: list[BlockJob] = []
        for block in range(FILE_BYTES // block_bytes):
            start = block * block_bytes % MEMORY_BYTES
            digest = self.tiers["nixl"].checksum(start, block_bytes)
            slot = block * block_bytes // shape.unit_bytes
            entry = SsdEntry(block.to_bytes(16, "big"), slot, block + 1, digest, block_bytes)
            self.jobs.append(BlockJob(entry, start))
        for tier in self.tiers.values():
            for start in range(0, len(self.jobs), 64):
                part = self.jobs[start : start + 64]
                assert all(tier.write(part)) and tier.keep([job.entry for job in part])

    def chosen(self, blocks: int) -> list[BlockJob]:
        """Random blocks of the file, to random positions in the memory."""
        positions = MEMORY_BYTES // self.block_bytes
        return [
            self.jobs[block]._replace(memory_bytes=int(position) * self.block_bytes)
            for block, position in zip(
                self.rng.choice(len(self.jobs), blocks, replace=False),
                self.rng.choice(positions, blocks, replace=False),
                strict=True,
            )
        ]

    def raw(self, jobs: list[BlockJob]) -> None:
        tier = self.tiers["nixl"]
        with tier._lanes.lane(time.monotonic() + 10) as lane:
            assert isinstance(lane, NixlLane), "NIXL's POSIX plugin does not work here"
            batch = lane.post(False, [tier._row(job) for job in jobs])
            while not lane._agent.is_done(batch):
                pass

    def load(self, way: str, jobs: list[BlockJob]) -> None:
        outcomes = self.tiers[way].load(jobs, time.monotonic() + 60)
        assert all(outcome is LoadOutcome.WHOLE for outcome in outcomes), outcomes

    def close(self) -> None:
        for tier in self.tiers.values():
            tier.close()


def timed(call: Callable[[], None]) -> Timed:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def measure(tiers: TierPair, blocks: int, rounds: int) -> list[dict[str, Cell]]:
    """The tier alone: a row for each way."""

    def raw() -> Timed:
        return timed(partial(tiers.raw, tiers.chosen(blocks)))

    def load(way: str) -> Timed:
        return timed(partial(tiers.load, way, tiers.chosen(blocks)))

    turns: dict[str, Callable[[], Timed]] = {"raw": raw}
    times = in_turns(turns | {way: partial(load, way) for way in WAYS}, rounds)
    seconds = {way: statistics.median(wall for wall, _ in found) for way, found in times.items()}
    return [
        {
            "block_bytes": tiers.block_bytes,
            "blocks": blocks,
            "way": way,
            "gb_per_s": moved(tiers.block_bytes, blocks, seconds[way])["gb_per_s"],
            "over_raw": round(seconds["raw"] / seconds[way], 3),
            "cpu": round(sum(cpu for _, cpu in found) / sum(wall for wall, _ in found), 2),
        }
        for way, found in times.items()
    ]


def known_memory() -> ByteArray:
    """Shared memory of known bytes, like a segment."""
    view = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), np.uint8)
    view[:] = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, np.uint8)
    return view


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder for an SSD tier, removed with its content when the block ends."""
    path.mkdir(parents=True, exist_ok=False)
    try:
        yield path.resolve()
    finally:
        shutil.rmtree(path)


def measure_node(
    address: str, node_id: str, folder: Path, block_bytes: int, rounds: int
) -> dict[str, float]:
    """Behind a node whose SSD is in `folder`: median seconds per batch, `get` and `raw`."""
    rng = np.random.default_rng(2)
    local = pages(NODE_FILLED_BYTES, rng)
    pattern = Pattern(block_bytes, NODE_FILLED_BYTES // block_bytes, local, rng)
    with StoreClient(address, node_id) as client, raw_reader(folder, block_bytes) as read_s:
        client.register(local)
        put_all(client, pattern, node_id)

        def get() -> float:
            cold = cold_blocks(client, pattern, node_id, BATCH)
            chosen = rng.choice(cold, BATCH, replace=False).tolist()
            targets = [np.ascontiguousarray(pattern.position(i)) for i in chosen]
            for target in targets:
                target[:1] ^= 1  # the bytes must come from the disk
            return get_s(client, [pattern.keys[i] for i in chosen], targets)

        def raw() -> float:
            return read_s(offsets(client, pattern, node_id, rng))

        return median_s({"get": get, "raw": raw}, rounds, warm_rounds=2)


def on_ssd_only(client: StoreClient, pattern: Pattern, node_id: str) -> list[int]:
    return [
        index
        for index, copies in enumerate(client.stat(pattern.keys))
        if copies and all(copy.node_id == f"{node_id}/ssd" for copy in copies)
    ]


def cold_blocks(client: StoreClient, pattern: Pattern, node_id: str, blocks_min: int) -> list[int]:
    """At least `blocks_min` blocks that are on the SSD alone. A read restores blocks into memory,
    and others are evicted a moment later."""
    until_s = time.monotonic() + SPILLED_S_MAX
    while len(cold := on_ssd_only(client, pattern, node_id)) < blocks_min:
        if time.monotonic() > until_s:
            raise CannotMeasure(
                f"{len(cold)} blocks are on the SSD alone after {SPILLED_S_MAX:g} s, not "
                f"{blocks_min}: does the node spill, and is the folder on a disk?"
            )
        time.sleep(0.1)
    return cold


def put_all(client: StoreClient, pattern: Pattern, node_id: str) -> None:
    """Put every block, no faster than the SSD writes them, until most are there."""
    for start in range(0, pattern.blocks, BATCH):
        chosen = range(start, min(start + BATCH, pattern.blocks))
        client.put(
            [pattern.keys[i] for i in chosen], [pattern.position(i) for i in chosen], node_id
        )
        time.sleep(0.03)
    cold_blocks(client, pattern, node_id, 3 * BATCH)


def offsets(
    client: StoreClient, pattern: Pattern, node_id: str, rng: np.random.Generator
) -> list[int]:
    """File offsets of BATCH random blocks. Reading blocks that were never written would cost no
    disk time."""
    found = client.stat(pattern.keys)
    slots = [copy.slot for copies in found for copy in copies if copy.node_id == f"{node_id}/ssd"]
    return [slot * UNIT_BYTES for slot in rng.choice(slots, BATCH, replace=False).tolist()]


@contextlib.contextmanager
def raw_reader(folder: Path, block_bytes: int) -> Iterator[Callable[[list[int]], float]]:
    """A function that reads BATCH blocks of the node's file and returns the seconds."""
    path = max(folder.rglob("*"), key=lambda each: each.stat().st_size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, BATCH * block_bytes)
    view = memoryview(memory)

    def read_one(at: int, start: int) -> int:
        target = view[at * block_bytes : (at + 1) * block_bytes]
        return os.preadv(descriptor, [target], start)

    with ThreadPoolExecutor(RAW_READERS) as pool:

        def read_s(starts: list[int]) -> float:
            started_s = time.perf_counter()
            done = list(pool.map(read_one, range(BATCH), starts))
            seconds = time.perf_counter() - started_s
            assert done == [block_bytes] * BATCH
            return seconds

        try:
            yield read_s
        finally:
            view.release()
            os.close(descriptor)


def main(
    folder: Annotated[Path, typer.Option(help="Folder on the measured disk.")] = Path(".mooncake"),
    rounds: BatchRounds = 25,
    seed: BlocksSeed = 1,
) -> None:
    """Measure reads of the SSD tier; the last line is JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    memory = known_memory()
    with benchmark("ssd_tier") as run:
        for block_bytes in dict.fromkeys(size for size, _ in BATCHES):
            with tempfile.TemporaryDirectory(dir=folder, prefix="bench-ssd-") as name:
                tiers = TierPair(Path(name).resolve(), memory, block_bytes, seed)
                for size, blocks in BATCHES:
                    if size == block_bytes:
                        run.rows += measure(tiers, blocks, rounds)
                tiers.close()


if __name__ == "__main__":
    typer.run(main)
