"""Blocks that only the SSD has, beside O_DIRECT reads of the same blocks from the same file.

The node has 128 MiB of DRAM and is given several times that: what is cold is spilled, then evicted.
Each get restores its blocks into DRAM (evicting others) and reads them from there. Raw reads take
as many random blocks that were written there into aligned memory, by threads of preadv.

Not here: the node (mooncake_store/ssd/).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from loadtest.bench.result import Cell
from loadtest.bench.store.pattern import BATCH, Pattern, pages
from loadtest.bench.store.site import MB, UNIT_BYTES, Site
from mooncake_store.client.client import StoreClient

FILLED_BYTES = 512 * MB
SPILLED_S_MAX = 60.0
READERS = 4


@contextlib.contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A folder for the SSD tier, removed with what is in it when the block ends."""
    path.mkdir(parents=True, exist_ok=False)
    try:
        yield path.resolve()
    finally:
        shutil.rmtree(path)


def on_ssd_only(client: StoreClient, pattern: Pattern, here: Site) -> list[int]:
    places = client.stat(pattern.keys)
    return [
        index
        for index, copies in enumerate(places)
        if copies and all(copy.node_id == f"{here.ssd}/ssd" for copy in copies)
    ]


def measure(here: Site, folder: Path, block_bytes: int, rounds: int) -> dict[str, float]:
    """Median seconds per batch: `raw` and `get`."""
    chance = np.random.default_rng(2)
    pattern = Pattern(block_bytes, FILLED_BYTES // block_bytes, pages(FILLED_BYTES, chance), chance)
    gets, raws = [], []
    with StoreClient(here.address, here.ssd) as client, raw_reader(folder, block_bytes) as raw:
        client.register(pattern.local)
        put_all(client, pattern, here)
        for turn in range(rounds + 2):
            cold = on_ssd_only(client, pattern, here)
            if len(cold) < BATCH:
                raise RuntimeError(f"only {len(cold)} blocks are on the SSD alone")
            chosen = chance.choice(cold, BATCH, replace=False).tolist()
            targets = [np.ascontiguousarray(pattern.place(i)) for i in chosen]
            for target in targets:
                target[:1] ^= 1  # what arrives must come from the disk
            started_s = time.perf_counter()
            arrived = client.get_into([pattern.keys[i] for i in chosen], targets)
            seconds = time.perf_counter() - started_s
            assert all(arrived), f"{arrived.count(False)} of {BATCH} blocks missing"
            raw_s = raw(offsets(client, pattern, here, chance))
            if turn >= 2:
                gets.append(seconds)
                raws.append(raw_s)
    return {"get": statistics.median(gets), "raw": statistics.median(raws)}


def put_all(client: StoreClient, pattern: Pattern, here: Site) -> None:
    """Put every block, no faster than the SSD takes them, until most are there."""
    until_s = time.monotonic() + SPILLED_S_MAX
    for start in range(0, pattern.blocks, BATCH):
        chosen = range(start, min(start + BATCH, pattern.blocks))
        client.put([pattern.keys[i] for i in chosen], [pattern.place(i) for i in chosen], here.ssd)
        time.sleep(0.03)
    while len(on_ssd_only(client, pattern, here)) < 3 * BATCH:
        if time.monotonic() > until_s:
            raise RuntimeError("the node did not spill to its SSD; is the folder on a disk?")
        time.sleep(0.1)


def offsets(
    client: StoreClient, pattern: Pattern, here: Site, chance: np.random.Generator
) -> list[int]:
    """Where BATCH random blocks lie in the file. What was never written costs no disk."""
    places = client.stat(pattern.keys)
    slots = [c.slot for copies in places for c in copies if c.node_id == f"{here.ssd}/ssd"]
    return [slot * UNIT_BYTES for slot in chance.choice(slots, BATCH, replace=False).tolist()]


@contextlib.contextmanager
def raw_reader(folder: Path, block_bytes: int):  # type: ignore[no-untyped-def]
    """A function that reads BATCH blocks of the node's file and returns the seconds."""
    path = max(folder.rglob("*"), key=lambda each: each.stat().st_size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, BATCH * block_bytes)
    view = memoryview(memory)

    def read_one(at: int, start: int) -> int:
        target = view[at * block_bytes : (at + 1) * block_bytes]
        return os.preadv(descriptor, [target], start)

    with ThreadPoolExecutor(READERS) as pool:

        def read(starts: list[int]) -> float:
            started_s = time.perf_counter()
            done = list(pool.map(read_one, range(BATCH), starts))
            seconds = time.perf_counter() - started_s
            assert done == [block_bytes] * BATCH
            return seconds

        try:
            yield read
        finally:
            view.release()
            os.close(descriptor)


def rows(seconds: dict[str, float], block_bytes: int) -> list[dict[str, Cell]]:
    return [
        {
            "way": f"ssd {name}", "block_bytes": block_bytes, "blocks": BATCH,
            "microseconds": round(value * 1e6, 1),
            "gb_per_s": round(BATCH * block_bytes / value / 1e9, 3),
        }
        for name, value in seconds.items()
    ]  # fmt: skip
