"""Restores blocks that only an SSD has into DRAM, group by group.

This process allocates slots in the node's DRAM, leased to the request. The node reads the blocks
from its SSD into these slots and verifies them. This process commits them, so the next reader finds
them in DRAM. While the node reads one group, the caller processes the previous group.

Not here: reading the file (the node), moving what is in DRAM (block_reader.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import NodeUnknown, QuotaExceeded, StoreError, StoreFull
from mooncake_store.records.blocks import Allocation, Copy, Slot
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.wire.node_protocol import BLOCKS_MAX, NodeClient, Restore

log = logging.getLogger("mooncake_store.store")
LEASE_MARGIN_S = 5.0  # a lease ends this long after the deadline of the transfer that it protects
GROUP_BYTES = 32 * 1024**2  # smaller groups leave the disk's queue empty and were slower
ANOTHERS_POLL_S = 0.005  # poll interval for a block that another process is restoring
Group = list[tuple[int, Restore]]  # (index in `copies` of `restore`, how to restore the block)


class LeaseTerms(NamedTuple):
    owner: str  # of the leases
    lease_s: float  # of each new lease
    until_s: float  # deadline of the transfer, by time.monotonic()


class Restorer:
    """Thread-safe. Raises errors of the directory; a block that cannot be read is omitted."""

    def __init__(self, directory: DirectoryClient, nodes: KnownNodes) -> None:
        self._directory = directory
        self._nodes = nodes
        self._lock = threading.Lock()
        self._clients: dict[str, NodeClient] = {}  # by node_id; of the node's newest incarnation
        self._users = Counter[NodeClient]()
        self._pool: ThreadPoolExecutor | None = None
        self.restored_blocks = 0  # blocks that nodes restored into DRAM for this process

    @contextlib.contextmanager
    def client(self, node: NodeInfo) -> Iterator[NodeClient]:
        """The control socket of a node. The socket of an earlier incarnation, with its threads and
        descriptors, is closed when its last user is done."""
        with self._lock:
            before = self._clients.get(node.node_id)
            is_same = before is not None and before.address == node.control
            client = before if before and is_same else NodeClient(node.control)
            self._clients[node.node_id] = client
            self._users[client] += 1
            is_unused = before is not None and not is_same and not self._users[before]
        if before is not None and is_unused:
            before.close()
        try:
            yield client
        finally:
            with self._lock:
                self._users[client] -= 1
                is_unused = not self._users[client]
                if is_unused:
                    del self._users[client]
                is_unused = is_unused and self._clients.get(node.node_id) is not client
            if is_unused:
                client.close()

    def restore(
        self, keys: Sequence[bytes], copies: Sequence[Copy], terms: LeaseTerms
    ) -> Iterator[list[tuple[int, Copy]]]:
        """Restore blocks whose `copies` are on SSDs. Yields groups of (index, copy in DRAM) as they
        arrive, leased to the owner. Blocks that could not be read are omitted."""
        by_node: dict[tuple[str, int], list[int]] = {}
        for index, copy in enumerate(copies):
            by_node.setdefault((copy.node_id, copy.size_bytes), []).append(index)
        for (ssd_id, size_bytes), indices in by_node.items():
            node_id = ssd_id.removesuffix(SSD_SUFFIX)
            info = self._nodes.find(node_id)
            if info is None or not info.control:
                continue
            chosen = [keys[index] for index in indices]
            given = self._allocate(node_id, chosen, size_bytes, terms)
            todo = [
                (index, _restore(keys[index], copies[index], slot))
                for index, slot in zip(indices, given.slots, strict=True)
                if slot is not None
            ]
            epoch = max((slot.epoch for slot in given.slots if slot is not None), default=0)
            with self.client(info) as client:
                yield from self._load(client, node_id, todo, terms, epoch)
            covered = zip(indices[: given.covered], given.slots, strict=False)
            awaited = [index for index, slot in covered if slot is None]
            if awaited:
                yield self._await_others(node_id, keys, awaited, terms)

    def _allocate(
        self, node_id: str, keys: list[bytes], size_bytes: int, terms: LeaseTerms
    ) -> Allocation:
        for _ in range(2):
            try:
                return self._directory.allocate(
                    node_id, keys, terms.owner, terms.lease_s, size_bytes=size_bytes
                )
            except NodeUnknown:  # this incarnation is not attached yet
                try:
                    self._directory.attach(node_id, "restore", size_bytes)
                except StoreError:
                    break
            except (StoreFull, QuotaExceeded) as error:
                log.warning("node_id=%s cannot restore: %s", node_id, error)
                break
        return Allocation((None,) * len(keys), 0)

    def _load(
        self, client: NodeClient, node_id: str, todo: Group, terms: LeaseTerms, epoch: int
    ) -> Iterator[list[tuple[int, Copy]]]:
        groups = _grouped(todo)
        loaded: Group = []
        loading = self._begin(client, groups, 0, terms.until_s, epoch)
        try:
            for at, group in enumerate(groups):
                assert loading is not None
                results = loading.result()
                # Start the next group only now, because two groups at once would share the disk
                # and both arrive late.
                loading = self._begin(client, groups, at + 1, terms.until_s, epoch)
                if results is None:
                    continue  # bytes may still arrive, so the lease on those slots must expire
                arrived = [each for each, is_done in zip(group, results, strict=True) if is_done]
                failed = [each for each, is_done in zip(group, results, strict=True) if not is_done]
                if failed:
                    slots = [Slot(node_id, each.slot, each.generation) for _, each in failed]
                    self._directory.abandon(slots, terms.owner)
                loaded += arrived
                with self._lock:
                    self.restored_blocks += len(arrived)
                if arrived:
                    yield [
                        (index, Copy(node_id, at.slot, at.generation, at.checksum, at.size_bytes))
                        for index, at in arrived
                    ]
        finally:
            rows = [(each.key, each.slot, each.generation, each.checksum) for _, each in loaded]
            if rows:
                self._directory.commit(node_id, rows, terms.owner, terms.lease_s, epoch=epoch)

    def _begin(
        self, client: NodeClient, groups: list[Group], at: int, until_s: float, epoch: int
    ) -> Future[list[bool] | None] | None:
        if at == len(groups):
            return None
        blocks = [restore for _, restore in groups[at]]
        return self._executor().submit(self._ask, client, blocks, until_s, epoch)

    def _ask(
        self, client: NodeClient, blocks: list[Restore], until_s: float, epoch: int
    ) -> list[bool] | None:
        """True per block that is in DRAM now. None: unknown; bytes may still arrive."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return [False] * len(blocks)
        try:
            return client.load(blocks, left_s, epoch)
        except StoreError as error:
            log.warning("restoring %d blocks failed: %s", len(blocks), error)
            return None

    def _await_others(
        self, node_id: str, keys: Sequence[bytes], indices: list[int], terms: LeaseTerms
    ) -> list[tuple[int, Copy]]:
        """Wait for blocks that got no slot, because another process has restored them or is
        restoring them. Blocks that are not in DRAM by the deadline are omitted."""
        found: dict[int, Copy] = {}
        while len(found) < len(indices) and time.monotonic() < terms.until_s:
            missing = [index for index in indices if index not in found]
            chosen = [keys[index] for index in missing]
            looked_up = self._directory.lookup(
                chosen, terms.owner, terms.lease_s, prefix_only=False
            )
            for index, copies in zip(missing, looked_up, strict=True):
                on_node = [copy for copy in copies if copy.node_id == node_id]
                if on_node:
                    found[index] = on_node[0]
            if len(found) < len(indices):
                time.sleep(ANOTHERS_POLL_S)
        return list(found.items())

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(2, "store-restore")
            return self._pool

    def close(self) -> None:
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
            pool, self._pool = self._pool, None
        for client in clients:
            client.close()
        if pool is not None:
            pool.shutdown(wait=True)


def _restore(key: bytes, copy: Copy, slot: Slot) -> Restore:
    return Restore(
        key, copy.slot, copy.generation, slot.slot, slot.generation, copy.checksum, copy.size_bytes
    )


def _grouped(todo: Group) -> list[Group]:
    groups: list[Group] = []
    group_bytes = GROUP_BYTES
    for each in todo:
        if group_bytes >= GROUP_BYTES or len(groups[-1]) == BLOCKS_MAX:
            groups.append([])
            group_bytes = 0
        groups[-1].append(each)
        group_bytes += each[1].size_bytes
    return groups
