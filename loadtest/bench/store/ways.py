"""Ways to move a batch of blocks, each a function that returns the seconds it took.

Metadata calls are inside: a get asks the directory first, a put allocates before and commits after.
`limits` copies or transfers the same pattern with nothing around it.

Not here: starting processes (site.py), which blocks (pattern.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import numpy as np

from loadtest.bench.store.pattern import BATCH, Pattern
from mooncake_store.client.client import StoreClient
from mooncake_store.layout import geometry
from mooncake_store.memory.segment import ByteArray, Segment
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_agent import make_agent

Way = Callable[[], float]


def fill(client: StoreClient, pattern: Pattern, node_id: str) -> None:
    """Put every block of the pattern on this node."""
    for start in range(0, pattern.blocks, BATCH):
        chosen = range(start, min(start + BATCH, pattern.blocks))
        stored = client.put(
            [pattern.keys[i] for i in chosen], [pattern.place(i) for i in chosen], node_id
        )
        if not all(stored):
            raise RuntimeError(f"{node_id} took {stored.count(True)} of {len(stored)} blocks")


def getting(client: StoreClient, pattern: Pattern) -> Way:
    def get() -> float:
        keys = [pattern.keys[i] for i in pattern.some()]
        targets = [pattern.place(i) for i in pattern.some()]
        started_s = time.perf_counter()
        arrived = client.get_into(keys, targets)
        seconds = time.perf_counter() - started_s
        assert all(arrived), f"{arrived.count(False)} of {BATCH} blocks missing"
        return seconds

    return get


def putting(client: StoreClient, pattern: Pattern, node_id: str) -> Way:
    """New keys each time; what was put is removed again, outside of the time."""

    def put() -> float:
        keys = [secrets.token_bytes(16) for _ in range(BATCH)]
        sources = [pattern.place(i) for i in pattern.some()]
        started_s = time.perf_counter()
        stored = client.put(keys, sources, node_id)
        seconds = time.perf_counter() - started_s
        assert all(stored), f"{stored.count(False)} of {BATCH} blocks not stored"
        # The next put shall not write where this one has just been (that would be in the cache):
        # half of what is there is kept until later.
        held.append(keys)
        if len(held) > 6:
            assert all(client.remove(held.pop(0)))
        return seconds

    held: list[list[bytes]] = []
    return put


def copying(source: ByteArray, pattern: Pattern, is_read: bool) -> Way:
    """memcpy between the local buffer and `source`, which is as long."""

    def copy() -> float:
        chosen, places = pattern.some(), [pattern.place(i) for i in pattern.some()]
        size = pattern.block_bytes
        far = [source[i * size : (i + 1) * size] for i in chosen]
        pairs = list(zip(places, far, strict=True) if is_read else zip(far, places, strict=True))
        started_s = time.perf_counter()
        for to, from_ in pairs:
            to[:] = from_
        return time.perf_counter() - started_s

    return copy


def payload_of(segment: Segment, info: NodeInfo) -> ByteArray:
    """The payload part of a node's segment, mapped."""
    return segment.view[geometry(info.segment_bytes, info.unit_bytes).payload_offset_bytes :]


class RawNixl:
    """NIXL with nothing around it: prepared lists, one handle per batch, as its users write it."""

    def __init__(self, info: NodeInfo, pattern: Pattern) -> None:
        self._pattern = pattern
        self._agent = make_agent(f"raw-{secrets.token_hex(4)}", has_progress_thread=False)
        size, local = pattern.block_bytes, pattern.local
        address = int(local.ctypes.data)
        self._agent.register_memory([(address, local.nbytes, 0, "")], "DRAM")
        peer = self._agent.add_remote_agent(info.agent_metadata)
        self._agent.make_connection(peer)
        payload = info.base_address
        payload += geometry(info.segment_bytes, info.unit_bytes).payload_offset_bytes
        self._here = self._list("NIXL_INIT_AGENT", address, size, local.nbytes // size)
        self._there = self._list(peer, payload, size, pattern.blocks)

    def _list(self, agent: object, address: int, size: int, count: int) -> object:
        grid = np.array([[address, size, 0, size, count]], np.uint64)
        return self._agent.prep_xfer_dlist(agent, grid, mem_type="DRAM")

    def transfer(self, operation: str) -> float:
        far = np.array(self._pattern.some(), np.int32)
        near = np.array(self._pattern.some(), np.int32)
        started_s = time.perf_counter()
        handle = self._agent.make_prepped_xfer(operation, self._here, near, self._there, far)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        return time.perf_counter() - started_s
