"""Ways to move a batch of blocks, each a function that returns its seconds.

`BATCH` blocks at random positions of one memory go to as many random positions of another. The
memory is larger than the CPU's cache, so each round reads uncached memory. Metadata calls are
included: a get asks the directory first, a put allocates before and commits after. `copying` and
`RawNixl` move the same pattern alone, the latter on a given number of lanes.

Several clients at once are a process each: it gets ready, waits for the others and works for a
while.

Not here: the comparisons (__main__.py).
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier

import numpy as np
import numpy.typing as npt

from mooncake_store.client.client import StoreClient
from mooncake_store.layout import geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.segment import Segment
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_agent import make_agent

MB = 2**20
BATCH = 16
WARM_ROUNDS = 3
TOGETHER_BYTES = 128 * MB  # of blocks of each concurrent client
TOGETHER_S, READY_S_MAX = 2.0, 60.0
Way = Callable[[], float]
Indices = npt.NDArray[np.int32]
_start: Barrier | None = None  # of the concurrent clients, in each of their processes


def pages(size_bytes: int, rng: np.random.Generator) -> ByteArray:
    """Memory whose pages have all been written."""
    return rng.integers(0, 256, size_bytes, dtype=np.uint8)


@dataclass(slots=True)
class Pattern:
    """`blocks` blocks of one size, their keys, and a local buffer of equally many positions."""

    block_bytes: int
    blocks: int
    local: ByteArray
    rng: np.random.Generator
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [secrets.token_bytes(16) for _ in range(self.blocks)]

    def position(self, index: int) -> ByteArray:
        start = index * self.block_bytes
        return self.local[start : start + self.block_bytes]

    def some(self) -> list[int]:
        found: list[int] = self.rng.choice(self.blocks, BATCH, replace=False).tolist()
        return found

    def some_positions(self) -> list[ByteArray]:
        return [self.position(index) for index in self.some()]


def fill(client: StoreClient, pattern: Pattern, node_id: str) -> None:
    """Put every block of the pattern on this node."""
    for start in range(0, pattern.blocks, BATCH):
        chosen = range(start, min(start + BATCH, pattern.blocks))
        stored = client.put(
            [pattern.keys[i] for i in chosen], [pattern.position(i) for i in chosen], node_id
        )
        if not all(stored):
            raise RuntimeError(f"{node_id} took {stored.count(True)} of {len(stored)} blocks")


def getting(client: StoreClient, pattern: Pattern) -> Way:
    return lambda: get_s(
        client, [pattern.keys[i] for i in pattern.some()], pattern.some_positions()
    )


def get_s(client: StoreClient, keys: list[bytes], targets: list[ByteArray]) -> float:
    started_s = time.perf_counter()
    arrived = client.get_into(keys, targets)
    seconds = time.perf_counter() - started_s
    assert all(arrived), f"{arrived.count(False)} of {BATCH} blocks missing"
    return seconds


def putting(client: StoreClient, pattern: Pattern, node_id: str) -> Way:
    """New keys each time; the blocks are removed outside of the measured time."""

    def put() -> float:
        keys = [secrets.token_bytes(16) for _ in range(BATCH)]
        sources = pattern.some_positions()
        started_s = time.perf_counter()
        stored = client.put(keys, sources, node_id)
        seconds = time.perf_counter() - started_s
        assert all(stored), f"{stored.count(False)} of {BATCH} blocks not stored"
        # The next put must not write to slots that this one has left in the CPU's cache, so half of
        # the blocks are kept until later.
        held.append(keys)
        if len(held) > 6:
            assert all(client.remove(held.pop(0)))
        return seconds

    held: list[list[bytes]] = []
    return put


def copying(source: ByteArray, pattern: Pattern, is_read: bool) -> Way:
    """memcpy between the local buffer and `source`, which has the same length."""

    def copy() -> float:
        chosen, positions = pattern.some(), pattern.some_positions()
        size = pattern.block_bytes
        far = [source[i * size : (i + 1) * size] for i in chosen]
        pairs = list(
            zip(positions, far, strict=True) if is_read else zip(far, positions, strict=True)
        )
        started_s = time.perf_counter()
        for to, from_ in pairs:
            to[:] = from_
        return time.perf_counter() - started_s

    return copy


def payload_of(segment: Segment, info: NodeInfo) -> ByteArray:
    """The payload part of a node's segment, mapped."""
    return segment.view[geometry(info.segment_bytes, info.unit_bytes).payload_offset_bytes :]


class RawNixl:
    """NIXL alone: prepared lists, one handle per batch and lane, as its users write it. A lane is
    an agent and a thread, because the waiting thread does the copying."""

    def __init__(self, info: NodeInfo, pattern: Pattern, lanes: int = 1) -> None:
        self._pattern = pattern
        self._lanes = [_RawLane(info, pattern) for _ in range(lanes)]
        self._threads = ThreadPoolExecutor(lanes)

    def transfer(self, operation: str) -> float:
        count = len(self._lanes)
        far = np.array_split(np.array(self._pattern.some(), np.int32), count)
        near = np.array_split(np.array(self._pattern.some(), np.int32), count)
        started_s = time.perf_counter()
        if count == 1:
            self._lanes[0].transfer(operation, far[0], near[0])
        else:
            moved = [
                self._threads.submit(lane.transfer, operation, there, here)
                for lane, there, here in zip(self._lanes, far, near, strict=True)
            ]
            for each in moved:
                each.result()
        return time.perf_counter() - started_s


class _RawLane:
    def __init__(self, info: NodeInfo, pattern: Pattern) -> None:
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

    def transfer(self, operation: str, far: Indices, near: Indices) -> None:
        handle = self._agent.make_prepped_xfer(operation, self._here, near, self._there, far)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()


def together(address: str, node_id: str, way: str, count: int, block_bytes: int) -> float:
    """Bytes per second of `count` clients that all get (or copy) at once."""
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(count)
    with ProcessPoolExecutor(count, spawn, _set_start, (start,)) as processes:
        rates = [
            processes.submit(_client_rate, address, node_id, way, number, block_bytes)
            for number in range(count)
        ]
        return sum(rate.result() for rate in rates)


def _set_start(start: Barrier) -> None:
    """A process receives a barrier only when it is created."""
    global _start
    _start = start


def _client_rate(address: str, node_id: str, way: str, number: int, block_bytes: int) -> float:
    """The rate of one concurrent client, in a process of its own."""
    rng = np.random.default_rng(number)
    blocks = TOGETHER_BYTES // block_bytes
    pattern = Pattern(block_bytes, blocks, pages(TOGETHER_BYTES, rng), rng)
    with StoreClient(address, node_id, threads=1) as client:  # a core each, as memcpy has
        if way == "get":
            client.register(pattern.local)
            fill(client, pattern, node_id)
            move = getting(client, pattern)
        else:
            move = copying(pages(pattern.local.nbytes, rng), pattern, is_read=True)
        for _ in range(WARM_ROUNDS):
            move()
        assert _start is not None
        _start.wait(READY_S_MAX)
        until_s, rounds, seconds = time.monotonic() + TOGETHER_S, 0, 0.0
        while time.monotonic() < until_s:
            seconds += move()
            rounds += 1
        if way == "get":
            client.remove(pattern.keys)
    return rounds * BATCH * block_bytes / seconds
