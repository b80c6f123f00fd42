"""NIXL transport: one-sided reads and writes (RDMA, CMA between processes, or TCP).

CMA is the kernel's copy between two processes of a host. An agent is an endpoint of NIXL.

Lanes: a lane is one NIXL agent with a lock around each of its calls. Over CMA a post copies all
bytes before it returns (the GIL is released), so one agent serves one thread. Two threads moved 9.7
GB/s through one locked agent and 17.8 GB/s through two (64 spans of 128 KiB, not in the CPU's
cache). A thread that finds every lane busy makes another lane, if the transport has fewer than
LANES_MAX. Over TCP a post returns at once, and the lock is free between polls.

Orphans: a transfer that misses its deadline cannot be revoked. NIXL writes to the target even after
the handle is released and the peer removed (measured). So the transfer becomes an *orphan*: later
calls poll it until it ends, and pending_targets() lists the local memory that it may still write.

Freezing: agents here have no progress thread, so bytes over TCP arrive only while an agent is
polled. A transfer over TCP can therefore be stopped. Its lane is *frozen*: its agent is never
called again, and another lane replaces it. An agent cannot be destroyed (nixl_agent.py), so a
frozen agent and its connections remain until the process exits. A process freezes at most
FROZEN_MAX agents. Freezing protects only local memory: bytes of a write that the kernel has taken
may still reach the node when the network works again.

Connecting: NIXL may take two minutes to connect to a node that does not answer, and the lane is
blocked for that time. So a separate thread first tests whether the node's host answers, and then
connects. It connects one lane at a time to a node, preferably a lane whose transfers no caller
awaits. While a lane has been connecting for longer than CONNECT_S_MAX, it is *stuck*. For each
stuck lane, up to STUCK_MAX, the transport may have one lane more than LANES_MAX.

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
from mooncake_store.transports.nixl_lane import AgentLane, Region, Transfer, is_reached
from mooncake_store.transports.transport import LocalSpan, TransferBatch, Transport

LANES_MAX = 4
STUCK_MAX = 8  # further lanes, in place of lanes that are stuck connecting
FROZEN_MAX = 32  # agents of this process
SPIN_S = 0.002  # polling does not sleep for this long; a few MB move over TCP in this time
POLL_S = 0.0001  # polling interval after SPIN_S, so that a silent peer does not cost a core
CONNECT_S_MAX = 2.0  # a call waits at most this long for a connection
LOCK_S_MAX = 0.05  # maximum wait for a lane's lock; connecting or a long copy may hold it longer

_keeping = threading.Lock()
_spare: list[AgentLane] = []  # closed without errors: the next transport reuses them
_abandoned: list[AgentLane] = []  # closed while a transfer was in flight or the lane was locked
_frozen: list[AgentLane] = []  # of all transports of this process


class LaneFrozen(TransferFailed):
    """The lane was frozen because of another transfer. No more bytes of this transfer arrive in
    local memory."""


class PostedTransfer(NamedTuple):
    batch: TransferBatch
    lane: AgentLane
    transfer: Transfer

    @property
    def is_done(self) -> bool:
        return self.transfer.is_done


def frozen_agents() -> int:
    return len(_frozen)


def pause(idle_since_s: float) -> None:
    """Wait before the next poll: only yield the CPU during the first SPIN_S after `idle_since_s`
    (time.monotonic()), then sleep for POLL_S."""
    time.sleep(0.0 if time.monotonic() < idle_since_s + SPIN_S else POLL_S)


class NixlTransport(Transport):
    """See transport.Transport. `devices`: the network cards that its agents use."""

    name = "nixl"

    def __init__(self, devices: AgentDevices = ALL_DEVICES) -> None:
        super().__init__()
        self._devices = devices
        self._lock = threading.Lock()  # guards _regions, _lanes and the making of lanes
        self._regions: list[Region] = []
        self._names = itertools.count()
        self._prefix = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._is_closed = False
        # agent_name -> event of the connecting thread; set when its attempt has ended
        self._connecting: dict[str, threading.Event] = {}
        self._lanes = [self._new_lane()]

    def register(self, buffer: ByteArray) -> None:
        self.remember(buffer)
        self._take_lane(time.monotonic() + 60.0).release()  # raises now if registration fails

    def remember(self, buffer: ByteArray) -> None:
        """Note the buffer. Each lane registers it when the lane is next taken for a transfer."""
        assert buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
        with self._lock:
            self._regions = [*self._regions, Region(buffer)]

    def make_lanes(self, count: int) -> None:
        """Make lanes up to `count` now. Each lane has about ten file descriptors."""
        assert 1 <= count <= LANES_MAX, count
        with self._lock:
            while not self._is_closed and len(self._lanes) < count:
                self._lanes.append(self._new_lane())

    def unregister(self, buffer: ByteArray) -> None:
        address = int(buffer.ctypes.data)
        with self._lock:
            gone = [region for region in self._regions if region.address == address]
            self._regions = [region for region in self._regions if region.address != address]
            lanes = list(self._lanes)
        for lane in lanes:
            lane.unregister_later(gone, LOCK_S_MAX)

    def _each_lane(self) -> Iterator[AgentLane]:
        """Lock and yield each lane, except frozen lanes and lanes locked longer than LOCK_S_MAX."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            if not lane.lock.acquire(timeout=LOCK_S_MAX):
                continue  # for example, the lane is connecting to a node that does not answer
            try:
                if not lane.is_frozen:
                    yield lane
            finally:
                lane.release()

    def reaches(self, node: NodeInfo, is_same_host: bool) -> bool:
        return bool(node.agent_name) and (is_same_host or not node.is_agent_local)

    def keeps_order(self, node: NodeInfo) -> bool:
        """True if the bytes of a transfer with this node arrive in the order of its spans. This is
        so over CMA, where the posting thread copies span by span (docs/decisions/0031). CMA is in
        use if all long transfers so far were complete when their post returned."""
        with self._lock:
            peers = [lane.peer(node) for lane in self._lanes]
        found = [peer.is_copied_at_once for peer in peers if peer is not None]
        return True in found and False not in found

    def _transfer(self, batch: TransferBatch) -> None:
        self.move(batch)

    def move(self, batch: TransferBatch) -> None:
        """Start a transfer and poll it to its end. The caller has checked the spans and counts the
        transfer."""
        posted = self.begin(batch)
        began_s = time.monotonic()
        while not posted.is_done:
            if time.monotonic() >= batch.until_s:
                self.leave(posted)
                return
            pause(began_s)
            self.poll(posted)

    def begin(self, batch: TransferBatch) -> PostedTransfer:
        """Start a transfer, whose spans have been checked. It may complete during this call."""
        while True:
            lane = self._take_lane(batch.until_s, batch.node)
            try:
                lane.reap()
                if lane.peer(batch.node) is not None:
                    return PostedTransfer(batch, lane, lane.post(batch))
            finally:
                lane.release()
            self._connect(batch.node, batch.until_s, lane)

    def poll(self, posted: PostedTransfer) -> bool:
        """Returns True if the transfer is complete. Raises TransferFailed if it failed, and its
        subclass LaneFrozen if its lane was frozen."""
        lane = posted.lane
        is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
        try:
            if lane.is_frozen and not posted.is_done:
                raise LaneFrozen("the lane was frozen")
            if is_ours:
                lane.poll(posted.transfer)
        finally:
            if is_ours:
                lane.release()
        return posted.is_done

    def leave(self, posted: PostedTransfer) -> None:
        """Poll once more, after the deadline. If the transfer is still in flight, make it an orphan
        and raise TransferTimeout."""
        if self.poll(posted):
            return
        is_ours = posted.lane.lock.acquire(timeout=LOCK_S_MAX)
        # Safe without the lock: an append is atomic, and `AgentLane.reap` does not release the GIL
        # between its last look at the list and the assignment of the new list.
        posted.lane.orphans.append(posted.transfer)
        if is_ours:
            posted.lane.release()
        raise TransferTimeout(
            f"node {posted.batch.node.node_id} did not transfer all bytes within the deadline: it "
            "is stopped, unreachable or overloaded; late bytes may still change the targets"
        )

    def freeze(self, node_id: str) -> bool:
        """Freeze the lanes with transfers of this node in flight; disconnect the other lanes from
        it. True: no more bytes of these transfers arrive in local memory. False: a lane cannot be
        frozen, so this lane and those after it are unchanged. A lane cannot be frozen if FROZEN_MAX
        agents are frozen, or if it also has transfers with other nodes and may use RDMA."""
        with self._lock:
            lanes = list(self._lanes)
        if not all(_stop_transfers(lane, node_id) for lane in lanes):
            return False
        with self._lock:
            self._lanes = [lane for lane in self._lanes if not lane.is_frozen]
        return True

    def has_late_reads(self, node: NodeInfo, target: ByteArray) -> bool:
        """True if a timed-out read of this node may still write to this memory."""
        self.pending_targets()  # also drops orphans that have ended
        with self._lock:
            orphans = [orphan for lane in self._lanes for orphan in lane.orphans]
        return any(
            orphan.peer.agent_name == node.agent_name
            and any(buffer is target for buffer, _ in orphan.targets)
            for orphan in orphans
        )

    def check(self) -> None:
        """Check that registered memory is in `_regions` or used by a transfer in flight."""
        for lane in self._each_lane():
            lane.check(self._regions)

    def _take_lane(self, until_s: float, node: NodeInfo | None = None) -> AgentLane:
        """A lane with its lock held and every buffer registered, preferably connected to `node`."""
        lane = self._locked_lane(until_s, node)
        while lane.is_frozen:  # frozen while this thread waited for the lock
            lane.release()
            lane = self._locked_lane(until_s, node)
        try:
            # If another thread removes a region now, lane.release() unregisters it again.
            lane.register(self._regions)
        except BaseException:
            lane.release()
            raise
        return lane

    def _locked_lane(self, until_s: float, node: NodeInfo | None) -> AgentLane:
        for turn in itertools.count(threading.get_ident()):
            with self._lock:
                self._lanes = [lane for lane in self._lanes if not lane.is_frozen]
                if self._is_closed:
                    raise TransferFailed("this transport is closed")
                lanes = self._lanes
                lane = self._free_lane(node)
            if lane is not None:
                return lane
            # All lanes are busy. Each thread starts at a lane of its own, so that the threads wait
            # at different lanes.
            lane = lanes[turn % len(lanes)]
            left_s = until_s - time.monotonic()
            if lane.lock.acquire(timeout=max(0.0, min(left_s, LOCK_S_MAX))):
                return lane
            if left_s <= 0:
                break
        raise TransferTimeout("every NIXL lane of this transport is busy; nothing was transferred")

    def _free_lane(self, node: NodeInfo | None) -> AgentLane | None:
        """Lock and return a free lane, or None if all are busy. Needs `_lock`. Prefers a lane that
        is connected to the node. A lane without a connection must connect first, which may block
        it for long. So the next best lane is one on which no caller waits for a transfer."""
        peers = [lane for lane in self._lanes if node is not None and lane.peer(node) is not None]
        for lane in [*peers, *(lane for lane in self._lanes if not node or not lane.is_awaited)]:
            if lane.lock.acquire(blocking=False):
                return lane
        stuck_since_s = time.monotonic() - CONNECT_S_MAX
        stuck = sum(lane.adding_since_s < stuck_since_s for lane in self._lanes)
        if len(self._lanes) < LANES_MAX + min(stuck, STUCK_MAX):
            lane = self._new_lane()
            lane.lock.acquire()
            self._lanes = [*self._lanes, lane]
            return lane
        return next((lane for lane in self._lanes if lane.lock.acquire(blocking=False)), None)

    def _connect(self, node: NodeInfo, until_s: float, wanted: AgentLane | None = None) -> None:
        """Connect a lane (`wanted` if it is free) to this node in another thread, and wait for at
        most CONNECT_S_MAX."""
        left_s = max(0.0, min(until_s - time.monotonic(), CONNECT_S_MAX))
        failures: list[Exception] = []
        has_ended = threading.Event()
        other = self._connecting.setdefault(node.agent_name, has_ended)  # atomic, so needs no lock
        if other is not has_ended:
            if not other.wait(left_s):
                raise _not_connected(node, left_s)
            return  # the caller checks whether the lane is connected now

        def connect() -> None:
            try:
                if not is_reached(node.data_address):
                    raise TransferFailed(
                        f"node {node.node_id}: nothing answers at {node.data_address}"
                    )
                if wanted is not None and wanted.lock.acquire(timeout=LOCK_S_MAX):
                    lane = wanted
                else:  # for example, the wanted lane is connecting to another node
                    lane = self._take_lane(until_s, node)
                try:
                    if not lane.is_frozen:
                        lane.connect(node)
                finally:
                    lane.release()
            except Exception as error:  # Catch all: the waiting thread raises it
                failures.append(error)
            finally:
                del self._connecting[node.agent_name]
                has_ended.set()

        try:
            threading.Thread(target=connect, name="connect", daemon=True).start()
        except RuntimeError as error:  # the process has reached its limit of threads
            del self._connecting[node.agent_name]
            has_ended.set()
            raise TransferFailed(f"node {node.node_id}: cannot connect: {error}") from error
        if not has_ended.wait(left_s):
            raise _not_connected(node, left_s)
        if failures:
            raise failures[0]

    def _new_lane(self) -> AgentLane:
        with _keeping:
            for lane in [lane for lane in _abandoned if lane.lock.acquire(blocking=False)]:
                if lane.close():
                    _abandoned.remove(lane)
                    if not lane.has_failed:
                        _spare.append(lane)
                lane.release()
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
                    lane.release()
            for orphan in list(lane.orphans):
                found += orphan.targets
        return found

    def disconnect(self, node_id: str) -> bool:
        with self._lock:
            lanes = [lane for lane in self._lanes if not lane.is_frozen]
        looked_at = []
        for lane in self._each_lane():
            lane.disconnect(node_id)
            looked_at.append(lane)
        return len(looked_at) >= len(lanes)

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
                    lane.release()
            with _keeping:
                if not is_empty:
                    _abandoned.append(lane)
                elif not lane.has_failed:
                    _spare.append(lane)


def _stop_transfers(lane: AgentLane, node_id: str) -> bool:
    """Stop all transfers with the node on this lane. False: the lane cannot be frozen."""
    while True:
        is_ours = lane.lock.acquire(timeout=LOCK_S_MAX)
        try:
            if is_ours and not lane.is_frozen and not lane.has_transfers(node_id):
                lane.disconnect(node_id)
                return True
            with _keeping:
                if lane.is_frozen:
                    return True
                if len(_frozen) >= FROZEN_MAX:
                    return False
                stop = lane.freeze if is_ours else lane.freeze_while_adding
                is_frozen = stop(node_id)
                if is_frozen:
                    _frozen.append(lane)
                if is_frozen is not None:
                    return is_frozen
        finally:
            if is_ours:
                lane.release()
        # Another thread is in another call of the agent, so bytes may arrive. Try again.


def _not_connected(node: NodeInfo, waited_s: float) -> TransferFailed:
    return TransferFailed(
        f"node {node.node_id}: no connection within {waited_s:.2g} s; nothing was transferred"
    )
