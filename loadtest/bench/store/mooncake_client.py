"""Mooncake's own store client, measured as ours is. Runs in a Python that has Mooncake's wheel.

Standard library, numpy and mooncake only: nothing of this project is installed there. Prints one
JSON object: seconds of batch_get_into and batch_put_from of 16 blocks per size (medians; each get
of 16 random keys into 16 random positions), and of batch_is_exist of 1,000 keys.

    client MASTER MIB ROUNDS SIZES
    node MASTER MIB

With MIB above 0 the client itself holds the blocks, in so much memory of its own process: then
Mooncake copies them (`MC_STORE_MEMCPY`), which is its fastest path on one host. With 0 they lie in
the node, which is the second form, and come over TCP.

Not here: starting its master and both (__main__.py).
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

BATCH = 16
LOCAL_BYTES = 256 * 2**20
HOST, NODE_HOST = "127.0.0.1:17955", "127.0.0.1:17956"


def measure(
    store: Any, address: int, size: int, rounds: int, chance: np.random.Generator
) -> dict[str, float]:
    """Median seconds of a get and of a put of BATCH blocks of `size` bytes."""
    positions = LOCAL_BYTES // size
    blocks = min(positions, 200 * 2**20 // size) // BATCH * BATCH
    keys = [f"k{size}_{i}" for i in range(blocks)]
    puts, gets = [], []

    def some() -> list[int]:
        return [address + int(i) * size for i in chance.choice(positions, BATCH, replace=False)]

    for start in range(0, blocks, BATCH):
        chosen, sources = keys[start : start + BATCH], some()
        began_s = time.perf_counter()
        codes = store.batch_put_from(chosen, sources, [size] * BATCH)
        puts.append(time.perf_counter() - began_s)
        assert all(code == 0 for code in codes), codes[:3]
    for _ in range(rounds):
        chosen = [keys[int(i)] for i in chance.choice(blocks, BATCH, replace=False)]
        targets = some()
        began_s = time.perf_counter()
        codes = store.batch_get_into(chosen, targets, [size] * BATCH)
        gets.append(time.perf_counter() - began_s)
        assert all(code == size for code in codes), codes[:3]
    return {"get_s": statistics.median(gets), "put_s": statistics.median(puts)}


def node(master: str, segment_mib: int) -> None:
    """Holds blocks until it is killed."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(NODE_HOST, "P2PHANDSHAKE", segment_mib << 20, 16 << 20, "tcp", "", master)
    assert code == 0, code
    print(json.dumps({"is_ready": True}), flush=True)
    time.sleep(3600)


def client(master: str, segment_mib: int, rounds: int, sizes: list[int]) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_mib << 20, 512 << 20, "tcp", "", master)
    assert code == 0, code
    memory = mmap.mmap(-1, LOCAL_BYTES)
    local = np.frombuffer(memory, np.uint8)
    local[:] = 7
    address = local.ctypes.data
    store.register_buffer(address, LOCAL_BYTES)
    for i in range(LOCAL_BYTES // 2**24 * 8):  # touches the node's pages, or puts measure that
        store.put_from(f"warm{i}", address, 2**24)
    store.remove_all(True)
    chance = np.random.default_rng(1)
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        found[str(size)] = measure(store, address, size, rounds, chance)
        store.remove_all(True)
    value, names = bytes(64), [f"meta{i}" for i in range(1000)]
    for name in names:
        store.put(name, value)
    asked = []
    for _ in range(200):
        began_s = time.perf_counter()
        codes = store.batch_is_exist(names)
        asked.append(time.perf_counter() - began_s)
    assert all(code == 1 for code in codes)
    found["exist_1000"] = {"s": statistics.median(asked), "best_s": min(asked)}
    print(json.dumps(found), flush=True)
    store.close()
    os._exit(0)  # its destructor may hang


if __name__ == "__main__":
    role, master, segment_mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "node":
        node(master, segment_mib)
    else:
        client(master, segment_mib, int(sys.argv[4]), json.loads(sys.argv[5]))
