"""The directory as other processes see it: one method per verb, synchronous, any thread.

Each call has a deadline; when it passes, the caller gets StoreUnavailable and goes on without the
store. The socket is then thrown away with what it had queued, so a directory that comes back does
not carry out requests that nobody waits for any more. A call that ran into its deadline may or may
not have taken effect: leases end by themselves, and commits and registrations can be repeated.

Not here: following changes (event_feed.py), moving bytes (store.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from mooncake_store.block_keys import check_keys
from mooncake_store.directory.core.spills import Spill
from mooncake_store.errors import RequestInvalid, StoreUnavailable
from mooncake_store.layout import Geometry
from mooncake_store.records.blocks import Allocation, Copy, Slot
from mooncake_store.records.events import Snapshot
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.records.status import DirectoryStats
from mooncake_store.wire import protocol
from mooncake_store.wire.direct_socket import DirectClient, direct_path
from mooncake_store.wire.protocol import Kind

if TYPE_CHECKING:
    from mooncake_store.directory.election import ElectedAddress

T = TypeVar("T")
ELECTED = "etcd://"  # an address that names an election (election.py)
ELECTED_CHECK_S = 1.0  # a silent leader may have been replaced
Decoder = msgspec.msgpack.Decoder

_NONE = Decoder(type(None))
_BOOL = Decoder(bool)
_BOOLS = Decoder(list[bool])
_INT = Decoder(int)
_GEOMETRY = Decoder(Geometry)
_ALLOCATION = Decoder(Allocation)
_PLACES = Decoder(list[tuple[Copy, ...]])
_NODES = Decoder(list[NodeInfo])
_BYTES = Decoder(bytes)
_NAMES = Decoder(list[str])
_SPILLS = Decoder(list[Spill])
_BLOCKS = Decoder(list[tuple[bytes, Copy]])
_WORKERS = Decoder(list[WorkerInfo])
_SNAPSHOT = Decoder(Snapshot)
_STATS = Decoder(DirectoryStats)


def _elected_address(address: str) -> ElectedAddress | None:
    if not address.startswith(ELECTED):
        return None
    from mooncake_store.directory.election import (
        ElectedAddress,  # with etcd only: it needs `requests`
    )

    return ElectedAddress(address)


class DirectoryClient:
    """Verbs of `Directory` over ZeroMQ. One request at a time; share it between threads freely."""

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        assert timeout_s > 0
        self.address = address
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._elected = _elected_address(address)
        path = "" if self._elected else direct_path(address)
        self._direct = DirectClient(path) if path else None
        self._number = 0
        self._is_closed = False

    # ---- storage nodes

    def register_node(self, info: NodeInfo) -> None:
        self._ask(protocol.RegisterNode(info), _NONE)

    def node_report(self, node_id: str, incarnation: str) -> bool:
        """False: the directory does not know this incarnation; register again."""
        return self._ask(protocol.NodeReport(node_id, incarnation), _BOOL)

    def deregister_node(self, node_id: str, incarnation: str) -> bool:
        return self._ask(protocol.DeregisterNode(node_id, incarnation), _BOOL)

    def nodes(self) -> list[NodeInfo]:
        return self._ask(protocol.Nodes(), _NODES)

    def attach(self, node_id: str, fingerprint: str, block_bytes: int) -> Geometry:
        """Where slots lie in the node. Again after NodeNotAttached: something has restarted."""
        return self._ask(protocol.Attach(node_id, fingerprint, block_bytes), _GEOMETRY)

    # ---- blocks

    def allocate(
        self,
        node_id: str,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool = False,
        size_bytes: int = 0,
        tenant: str = "",
    ) -> Allocation:
        """A fresh slot for each key that this node neither has nor is being written."""
        request = protocol.Allocate(
            node_id, list(keys), owner, lease_s, ephemeral, size_bytes, tenant
        )
        return self._ask(request, _ALLOCATION)

    def commit(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        lease_s: float,
    ) -> list[bool]:
        """(key, slot, generation, checksum) are written; False for those that came too late."""
        return self._ask(protocol.Commit(node_id, list(blocks), owner, lease_s), _BOOLS)

    def abandon(self, slots: Sequence[Slot], owner: str) -> int:
        """Free slots that will not be committed and to which nothing is in flight."""
        return self._ask(protocol.Abandon(list(slots), owner), _INT)

    def lookup(
        self, keys: Sequence[bytes], owner: str, lease_s: float, prefix_only: bool = True
    ) -> list[tuple[Copy, ...]]:
        """The ready copies of each key, up to the first that has none; leased to `owner`."""
        return self._ask(protocol.Lookup(list(keys), owner, lease_s, prefix_only), _PLACES)

    def drop_copy(self, key: bytes, node_id: str, generation: int) -> bool:
        """This copy proved missing or corrupt."""
        return self._ask(protocol.DropCopy(key, node_id, generation), _BOOL)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Is each of these keys anywhere? No lease, and no use of the block."""
        check_keys(keys)
        packed = b"".join(keys)
        return list(map(bool, bytearray(self._ask(protocol.Exist(packed), _BYTES))))

    def remove(self, keys: Sequence[bytes], node_id: str = "") -> list[bool]:
        """Give up the copies of these keys (on one node only); False for what is in use."""
        return self._ask(protocol.Remove(list(keys), node_id), _BOOLS)

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float = 0.0) -> list[bool]:
        """ "soft" (for ttl_s), "hard" or "none"; False where a hard pin found no room."""
        return self._ask(protocol.PinKeys(list(keys), kind, ttl_s), _BOOLS)

    # ---- upkeep

    def adopt(
        self,
        node_id: str,
        incarnation: str,
        blocks: Sequence[tuple[bytes, int, int, int, int, int]],
        is_last: bool,
    ) -> int:
        """What a node holds: (key, slot, generation, checksum, size_bytes, state) each."""
        return self._ask(protocol.Adopt(node_id, incarnation, list(blocks), is_last), _INT)

    def take_spills(self, node_id: str, owner: str, blocks_max: int, lease_s: float) -> list[Spill]:
        """What this node should copy to its SSD next, and where to."""
        return self._ask(protocol.TakeSpills(node_id, owner, blocks_max, lease_s), _SPILLS)

    def drain(self, node_id: str, is_on: bool = True) -> None:
        """Give this node no new blocks (or some again)."""
        self._ask(protocol.Drain(node_id, is_on), _NONE)

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool = False
    ) -> list[tuple[bytes, Copy]]:
        """Ready blocks of a node; `only_here`: those that no other node of its tier has."""
        return self._ask(protocol.BlocksOn(node_id, blocks_max, only_here), _BLOCKS)

    def place(self, keys: Sequence[bytes], excluded: Sequence[str] = ()) -> list[str]:
        """Which node each key, the first of a chain, should be put on; "" when none takes any."""
        return self._ask(protocol.Place(list(keys), list(excluded)), _NAMES)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """0 takes the quota away."""
        self._ask(protocol.SetQuota(tenant, quota_bytes), _NONE)

    # ---- leases

    def renew(self, owner: str, lease_s: float) -> bool:
        """False: this owner leases nothing (any more)."""
        return self._ask(protocol.Renew(owner, lease_s), _BOOL)

    def release(self, owner: str) -> bool:
        """`owner` is done with everything."""
        return self._ask(protocol.Release(owner), _BOOL)

    def release_later(self, owner: str) -> None:
        """As `release`, without waiting for the answer; when it is lost, the lease runs out."""
        body = msgspec.msgpack.encode(protocol.Release(owner))
        if not self._lock.acquire(timeout=self.timeout_s):
            return
        try:
            if not self._is_closed:
                self._number += 1  # its answer is passed over by the next exchange
                frames = [protocol.pack_header(Kind.REQUEST, self._number), body]
                if self._direct is not None:
                    self._direct.tell(frames)
                    return
                with contextlib.suppress(zmq.Again, StoreUnavailable):
                    self._connected().send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._lock.release()

    # ---- workers

    def register_worker(self, info: WorkerInfo) -> None:
        """FingerprintMismatch when its KV does not fit the workers that are there."""
        self._ask(protocol.RegisterWorker(info), _NONE)

    def worker_report(self, report: WorkerReport) -> bool:
        """False: the directory does not know this incarnation; register again."""
        return self._ask(protocol.ReportWorker(report), _BOOL)

    def deregister_worker(self, worker_id: str, incarnation: str) -> bool:
        return self._ask(protocol.DeregisterWorker(worker_id, incarnation), _BOOL)

    def workers(self) -> list[WorkerInfo]:
        return self._ask(protocol.Workers(), _WORKERS)

    # ---- the outside view

    def snapshot(self) -> Snapshot:
        return self._ask(protocol.TakeSnapshot(), _SNAPSHOT)

    def stats(self) -> DirectoryStats:
        return self._ask(protocol.Stats(), _STATS)

    # ---- the socket

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._disconnect()
            self._context.term()

    def __enter__(self) -> DirectoryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_elected(self) -> bool:
        """Is it for an election to say where the directory is?"""
        return self._elected is not None

    def _ask(self, request: protocol.AnyRequest, decoder: Decoder[T]) -> T:
        deadline_s = time.monotonic() + self.timeout_s
        body = msgspec.msgpack.encode(request)
        if not self._lock.acquire(timeout=self.timeout_s):
            raise self._unavailable(request, "other threads were asking it all that time")
        try:
            if self._is_closed:
                raise StoreUnavailable(f"this client of the directory at {self.address} is closed")
            reply = self._exchange(body, deadline_s)
        finally:
            self._lock.release()
        if reply is None:
            raise self._unavailable(request, "is it running, and is the address right?")
        try:
            return protocol.result_of(reply, decoder, f"the directory at {self.address}")
        except StoreUnavailable:  # it does not lead any more
            with self._lock:
                self._disconnect()
            raise

    def _exchange(self, body: bytes, deadline_s: float) -> list[bytes] | None:
        """Send one request and wait for its reply; None when the deadline passed."""
        self._number += 1
        frames = [protocol.pack_header(Kind.REQUEST, self._number), body]
        if self._direct is not None:
            return self._direct.exchange(frames, self._number, deadline_s)
        socket = self._connected()
        socket.send_multipart(frames)
        while (left_s := deadline_s - time.monotonic()) > 0:
            step_s = min(left_s, ELECTED_CHECK_S) if self._elected else left_s
            if socket.poll(math.ceil(step_s * 1000)):
                reply = socket.recv_multipart()
                if protocol.number_of(reply[0]) == self._number:
                    return reply
            elif self._elected is not None and self._elected.has_moved():
                break  # who leads now has not heard of this request
        self._disconnect()
        return None

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            address = self._elected.find() if self._elected else self.address
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            try:
                self._socket.connect(address)
            except zmq.ZMQError as error:
                self._disconnect()
                raise RequestInvalid(
                    f"{address!r} is no address of a directory ({error}): use ipc:///path/to/it "
                    "(at most 100 characters), tcp://host:port or etcd://host:port/prefix"
                ) from error
        return self._socket

    def _disconnect(self) -> None:
        if self._direct is not None:
            self._direct.close()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _unavailable(self, request: protocol.AnyRequest, why: str) -> StoreUnavailable:
        verb = request.__struct_config__.tag
        return StoreUnavailable(
            f"the directory at {self.address} did not answer {verb} within {self.timeout_s:g} s; "
            f"{why}"
        )
