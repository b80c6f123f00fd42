"""Transport over NIXL: one-sided reads and writes (RDMA, CMA between processes, or TCP).

A transport owns up to LANES_MAX *lanes*: a lane is one NIXL agent with a lock around each of its
calls. Over CMA a post copies all bytes before it returns (the GIL is released), so one agent
serves one thread: two threads moved 9.7 GB/s through one locked agent and 17.8 GB/s through two
(128 KiB x 64, cold). A further lane is made when a thread finds every lane busy, unless
`make_lanes` has made them before. Over TCP a post returns at once and the lock is free between
polls.

A transfer that misses its deadline cannot be revoked: NIXL writes into the target even after the
handle is released and the peer removed (measured). So its handle and buffers become an *orphan*,
polled until it resolves; pending_targets() says which local memory is not safe meanwhile. Agents
here have no progress thread, so bytes over TCP arrive only while somebody polls.

Not here: making agents (nixl_agent.py), one lane's calls (nixl_lane.py).
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time

import numpy as np

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_lane import AgentLane, Region, Transfer
from mooncake_store.transports.transport import LocalSpan, TransferBatch, Transport

LANES_MAX = 4
SPIN_S = 0.002  # poll without sleeping for this long: a TCP transfer of a few MB
POLL_S = 0.0001  # then this often: a silent peer must not cost a core

_keeping = threading.Lock()
_spare: list[AgentLane] = []  # closed in good health: the next transport uses them
_abandoned: list[AgentLane] = []  # closed with orphans: their memory must outlive them


class NixlTransport(Transport):
    """See transport.Transport."""

    name = "nixl"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # of the two lists and of making lanes
        self._regions: list[Region] = []
        self._names = itertools.count()
        self._prefix = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._lanes = [self._new_lane()]

    def register(self, buffer: ByteArray) -> None:
        assert buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
        with self._lock:
            self._regions = [*self._regions, Region(buffer)]
        self._take_lane(time.monotonic() + 60.0).lock.release()  # complain now if it cannot be

    def make_lanes(self, count: int) -> None:
        """Have so many now, and not in the middle of a request: each has some ten descriptors."""
        assert 1 <= count <= LANES_MAX, count
        with self._lock:
            while 0 < len(self._lanes) < count:
                self._lanes.append(self._new_lane())

    def unregister(self, buffer: ByteArray) -> None:
        address = int(buffer.ctypes.data)
        with self._lock:
            gone = [region for region in self._regions if region.address == address]
            self._regions = [region for region in self._regions if region.address != address]
            lanes = list(self._lanes)
        for lane in lanes:
            with lane.lock:
                for region in gone:
                    lane.unregister(region)

    def connect(self, node: NodeInfo) -> None:
        lane = self._take_lane(time.monotonic() + 60.0)
        try:
            lane.connect(node)
        finally:
            lane.lock.release()

    def _transfer(self, batch: TransferBatch) -> None:
        lane = self._take_lane(batch.until_s)
        try:
            lane.reap()
            transfer = lane.post(batch)
        finally:
            lane.lock.release()
        spin_until_s = time.monotonic() + SPIN_S
        while not transfer.is_done:
            now_s = time.monotonic()
            if now_s >= batch.until_s:
                self._give_up(lane, batch.node, transfer)
                return
            time.sleep(0.0 if now_s < spin_until_s else POLL_S)
            with lane.lock:
                lane.poll(transfer)

    def _give_up(self, lane: AgentLane, node: NodeInfo, transfer: Transfer) -> None:
        with lane.lock:
            lane.poll(transfer)
            if transfer.is_done:
                return  # at the last moment
            lane.orphans.append(transfer)
        raise TransferTimeout(
            f"node {node.node_id} did not move the bytes within the deadline: it is frozen, cut "
            "off or overloaded; they may still arrive, so the targets stay quarantined"
        )

    def _take_lane(self, until_s: float) -> AgentLane:
        """A lane with its lock held and every buffer registered."""
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.lock.acquire(False)), None)
            if lane is None and 0 < len(self._lanes) < LANES_MAX:
                lane = self._new_lane()
                lane.lock.acquire()
                self._lanes.append(lane)
            lanes = self._lanes
        if not lanes:
            raise TransferFailed("this transport is closed")
        if lane is None:  # all busy: wait for the one this thread would rather have
            lane = lanes[threading.get_ident() % len(lanes)]
            if not lane.lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
                raise TransferTimeout("every NIXL lane of this process is busy; nothing was moved")
        try:
            lane.register(self._regions)  # read under the lane's lock: what is taken out meanwhile
            # is unregistered by whoever did it, as soon as he gets that lock
        except BaseException:
            lane.lock.release()
            raise
        return lane

    def _new_lane(self) -> AgentLane:
        with _keeping:
            if _spare:
                return _spare.pop()
        return AgentLane(f"{self._prefix}-{next(self._names)}")

    def pending_targets(self) -> list[LocalSpan]:
        found: list[LocalSpan] = []
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            if not lane.orphans:
                continue
            with lane.lock:
                lane.reap()
                for orphan in lane.orphans:
                    found += orphan.targets
        return found

    def disconnect(self, node_id: str) -> None:
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            with lane.lock:
                lane.disconnect(node_id)

    def close(self) -> None:
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            with lane.lock:
                is_empty = lane.close()
            with _keeping:
                if not is_empty:
                    _abandoned.append(lane)
                elif not lane.has_failed:
                    _spare.append(lane)
