"""Client of the directory: one synchronous method per verb, thread-safe.

Each call has a deadline (wire/request_reply.py). A call that timed out may or may not have taken
effect. Leases expire, and commits and registrations can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from mooncake_store.block_keys import check_keys
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import AccessRefused, EpochPassed, RequestInvalid, StoreUnavailable
from mooncake_store.layout import Geometry
from mooncake_store.records.blocks import Allocation, BlockPage, Copy, ReservedCommit, Slot, Spill
from mooncake_store.records.events import Snapshot
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.records.status import DirectoryStats
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.addresses import ELECTED
from mooncake_store.wire.request_reply import Connection, Requester, ZeroMqConnection
from mooncake_store.wire.unix_socket import UnixConnection, direct_path

if TYPE_CHECKING:
    from mooncake_store.directory.election import ElectedAddress, Leader

log = logging.getLogger("mooncake_store.client")
T = TypeVar("T")


def _elected_address(address: str) -> ElectedAddress | None:
    if not address.startswith(ELECTED):
        return None
    # Imported with etcd only, because the module needs `requests`.
    from mooncake_store.directory.election import ElectedAddress

    return ElectedAddress(address)


class DirectoryClient:
    """Verbs of `Directory` (core/directory.py) over ZeroMQ; thread-safe, one request at a time.
    Verbs without a docstring behave as documented there."""

    def __init__(self, address: str, timeout_s: float = 2.0) -> None:
        assert timeout_s > 0
        self.address = address
        self.timeout_s = timeout_s
        self._elected = _elected_address(address)
        self._direct_path = "" if self._elected else direct_path(address)
        self._requester = Requester(
            f"the directory at {address}",
            "is it running, and is the address right?",
            self._connect,
            is_in_order=True,
        )

    # ---- storage nodes

    def register_node(self, info: NodeInfo) -> int:
        return self._ask(protocol.RegisterNode(info))

    def node_report(self, node_id: str, incarnation: str, epoch: int = 0) -> bool:
        return self._ask(protocol.NodeReport(node_id, incarnation, epoch))

    def deregister_node(self, node_id: str, incarnation: str) -> bool:
        return self._ask(protocol.DeregisterNode(node_id, incarnation))

    def nodes(self) -> list[NodeInfo]:
        return self._ask(protocol.Nodes())

    def attach(self, node_id: str, fingerprint: str, block_bytes: int) -> Geometry:
        return self._ask(protocol.Attach(node_id, fingerprint, block_bytes))

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
        request = protocol.Allocate(
            node_id, list(keys), owner, lease_s, ephemeral, size_bytes, tenant
        )
        asked_s = boot_s()
        given = self._ask(request)
        return replace(given, asked_s=asked_s) if given.begin_s else given

    def may_write(self, given: Allocation, owner: str, lease_s: float) -> bool:
        """Whether the writer may write the bytes, now that it has marked the slot headers.

        False: too late, another directory may have granted the slots to another writer. In time
        (Allocation.begin_s), no other directory leads yet. Whatever happens afterwards, the next
        directory finds the marked headers and quarantines the slots (inventory.py).

        The check covers a stopped process and a sleeping machine. It does not cover a paused
        virtual machine, all of whose clocks stop: such a writer may mark slots of another writer.
        Its commit is rejected by the epoch. Readers detect its bytes as a miss by checksum, and
        nearly always by generation (docs/decisions/0026).
        """
        if not given.begin_s or boot_s() - given.asked_s <= given.begin_s:
            return True
        granted = [slot for slot in given.slots if slot is not None]
        if not granted:
            return True
        try:
            return self.renew(owner, lease_s, granted[0].epoch)
        except (EpochPassed, StoreUnavailable) as error:
            log.warning("owner=%s marked its slots too late: %s", owner, error)
            return False

    def commit(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        lease_s: float,
        epoch: int = 0,
    ) -> list[bool]:
        """Commit written blocks (key, slot, generation, checksum); False for each late one.
        `epoch`: of the slots. All commits are late when another directory leads by now."""
        try:
            return self._ask(protocol.Commit(node_id, list(blocks), owner, lease_s, epoch))
        except EpochPassed as error:
            log.warning("owner=%s commits %d blocks too late: %s", owner, len(blocks), error)
            return [False] * len(blocks)

    def commit_reserved(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        size_bytes: int,
        slots: int,
        lease_s: float,
        epoch: int = 0,
        tenant: str = "",
    ) -> ReservedCommit:
        """Commit (key, slot, generation, checksum) in reserved slots; reserve up to `slots` more.
        EpochPassed when another directory leads by now."""
        request = protocol.CommitReserved(
            node_id, list(blocks), owner, size_bytes, slots, lease_s, epoch, tenant
        )
        return self._ask(request)

    def abandon(self, slots: Sequence[Slot], owner: str) -> int:
        return self._ask(protocol.Abandon(list(slots), owner))

    def lookup(
        self, keys: Sequence[bytes], owner: str, lease_s: float, prefix_only: bool = True
    ) -> list[tuple[Copy, ...]]:
        return self._ask(protocol.Lookup(list(keys), owner, lease_s, prefix_only))

    def drop_copy(self, key: bytes, node_id: str, generation: int) -> bool:
        return self._ask(protocol.DropCopy(key, node_id, generation))

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)
        packed = b"".join(keys)
        return list(map(bool, bytearray(self._ask(protocol.Exist(packed)))))

    def used(self, keys: bytes) -> None:
        """Record reads of these blocks (keys of 16 bytes each, joined) that needed no lookup. Does
        not wait for the answer. If the message is lost, the blocks count as slightly colder."""
        self._requester.send(protocol.Used(keys), self.timeout_s)

    def remove(self, keys: Sequence[bytes], node_id: str = "") -> list[bool]:
        return self._ask(protocol.Remove(list(keys), node_id))

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float = 0.0) -> list[bool]:
        return self._ask(protocol.PinKeys(list(keys), kind, ttl_s))

    # ---- admin

    def adopt(
        self,
        node_id: str,
        incarnation: str,
        blocks: Sequence[tuple[bytes, int, int, int, int, int]],
        is_last: bool,
        epoch: int = 0,
    ) -> int:
        return self._ask(protocol.Adopt(node_id, incarnation, list(blocks), is_last, epoch))

    def take_spills(
        self, node_id: str, owner: str, blocks_max: int, lease_s: float, epoch: int = 0
    ) -> list[Spill]:
        request = protocol.TakeSpills(node_id, owner, blocks_max, lease_s, epoch)
        return self._ask(request)

    def drain(self, node_id: str, is_on: bool = True) -> None:
        self._ask(protocol.DrainNode(node_id, is_on))

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool = False
    ) -> list[tuple[bytes, Copy]]:
        return self._ask(protocol.BlocksOn(node_id, blocks_max, only_here))

    def place(self, keys: Sequence[bytes], excluded: Sequence[str] = ()) -> list[str]:
        return self._ask(protocol.PlaceKeys(list(keys), list(excluded)))

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        self._ask(protocol.SetQuota(tenant, quota_bytes))

    # ---- leases

    def renew(self, owner: str, lease_s: float, epoch: int = 0) -> bool:
        return self._ask(protocol.Renew(owner, lease_s, epoch))

    def release(self, owner: str) -> bool:
        return self._ask(protocol.Release(owner))

    def release_later(self, owner: str) -> None:
        """`release` without waiting for the answer. If the message is lost, the lease expires."""
        self._requester.send(protocol.Release(owner), self.timeout_s)

    # ---- workers

    def register_worker(self, info: WorkerInfo) -> None:
        """FingerprintMismatch when its KV does not match that of the registered workers."""
        self._ask(protocol.RegisterWorker(info))

    def worker_report(self, report: WorkerReport) -> bool:
        return self._ask(protocol.ReportWorker(report))

    def deregister_worker(self, worker_id: str, incarnation: str) -> bool:
        return self._ask(protocol.DeregisterWorker(worker_id, incarnation))

    def workers(self) -> list[WorkerInfo]:
        return self._ask(protocol.Workers())

    # ---- frontends

    def note_routed(self, frontend: str, number: int, notes: bytes) -> None:
        self._ask(protocol.NoteRouted(frontend, number, notes))

    # ---- the outside view

    def snapshot(self, with_blocks: bool = True) -> Snapshot:
        return self._ask(protocol.TakeSnapshot(with_blocks))

    def index_page(self, first: int, blocks_max: int) -> BlockPage:
        """Up to `blocks_max` blocks from number `first` on, and whether they are the last."""
        return self._ask(protocol.IndexPage(first, blocks_max))

    def stats(self) -> DirectoryStats:
        return self._ask(protocol.Stats())

    # ---- the socket

    def close(self) -> None:
        self._requester.close()

    def __enter__(self) -> DirectoryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_elected(self) -> bool:
        """Whether the address names an election instead of a directory."""
        return self._elected is not None

    def leader(self) -> Leader:
        """The current leader of an election; NoLeader, EtcdFailed. Not cached."""
        assert self._elected is not None, f"no directory is elected at {self.address}"
        return self._elected.leader()

    def disconnect(self) -> None:
        """Reconnect at the next request, to the leader at that time."""
        self._requester.disconnect()

    def _ask(self, request: protocol.DirectoryVerb[T]) -> T:
        try:
            return self._requester.ask(request, self.timeout_s)
        except (StoreUnavailable, AccessRefused):  # the directory may have lost the lead
            self._requester.disconnect()
            raise

    def _connect(self, context: zmq.Context[Any]) -> Connection:
        if self._direct_path:
            return UnixConnection(self._direct_path)
        address = self._elected.find() if self._elected else self.address
        has_moved = self._elected.has_moved if self._elected else None
        try:
            return ZeroMqConnection(context, address, has_moved, f"the directory at {address}")
        except zmq.ZMQError as error:
            raise RequestInvalid(
                f"{address!r} is no address of a directory ({error}): use ipc:///path/to/it "
                "(at most 100 characters), tcp://host:port or etcd://host:port/prefix"
            ) from error
