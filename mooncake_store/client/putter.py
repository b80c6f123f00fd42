"""Puts blocks of one size on one node: slots, bytes, commit.

What fails is told apart by what may still happen: after a failed transfer nothing is in flight, and
the slots go back at once; after a timeout bytes may still arrive, so the slots rest until the lease
ends.

Not here: the caller's arguments (client.py), moving the bytes (block_writer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mooncake_store.client.block_writer import BlockWriter, Write
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import NodeUnknown, TransferFailed, TransferTimeout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.registrations import Registrations
from mooncake_store.records.blocks import Allocation
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes

log = logging.getLogger("mooncake_store.client")
LEASE_MARGIN_S = 5.0  # a lease outlives the deadline of what it protects


class Putter:
    """Thread-safe."""

    def __init__(
        self,
        directory: DirectoryClient,
        nodes: KnownNodes,
        registrations: Registrations,
        writer: BlockWriter,
        tenant: str,
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._registrations = registrations
        self._writer = writer
        self._tenant = tenant
        self._attached: dict[str, str] = {}  # node_id -> the life of it that was attached

    def put(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
    ) -> list[bool]:
        """`sources` have one size. True: it is in the store, by now or from before."""
        info, given = self._allocate(node_id, keys, sources[0].nbytes, owner, deadline_s)
        done = [slot is None and at < given.covered for at, slot in enumerate(given.slots)]
        try:
            return self._fill(info, given, keys, sources, owner, deadline_s, done)
        finally:
            if None in given.slots:  # blocks that were there already are leased to `owner` now
                self._directory.release_later(owner)

    def _fill(
        self,
        info: NodeInfo,
        given: Allocation,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
        done: list[bool],
    ) -> list[bool]:
        node_id = info.node_id
        taken = [(at, slot) for at, slot in enumerate(given.slots) if slot is not None]
        writes = [Write(keys[at], slot.slot, slot.generation, sources[at]) for at, slot in taken]
        if not writes:
            return done
        try:
            with self._registrations.covering([write.source for write in writes]):
                digests = self._writer.write(info, writes, deadline_s)
        except TransferTimeout as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            return done
        except TransferFailed as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            self._nodes.mark_bad(info)
            self._directory.abandon([slot for _, slot in taken], owner)
            return done
        rows = [
            (write.key, write.slot, write.generation, digest)
            for write, digest in zip(writes, digests, strict=True)
        ]
        stored = self._directory.commit(node_id, rows, owner, 0.0)
        for (at, _), is_stored in zip(taken, stored, strict=True):
            done[at] = is_stored
        return done

    def _allocate(
        self, node_id: str, keys: Sequence[bytes], size_bytes: int, owner: str, deadline_s: float
    ) -> tuple[NodeInfo, Allocation]:
        lease_s = deadline_s + LEASE_MARGIN_S
        for is_last in (False, True):
            info = self._attach(node_id, size_bytes)
            try:
                return info, self._directory.allocate(
                    node_id, keys, owner, lease_s, size_bytes=size_bytes, tenant=self._tenant
                )
            except NodeUnknown:  # it began anew a moment ago
                self._attached.pop(node_id, None)
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def _attach(self, node_id: str, size_bytes: int) -> NodeInfo:
        info = self._nodes.find(node_id)
        if info is not None and self._attached.get(node_id) == info.incarnation:
            return info
        self._nodes.refresh()
        info = self._nodes.find(node_id)
        if info is None:
            known = ", ".join(sorted(node.node_id for node in self._nodes.all()))
            raise NodeUnknown(f"storage node {node_id} is not registered; known: {known or 'none'}")
        self._directory.attach(node_id, "store", size_bytes)
        self._attached[node_id] = info.incarnation
        return info
