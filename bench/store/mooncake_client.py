"""Mooncake's own store client, called as ours is, in a Python with Mooncake's wheel.

It imports the standard library, numpy and mooncake only, because this project is not installed
there. The client reads one command a line and answers each with one JSON object. "s" is the seconds
of one call, and nothing else is timed:

    fill SIZE    put the blocks for the gets of this size
    get SIZE     batch_get_into of 16 random blocks into 16 random positions
    put SIZE     batch_put_from of 16 new blocks from 16 random positions
    exist        batch_is_exist of 1,000 present keys
    empty        remove everything

    client MASTER MIB PORT
    node MASTER MIB PORT

With MIB above 0 the client holds the blocks in that much memory of its own process; Mooncake then
copies them (`MC_STORE_MEMCPY`), its fastest path on one host. With 0 the node, the second form,
holds them, and they come over TCP.

Not here: starting its master and both (mooncake.py).
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH = 16
LOCAL_BYTES = 256 * 2**20
FILLED_BYTES = 128 * 2**20  # of blocks for gets, as for ours
HELD = 6  # batches that are not removed yet: a put must not reuse its own cache lines
NAMES = 1_000


class Asked:
    """One client and its registered memory of LOCAL_BYTES."""

    def __init__(self, store: Any, address: int) -> None:
        self._store, self._address = store, address
        self._rng = np.random.default_rng(1)
        self._held: list[list[str]] = []
        self._puts = 0
        self._names: list[str] = []

    def empty(self) -> float:
        self._held.clear()
        self._store.remove_all(True)
        return 0.0

    def fill(self, size: int) -> float:
        keys = [f"k{size}_{i}" for i in range(FILLED_BYTES // size)]
        for start in range(0, len(keys), BATCH):
            self._put(keys[start : start + BATCH], size)
        return 0.0

    def get(self, size: int) -> float:
        chosen = self._rng.choice(FILLED_BYTES // size, BATCH, replace=False)
        keys, targets = [f"k{size}_{int(i)}" for i in chosen], self._some(size)
        began_s = time.perf_counter()
        codes = self._store.batch_get_into(keys, targets, [size] * BATCH)
        seconds = time.perf_counter() - began_s
        assert all(code == size for code in codes), codes[:3]
        return seconds

    def put(self, size: int) -> float:
        self._puts += 1
        keys = [f"p{self._puts}_{i}" for i in range(BATCH)]
        seconds = self._put(keys, size)
        self._held.append(keys)
        if len(self._held) > HELD:
            codes = self._store.batch_remove(self._held.pop(0), True)
            assert all(code == 0 for code in codes), codes[:3]
        return seconds

    def exist(self) -> float:
        if not self._names:
            self._names = [f"meta{i}" for i in range(NAMES)]
            for name in self._names:
                self._store.put(name, bytes(64))
        began_s = time.perf_counter()
        codes = self._store.batch_is_exist(self._names)
        seconds = time.perf_counter() - began_s
        assert all(code == 1 for code in codes)
        return seconds

    def _put(self, keys: list[str], size: int) -> float:
        sources = self._some(size)
        began_s = time.perf_counter()
        codes = self._store.batch_put_from(keys, sources, [size] * BATCH)
        seconds = time.perf_counter() - began_s
        assert all(code == 0 for code in codes), codes[:3]
        return seconds

    def _some(self, size: int) -> list[int]:
        positions = self._rng.choice(LOCAL_BYTES // size, BATCH, replace=False)
        return [self._address + int(i) * size for i in positions]


def ready_store(host: str, segment_mib: int, buffer_mib: int, master: str) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    sizes = (segment_mib << 20, buffer_mib << 20)
    code = store.setup(host, "P2PHANDSHAKE", *sizes, "tcp", "", master)
    assert code == 0, code
    return store


def client(master: str, segment_mib: int, port: int) -> None:
    store = ready_store(f"127.0.0.1:{port}", segment_mib, 512, master)
    memory = mmap.mmap(-1, LOCAL_BYTES)
    local = np.frombuffer(memory, np.uint8)
    local[:] = 7
    address = local.ctypes.data
    store.register_buffer(address, LOCAL_BYTES)
    # touches the node's pages; otherwise puts would measure page faults
    for i in range(LOCAL_BYTES // 2**24 * 8):
        store.put_from(f"warm{i}", address, 2**24)
    asked = Asked(store, address)
    asked.empty()
    ways: dict[str, Callable[..., float]] = {
        name: getattr(asked, name) for name in ("fill", "get", "put", "exist", "empty")
    }
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        name, *sizes = line.split()
        print(json.dumps({"s": ways[name](*map(int, sizes))}), flush=True)
    store.close()
    os._exit(0)  # its destructor may hang


def node(master: str, segment_mib: int, port: int) -> None:
    """Holds blocks until it is killed."""
    store = ready_store(f"127.0.0.1:{port}", segment_mib, 16, master)
    print(json.dumps({"is_ready": True}), flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    role, master, segment_mib, port = sys.argv[1:5]
    {"client": client, "node": node}[role](master, int(segment_mib), int(port))
