"""`exist` and `get` by the index replica of the host beside the same by the directory, in turns.

    python -m bench.store.index_replica

Four clients of one store: of the own node and of another one, each with and without the replica
(MOONCAKE_INDEX_REPLICA=off). They ask for 1,000 block keys, and get 16 random blocks of 256 KiB
into registered memory. Each question comes right after others have emptied the CPU's cache, as
between the steps of an engine. `exist, again` asks the same twice and measures the second time.

Not here: the store beside its peers (__main__.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import numpy as np
import typer

from bench.harness.processes import BenchStore
from bench.store.ways import BATCH, MB
from loadtest.harness.benchmark import BatchRounds, BlocksSeed, benchmark, median_s
from loadtest.harness.result import Cell, Target
from mooncake_store.client.client import StoreClient
from mooncake_store.memory.index_table import SWITCH

BLOCK_BYTES = 256 * 1024
BLOCKS = 256
EXIST_KEYS = 1_000
NODE_BYTES = 256 * MB
KNOWN_S_MAX = 30.0


def asking(client: StoreClient, keys: list[bytes], is_second: bool = False) -> Callable[[], float]:
    def ask() -> float:
        if is_second:
            client.exist(keys)
        started_s = time.perf_counter()
        there = client.exist(keys)
        seconds = time.perf_counter() - started_s
        assert all(there)
        return seconds

    return ask


def measure(rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    local = rng.integers(0, 256, BLOCKS * BLOCK_BYTES, np.uint8)
    blocks = [local[at : at + BLOCK_BYTES] for at in range(0, local.nbytes, BLOCK_BYTES)]
    keys = [rng.bytes(16) for _ in blocks]
    small = [rng.bytes(16) for _ in range(EXIST_KEYS)]
    with contextlib.ExitStack() as stack:
        store = BenchStore(stack)
        for node_id in ("near", "far"):
            store.node(node_id, NODE_BYTES, "--unit-bytes", "16384")

        def client(node_id: str, how: str) -> StoreClient:
            os.environ[SWITCH] = "off" if how == "directory" else "on"
            made = stack.enter_context(StoreClient(store.address, node_id))
            made.register(local)
            return made

        def getting(client: StoreClient) -> Callable[[], float]:
            def get() -> float:
                chosen = rng.choice(BLOCKS, BATCH, replace=False)
                wanted, targets = [keys[at] for at in chosen], [blocks[at] for at in chosen]
                started_s = time.perf_counter()
                arrived = client.get_into(wanted, targets)
                seconds = time.perf_counter() - started_s
                assert all(arrived)
                return seconds

            return get

        clients = {
            (node_id, how): client(node_id, how)
            for node_id in ("near", "far")
            for how in ("directory", "replica")
        }
        near = clients["near", "replica"]
        assert all(near.put(keys, blocks, "near"))
        assert all(near.put(small, [b"block"] * EXIST_KEYS, "near"))
        until_s = time.monotonic() + KNOWN_S_MAX
        while not all(near._index.find([*keys, *small])):
            assert time.monotonic() < until_s, "the replica does not receive the blocks"
        ways: dict[str, Callable[[], float]] = {}
        for how in ("directory", "replica"):
            near, far = clients["near", how], clients["far", how]
            ways[f"exist, {how}"] = asking(near, small)
            ways[f"exist again, {how}"] = asking(near, small, is_second=True)
            ways[f"get own node, {how}"] = getting(near)
            ways[f"get other node, {how}"] = getting(far)
        return median_s(ways, rounds, 5)


def main(rounds: BatchRounds = 100, seed: BlocksSeed = 1) -> None:
    """Measure both; the last line is JSON."""
    with benchmark("index_replica") as run:
        seconds = measure(rounds, seed)
        for way, value in seconds.items():
            cells: dict[str, Cell] = {"way": way, "microseconds": round(value * 1e6, 1)}
            run.rows.append(cells)
        exist_us = round(seconds["exist again, replica"] * 1e6, 1)
        run.targets = [Target("exist_1000_us", exist_us, "<=", 100.0)]


if __name__ == "__main__":
    typer.run(main)
