"""Client of the directory: one synchronous method per verb, thread-safe.

Each call has a deadline (wire/request_reply.py). A call that timed out may have taken effect. This
is harmless, because leases expire, registrations can be repeated, and Directory.commit rejects a
second commit of a block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import zmq

from mooncake_store.block_keys import check_keys
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import AccessRefused, EpochPassed, RequestInvalid, StoreUnavailable
from mooncake_store.records.blocks import Allocation, Copy
from mooncake_store.wire import directory_protocol as protocol
from mooncake_store.wire.addresses import ELECTED
from mooncake_store.wire.request_reply import Connection, Requester, ZeroMqConnection
from mooncake_store.wire.unix_socket import UnixConnection, direct_path

if TYPE_CHECKING:
    from mooncake_store.directory.election import ElectedAddress, Leader

log = logging.getLogger("mooncake_store.client")
P = ParamSpec("P")
T = TypeVar("T")


def _elected_address(address: str) -> ElectedAddress | None:
    if not address.startswith(ELECTED):
        return None
    # Imported only for elections, because the module needs the package `requests`.
    from mooncake_store.directory.election import ElectedAddress

    return ElectedAddress(address)


def _verb(
    request: Callable[P, protocol.DirectoryVerb[T]],
) -> Callable[Concatenate[DirectoryClient, P], T]:
    """A method whose arguments are the fields of this request, and which returns its result."""

    def ask(self: DirectoryClient, /, *fields: P.args, **named: P.kwargs) -> T:
        return self._ask(request(*fields, **named))

    return ask


class DirectoryClient:
    """Verbs of `Directory` over ZeroMQ or a Unix socket. Thread-safe, one request at a time.
    core/directory.py documents the verbs that have no docstring here. Arguments are the fields of
    the request (wire/directory_protocol.py)."""

    # storage nodes
    register_node = _verb(protocol.RegisterNode)
    node_report = _verb(protocol.NodeReport)
    deregister_node = _verb(protocol.DeregisterNode)
    nodes = _verb(protocol.Nodes)
    attach = _verb(protocol.Attach)
    # blocks and leases
    commit_reserved = _verb(protocol.CommitReserved)
    abandon = _verb(protocol.Abandon)
    drop_copy = _verb(protocol.DropCopy)
    remove = _verb(protocol.Remove)
    renew = _verb(protocol.Renew)
    release = _verb(protocol.Release)
    # workers and frontends
    register_worker = _verb(protocol.RegisterWorker)
    worker_report = _verb(protocol.ReportWorker)
    deregister_worker = _verb(protocol.DeregisterWorker)
    workers = _verb(protocol.Workers)
    note_routed = _verb(protocol.NoteRouted)
    # admin and views
    adopt = _verb(protocol.Adopt)
    take_spills = _verb(protocol.TakeSpills)
    set_quota = _verb(protocol.SetQuota)
    snapshot = _verb(protocol.TakeSnapshot)
    index_page = _verb(protocol.IndexPage)
    stats = _verb(protocol.Stats)

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
        request = protocol.Allocate(node_id, keys, owner, lease_s, ephemeral, size_bytes, tenant)
        asked_s = boot_s()
        given = self._ask(request)
        return replace(given, asked_s=asked_s) if given.begin_s else given

    def may_write(self, given: Allocation, owner: str, lease_s: float) -> bool:
        """Whether the writer may mark the slot headers as "writing", or, after it, write the bytes.

        True within Allocation.begin_s after the request, because no other directory leads yet; the
        next directory will find the marks and quarantine the slots (inventory.py). Later, True only
        if the lease can be renewed. False: another writer may have these slots.

        The check covers a stopped process and a sleeping machine. It does not cover a paused
        virtual machine, because all of its clocks stop. A writer there may mark slots of another
        writer. Its commit is then rejected by the epoch. Readers detect its bytes by checksum, and
        nearly always by generation, and count a miss (docs/decisions/0026).
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
        """Commit written blocks (key, slot, generation, checksum); False for each late block. All
        blocks are late if the directory of `epoch`, which granted the slots, no longer leads."""
        try:
            return self._ask(protocol.Commit(node_id, blocks, owner, lease_s, epoch))
        except EpochPassed as error:
            log.warning("owner=%s commits %d blocks too late: %s", owner, len(blocks), error)
            return [False] * len(blocks)

    def lookup(
        self, keys: Sequence[bytes], owner: str, lease_s: float, prefix_only: bool = True
    ) -> list[tuple[Copy, ...]]:
        return self._ask(protocol.Lookup(keys, owner, lease_s, prefix_only))

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)
        packed = b"".join(keys)
        return list(map(bool, bytearray(self._ask(protocol.Exist(packed)))))

    def used(self, keys: bytes) -> None:
        """Record reads of these blocks (keys of 16 bytes each, joined) without a lookup. Does not
        wait for an answer. If the message is lost, the blocks may be evicted earlier."""
        self._requester.send(protocol.Used(keys), self.timeout_s)

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float = 0.0) -> list[bool]:
        return self._ask(protocol.PinKeys(keys, kind, ttl_s))

    def drain(self, node_id: str, is_on: bool = True) -> None:
        self._ask(protocol.DrainNode(node_id, is_on))

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool = False
    ) -> list[tuple[bytes, Copy]]:
        return self._ask(protocol.BlocksOn(node_id, blocks_max, only_here))

    def place(self, keys: Sequence[bytes], excluded: Sequence[str] = ()) -> list[str]:
        return self._ask(protocol.PlaceKeys(keys, excluded))

    def release_later(self, owner: str) -> None:
        """`release` without waiting for an answer. If the message is lost, the leases expire."""
        self._requester.send(protocol.Release(owner), self.timeout_s)

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
        """The current leader of an election, read from etcd. Raises NoLeader or EtcdFailed."""
        assert self._elected is not None, f"no directory is elected at {self.address}"
        return self._elected.leader()

    def disconnect(self) -> None:
        """Close idle connections. The next request connects to the leader at that time."""
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
