"""Bytes per second out of a storage node's segment: memcpy (the limit), mapped, NIXL.

    python -m bench.transports [--block-kib 128] [--blocks 64] [--segment-mib 256]

It starts a directory and two storage nodes as processes, fills one, and reads random blocks of it
into a pool, as a worker of the other node does. They are looked up, copied and verified (xxh3). The
blocks are spread over the whole segment, so the CPU's cache does not help. The way memcpy copies
the same pattern from the same segment without verifying, which is the maximum of one core.

Not here: the server (reuse.py), other users of the store (store/).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Annotated

import numpy as np
import typer

from bench.harness.processes import BenchStore
from loadtest.harness.benchmark import BlocksSeed, benchmark, console, median_s, moved
from loadtest.harness.result import Cell
from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import KvLayout, memory_bytes_for
from mooncake_store.memory.segment import Segment
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import UNIT_BYTES

POOL_BLOCKS = 512
DEADLINE_S = 10.0
LEASE_S = 600.0


def fill(store: Store, blocks: int, rng: np.random.Generator) -> list[Copy]:
    """Put that many random blocks into the store's own node."""
    keys = [secrets.token_bytes(16) for _ in range(blocks)]
    given = store.allocate(keys, "bench", LEASE_S)
    rows = []
    for key, slot in zip(keys, given.slots, strict=True):
        assert slot is not None, "the segment is too small for its own blocks"
        block = rng.integers(0, 256, store.layout.block_bytes, dtype=np.uint8)
        [digests] = store.write([slot], block, [0], DEADLINE_S)
        assert digests is not None
        rows.append((key, slot, digests))
    assert all(store.commit(rows, "bench", LEASE_S))
    return [copies[0] for copies in store.lookup(keys, "bench", LEASE_S)]


def measure(
    layout: KvLayout, blocks: int, total_blocks: int, rounds: int, seed: int
) -> list[dict[str, Cell]]:
    rng = np.random.default_rng(seed)
    block_bytes = layout.block_bytes
    full_bytes = memory_bytes_for(total_blocks, block_bytes, UNIT_BYTES)
    own_bytes = memory_bytes_for(8, block_bytes, UNIT_BYTES)
    with contextlib.ExitStack() as stack:
        processes = BenchStore(stack)
        processes.node("full", full_bytes)
        processes.node("own", own_bytes)
        directory = stack.enter_context(DirectoryClient(processes.address))

        def store(node_id: str, transports: str) -> Store:
            made = Store(directory, node_id, "bench", layout, transports)
            stack.callback(made.close)
            return made

        copies = fill(store("full", "mapped"), total_blocks, rng)
        info = next(info for info in directory.nodes() if info.node_id == "full")
        shape = directory.attach("full", "bench", block_bytes)
        source = stack.enter_context(Segment.open(info.segment_path))
        pool = np.ones(POOL_BLOCKS * block_bytes, np.uint8)
        readers = {name: store("own", name) for name in ("mapped", "nixl")}
        for reader in readers.values():
            reader.register_buffer(pool)

        def pattern() -> tuple[list[Copy], list[int]]:
            chosen = rng.choice(total_blocks, blocks, replace=False).tolist()
            pages = rng.choice(POOL_BLOCKS, blocks, replace=False).tolist()
            return [copies[index] for index in chosen], [page * block_bytes for page in pages]

        def copy() -> float:
            chosen, offsets = pattern()
            starts = [shape.slot_offset_bytes(copy.slot) for copy in chosen]
            started_s = time.perf_counter()
            for start, offset in zip(starts, offsets, strict=True):
                pool[offset : offset + block_bytes] = source.view[start : start + block_bytes]
            return time.perf_counter() - started_s

        def read(name: str) -> float:
            chosen, offsets = pattern()
            started_s = time.perf_counter()
            arrived = readers[name].read(chosen, pool, offsets, DEADLINE_S)
            seconds = time.perf_counter() - started_s
            assert all(arrived), f"{name}: {arrived.count(False)} of {blocks} blocks missing"
            return seconds

        ways = {"memcpy": copy, "mapped": lambda: read("mapped"), "nixl": lambda: read("nixl")}
        seconds = median_s(ways, rounds, warm_rounds=1)
    return [
        {
            "transport": name,
            **moved(block_bytes, blocks, value),
            "over_memcpy": round(seconds["memcpy"] / value, 3),
        }
        for name, value in seconds.items()
    ]


def main(
    block_kib: Annotated[int, typer.Option(min=4, help="Size of a block.")] = 128,
    blocks: Annotated[int, typer.Option(min=1, max=POOL_BLOCKS, help="Blocks per read.")] = 64,
    segment_mib: Annotated[int, typer.Option(min=1, help="They are spread over it.")] = 256,
    rounds: Annotated[int, typer.Option(min=3, help="Reads of each kind.")] = 60,
    seed: BlocksSeed = 1,
) -> None:
    """Read blocks of another storage node in each way; the last line is JSON."""
    layout = KvLayout(layers=4, kv_heads=1, head_dim=block_kib * 8, dtype="float32", block_tokens=4)
    assert layout.block_bytes == block_kib * 1024
    total_blocks = max(blocks, segment_mib * 1024 // block_kib)
    with benchmark("transports") as run, console.status("measuring ..."):
        run.rows = measure(layout, blocks, total_blocks, rounds, seed)


if __name__ == "__main__":
    typer.run(main)
