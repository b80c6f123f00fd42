"""Two nodes in one process (or with agents in others), their directory, and stores on them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from mooncake_store.client.store import Store
from mooncake_store.layout import KvLayout
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import NodeInfo
from tests.mooncake_store.in_process import InProcessDirectory
from tests.mooncake_store.targets import TARGET_BYTES, Target, TargetPool

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype="float32", block_tokens=16)
BLOCK = LAYOUT.block_bytes
SEGMENT_BYTES = TARGET_BYTES
PAGES = 32
DEADLINE_S = 10.0


class MappedNode:
    """A node in this process: a segment without an agent."""

    def __init__(self, path: str, node_id: str) -> None:
        self.segment = Segment.create(path, SEGMENT_BYTES)
        self.info = NodeInfo(
            node_id,
            secrets.token_hex(4),
            host_id(path),
            path,
            SEGMENT_BYTES,
            "",
            b"",
            self.segment.address,
        )

    def kill(self) -> None:
        self.segment.close()

    def close(self) -> None:
        self.segment.close()


class World:
    """Two nodes, their directory, and stores on them."""

    def __init__(self, transports: str, targets: TargetPool) -> None:
        self.transports = transports
        self.targets = targets
        self.directory = InProcessDirectory()
        self.prefix = f"/dev/shm/mooncake-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.nodes: dict[str, MappedNode | Target] = {}
        self.stores: list[Store] = []
        self.start("s0")
        self.start("s1")

    def start(self, node_id: str) -> MappedNode | Target:
        path = f"{self.prefix}-{node_id}"
        node: MappedNode | Target
        if self.transports == "mapped":
            node = MappedNode(path, node_id)
        else:
            node = self.targets.take(node_id)
        old = self.nodes.get(node_id)
        if isinstance(old, Target):
            self.targets.give_back(old)
        self.nodes[node_id] = node
        self.directory.up(node.info)
        return node

    def store(self, node_id: str, transports: str | None = None) -> tuple[Store, np.ndarray]:
        mode = transports or self.transports
        store = Store(self.directory, node_id, "f" * 32, LAYOUT, mode)  # type: ignore[arg-type]
        self.stores.append(store)
        pool = np.zeros(PAGES * BLOCK, np.uint8)
        store.register_buffer(pool)
        return store, pool

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for node in self.nodes.values():
            if isinstance(node, Target):
                self.targets.give_back(node)
            else:
                node.close()
        assert not list(Path("/dev/shm").glob(Path(self.prefix).name + "*"))


def keys_of(count: int, seed: int) -> list[bytes]:
    return [np.random.default_rng([seed, i]).bytes(16) for i in range(count)]


def content(key: bytes) -> np.ndarray:
    words = np.frombuffer(key, np.uint64)
    return np.random.default_rng(words).integers(0, 256, BLOCK, dtype=np.uint8)


def put(store: Store, keys: list[bytes], owner: str = "writer", is_ephemeral: bool = False) -> None:
    given = store.allocate(keys, owner, 60.0, is_ephemeral)
    rows = []
    for key, slot in zip(keys, given.slots, strict=True):
        assert slot is not None
        [digests] = store.write([slot], content(key), [0], DEADLINE_S)
        assert digests is not None
        rows.append((key, slot, digests))
    assert all(store.commit(rows, owner, 60.0))


def choose(found: list[tuple[Copy, ...]], node_id: str) -> list[Copy]:
    return [next(copy for copy in places if copy.node_id == node_id) for places in found]
