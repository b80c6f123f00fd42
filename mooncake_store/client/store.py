"""A worker's access to the KV store: requests to the directory, and transfers of block bytes.

The directory maps block keys to copies of blocks, and grants slots (memory for one block) and
leases. A worker belongs to one storage node on its host, the local node, and maps that node's
segment (memory in /dev/shm). The worker copies blocks into slots of this segment and commits them.
Blocks of other nodes are read straight into the engine's registered KV pool, or fetched into the
local segment and committed there as a further copy.

Threads: every method may be called from several threads. Bytes move outside the GIL, and reads of
several threads run in parallel (nixl_transport.py).

Failure: a block that cannot be read in time is a miss, never an exception. A corrupt copy is
reported to the directory. A node whose transfer failed is not used for two seconds
(known_nodes.py). StoreUnavailable is raised if the directory does not answer. `deadline_s` counts
from the call. After a timeout, bytes may still arrive in the pages that pending_offsets() lists, so
these pages must not be reused.

When the local node dies, this process unmaps the node's memory within a fraction of a second,
because the node's next incarnation may need it (mapped_transport.py). All blocks of the dead node
are lost. The next allocate() detects the new incarnation (NodeNotAttached) and maps its segment.

Not here: transfer and verification (block_reader.py), nodes and their failures (known_nodes.py),
replication decided by the conductor (the conductor calls fetch).
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
from mooncake_store.client.fetcher import Fetcher, LocalSegment
from mooncake_store.client.in_place import (
    NOTHING_PLACED,
    PlacedBlock,
    PlacedBlocks,
    begun_blocks,
    digests_in_place,
    is_still,
    placed_blocks,
)
from mooncake_store.client.layer_writer import LayerWrite, LayerWriter, WrittenBlock
from mooncake_store.client.restorer import LeaseTerms, Restorer
from mooncake_store.client.worker_store import Fetched, WorkerStore
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import (
    LayoutMismatch,
    NodeUnknown,
    QuotaExceeded,
    RequestInvalid,
    TransferFailed,
)
from mooncake_store.layout import Geometry, KvLayout, LayerRange, PageLayout
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.digests import block_checksum, pack_digests, unpack_digests
from mooncake_store.memory.registrations import Scratch
from mooncake_store.memory.segment import Segment, host_id
from mooncake_store.records.blocks import Allocation, Copy, Slot, by_node
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.nixl_transport import frozen_agents
from mooncake_store.transports.paths.nic_paths import NicCounters
from mooncake_store.transports.rates import PathReport, Probe
from mooncake_store.transports.transport import ByteSpan, TransferCounters

log = logging.getLogger("mooncake_store.store")
RECENT_LOOKUPS_MAX = 64  # lookups remembered, to find the block key of a corrupt copy
LATE_SLOTS_MAX = 65_536  # remembered slots to which an earlier transfer may still write


@dataclass(slots=True)
class LocalNode:
    """One incarnation of the local node: its record, the layout of its slots, its mapped memory."""

    info: NodeInfo
    shape: Geometry
    segment: Segment

    def mapped(self) -> LocalSegment | None:
        """The segment, which stays mapped while the result is in use. None: the node is dead."""
        view = self.segment.view_if_open()
        return None if view is None else LocalSegment(self.info, view, self.shape)


class Store:
    """`transports`: how this process reaches the memory of nodes; a mode of known_nodes.py. In
    every mode the local segment is mapped, and writes to it are memory copies."""

    def __init__(
        self,
        directory: DirectoryClient,
        node_id: str,
        fingerprint: str,
        layout: KvLayout,
        transports: str = "auto",
        layers: LayerRange | None = None,
    ) -> None:
        """`layers`: the layers in the pages of this worker; None: all. Raises NodeUnknown or
        TransferFailed if the local node is not registered or has died, and LayoutMismatch if the
        layout does not fit the node."""
        self.node_id = node_id
        self.layout = layout
        self.pages = PageLayout(layout, layers) if layers else PageLayout.whole(layout)
        self._directory = directory
        self._fingerprint = fingerprint
        self._nodes = KnownNodes(directory, node_id, transports)
        self._attaching = threading.Lock()
        self._recent: deque[tuple[Sequence[bytes], list[tuple[Copy, ...]]]]
        self._recent = deque(maxlen=RECENT_LOOKUPS_MAX)
        self._late = deque[Slot | None](maxlen=LATE_SLOTS_MAX)
        self._buffers: list[ByteArray] = []
        scratch = Scratch(self._nodes)
        self._headers = HeaderReader(self._nodes, scratch)
        self._reader = BlockReader(self._nodes, self._report_bad_copy, headers=self._headers)
        self._restorer = Restorer(directory, self._nodes)
        self._fetcher = Fetcher(
            directory,
            self._reader,
            self._restorer,
            lambda keys, owner, lease_s, size: self.allocate(keys, owner, lease_s, False, size),
            self._nodes.pending_in,
            layout.layers,
        )
        self._layer_writer = LayerWriter(self._nodes, self._headers, scratch, layout)
        try:
            self._local = self._attach(None)
        except BaseException:
            self._nodes.close()
            raise
        self._probe = Probe(self._nodes)

    def _attach(self, before: LocalNode | None) -> LocalNode:
        """Attach to the local node (a condition for `allocate`) and map its segment. Raises
        NodeUnknown, TransferFailed or LayoutMismatch."""
        self._nodes.refresh()
        info = self._nodes.find(self.node_id)
        if info is None:
            raise NodeUnknown(
                f"storage node {self.node_id} is not registered: start it (python -m "
                f"mooncake_store.node --node-id {self.node_id} ...) or correct store_node"
            )
        _refuse_other_host(info)
        shape = self._directory.attach(self.node_id, self._fingerprint, self.layout.block_bytes)
        layout = self.layout
        has_digests = shape.digests(0, layout.block_bytes, layout.layers) is not None
        if not self.pages.is_whole and not has_digests:
            raise LayoutMismatch(
                f"blocks of {layout.layers} layers of {layout.layer_bytes} bytes have no room for "
                f"digests in units of {shape.unit_bytes} bytes, so some of their layers cannot be "
                "read alone: use larger blocks (block_tokens) or smaller units (--unit-bytes)"
            )
        segment = self._nodes.mapped.segment(info)
        if before is not None and before.segment is segment:  # only the directory restarted
            return LocalNode(info, shape, segment)
        view = segment.view_if_open()
        if view is None:
            raise NodeUnknown(f"storage node {self.node_id} died a moment ago")
        self._nodes.register(view)
        return LocalNode(info, shape, segment)

    def _attach_again(self, before: LocalNode) -> None:
        with self._attaching:
            if self._local is not before:
                return  # another thread did it
            self._local = self._attach(before)
            log.warning("node_id=%s attached again", self.node_id)

    def _map_next_incarnation(self, before: LocalNode) -> None:
        """Attach to the restarted local node. Raises TransferFailed if this is not possible yet."""
        try:
            self._attach_again(before)
        except (NodeUnknown, LayoutMismatch) as error:
            raise TransferFailed(f"storage node {self.node_id} has died: {error}") from None

    def register_buffer(self, buffer: ByteArray) -> None:
        """Register a KV pool (uint8, contiguous) for `read` and `write` until `close`."""
        assert buffer.dtype == np.uint8 and buffer.flags.c_contiguous, buffer.dtype
        self._buffers.append(buffer)
        self._nodes.register(buffer.reshape(-1))

    def expect_threads(self, count: int) -> None:
        """Prepare NIXL for `count` threads (1 to 4) that move bytes at the same time."""
        if self._nodes.nixl is not None:
            self._nodes.nixl.make_lanes(count)

    def lookup(self, keys: Sequence[bytes], owner: str, lease_s: float) -> list[tuple[Copy, ...]]:
        """The copies of each key, up to the first key without a copy; all leased to `owner`."""
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
        """Allocate slots on the local node, leased to `owner`, and set their headers to "writing".
        A block that the node stores already gets a lease and no slot. No key is covered if the node
        takes no blocks, or if blocks in use fill the quota of `tenant`. `ephemeral`: free the block
        with its last lease. `size_bytes`: of each block; 0: of this layout. Raises TransferFailed
        if the node has died and not restarted, and StoreFull if there are too many leases."""
        size_bytes = size_bytes or self.layout.block_bytes
        for _ in range(2):
            local = self._local
            try:
                given = self._directory.allocate(
                    self.node_id, keys, owner, lease_s, ephemeral, size_bytes, tenant
                )
            except QuotaExceeded as error:
                log.debug("owner=%s not stored: %s", owner, error)
                break
            except NodeUnknown:
                try:
                    self._attach_again(local)
                except (NodeUnknown, TransferFailed, LayoutMismatch) as error:
                    log.warning("node_id=%s cannot store: %s", self.node_id, error)
                    break
                continue
            # another thread may be attaching to the incarnation that granted these slots
            with self._attaching:
                local = self._local
            if not local.segment.is_owner_alive():
                # Either another worker has attached to the node's next incarnation, which granted
                # these slots. Or the node has died and the directory still lists it.
                self.abandon([slot for slot in given.slots if slot is not None], owner)
                self._map_next_incarnation(local)
                continue
            # Check before the headers are written, and again afterwards, because a late writer
            # would overwrite headers of slots that have been granted to another owner.
            is_ours = self._directory.may_write(given, owner, lease_s)
            for key, slot in zip(keys, given.slots, strict=True):
                if slot is None or not is_ours:
                    continue
                if (mapped := local.mapped()) is not None:
                    is_ours = mapped.begin(key, slot, size_bytes, lease_s, ephemeral)
            if is_ours and self._directory.may_write(given, owner, lease_s):
                self._late.extend(given.slots[at] for at in given.late)
                return given
        else:
            self._check_alive(self._local)
        return Allocation((None,) * len(keys), 0)

    def write(
        self,
        slots: Sequence[Slot],
        buffer: ByteArray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
    ) -> list[tuple[int, ...] | None]:
        """Copy layers of the page at buffer[offsets_bytes[i]] into slots[i]; return their digests.

        The slots may be of any node. Another process of the same release may have allocated them;
        the lease of that process must still be valid. `layers`: only these layers of the page.
        `deadline_s` bounds writes to other nodes only. None: the slot is not "writing" in its
        generation any more, and nothing was written to it. Raises TransferFailed if the slots' node
        has died or cannot be reached. After TransferTimeout, bytes may still arrive. The caller
        must then let the lease expire instead of abandoning the slots.
        """
        part = self._part(layers)
        skip_bytes = part.offset_bytes - self._part(None).offset_bytes
        sources = [buffer[at + skip_bytes :][: part.length_bytes] for at in offsets_bytes]
        writes = [
            LayerWrite(slot, part.offset_bytes, source)
            for slot, source in zip(slots, sources, strict=True)
        ]
        if all(slot.node_id == self.node_id for slot in slots):
            return self._copy_layers(writes)
        found: dict[int, tuple[int, ...] | None] = {}
        for node_id, indices in by_node(slots).items():
            chosen = [writes[index] for index in indices]
            if node_id == self.node_id:
                digests = self._copy_layers(chosen)
            else:
                digests = self._layer_writer.send(node_id, chosen, deadline_s)
            found.update(zip(indices, digests, strict=True))
        return [found[index] for index in range(len(writes))]

    def _copy_layers(self, writes: Sequence[LayerWrite]) -> list[tuple[int, ...] | None]:
        """Copy into the local segment, which is mapped for writes in every transport mode."""
        local = self._local
        mapped = local.mapped()
        done = None if mapped is None else self._layer_writer.copy(mapped, writes)
        self._check_alive(local)
        return done or [None] * len(writes)

    def commit(self, blocks: Sequence[WrittenBlock], owner: str, lease_s: float) -> list[bool]:
        """Complete written blocks: write their digests and headers, then commit them to the
        directory. A block is (key, slot leased to `owner`, digests of all layers). lease_s = 0
        ends the leases. False: the slot was granted to another writer, or another directory leads.
        Raises TransferFailed and TransferTimeout as `write` does, and RequestInvalid if a digest is
        missing, or if all blocks of a node were committed before or never allocated."""
        done = [False] * len(blocks)
        for _, _, digests in blocks:
            if len(digests) != self.layout.layers:
                raise RequestInvalid(
                    f"{len(digests)} digests for a block of {self.layout.layers} layers; give one "
                    "digest per layer"
                )
        for node_id, indices in by_node([slot for _, slot, _ in blocks]).items():
            accepted = self._commit_on(node_id, [blocks[i] for i in indices], owner, lease_s)
            for index, is_ready in zip(indices, accepted, strict=True):
                done[index] = is_ready
        return done

    def _commit_on(
        self, node_id: str, blocks: Sequence[WrittenBlock], owner: str, lease_s: float
    ) -> list[bool]:
        epochs = {slot.epoch for _, slot, _ in blocks}
        # The grants of the earlier of two directories are void. Without them the prefix is useless.
        if len(epochs) > 1:
            return [False] * len(blocks)
        if node_id == self.node_id:
            local, size_bytes = self._local, self.layout.block_bytes
            mapped = local.mapped()
            done = [mapped is not None and mapped.finish_begun(*one, size_bytes) for one in blocks]
            self._check_alive(local)
        else:
            done = self._layer_writer.finish(node_id, blocks)
        ours = [index for index, is_ours in enumerate(done) if is_ours]
        rows = [
            (key, slot.slot, slot.generation, block_checksum(pack_digests(digests)))
            for key, slot, digests in (blocks[index] for index in ours)
        ]
        if rows:
            accepted = self._directory.commit(node_id, rows, owner, lease_s, epoch=epochs.pop())
            for index, is_ready in zip(ours, accepted, strict=True):
                done[index] = is_ready
        return done

    def _check_alive(self, local: LocalNode) -> None:
        """Raise TransferFailed if the local node has died. Its blocks are then lost, although the
        memory stays writable while mapped, and the directory lists the blocks for some seconds."""
        if not local.segment.is_owner_alive():
            raise TransferFailed(f"storage node {self.node_id} has died; its blocks are lost")

    def abandon(self, slots: Sequence[Slot], owner: str) -> None:
        """Free slots that will not be committed and that no transfer writes to any more."""
        self._directory.abandon(slots, owner)

    def renew(self, owner: str, lease_s: float) -> bool:
        """Extend all leases of `owner`. Returns False if `owner` has no leases."""
        return self._directory.renew(owner, lease_s)

    def release(self, owner: str) -> None:
        """End all leases of `owner`; its uncommitted slots are quarantined."""
        self._directory.release(owner)

    def read(
        self,
        copies: Sequence[Copy],
        buffer: ByteArray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        """Read block copies[i] into the page at buffer[offsets_bytes[i]]. False: a miss.

        `layers` restricts the read to these consecutive layers, each at its offset in the page;
        None: all layers of the page. `checksums`: the digests of these layers, block by block.
        Without `checksums`, a read of a part of the block's layers first reads the digests stored
        beside the block, which the block's checksum verifies. After a miss the content of the page
        is undefined, and pending_offsets() may list the page.
        """
        part = self._part(layers)
        skip_bytes = part.offset_bytes - self._part(None).offset_bytes
        if checksums is None and part.length_bytes == self.layout.block_bytes:
            size_bytes, layers_count = part.length_bytes, self.layout.layers
            wants = [
                Want(copy, 0, (buffer, ByteSpan(at, size_bytes)), (copy.checksum,), layers_count)
                for copy, at in zip(copies, offsets_bytes, strict=True)
            ]
            return self._reader.read(wants, deadline_s)
        digests = self._digests(copies, layers, checksums)
        single: dict[int, Want] = {}
        for index, (copy, offset) in enumerate(zip(copies, offsets_bytes, strict=True)):
            expected = digests[index]
            if expected is not None:
                target = (buffer, ByteSpan(offset + skip_bytes, part.length_bytes))
                single[index] = Want(copy, part.offset_bytes, target, expected)
        arrived = self._reader.read(list(single.values()), deadline_s)
        is_here = dict(zip(single, arrived, strict=True))
        return [is_here.get(index, False) for index in range(len(copies))]

    @property
    def mapped_node(self) -> NodeInfo | None:
        """The local node; None if it died, or if this transport mode does not read it mapped."""
        local = self._local
        is_mapped = isinstance(self._nodes.transport(local.info), MappedTransport)
        return local.info if is_mapped and local.segment.is_owner_alive() else None

    def verify_in_place(self, copies: Sequence[Copy], deadline_s: float) -> PlacedBlocks:
        """Verify local blocks in the segment, without a copy. The caller must lease them. None: the
        block is corrupt, remote or not verified in time. Returns NOTHING_PLACED if there is no
        `mapped_node`."""
        started_s = time.monotonic()
        node = self._nodes.access_to(info) if (info := self.mapped_node) else None
        if node is None or not isinstance(node.transport, MappedTransport):
            return NOTHING_PLACED
        local = [copy for copy in copies if copy.node_id == self.node_id]
        try:
            with node.transport.owned(node.info) as view:
                found = placed_blocks(
                    view, node.shape, local, self.layout.layers, started_s + deadline_s
                )
        except TransferFailed:
            return NOTHING_PLACED
        node.transport.note(True, sum(copy.size_bytes for copy in local), started_s)
        placed = iter(found)
        return PlacedBlocks(
            node.info.incarnation,
            [next(placed) if copy.node_id == self.node_id else None for copy in copies],
        )

    def is_in_place(self, incarnation: str, block: PlacedBlock) -> bool:
        """False if a writer has begun to refill the block's slot. True if the node has died,
        because slots of a dead node's memory are not granted again."""
        local = self._local
        view = local.segment.view_if_open()
        return local.info.incarnation != incarnation or view is None or is_still(view, block)

    def slots_in_place(self, slots: Sequence[Slot]) -> PlacedBlocks:
        """The positions of local slots that `allocate` granted, for another process of this host to
        fill. None: an earlier transfer may still write to the slot, so a digest of its memory would
        prove nothing."""
        local, late = self._local, set(self._late)
        blocks = begun_blocks(local.shape, slots, self.layout.block_bytes)
        safe = [at if slot not in late else None for slot, at in zip(slots, blocks, strict=True)]
        return PlacedBlocks(local.info.incarnation, safe)

    def digest(self, slots: Sequence[Slot]) -> list[tuple[int, ...] | None]:
        """The digests, as from `write`, of local slots that another process has filled completely
        in place."""
        local = self._local
        mapped, layout = local.mapped(), self.layout
        done = mapped and digests_in_place(mapped, slots, layout.block_bytes, layout.layers)
        self._check_alive(local)
        return done or [None] * len(slots)

    @property
    def keeps_digests(self) -> bool:
        """True if blocks of this layout have room for the digests of their layers."""
        return self._local.shape.digests(0, self.layout.block_bytes, self.layout.layers) is not None

    def layer_digests(self, copies: Sequence[Copy]) -> list[tuple[int, ...] | None]:
        """Digests of the layers in this worker's pages, for layer-wise reads. None: a miss."""
        return self._digests(copies, None, None)

    def _digests(
        self, copies: Sequence[Copy], layers: range | None, checksums: Sequence[int] | None
    ) -> list[tuple[int, ...] | None]:
        """Digests of these layers of each block: from `checksums`, or else those stored with it."""
        wanted = self.pages.layers.indices if layers is None else layers
        if checksums is not None:
            count = len(wanted)
            assert len(checksums) == len(copies) * count, (len(checksums), len(copies), count)
            return [tuple(checksums[at : at + count]) for at in range(0, len(checksums), count)]
        found: list[tuple[int, ...] | None] = []
        kept = self._headers.digests(copies, [self.layout.layers] * len(copies))
        for copy, packed in zip(copies, kept, strict=True):
            if packed:
                found.append(unpack_digests(packed)[wanted.start : wanted.stop])
            else:
                found.append(None)
                # b"": the block's checksum contradicts its digests. None: no digests were read.
                if packed is not None:
                    self._report_bad_copy(copy)
        return found

    def _part(self, layers: range | None) -> ByteSpan:
        wanted = self.pages.layers.indices if layers is None else layers
        assert wanted.step == 1 and len(wanted), f"layers must be consecutive: {wanted}"
        assert self.pages.layers.first <= wanted.start and wanted.stop <= self.pages.layers.stop
        start = self.layout.layer_offset_bytes(wanted.start)
        return ByteSpan(start, len(wanted) * self.layout.layer_bytes)

    def choose(
        self, found: Sequence[Sequence[Copy]], first: Sequence[str] = ()
    ) -> list[Copy | None]:
        """The copy of each block to read: that on the first node of `first` with a copy, else the
        cheapest one. None: no copy can be read now."""
        return self._nodes.choose(found, first)

    def fetch(
        self,
        keys: Sequence[bytes],
        copies: Sequence[Copy],
        owner: str,
        lease_s: float,
        deadline_s: float,
    ) -> Fetched:
        """Copy blocks of other nodes or SSDs into the local segment and commit them there. Then
        lease the prefix of `keys` that has copies to `owner`. Copies that are local already are
        skipped. Raises the errors of `allocate`."""
        terms = LeaseTerms(owner, lease_s, time.monotonic() + deadline_s)
        bytes_from = self._fetcher.fetch(lambda: self._local.mapped(), keys, copies, terms)
        found = self._directory.lookup(keys, owner, lease_s)
        local = [any(copy.node_id == self.node_id for copy in copies) for copies in found]
        return Fetched(local.index(False) if False in local else len(local), bytes_from)

    def pending_offsets(self, buffer: ByteArray | None = None) -> list[ByteSpan]:
        """Spans of this registered buffer (default: the first) that timed-out reads may still
        write. These reads end only while they are polled, and each call polls them once. So repeat
        the call about every 10 ms until no span is listed."""
        if buffer is None and not self._buffers:
            return []
        return self._nodes.pending_in(self._buffers[0] if buffer is None else buffer)

    def _report_bad_copy(self, copy: Copy) -> None:
        """Report a corrupt copy to the directory, if its block key can be determined."""
        key = self._key_of(copy)
        log.warning("bad copy %s key=%s", copy, key.hex() if key else "unknown")
        if key is not None:
            self._directory.drop_copy(key, copy.node_id, copy.generation)

    def _key_of(self, copy: Copy) -> bytes | None:
        """The block key, from a recent lookup of this worker or the slot's header, if known."""
        for keys, found in reversed(tuple(self._recent)):
            for key, copies in zip(keys, found, strict=False):
                if copy in copies:
                    return key
        header = self._headers.read(copy)
        return header.key if header and header.generation == copy.generation else None

    def measure_rates(self, patience_s: float = 0.0) -> dict[str, float]:
        """Bytes per second from each node that answers; see Probe.rates. Takes about 0.1 s per
        node, and up to `patience_s` if a node does not answer."""
        return self._probe.rates(patience_s)

    def latencies_s(self) -> dict[str, float]:
        """Seconds for one small read from each node, as measured by measure_rates()."""
        return dict(self._probe.latency_s)

    def paths(self) -> list[PathReport]:
        """The transport that reaches each node, and its rate at the last measure_rates()."""
        return self._probe.paths()

    def counters(self) -> dict[str, TransferCounters]:
        """Totals of each transport. Writes into local slots are not counted."""
        return {transport.name: transport.counters for transport in self._nodes.transports()}

    def nic_counters(self) -> dict[str, NicCounters]:
        return self._nodes.nic_counters()

    @property
    def restored_blocks(self) -> int:
        """Blocks that nodes restored from their SSDs for this process."""
        return self._restorer.restored_blocks

    @property
    def agents_abandoned(self) -> int:
        """NIXL agents that this process has abandoned and will not use again."""
        return frozen_agents()

    def close(self) -> None:
        """Unmap the segments and disconnect from the nodes. Leases and the directory's client are
        not affected. A second call has no effect."""
        self._restorer.close()
        self._nodes.close()


def _refuse_other_host(info: NodeInfo) -> None:
    """Raise NodeUnknown if the node is on another host, where this process cannot map its
    memory."""
    try:
        here = host_id(info.segment_path)
    except OSError:
        here = f"a host without {os.path.dirname(info.segment_path)}"
    if info.host_id != here:
        raise NodeUnknown(
            f"storage node {info.node_id} is on another host ({info.host_id}; this is {here}), "
            "but a worker must map the memory of its node: start a storage node on this host "
            "and name it as store_node"
        )


def as_worker_store(store: Store) -> WorkerStore:
    """Type checkers verify here that `Store` fulfils the contract."""
    return store
