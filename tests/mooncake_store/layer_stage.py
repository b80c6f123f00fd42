"""A stage of a pipeline as a process: it writes its layers where it is told, until it is killed.

    python -m tests.mooncake_store.layer_stage DIRECTORY NODE TRANSPORTS FIRST STOP

Each line on stdin is [key in hex, slot, content]: it writes these layers of that content into the
slot, and then says [key in hex, digests] on stdout; null for a slot that is not being written.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from mooncake_store.client.store import Store
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import KvLayout, LayerRange
from mooncake_store.records.blocks import Slot

LAYOUT = KvLayout(layers=12, kv_heads=4, head_dim=64, dtype="float32", block_tokens=16)
DEADLINE_S = 10.0


def content(seed: int) -> np.ndarray:
    """Of a whole block."""
    chance = np.random.default_rng(seed)
    return chance.integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


def main(address: str, node_id: str, transports: str, layers: LayerRange) -> None:
    with DirectoryClient(address) as directory:
        store = Store(directory, node_id, "f" * 32, LAYOUT, transports, layers)
        page = np.zeros(store.pages.page_bytes, np.uint8)
        store.register_buffer(page)
        print("ready", flush=True)
        for line in sys.stdin:
            key, slot, seed = json.loads(line)
            start = LAYOUT.layer_offset_bytes(layers.first)
            page[:] = content(seed)[start : start + page.nbytes]
            [digests] = store.write([Slot(*slot)], page, [0], DEADLINE_S)
            print(json.dumps([key, digests]), flush=True)
        store.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], LayerRange(*map(int, sys.argv[4:6])))  # type: ignore[misc]
