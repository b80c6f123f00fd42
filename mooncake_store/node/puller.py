"""Copies blocks of other nodes into this node on request (control verb `fetch`).

The puller runs the client's read path (BlockReader, Fetcher) in a storage node. To replicate, move
or drain blocks, a client requests that the receiving node reads them one-sided. The transports are
opened at the first pull, so a node without pulls has no second NIXL agent.

Not here: the transfer of a batch (fetcher.py), the decision to copy (replicas.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence

from mooncake_store.client.block_reader import BlockReader, HeaderReader
from mooncake_store.client.fetcher import Fetcher, LocalSegment
from mooncake_store.client.restorer import LeaseTerms, Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import NodeUnknown, QuotaExceeded, StoreError
from mooncake_store.memory.registrations import Scratch
from mooncake_store.memory.slot_memory import SlotMemory
from mooncake_store.records.blocks import Allocation, Copy
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes

log = logging.getLogger("mooncake_store.node")
LEASE_MARGIN_S = 10.0  # seconds from the deadline of the pull to the end of its leases


class Puller:
    """All pulls of one storage node. Thread-safe."""

    def __init__(self, info: NodeInfo, memory: SlotMemory, directory: DirectoryClient) -> None:
        self.blocks = 0  # number of blocks pulled so far
        self._local = LocalSegment(info, memory.view, memory.shape)
        self._directory = directory
        self._mode = "auto" if info.agent_name or info.data_address else "mapped"
        self._lock = threading.Lock()
        # None before the first pull
        self._opened: tuple[KnownNodes, Restorer, HeaderReader] | None = None
        self._numbers = itertools.count()

    @property
    def nodes(self) -> KnownNodes | None:
        """The nodes from which blocks are pulled; None before the first pull."""
        return self._opened and self._opened[0]

    def pull(self, keys: Sequence[bytes], copies: Sequence[Copy], until_s: float) -> list[bool]:
        """Pull keys[i] from copies[i]; True for each block that is then in this node's DRAM."""
        nodes, restorer, headers = self._open()
        key_of = dict(zip(copies, keys, strict=True))

        def on_bad_copy(copy: Copy) -> None:
            self._directory.drop_copy(key_of[copy], copy.node_id, copy.generation)

        reader = BlockReader(nodes, on_bad_copy, headers=headers)
        fetcher = Fetcher(self._directory, reader, restorer, self._allocate, nodes.pending_in)
        owner = f"fetch {self._local.info.incarnation} {next(self._numbers)}"
        left_s = max(0.001, until_s - time.monotonic())
        terms = LeaseTerms(owner, left_s + LEASE_MARGIN_S, until_s)
        try:
            before = self._on_this_node(keys, owner)
            fetcher.fetch(lambda: self._local, keys, copies, terms)
            after = self._on_this_node(keys, owner)
        finally:
            with contextlib.suppress(StoreError):  # without a release, the leases expire
                self._directory.release(owner)
        self.blocks += after.count(True) - before.count(True)
        return after

    def _on_this_node(self, keys: Sequence[bytes], owner: str) -> list[bool]:
        found = self._directory.lookup(keys, owner, 0.0, prefix_only=False)
        node_id = self._local.info.node_id
        return [any(copy.node_id == node_id for copy in copies) for copies in found]

    def _open(self) -> tuple[KnownNodes, Restorer, HeaderReader]:
        with self._lock:
            if self._opened is None:
                nodes = KnownNodes(self._directory, self._local.info.node_id, self._mode)
                nodes.register(self._local.view)
                restorer = Restorer(self._directory, nodes)
                self._opened = nodes, restorer, HeaderReader(nodes, Scratch(nodes))
            return self._opened

    def _allocate(
        self, keys: Sequence[bytes], owner: str, lease_s: float, size_bytes: int
    ) -> Allocation:
        node_id = self._local.info.node_id

        def ask() -> Allocation:
            return self._directory.allocate(node_id, keys, owner, lease_s, size_bytes=size_bytes)

        try:
            try:
                given = ask()
            except NodeUnknown:  # no worker has attached to this node in this epoch
                self._directory.attach(node_id, "fetch", size_bytes)
                given = ask()
        except QuotaExceeded as error:
            log.info("node_id=%s pulls no further blocks: %s", node_id, error)
            return Allocation((None,) * len(keys), 0)
        is_ours = self._directory.may_write(given, owner, lease_s)
        for key, slot in zip(keys, given.slots, strict=True):
            if slot is not None and is_ours:
                is_ours = self._local.begin(key, slot, size_bytes, lease_s)
        if not is_ours or not self._directory.may_write(given, owner, lease_s):
            return Allocation((None,) * len(keys), 0)
        return given

    def close(self) -> None:
        """Close the transports. Idempotent."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            nodes, restorer, _ = opened
            restorer.close()
            nodes.close()
