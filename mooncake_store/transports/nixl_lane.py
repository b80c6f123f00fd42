"""One NIXL agent as an initiator: its peers, its registered memory, its transfers.

A *lane* is one NIXL agent with a lock around each of its calls. An *orphan* is a transfer that its
caller no longer waits for, because the deadline passed. NIXL cannot revoke a transfer, so the lane
polls an orphan until it ends.

The agent has no locks of its own. So every method needs `lock` held, except those whose docstring
contains "Needs no lock". The lock covers single calls, not whole transfers, so several transfers
may be in flight on one lane. `release` first unregisters the memory that other threads could not
unregister (unregister_later), then releases the lock.

NIXL's descriptors (address, length, device of a span) are passed with each transfer. Prepared
descriptors would save 0.05 us per span, but finding their indices costs 6 us or more per batch
(bench/RESULTS.md).

Not here: deadlines and the choice of a lane (nixl_transport.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake_store.errors import TransferFailed
from mooncake_store.memory.buffers import ByteArray, address_of
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.nixl_agent import (
    ALL_DEVICES,
    AgentDevices,
    NixlUnavailable,
    make_agent,
    nixl_errors,
)
from mooncake_store.transports.transport import LocalSpan, TransferBatch

REFUSED_S = 1.0  # pause after a failed attempt to connect, which leaks a socket inside UCX
REFUSED_MAX = 64  # nodes whose pause is remembered; the oldest is dropped
REACH_S_MAX = 0.5  # seconds to wait for an answer of a node's host
LONG_BYTES = 128 * 1024  # exceeds a socket buffer, so a TCP post returns before all is sent


def is_reached(address: str, source: str = "") -> bool:
    """True if the host of `address` (HOST:PORT) accepts or refuses a connection; also for address
    "". `source`: the local address to use. NIXL itself blocks two minutes without an answer."""
    host, _, port = address.partition("#")[0].rpartition(":")  # the part after # is a public key
    if not host:
        return True
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), REACH_S_MAX, (source, 0) if source else None
        ).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


class Region:
    """A registered local buffer; the reference to the array keeps its memory alive."""

    def __init__(self, buffer: ByteArray) -> None:
        self.buffer = buffer
        self.address = int(buffer.ctypes.data)
        self.size_bytes = int(buffer.nbytes)

    def holds(self, address: int, size_bytes: int) -> bool:
        return 0 <= address - self.address <= self.size_bytes - size_bytes


@dataclass(slots=True)
class NixlPeer:
    """One incarnation of a node, to which this lane's agent has connected."""

    node_id: str
    agent_name: str  # unique to the incarnation
    transfers: int = 0  # in flight, orphans included; the peer can be removed only at 0
    is_broken: bool = False  # the connection failed; the next use connects again
    has_moved: bool = False  # a transfer has ended, so the connection has been established
    # True: every long transfer was complete when its post returned (CMA). False: one was not.
    # None: no long transfer yet on an established connection.
    is_copied_at_once: bool | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    handle: Any  # of NIXL
    peer: NixlPeer
    targets: list[LocalSpan]  # local spans that a read fills; empty for a write
    regions: frozenset[Region]  # registered memory that contains its local spans
    # keeps the local buffers alive until the transfer ends
    memory: list[LocalSpan] = field(default_factory=list)
    is_done: bool = False  # ended, with or without success


class AgentLane:
    """One NIXL agent and its lock; see the module docstring."""

    def __init__(self, name: str, devices: AgentDevices = ALL_DEVICES) -> None:
        self.lock = threading.Lock()
        self.devices = devices
        self.orphans: list[Transfer] = []
        self.has_failed = False  # True: a transfer failed, so no later transport uses this lane
        self.is_frozen = False  # see `freeze`
        # time.monotonic() at the start of the current add_remote_agent; inf: none is in progress
        self.adding_since_s = float("inf")
        self._adding = threading.Lock()  # guards adding_since_s, and freezing during an add
        self._errors = nixl_errors()
        self._failures: tuple[type[Exception], ...] = (*self._errors, TransferFailed)
        self._agent = make_agent(name, has_progress_thread=False, devices=devices)
        self._registered: dict[Region, Any] = {}
        self._under_way: set[Transfer] = set()  # orphans included
        self._leaving: set[Region] = set()  # to be unregistered when their last transfer has ended
        self._unwanted: deque[Region] = deque()  # to be unregistered before the lock is released
        self._peers: dict[str, NixlPeer] = {}  # node_id -> its current incarnation
        # earlier incarnations that still have transfers in flight
        self._retired: list[NixlPeer] = []
        self._refused: dict[str, float] = {}  # agent name -> earliest time.monotonic() of a retry

    def register(self, regions: Sequence[Region]) -> None:
        """Register the regions that this agent has not registered yet."""
        for region in regions:
            if region not in self._registered:
                whole = [(region.address, region.size_bytes, 0, "")]
                try:
                    self._registered[region] = self._agent.register_memory(whole, "DRAM")
                except self._errors as error:
                    raise NixlUnavailable(
                        f"cannot register {region.size_bytes} bytes with NIXL ({error}): RDMA "
                        "needs as much locked memory, see ulimit -l"
                    ) from error

    def unregister_later(self, regions: Sequence[Region], wait_s: float) -> None:
        """Unregister these regions, now or when the lock is next released. Needs no lock."""
        self._unwanted.extend(regions)
        if self.lock.acquire(timeout=wait_s):
            self.release()

    def release(self) -> None:
        while True:
            if self.is_frozen:
                self._unregister_all()
            while self._unwanted:
                self._unregister(self._unwanted.popleft())
            self.lock.release()
            # If a region was queued after the loop above, this or another thread locks again.
            if not self._unwanted or not self.lock.acquire(blocking=False):
                return

    def _unregister(self, region: Region) -> None:
        """Unregister when the region has no transfer in flight, because NIXL uses the registration
        until then."""
        if any(region in transfer.regions for transfer in self._under_way):
            self._leaving.add(region)
            return
        self._leaving.discard(region)
        memory = self._registered.pop(region, None)
        if memory is not None:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(memory)

    def _unregister_all(self) -> None:
        """Unregister all memory. NIXL's deregister_memory moves no bytes of transfers in flight, so
        it is safe on a frozen lane."""
        for memory in self._registered.values():
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(memory)
        self._registered.clear()
        self._leaving.clear()

    def check(self, regions: Sequence[Region]) -> None:
        in_use = {region for transfer in self._under_way for region in transfer.regions}
        left = self._registered.keys() - set(regions)
        assert left <= in_use, f"{len(left - in_use)} regions are registered without a use"
        assert left == self._leaving, f"{len(left)} to unregister, {len(self._leaving)} noted"
        assert not self.is_frozen or not self._registered, "a frozen lane has registered memory"

    def peer(self, node: NodeInfo) -> NixlPeer | None:
        """The peer of this incarnation; None: not connected, or its connection is broken."""
        peer = self._peers.get(node.node_id)
        is_usable = peer and not peer.is_broken and peer.agent_name == node.agent_name
        return peer if is_usable else None

    def connect(self, node: NodeInfo) -> None:
        """Connect to this incarnation, in place of an earlier one or a broken connection. The call
        may take two minutes if the node does not answer."""
        if self.peer(node) is None:
            self.disconnect(node.node_id)
            self._remove_retired()
            if any(old.agent_name == node.agent_name for old in self._retired):
                raise TransferFailed(
                    f"node {node.node_id}: its connection broke and earlier transfers have not "
                    "ended yet; try again"
                )
            self._peers[node.node_id] = NixlPeer(node.node_id, self._add(node))

    def _add(self, node: NodeInfo) -> str:
        if not node.agent_metadata:
            raise TransferFailed(f"node {node.node_id} serves mapped memory only, not NIXL")
        if time.monotonic() < self._refused.get(node.agent_name, 0.0):
            raise TransferFailed(f"node {node.node_id} could not be connected to a moment ago")
        try:
            name = self._add_remote(node.agent_metadata)
            if self.is_frozen:
                raise TransferFailed(
                    f"node {node.node_id}: its NIXL agent was abandoned; try again"
                )
            self._agent.make_connection(name)
        except self._errors as error:
            while len(self._refused) >= REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
            self._refused[node.agent_name] = time.monotonic() + REFUSED_S
            raise TransferFailed(f"cannot connect to node {node.node_id}: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def _add_remote(self, metadata: bytes) -> bytes | str:
        """Call NIXL's add_remote_agent; another thread may freeze the lane during the call."""
        with self._adding:
            self.adding_since_s = time.monotonic()
        try:
            name: bytes | str = self._agent.add_remote_agent(metadata)
            return name
        finally:
            with self._adding:
                self.adding_since_s = float("inf")

    def disconnect(self, node_id: str) -> None:
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            self._retired.append(peer)
            self._remove_retired()

    def _remove_retired(self) -> None:
        self.reap()
        for peer in [peer for peer in self._retired if not peer.transfers]:
            self._retired.remove(peer)
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(peer.agent_name)

    def has_transfers(self, node_id: str) -> bool:
        """True if any transfer with an incarnation of the node is in flight, orphans included."""
        return any(transfer.peer.node_id == node_id for transfer in self._under_way)

    @property
    def is_awaited(self) -> bool:
        """True if a caller waits for a transfer of this lane. Needs no lock."""
        return len(self._under_way) > len(self.orphans)

    def freeze(self, node_id: str) -> bool:
        """Never call this agent again, except to unregister memory. The agent has no thread of its
        own, so its connections are not read any more. Without RDMA, no byte of its transfers then
        reaches local memory, and that memory may be reused. Bytes of a write may still reach the
        node. The caller must have checked that transfers with `node_id` use no RDMA. Returns False
        and changes nothing if an RDMA card may still write to local memory for another node."""
        others = any(transfer.peer.node_id != node_id for transfer in self._under_way)
        if others and not self.devices.is_tcp_only:
            return False
        self.is_frozen = True
        for transfer in self._under_way:
            # releasing a handle would read from the connections, so the handle is kept alive
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(transfer.handle))
        self._under_way.clear()
        self.orphans = []
        return True

    def freeze_while_adding(self, node_id: str) -> bool | None:
        """Freeze a lane whose lock holder is in add_remote_agent. This is safe, because that call
        moves no bytes of other peers, and the lock holder then only releases the lock. Returns None
        if the lock holder is in another call, else the result of `freeze`. Needs no lock."""
        with self._adding:
            is_adding = self.adding_since_s != float("inf")
            return self.freeze(node_id) if is_adding else None

    def post(self, batch: TransferBatch) -> Transfer:
        """Start a transfer, whose spans have been checked. It may complete during this call."""
        node, remote, local, _, is_read = batch
        peer = self.peer(node)
        if peer is None:
            raise TransferFailed(f"node {node.node_id}: its connection broke a moment ago")
        starts, regions = self._addresses(local)
        rows = np.zeros((2, len(remote), 3), np.uint64)  # address, length, device
        rows[0, :, 0] = starts
        rows[1, :, 0] = [offset + node.base_address for offset, _ in remote]
        rows[:, :, 1] = lengths = [length for _, length in remote]
        try:
            handle = self._agent.initialize_xfer(
                "READ" if is_read else "WRITE",
                self._agent.get_xfer_descs(rows[0], "DRAM"),
                self._agent.get_xfer_descs(rows[1], "DRAM"),
                peer.agent_name,
            )
            targets = list(local) if is_read else []
            transfer = Transfer(handle, peer, targets, regions, list(local))
            peer.transfers += 1
            self._under_way.add(transfer)
        except self._errors as error:
            raise TransferFailed(
                f"NIXL rejected a transfer of {len(remote)} spans with node {node.node_id}: {error}"
            ) from error
        was_wired_up = peer.has_moved
        self._step(transfer, self._agent.transfer)
        if was_wired_up and max(lengths) >= LONG_BYTES:
            peer.is_copied_at_once = transfer.is_done and peer.is_copied_at_once is not False
        return transfer

    def poll(self, transfer: Transfer) -> None:
        if not transfer.is_done:
            self._step(transfer, self._agent.check_xfer_state)

    def _step(self, transfer: Transfer, call: Any) -> None:
        """Post or poll. An exception and the state "ERR" both mean that the transfer failed."""
        try:
            state = call(transfer.handle)
            if state == "ERR":
                raise TransferFailed("NIXL reports an error")
        except self._failures as error:
            self._end(transfer)
            transfer.peer.is_broken = self.has_failed = True
            raise TransferFailed(
                f"transfer with {transfer.peer.agent_name} failed: {error}; is the node gone or "
                "cut off?"
            ) from error
        if state == "DONE":
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        transfer.is_done = transfer.peer.has_moved = True
        transfer.peer.transfers -= 1
        self._release(transfer.handle)
        self._under_way.discard(transfer)
        for region in transfer.regions & self._leaving:
            self._unregister(region)

    def reap(self) -> None:
        """Poll the orphans and forget those that have ended, with or without success."""
        for orphan in self.orphans:
            with contextlib.suppress(TransferFailed):
                self.poll(orphan)
        self.orphans = [orphan for orphan in self.orphans if not orphan.is_done]

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*self._errors):
            handle.release()

    def _addresses(self, local: Sequence[LocalSpan]) -> tuple[list[int], frozenset[Region]]:
        """The start addresses of these spans, and the regions that contain them."""
        known: dict[int, int] = {}  # id() of a buffer -> its address
        regions: set[Region] = set()
        region: Region | None = None  # of the previous buffer, nearly always the right one
        found: list[int] = []
        for buffer, (offset_bytes, _) in local:
            address = known.get(id(buffer))
            if address is None:
                address = known[id(buffer)] = address_of(buffer)
                if region is None or not region.holds(address, buffer.nbytes):
                    region = self._region_of(address, buffer.nbytes)
                    regions.add(region)
            found.append(address + offset_bytes)
        return found, frozenset(regions)

    def _region_of(self, address: int, size_bytes: int) -> Region:
        for region in self._registered:
            if region.holds(address, size_bytes):
                return region
        raise TransferFailed(
            f"a buffer of {size_bytes} bytes is not registered: call register() with the "
            "memory it is a view of"
        )

    def close(self) -> bool:
        """Disconnect all peers and unregister all memory; the agent is kept. Does nothing and
        returns False if a transfer is in flight."""
        self.reap()
        if self._under_way:
            return False
        for peer in [*self._peers.values(), *self._retired]:
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(peer.agent_name)
        self._unregister_all()
        self._peers.clear()
        self._retired.clear()
        self._refused.clear()
        return True
