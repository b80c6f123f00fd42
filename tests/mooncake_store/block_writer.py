"""Stores blocks in a node the way a worker does, for tests of what nodes do with them."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash

from mooncake_store.layout import STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.membership import NodeInfo
from tests.mooncake_store.site import Site

BLOCK = 10_000  # three units of 4,096 bytes


class BlockWriter:
    """Of one node. `payloads`: what it stored, by key."""

    def __init__(self, site: Site, info: NodeInfo, seed: int) -> None:
        self.directory, self.node_id = site.client, info.node_id
        self.chance = np.random.default_rng(seed)
        self.payloads: dict[bytes, ByteArray] = {}
        self.owners = itertools.count()
        self.segment = Segment.open(info.segment_path, info.segment_bytes)
        shape = geometry(info.segment_bytes, info.unit_bytes)
        self.memory = SlotMemory(self.segment.view, shape)
        self.attach()

    def attach(self) -> None:
        self.directory.attach(self.node_id, "print", BLOCK)

    def close(self) -> None:
        del self.memory
        self.segment.close()

    def store(self, keys: list[bytes]) -> None:
        for key in keys:
            payload = self.chance.integers(0, 256, BLOCK, np.uint8)
            owner = f"w{next(self.owners)}"
            [slot] = self.directory.allocate(
                self.node_id, [key], owner, 60.0, size_bytes=BLOCK
            ).slots
            assert slot is not None
            digest = xxhash.xxh3_64_intdigest(payload.data)
            start = self.memory.shape.slot_offset_bytes(slot.slot)
            self.write_header(key, slot.slot, slot.generation, digest, STATE_WRITING)
            self.memory.view[start : start + BLOCK] = payload
            self.write_header(key, slot.slot, slot.generation, digest, STATE_READY)
            rows = [(key, slot.slot, slot.generation, digest)]
            assert self.directory.commit(self.node_id, rows, owner, 0.0) == [True]
            self.payloads[key] = payload

    def write_header(self, key: bytes, slot: int, generation: int, digest: int, state: int) -> None:
        self.memory.write_header(slot, SlotHeader(state, generation, key, digest, BLOCK))
