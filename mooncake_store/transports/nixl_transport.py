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

Therefore a transfer over TCP can be revoked after all, at a price: its lane is *frozen*, so that
nobody calls its agent again, and another lane takes its position. An agent cannot be destroyed
(nixl_agent.py), so a frozen one stays, with its connections, until the process ends; a process
freezes FROZEN_MAX at most. Only the local side is safe then: what a write has handed to the kernel
may still reach the node when the network is there again.

To connect to a node that keeps silent may take NIXL two minutes, in which nobody can use the lane.
So another thread does it, and whoever wants the lock of just that lane waits LOCK_S_MAX at most.

Not here: making agents (nixl_agent.py), one lane's calls (nixl_lane.py), several network cards
(nic_transport.py).
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_agent import ALL_DEVICES, AgentDevices
from mooncake_store.transports.nixl_lane import AgentLane, Region, Transfer
from mooncake_store.transports.transport import LocalSpan, TransferBatch, Transport

LANES_MAX = 4
FROZEN_MAX = 32
SPIN_S = 0.002  # poll without sleeping for this long: a TCP transfer of a few MB
POLL_S = 0.0001  # then this often: a silent peer must not cost a core
CONNECT_S_MAX = 2.0  # a call waits so long for a connection, if its deadline allows
LOCK_S_MAX = 0.05  # of a lane; nobody has it for so long who does not connect

_keeping = threading.Lock()
_spare: list[AgentLane] = []  # closed in good health: the next transport uses them
_abandoned: list[AgentLane] = []  # closed with orphans: their memory must outlive them
_frozen: list[AgentLane] = []  # of transports that gave a path up


class LaneFrozen(TransferFailed):
    """Another transfer of this lane was given up, and the lane with it: nothing more arrives."""


class PostedTransfer(NamedTuple):
    """A transfer under way, and the lane that it is on."""

    batch: TransferBatch
    lane: AgentLane
    transfer: Transfer

    @property
    def is_done(self) -> bool:
        return self.transfer.is_done


def frozen_agents() -> int:
    """How many agents of this process were given up for good."""
    return len(_frozen)


def pause(idle_since_s: float) -> None:
    """Between two polls of something that has not moved since then (time.monotonic())."""
    time.sleep(0.0 if time.monotonic() < idle_since_s + SPIN_S else POLL_S)


class NixlTransport(Transport):
    """See transport.Transport. `devices`: the network cards that its agents use."""

    name = "nixl"

    def __init__(self, devices: AgentDevices = ALL_DEVICES) -> None:
        super().__init__()
        self._devices = devices
        self._lock = threading.Lock()  # of the two lists and of making lanes
        self._regions: list[Region] = []
        self._names = itertools.count()
        self._prefix = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_closed = False
        self._lanes = [self._new_lane()]

    def register(self, buffer: ByteArray) -> None:
        self.remember(buffer)
        self._take_lane(time.monotonic() + 60.0).lock.release()  # complain now if it cannot be

    def remember(self, buffer: ByteArray) -> None:
        """Register it with the next transfer."""
        assert buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
        with self._lock:
            self._regions = [*self._regions, Region(buffer)]

    def make_lanes(self, count: int) -> None:
        """Have so many now, and not in the middle of a request: each has some ten descriptors."""
        assert 1 <= count <= LANES_MAX, count
        with self._lock:
            while not self._is_closed and len(self._lanes) < count:
                self._lanes.append(self._new_lane())

    def unregister(self, buffer: ByteArray) -> None:
        address = int(buffer.ctypes.data)
        with self._lock:
            gone = [region for region in self._regions if region.address == address]
            self._regions = [region for region in self._regions if region.address != address]
        for lane in self._each_lane():
            for region in gone:
                lane.unregister(region)

    def _each_lane(self) -> Iterator[AgentLane]:
        """Each lane that is not frozen, with its lock held meanwhile."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            if not lane.lock.acquire(timeout=LOCK_S_MAX):
                continue  # it connects to a node that keeps silent
            try:
                if not lane.is_frozen:
                    yield lane
            finally:
                lane.lock.release()

    def connect(self, node: NodeInfo) -> None:
        until_s = time.monotonic() + CONNECT_S_MAX
        lane = self._take_lane(until_s)
        lane.lock.release()
        _connect(lane, node, until_s)

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        """Can NIXL move bytes between this process and the node?"""
        return bool(node.agent_name) and (is_same_host or not node.is_agent_local)

    def _transfer(self, batch: TransferBatch) -> None:
        self.move(batch)

    def move(self, batch: TransferBatch) -> None:
        """Move all of it; the spans have been checked, and somebody else counts."""
        posted = self.begin(batch)
        began_s = time.monotonic()
        while not posted.is_done:
            if time.monotonic() >= batch.until_s:
                self.leave(posted)
                return
            pause(began_s)
            self.poll(posted)

    def begin(self, batch: TransferBatch) -> PostedTransfer:
        """Start a transfer, whose spans have been checked; it may be done already."""
        lane = self._take_lane(batch.until_s)
        try:
            lane.reap()
            if lane.peer(batch.node) is not None:
                return PostedTransfer(batch, lane, lane.post(batch))
        finally:
            lane.lock.release()
        _connect(lane, batch.node, batch.until_s)
        if not lane.lock.acquire(timeout=max(0.0, batch.until_s - time.monotonic())):
            raise TransferTimeout("a NIXL lane connects to a silent node; nothing was moved")
        try:
            if lane.is_frozen:
                raise LaneFrozen("the path was given up before anything was posted")
            return PostedTransfer(batch, lane, lane.post(batch))
        finally:
            lane.lock.release()

    def poll(self, posted: PostedTransfer) -> bool:
        """Is it done? TransferFailed when it failed; LaneFrozen when it cannot end any more."""
        lane = posted.lane
        is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
        try:
            if lane.is_frozen and not posted.is_done:
                raise LaneFrozen("the path was given up")
            if is_ours:
                lane.poll(posted.transfer)
        finally:
            if is_ours:
                lane.lock.release()
        return posted.is_done

    def leave(self, posted: PostedTransfer) -> None:
        """Its deadline has passed: it becomes an orphan, and TransferTimeout says so.

        Nothing happens when it ends at this last moment.
        """
        if self.poll(posted):
            return
        is_ours = posted.lane.lock.acquire(timeout=LOCK_S_MAX)
        posted.lane.orphans.append(posted.transfer)  # who connects has looked at them before
        if is_ours:
            posted.lane.lock.release()
        raise TransferTimeout(
            f"node {posted.batch.node.node_id} did not move the bytes within the deadline: it is "
            "frozen, cut off or overloaded; they may still arrive, so the targets stay quarantined"
        )

    def freeze(self, node_id: str) -> bool:
        """Give up all that is under way with this node, and forget its connections.

        Nothing of it arrives in local memory after this. False: FROZEN_MAX agents are given up
        already, so nothing was done.
        """
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
            try:
                if is_ours and not lane.has_transfers(node_id):
                    lane.disconnect(node_id)
                elif not _freeze(lane):
                    return False
            finally:
                if is_ours:
                    lane.lock.release()
        with self._lock:
            self._lanes = [lane for lane in self._lanes if not lane.is_frozen]
        return True

    def _take_lane(self, until_s: float) -> AgentLane:
        """A lane with its lock held and every buffer registered."""
        lane = self._locked_lane(until_s)
        while lane.is_frozen:  # by somebody who had its lock a moment ago
            lane.lock.release()
            lane = self._locked_lane(until_s)
        try:
            lane.register(self._regions)  # read under the lane's lock: what is taken out meanwhile
            # is unregistered by whoever did it, as soon as he gets that lock
        except BaseException:
            lane.lock.release()
            raise
        return lane

    def _locked_lane(self, until_s: float) -> AgentLane:
        with self._lock:
            self._lanes = [lane for lane in self._lanes if not lane.is_frozen]
            lane = next((lane for lane in self._lanes if lane.lock.acquire(False)), None)
            if lane is None and not self._is_closed and len(self._lanes) < LANES_MAX:
                lane = self._new_lane()
                lane.lock.acquire()
                self._lanes.append(lane)
            lanes = self._lanes
        if not lanes:
            raise TransferFailed("this transport is closed")
        if lane is not None:
            return lane
        first = threading.get_ident()  # all busy: wait for the one this thread would rather have
        for turn in itertools.count(first):
            lane = lanes[turn % len(lanes)]
            left_s = until_s - time.monotonic()
            if lane.lock.acquire(timeout=max(0.0, min(left_s, LOCK_S_MAX))):
                return lane
            if left_s <= 0:
                break
        raise TransferTimeout("every NIXL lane of this process is busy; nothing was moved")

    def _new_lane(self) -> AgentLane:
        with _keeping:
            for lane in _spare:
                if lane.devices == self._devices:
                    _spare.remove(lane)
                    return lane
        return AgentLane(f"{self._prefix}-{next(self._names)}", self._devices)

    def pending_targets(self) -> list[LocalSpan]:
        found: list[LocalSpan] = []
        with self._lock:
            lanes = [lane for lane in self._lanes if lane.orphans]
        for lane in lanes:
            is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
            if is_ours:
                try:
                    if not lane.is_frozen:
                        lane.reap()
                finally:
                    lane.lock.release()
            for orphan in list(lane.orphans):
                found += orphan.targets
        return found

    def disconnect(self, node_id: str) -> None:
        for lane in self._each_lane():
            lane.disconnect(node_id)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
            try:
                if lane.is_frozen:
                    continue
                is_empty = is_ours and lane.close()
            finally:
                if is_ours:
                    lane.lock.release()
            with _keeping:
                if not is_empty:
                    _abandoned.append(lane)
                elif not lane.has_failed:
                    _spare.append(lane)


def _freeze(lane: AgentLane) -> bool:
    """Whoever has its lock meanwhile is connecting, and touches no transfer. False: too many."""
    with _keeping:
        if len(_frozen) >= FROZEN_MAX:
            return False
        if not lane.is_frozen:
            _frozen.append(lane)
            lane.freeze()
    return True


def _connect(lane: AgentLane, node: NodeInfo, until_s: float) -> None:
    """Have another thread connect the lane to this node, and wait for it, but not for ever."""
    failures: list[Exception] = []
    is_over = threading.Event()

    def connect() -> None:
        with lane.lock:
            try:
                if not lane.is_frozen:
                    lane.connect(node)
            except Exception as error:  # edge of this thread: the one that waits raises it
                failures.append(error)
        is_over.set()

    threading.Thread(target=connect, name="connect", daemon=True).start()
    left_s = max(0.0, until_s - time.monotonic())
    if not is_over.wait(min(left_s, CONNECT_S_MAX)):
        raise TransferFailed(
            f"node {node.node_id}: no connection within {min(left_s, CONNECT_S_MAX):.2g} s; "
            "nothing was moved"
        )
    if failures:
        raise failures[0]
