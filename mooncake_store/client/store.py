"""One worker's door to the KV store: the directory's verbs, and the bytes behind them.

A worker belongs to one storage node of its host and maps that node's segment: it fills slots there
with plain copies and commits them. Blocks of other nodes are read straight into the engine's
registered KV pool, or fetched into the own segment and committed there (a further copy).

Threads: every method may be called from several threads (an engine loop and its movers); bytes
move outside the GIL, and reads of several threads run side by side (nixl_transport.py).

Failure: a block that cannot be read is a miss, never an exception. A copy that proves corrupt is
reported to the directory; a node that fails is left alone for a moment. StoreUnavailable is raised
when the directory itself does not answer. After a timeout bytes may still arrive later: the pages
in pending_offsets() must not be given to anybody until it stops listing them.

When the own storage node dies its memory is unmapped within a fraction of a second, because its
next incarnation may need the room (mapped_transport.py). What is written to its slots then is lost,
as it would be in the memory of a dead node. The next allocate() notices the new incarnation
(NodeNotAttached) and maps its segment.

Not here: moving and verifying (block_reader.py), nodes and their failures (known_nodes.py),
replication by decision of the conductor (it calls fetch).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_store.client.block_reader import BlockReader, HeaderReader, Want
from mooncake_store.client.fetcher import Fetcher, OwnSegment
from mooncake_store.client.restorer import LeaseTerms, Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import LayoutMismatch, NodeUnknown, QuotaExceeded, TransferFailed
from mooncake_store.layout import Geometry, KvLayout
from mooncake_store.memory.buffers import ByteArray, checksum
from mooncake_store.memory.registrations import Scratch
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.blocks import GENERATION_MAX, Allocation, Copy, Slot
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.nixl_transport import frozen_agents
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.rates import PathReport, Probe
from mooncake_store.transports.transport import ByteSpan, TransferCounters

__all__ = ["Store", "checksum"]

log = logging.getLogger("mooncake_store.store")
RECENT_LOOKUPS_MAX = 64  # remembered so that a bad copy can be named by its key


@dataclass(slots=True)
class _Own:
    """The own node as attached: one of its incarnations, mapped until it dies."""

    info: NodeInfo
    shape: Geometry
    segment: Segment
    first_generation: int = GENERATION_MAX  # that this incarnation of it gave out

    def now(self) -> OwnSegment | None:
        """Its memory, mapped for as long as this is held; None when it is dead."""
        view = self.segment.view_if_open()
        return None if view is None else OwnSegment(self.info, view, self.shape)

    def holding(self, slot: Slot) -> OwnSegment | None:
        """The same for this use of a slot; None when an earlier incarnation gave it."""
        return self.now() if slot.generation >= self.first_generation else None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a fetch."""

    blocks: int  # leading ones that have a copy in the own node now
    bytes_from: dict[str, int]  # by the node that sent them


class Store:
    """See the module docstring. `transports` says how bytes of a node get here.

    "auto": the own node mapped, all others by NIXL. "mapped": every node of this host mapped (no
    NIXL needed). "nixl": reads of the own node go through NIXL too, to test one against the other.
    Writing to the own segment is a mapped copy in each.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        node_id: str,
        fingerprint: str,
        layout: KvLayout,
        transports: str = "auto",
    ) -> None:
        self.node_id = node_id
        self.layout = layout
        self._directory = directory
        self._fingerprint = fingerprint
        self._nodes = KnownNodes(directory, node_id, transports)
        self._reader = BlockReader(self._nodes, self._report_bad_copy)
        self._attaching = threading.Lock()
        self._recent: deque[tuple[Sequence[bytes], list[tuple[Copy, ...]]]]
        self._recent = deque(maxlen=RECENT_LOOKUPS_MAX)
        self._buffers: list[ByteArray] = []
        self._headers = HeaderReader(self._nodes, Scratch(self._nodes))
        self._restorer = Restorer(directory, self._nodes)
        self._fetcher = Fetcher(
            directory,
            self._reader,
            self._restorer,
            lambda keys, owner, lease_s, size: self.allocate(keys, owner, lease_s, False, size),
            self._nodes.pending_in,
        )
        try:
            self._own = self._attach(None)
        except BaseException:
            self._nodes.close()
            raise
        self._probe = Probe(self._nodes)

    # ---- the own node

    def _attach(self, before: _Own | None) -> _Own:
        """Format the own node as it is now, and map it unless this incarnation is mapped."""
        self._nodes.refresh()
        info = self._nodes.find(self.node_id)
        if info is None:
            raise NodeUnknown(
                f"storage node {self.node_id} is not registered: start it (python -m "
                f"mooncake_store.node --node-id {self.node_id} ...) or correct store_node"
            )
        _refuse_other_host(info)
        shape = self._directory.attach(self.node_id, self._fingerprint, self.layout.block_bytes)
        segment = self._nodes.mapped.segment(info)
        if before is not None and before.segment is segment:  # only the directory restarted
            return _Own(info, shape, segment, before.first_generation)
        view = segment.view_if_open()
        if view is None:
            raise NodeUnknown(f"storage node {self.node_id} died a moment ago")
        self._nodes.register(view)
        return _Own(info, shape, segment)

    def _attach_again(self, before: _Own) -> None:
        """After NodeNotAttached: the own node restarted, or the directory did."""
        with self._attaching:
            if self._own is not before:
                return  # another thread did it
            self._own = self._attach(before)
            log.warning("node_id=%s attached again", self.node_id)

    def _map_next_incarnation(self, before: _Own) -> None:
        """Of the own node that died; TransferFailed while there is none."""
        try:
            self._attach_again(before)
        except (NodeUnknown, LayoutMismatch) as error:
            raise TransferFailed(f"storage node {self.node_id} has died: {error}") from None

    def register_buffer(self, buffer: ByteArray) -> None:
        """The engine's KV pool (uint8, contiguous): NIXL reads land in it without a copy."""
        assert buffer.dtype == np.uint8 and buffer.flags.c_contiguous, buffer.dtype
        self._buffers.append(buffer)
        self._nodes.register(buffer.reshape(-1))

    def expect_threads(self, count: int) -> None:
        """So many threads will move bytes at once; called once, before they do."""
        if self._nodes.nixl is not None:
            self._nodes.nixl.make_lanes(count)

    # ---- the directory's verbs

    def lookup(self, keys: Sequence[bytes], owner: str, lease_s: float) -> list[tuple[Copy, ...]]:
        """The copies of each key, up to the first that has none; leased to `owner`."""
        found = self._directory.lookup(keys, owner, lease_s)
        if found:
            self._recent.append((keys, found))
        return found

    def allocate(
        self,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool = False,
        size_bytes: int = 0,
        tenant: str = "",
    ) -> Allocation:
        """Slots to write in the own node.

        Nothing covered (full) while that node is down, or while the `tenant` that the blocks count
        for has its quota full of blocks in use. `size_bytes`: of each block; 0 for blocks of the
        own layout. TransferFailed when its process has died and the directory has not heard of it.
        """
        size_bytes = size_bytes or self.layout.block_bytes
        for _ in range(2):
            own = self._own
            try:
                given = self._directory.allocate(
                    self.node_id, keys, owner, lease_s, ephemeral, size_bytes, tenant
                )
            except QuotaExceeded as error:
                log.debug("owner=%s not stored: %s", owner, error)
                break
            except NodeUnknown:
                try:
                    self._attach_again(own)
                except (NodeUnknown, TransferFailed, LayoutMismatch) as error:
                    log.warning("node_id=%s cannot store: %s", self.node_id, error)
                    break
                continue
            with self._attaching:  # a new incarnation that gave these slots may be being mapped
                own = self._own
            if not own.segment.is_owner_alive():
                # Another worker was the first to attach the node's next incarnation, so the
                # directory gives slots of it; or nobody has noticed yet that it died.
                self.abandon([slot for slot in given.slots if slot is not None], owner)
                self._map_next_incarnation(own)
                continue
            # Before too: who is late finds blocks of others there, and their headers.
            is_ours = self._directory.may_write(given, owner, lease_s)
            for key, slot in zip(keys, given.slots, strict=True):
                if slot is None or not is_ours:
                    continue
                own.first_generation = min(own.first_generation, slot.generation)
                if (here := own.now()) is not None:
                    is_ours = here.begin(key, slot, size_bytes, lease_s, ephemeral)
            if is_ours and self._directory.may_write(given, owner, lease_s):
                return given
        else:
            self._check_alive(self._own)
        return Allocation((None,) * len(keys), 0)

    def slot_view(self, slot: Slot) -> ByteArray:
        """The payload of a slot of the own segment, to be filled with a block (uint8).

        When that incarnation is over, memory that nobody reads.
        """
        assert slot.node_id == self.node_id, f"{slot} is not of the own node {self.node_id}"
        here = self._own.holding(slot)
        if here is None:
            return np.empty(self.layout.block_bytes, np.uint8)
        return here.payload(slot.slot, self.layout.block_bytes)

    def commit(
        self, blocks: Sequence[tuple[bytes, Slot, int]], owner: str, lease_s: float
    ) -> list[bool]:
        """(key, slot, checksum of its whole payload) are written. False: not ours any more.

        TransferFailed when the own node has died: nobody can read what was written.
        """
        own = self._own
        rows = []
        for key, slot, digest in blocks:
            if (here := own.holding(slot)) is not None:
                here.finish(key, slot, digest, self.layout.block_bytes)
            rows.append((key, slot.slot, slot.generation, digest))
        self._check_alive(own)
        epochs = {slot.epoch for _, slot, _ in blocks} or {0}
        if len(epochs) > 1:  # what the earlier one granted is lost, and the request's prefix too
            return [False] * len(blocks)
        return self._directory.commit(self.node_id, rows, owner, lease_s, epoch=epochs.pop())

    def _check_alive(self, own: _Own) -> None:
        """Memory of a dead node can be written all the same, and the directory promises it for as
        long as it waits for the node: whoever reads it would find nothing. About 1 us."""
        if not own.segment.is_owner_alive():
            raise TransferFailed(f"storage node {self.node_id} has died, what it held is lost")

    def abandon(self, slots: Sequence[Slot], owner: str) -> None:
        """These slots will not be committed, and nothing is being written to them any more."""
        self._directory.abandon(slots, owner)

    def renew(self, owner: str, lease_s: float) -> bool:
        return self._directory.renew(owner, lease_s)

    def release(self, owner: str) -> None:
        self._directory.release(owner)

    # ---- bytes

    def read(
        self,
        copies: Sequence[Copy],
        buffer: ByteArray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        """Block i of copies[i] into the page that starts at buffer[offsets_bytes[i]].

        With `layers` only these consecutive layers, each to its position inside the page;
        `checksums` are then those of the single layers, block by block. Without them a partial
        read cannot be verified. False: this block is a miss (its page may hold anything).
        """
        part = self._part(layers)
        per_block = len(layers) if layers is not None else 1
        assert checksums is None or len(checksums) == len(copies) * per_block
        wants = []
        for index, (copy, offset) in enumerate(zip(copies, offsets_bytes, strict=True)):
            if checksums is not None:
                digests = tuple(checksums[index * per_block : (index + 1) * per_block])
            else:
                digests = (copy.checksum,) if layers is None else ()
            target = (buffer, ByteSpan(offset + part.offset_bytes, part.length_bytes))
            wants.append(Want(copy, part.offset_bytes, target, digests))
        return self._reader.read(wants, deadline_s)

    def _part(self, layers: range | None) -> ByteSpan:
        """The span of these layers inside a block."""
        if layers is None:
            return ByteSpan(0, self.layout.block_bytes)
        assert layers.step == 1 and len(layers), f"layers must be consecutive: {layers}"
        first, last = (self.layout.layer_offset_bytes(x) for x in (layers[0], layers[-1]))
        return ByteSpan(first, last + self.layout.layer_bytes - first)

    def choose(
        self, found: Sequence[Sequence[Copy]], first: Sequence[str] = ()
    ) -> list[Copy | None]:
        """Which copy of each block to fetch: see known_nodes.py."""
        return self._nodes.choose(found, first)

    def fetch(
        self,
        keys: Sequence[bytes],
        copies: Sequence[Copy],
        owner: str,
        lease_s: float,
        deadline_s: float,
    ) -> Fetched:
        """Copy blocks of other nodes, or of SSDs, into the own segment and commit them there.

        `copies[i]` may be a local one already.
        """
        terms = LeaseTerms(owner, lease_s, time.monotonic() + deadline_s)
        bytes_from = self._fetcher.fetch(lambda: self._own.now(), keys, copies, terms)
        found = self._directory.lookup(keys, owner, lease_s)
        local = [any(copy.node_id == self.node_id for copy in copies) for copies in found]
        return Fetched(local.index(False) if False in local else len(local), bytes_from)

    def pending_offsets(self, buffer: ByteArray | None = None) -> list[ByteSpan]:
        """Where a timed-out read may still write into this registered buffer (default: the first).

        Polls: call it about every 10 ms while it lists anything, and keep those pages unused.
        """
        if buffer is None and not self._buffers:
            return []
        return self._nodes.pending_in(self._buffers[0] if buffer is None else buffer)

    def _report_bad_copy(self, copy: Copy) -> None:
        """A copy proved corrupt: the directory drops it, if its key can be found out."""
        key = self._key_of(copy)
        log.warning("bad copy %s key=%s", copy, key.hex() if key else "unknown")
        if key is not None:
            self._directory.drop_copy(key, copy.node_id, copy.generation)

    def _key_of(self, copy: Copy) -> bytes | None:
        """From a recent lookup of this worker, or else from the header of the slot."""
        for keys, found in reversed(tuple(self._recent)):
            for key, copies in zip(keys, found, strict=False):
                if copy in copies:
                    return key
        header = self._headers.read(copy)
        return header.key if header and header.generation == copy.generation else None

    # ---- numbers

    def measure_rates(self, patience_s: float = 0.0) -> dict[str, float]:
        """Bytes per second from each node that answers now; see rates.py. Takes ~0.1 s per node,
        and up to patience_s when one keeps silent."""
        return self._probe.rates(patience_s)

    def latencies_s(self) -> dict[str, float]:
        """Seconds for one small read from each node, as measure_rates() found them."""
        return dict(self._probe.latency_s)

    def paths(self) -> list[PathReport]:
        """Which transport reaches each node, and how fast, as measure_rates() found last."""
        return self._probe.paths()

    def counters(self) -> dict[str, TransferCounters]:
        """What each transport moved. Filling own slots through slot_view is not a transfer."""
        return {transport.name: transport.counters for transport in self._nodes.transports()}

    def nic_counters(self) -> dict[str, NicCounters]:
        """What went over each network card that has a NIXL agent of its own."""
        return self._nodes.nic_counters()

    @property
    def agents_given_up(self) -> int:
        """NIXL agents of this process that stay unused until it ends."""
        return frozen_agents()

    def close(self) -> None:
        """Unmap and disconnect. Leases are not released: they belong to requests."""
        self._restorer.close()
        self._nodes.close()


def _refuse_other_host(info: NodeInfo) -> None:
    """The own node is written by mapping it, which a path of the same name must not pretend."""
    try:
        here = host_id(info.segment_path)
    except OSError:
        here = f"without {os.path.dirname(info.segment_path)}"
    if info.host_id != here:
        raise NodeUnknown(
            f"storage node {info.node_id} is on another host ({info.host_id}, here it is {here}), "
            "but a worker writes into the memory of a node of its own: give this host a storage "
            "node and name that one as store_node"
        )
