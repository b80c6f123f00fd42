"""Directory of all blocks, copies, leases, storage nodes and workers: the source of truth.

The DRAM and the SSD of a node register separately, as "s0" and "s0/ssd". Each is a *holder*. A
writer allocates a slot on a holder (state writing, leased to the writer), fills it, and commits it
with a checksum (state ready, announced by an event). Lookups lease the copy to readers. Without
leases the copy is idle and may be evicted. Each use of a slot has a number, its *generation*, which
only grows. Each start of the directory has a number, its *epoch*.

Faults are made harmless instead of being prevented:
1. Vanished writer: its lease has expired, or was released without a commit. A transfer may still be
   in flight, so the slot is quarantined. A writer without transfers calls `abandon` instead, which
   frees the slot.
2. Late commit: its generation is not current any more. The commit is rejected and changes nothing.
3. Late or failed read: the reader finds another generation or checksum, counts a miss, and calls
   `drop_copy`. If the copy is still listed, it is removed. Its slot is freed after the last lease.
4. Restarted storage node: the copies of its earlier incarnation (process) are removed. The new
   incarnation reports the blocks that are left (those on its SSD) as its inventory.
5. Restarted directory: it starts empty and adopts the inventories of the nodes (`adopt`). It
   rejects grants of earlier epochs (EpochPassed) and quarantines slots that were being written.

Ephemeral copies (such as the partial last block of a prompt) are never announced and never idle.
They are freed with their last lease.

Purity: no clock, no I/O, no randomness, so a simulator can drive this class. A verb takes `now_s`
(seconds of a monotonic clock) and first ends the leases that are due.

Not here: creation and removal of copies (copies.py), the rules of each verb (leases.py, tenants.py,
inventory.py), eviction (eviction/), liveness (nodes.py, workers.py), sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice

from mooncake_store.block_keys import split_keys
from mooncake_store.directory.core import inventory, reservations
from mooncake_store.directory.core.block_index import Held, copies_of, records_of
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.holder import CopyKind, CopyState, HeldCopy
from mooncake_store.directory.core.leases import PinTable
from mooncake_store.directory.core.nodes import NodeTable
from mooncake_store.directory.core.tenants import TenantTable
from mooncake_store.directory.core.workers import WorkerTable
from mooncake_store.errors import EpochPassed, NodeUnknown, RequestInvalid, StoreUnavailable
from mooncake_store.layout import STATE_READY, Geometry
from mooncake_store.records.blocks import (
    REFUSED,
    Allocation,
    BlockPage,
    Copy,
    ReservedCommit,
    Slot,
    Spill,
)
from mooncake_store.records.events import Event, FrontendNoted, NodeUp, Snapshot
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.records.status import DirectoryStats

INVENTORY_BLOCKS_MAX = 100_000_000  # blocks in the inventory of one holder


class Directory:
    """Map of block key -> copies over all holders, with leases, pins and quotas. For one thread."""

    def __init__(
        self, epoch: int, config: DirectoryConfig | None = None, begin_s: float = 0.0
    ) -> None:
        """`begin_s`: see Allocation.begin_s; 0: directories are not elected."""
        assert epoch >= 0
        self.epoch, self.begin_s = epoch, begin_s
        self.config = config or DirectoryConfig()
        assert not self.config.problems(), self.config.problems()
        self._nodes = NodeTable(self.config)
        self._workers = WorkerTable(self.config)
        self._copies = CopyTable(epoch, self.config)

    # ---- storage nodes
    # A node registers, reports every second, and is removed when it is silent for node_ttl_s.

    def register_node(self, info: NodeInfo, now_s: float) -> int:
        """Register a holder; returns the epoch. A new incarnation replaces the earlier one, whose
        copies are removed. Raises RequestInvalid or StoreFull if the holder may not register."""
        self._copies.advance(now_s)
        if self._nodes.alive(info.node_id, info.incarnation, now_s):
            return self.epoch  # repeated registration: the copies stay valid
        self._nodes.refuse_misfit(info)
        if self._nodes.get(info.node_id) is not None:
            self._copies.lose(self._nodes.take(info.node_id, is_replaced=True))
        self._nodes.put(info, now_s)
        self._copies.events.append(NodeUp(info))
        return self.epoch

    def node_report(self, node_id: str, incarnation: str, now_s: float, epoch: int = 0) -> bool:
        """Record that the node is alive. False: this incarnation is not registered (any more).
        Raises EpochPassed if the node registered with another directory, of `epoch`."""
        self._copies.advance(now_s)
        self._refuse_epoch(epoch)
        return self._nodes.alive(node_id, incarnation, now_s)

    def deregister_node(self, node_id: str, incarnation: str, now_s: float) -> bool:
        """Remove the node with its copies. False: this incarnation is not registered."""
        self._copies.advance(now_s)
        is_known = self._nodes.alive(node_id, incarnation, now_s)
        if is_known:
            self._copies.lose(self._nodes.take(node_id))
        return is_known

    def nodes(self, now_s: float) -> list[NodeInfo]:
        self._copies.advance(now_s)
        return [holder.info for holder in self._nodes]

    def attach(self, node_id: str, fingerprint: str, block_bytes: int, now_s: float) -> Geometry:
        """The geometry of this node's slots. A call is required before `allocate`, and again after
        NodeNotAttached. LayoutMismatch: the node is smaller than one block of `block_bytes`."""
        self._copies.advance(now_s)
        return self._nodes.attach(node_id, fingerprint, block_bytes)

    # ---- blocks

    def allocate(
        self,
        node_id: str,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool,
        now_s: float,
        size_bytes: int = 0,
        tenant: str = "",
    ) -> Allocation:
        """A new slot, leased to `owner`, for each key that this node neither stores nor is writing.

        `keys` are consecutive blocks of a prompt, each of `size_bytes` (0: the block size of the
        worker that attached first). Stored blocks are leased to `owner` too, so that the new blocks
        do not evict them. The grant stops at the first key without room, because blocks after a
        hole in a prompt cannot be found. A node that drains, or whose inventory is incomplete,
        grants and leases nothing. The new blocks count for `tenant`, or, if it is "", for the
        tenant of the block's other copies. Raises QuotaExceeded if the tenant has no room for
        keys[0], NodeNotAttached, or StoreFull (too many leases).
        """
        table = self._copies
        table.advance(now_s)
        holder = self._nodes.attached(node_id)
        if lease_s <= 0:
            raise RequestInvalid("allocate needs lease_s > 0, because a slot needs a writer")
        size_bytes = size_bytes or holder.block_bytes
        if holder.pool.units < holder.pool.units_for(size_bytes):
            raise RequestInvalid(
                f"a block of {size_bytes} bytes is larger than the memory of {node_id} "
                f"({holder.pool.units * holder.pool.unit_bytes} bytes); use smaller blocks"
            )
        table.leases.refuse_too_many(owner, len(keys))
        if not holder.is_open or holder.is_draining:
            return Allocation((None,) * len(keys), 0)
        until_s = table.leases.deadline_s(now_s, lease_s)
        first = table.leases.next_depth(owner)
        present = table.blocks.all_on(keys, holder)
        ready = [(i, copy) for i, copy in enumerate(present, first) if copy is not None]
        if ready:
            table.leases.hold(owner, ready, until_s)
        kind = CopyKind.EPHEMERAL if ephemeral else CopyKind.COMMITTED
        slots = table.grant(holder, keys, present, owner, size_bytes, kind, first, until_s, tenant)
        covered = len(slots)
        late = holder.pool.late(slots, holder.pool.units_for(size_bytes), now_s)
        slots += [None] * (len(keys) - covered)
        return Allocation(tuple(slots), covered, self.begin_s, late=late)

    def commit(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        lease_s: float,
        now_s: float,
        epoch: int = 0,
    ) -> list[bool]:
        """Commit written blocks (key, slot, generation, checksum). If lease_s is 0, these blocks
        lose their leases. Otherwise all leases of `owner` are extended.

        Returns False for a block whose slot does not belong to this owner (any more). Raises
        EpochPassed if an earlier directory, of `epoch`, granted the slots (0: unknown), and
        RequestInvalid if each block was committed before or was never allocated.
        """
        table = self._copies
        table.advance(now_s)
        self._refuse_epoch(epoch)
        holder = self._nodes.get(node_id)
        done: list[bool] = []
        committed: list[HeldCopy] = []
        for key, slot, generation, checksum in blocks:
            copy = holder.writing_copy(key, owner, slot, generation) if holder else None
            if copy is not None:
                copy.size_class.holder.publish(copy, checksum)
                committed.append(copy)
            done.append(copy is not None)
        table.show(committed)
        if blocks and not committed:
            self._refuse_misuse(node_id, blocks)
        if lease_s > 0 and committed:
            table.leases.renew(owner, table.leases.deadline_s(now_s, lease_s))
        elif committed:
            table.leases.drop_all(owner, committed)
            table.unleased(reversed(committed))
        table.totals.commits += len(committed)
        if holder is not None and holder.info.is_ssd:
            table.totals.spills += len(committed)
        return done

    def commit_reserved(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        size_bytes: int,
        slots: int,
        lease_s: float,
        now_s: float,
        epoch: int = 0,
        tenant: str = "",
    ) -> ReservedCommit:
        """Commit (key, slot, generation, checksum) of blocks in slots that `owner` has reserved.
        The blocks become ready, without a lease. Then up to `slots` more slots of `size_bytes` each
        are reserved without a key, and all leases of `owner` are renewed. If the node is unknown or
        its inventory is incomplete, nothing changes, and every block is REFUSED."""
        table = self._copies
        table.advance(now_s)
        self._refuse_epoch(epoch)
        holder = self._nodes.get(node_id)
        if holder is None or not holder.is_open:
            return ReservedCommit((REFUSED,) * len(blocks), False, 0, (), self.epoch, self.begin_s)
        is_held, until_s = owner in holder.reserved_units, table.leases.deadline_s(now_s, lease_s)
        verdicts = reservations.commit(table, holder, blocks, owner, tenant)
        table.leases.renew(owner, until_s)
        wished = 0 if holder.is_draining or lease_s <= 0 else slots
        new = reservations.reserve(table, holder, owner, size_bytes, wished, until_s)
        most = reservations.slots_max(holder, owner, holder.pool.units_for(size_bytes))
        return ReservedCommit(tuple(verdicts), is_held, most, tuple(new), self.epoch, self.begin_s)

    def _refuse_epoch(self, epoch: int) -> None:
        """Raise an error if another directory, of `epoch`, granted what the request refers to; 0:
        unknown. Elected epochs only grow, so a later epoch proves that this directory no longer
        leads. Without elections, epochs are wall-clock times; any other epoch counts as earlier."""
        if epoch in (0, self.epoch):
            return
        is_elected = self.begin_s > 0
        if is_elected and epoch > self.epoch:
            raise StoreUnavailable(
                f"the directory of epoch {epoch} granted this; this one has epoch {self.epoch} and "
                "cannot lead any more: find the leader"
            )
        raise EpochPassed(
            f"the directory of epoch {epoch} granted this; {self.epoch} leads by now: try again"
        )

    def _refuse_misuse(self, node_id: str, blocks: Sequence[tuple[bytes, int, int, int]]) -> None:
        """Raise RequestInvalid if each of these commits is an error of the caller, not a late
        one."""
        table, holder = self._copies, self._nodes.get(node_id)
        mistakes = []
        for key, slot, generation, _ in blocks:
            ready = table.blocks.on(key, holder) if holder else None
            is_there = ready is not None and (ready.slot, ready.generation) == (slot, generation)
            if ready is not None and is_there and ready.kind is not CopyKind.ADOPTED:
                mistakes.append("was committed already; a commit is final, write a new slot")
            elif holder is not None and holder.is_open and generation >= table.next_generation:
                mistakes.append("was never allocated; allocate first, then write and commit")
            else:
                return
        raise RequestInvalid(f"block {blocks[0][0].hex()} on {node_id} {mistakes[0]}")

    def abandon(self, slots: Sequence[Slot], owner: str, now_s: float) -> int:
        """Free slots that `owner` will not commit and that have no transfer in flight. Returns the
        number of freed slots. Slots that `owner` is not writing are ignored."""
        self._copies.advance(now_s)
        abandoned = {slot[:3] for slot in slots}
        writing = [
            copy
            for copy in self._copies.leases.held(owner)
            if copy.state is CopyState.WRITING and copy.use()[:3] in abandoned
        ]
        self._copies.leases.drop_all(owner, writing)
        for copy in writing:
            self._copies.remove(copy)
        return len(writing)

    def lookup(
        self,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        now_s: float,
        prefix_only: bool = True,
    ) -> list[tuple[Copy, ...]]:
        """The ready copies of each key, leased to `owner`, up to the first key without a copy. With
        lease_s=0, a use is recorded instead of a lease. With prefix_only=False, the result has an
        entry for each key, which is () without a copy."""
        table = self._copies
        table.advance(now_s)
        found: Sequence[Held | None]
        found = table.blocks.prefix(keys) if prefix_only else table.blocks.each(keys)
        answer = list(map(records_of, found))
        hits = [held for held in found if held is not None]
        totals = table.totals
        totals.lookups += 1
        totals.lookup_blocks += len(keys)
        totals.hit_blocks += len(hits)
        totals.hit_ssd_blocks += sum(copies_of(held)[0].size_class.is_ssd for held in hits)
        if lease_s > 0 and not owner:
            raise RequestInvalid("a lease needs an owner: name the request that will release it")
        if lease_s > 0 and hits:
            pairs = [(depth, copy) for depth, held in enumerate(hits) for copy in copies_of(held)]
            table.leases.refuse_too_many(owner, len(pairs))
            table.leases.hold(owner, pairs, table.leases.deadline_s(now_s, lease_s))
            return answer
        table.touch_all(reversed(hits))  # the end of a prompt is colder, so it comes first
        return answer

    def exist(self, keys: bytes, now_s: float) -> bytes:
        """Whether each of these keys (16 bytes each, joined) has a copy: one byte per key, 0 or 1.
        The call records no lease and no use. Joined keys save the client an object per key."""
        self._copies.advance(now_s)
        return bytes(map(self._copies.blocks.held.__contains__, split_keys(keys)))

    def used(self, keys: bytes, now_s: float) -> None:
        """Record reads of these keys (16 bytes each, joined) without a lookup, in this order."""
        self._copies.advance(now_s)
        self._copies.used(split_keys(keys))

    def drop_copy(self, key: bytes, node_id: str, generation: int, now_s: float) -> bool:
        """Remove a missing or corrupt copy. False: the node has no copy with this generation."""
        self._copies.advance(now_s)
        holder = self._nodes.get(node_id)
        copy = self._copies.blocks.on(key, holder) if holder else None
        if copy is None or copy.generation != generation:
            return False
        self._copies.reject(copy)
        return True

    def remove(self, keys: Sequence[bytes], now_s: float, node_id: str = "") -> list[bool]:
        """Remove the copies of these keys on all nodes, or on `node_id`, even if pinned. Leased
        copies stay. The result is False for each key with a copy that stays."""
        self._copies.advance(now_s)
        gone = []
        for key in keys:
            copies = copies_of(self._copies.blocks.held.get(key))
            chosen = [copy for copy in copies if node_id in ("", copy.node_id)]
            free = [copy for copy in chosen if copy.leases == 0]
            for copy in free:
                self._copies.remove(copy)
            gone.append(len(free) == len(chosen))
        return gone

    # ---- leases

    def renew(self, owner: str, lease_s: float, now_s: float, epoch: int = 0) -> bool:
        """Extend all leases of `owner`. Returns False if `owner` has no leases (any more). Raises
        EpochPassed if an earlier directory, of `epoch`, granted the leases."""
        self._copies.advance(now_s)
        self._refuse_epoch(epoch)
        leases = self._copies.leases
        return leases.renew(owner, leases.deadline_s(now_s, lease_s))

    def release(self, owner: str, now_s: float) -> bool:
        """End all leases of `owner`; its uncommitted slots are quarantined. False: no leases."""
        self._copies.advance(now_s)
        is_known = owner in self._copies.leases
        self._copies.unleased(self._copies.leases.release(owner))
        return is_known

    # ---- workers

    def register_worker(self, info: WorkerInfo, now_s: float) -> None:
        self._copies.advance(now_s)
        self._copies.events.extend(self._workers.register(info, now_s))

    def worker_report(self, report: WorkerReport, now_s: float) -> bool:
        """Record and announce the report. False: the worker is not registered and must register."""
        self._copies.advance(now_s)
        events = self._workers.report(report, now_s)
        self._copies.events.extend(events)
        return bool(events)

    def deregister_worker(self, worker_id: str, incarnation: str, now_s: float) -> bool:
        self._copies.advance(now_s)
        events = self._workers.deregister(worker_id, incarnation)
        self._copies.events.extend(events)
        return bool(events)

    def workers(self, now_s: float) -> list[WorkerInfo]:
        self._copies.advance(now_s)
        return self._workers.infos

    # ---- frontends

    def note_routed(self, frontend: str, number: int, notes: bytes, now_s: float) -> None:
        """Announce the requests that a frontend routed (`notes`) to all subscribers of events."""
        self._copies.advance(now_s)
        self._copies.events.append(FrontendNoted(frontend, number, notes))

    # ---- views

    @property
    def sequence(self) -> int:
        return self._copies.events.sequence

    def events_since(self, sequence: int) -> list[Event] | None:
        """Events after number `sequence`; None if some of these are no longer kept."""
        return self._copies.events.since(sequence)

    def snapshot(self, now_s: float, with_blocks: bool = True) -> Snapshot:
        self._copies.advance(now_s)
        return Snapshot(
            epoch=self.epoch,
            sequence=self.sequence,
            nodes=tuple(holder.info for holder in self._nodes),
            workers=tuple(self._workers.infos),
            reports=tuple(self._workers.reports),
            holders=tuple(self._copies.blocks.announced()) if with_blocks else (),
        )

    def index_page(self, first: int, blocks_max: int, now_s: float) -> BlockPage:
        """A page of (key, copies), and whether it is the last; see BlockIndex.page."""
        self._copies.advance(now_s)
        return self._copies.blocks.page(first, blocks_max)

    def stats(self, now_s: float) -> DirectoryStats:
        table = self._copies
        table.advance(now_s)
        nodes = tuple(holder.stats() for holder in self._nodes)
        return DirectoryStats(
            epoch=self.epoch,
            sequence=self.sequence,
            blocks=len(table.blocks) - table.ephemeral,
            ephemeral=table.ephemeral,
            copies=sum(node.ready_blocks for node in nodes) - table.ephemeral,
            used_bytes=sum(node.used_bytes for node in nodes),
            leases=len(table.leases),
            owners=table.leases.owners,
            workers=len(self._workers),
            pins=len(table.pins),
            tenants=tuple(table.tenants.usage()),
            nodes=nodes,
            **asdict(table.totals),
        )

    # ---- admin
    # Verbs of storage nodes and operators, not of requests. They are rare and may be slower.

    def adopt(
        self,
        node_id: str,
        incarnation: str,
        blocks: Sequence[tuple[bytes, int, int, int, int, int]],
        is_last: bool,
        now_s: float,
        epoch: int = 0,
    ) -> int:
        """Adopt an inventory: (key, slot, generation, checksum, size_bytes, state) of each block
        that the holder had before it registered.

        The inventory may take several calls; the last call opens the holder for new blocks.
        Returns the number of adopted blocks, which is 0 before the last call. Raises NodeUnknown if
        this incarnation is not registered, and EpochPassed if it registered with an earlier
        directory. Slots of unfinished and of ephemeral blocks are quarantined (inventory.py).
        """
        table = self._copies
        table.advance(now_s)
        self._refuse_epoch(epoch)
        holder = self._nodes.registered(node_id)
        if holder.info.incarnation != incarnation:
            raise NodeUnknown(
                f"another incarnation of storage node {node_id} is registered: register again"
            )
        if holder.is_open:
            raise RequestInvalid(
                f"the inventory of storage node {node_id} is complete; it cannot be extended"
            )
        holder.inventory += [inventory.InventoryBlock(*block) for block in blocks]
        if len(holder.inventory) > min(holder.pool.units, INVENTORY_BLOCKS_MAX):
            holder.inventory.clear()
            raise RequestInvalid(
                f"storage node {node_id} reports more blocks than its {holder.pool.units} "
                "units can hold; begin the inventory again"
            )
        if not is_last:
            return 0
        reported, holder.inventory = inventory.sound(holder.inventory, holder.pool), []
        table.outgrow(max((block.generation for block in reported), default=0))
        adopted = 0
        for block in inventory.consistent(reported, holder.pool):
            if block.state == STATE_READY:
                adopted += table.adopt(holder, block)
            elif holder.pool.adopt(block.slot, holder.pool.units_for(block.size_bytes)):
                lease_s = inventory.writers_lease_s(block, table.config.lease_s_max)
                holder.pool.quarantine(block.slot, now_s + lease_s + table.config.quarantine_s)
        holder.is_open = True
        return adopted

    def take_spills(
        self,
        node_id: str,
        owner: str,
        blocks_max: int,
        lease_s: float,
        now_s: float,
        epoch: int = 0,
    ) -> list[Spill]:
        """Blocks in the DRAM of `node_id` to copy to its SSD, with SSD slots leased to `owner`; []
        if there are none or the SSD has no room. Raises NodeUnknown if the node or its SSD is not
        registered."""
        table = self._copies
        table.advance(now_s)
        self._refuse_epoch(epoch)
        dram = self._nodes.registered(node_id)
        ssd = self._nodes.registered(node_id + SSD_SUFFIX)
        if not ssd.is_open or ssd.is_draining:
            return []
        until_s = table.leases.deadline_s(now_s, lease_s)
        spills = table.spill(dram, ssd, owner, blocks_max, until_s)
        return [spill._replace(epoch=self.epoch) for spill in spills]

    def drain(self, node_id: str, is_on: bool, now_s: float) -> None:
        """Switch draining: a draining node gets no new blocks; its blocks stay readable."""
        self._copies.advance(now_s)
        self._nodes.registered(node_id).is_draining = is_on

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool, now_s: float
    ) -> list[tuple[bytes, Copy]]:
        """Up to `blocks_max` ready blocks of a node, without ephemeral ones. `only_here`: only
        blocks without a copy on another node in the same tier (DRAM or SSD)."""
        self._copies.advance(now_s)
        found = self._copies.listed(self._nodes.registered(node_id), only_here)
        return [(copy.key, copy.record) for copy in islice(found, blocks_max)]

    def place(self, keys: Sequence[bytes], excluded: Sequence[str], now_s: float) -> list[str]:
        """The node that should store the prompt that begins with each key; "": no node takes
        blocks. Nodes with more free memory get more prompts, new nodes fewer (nodes.py)."""
        self._copies.advance(now_s)
        without = set(excluded)
        return [self._nodes.placed(key, now_s, without) for key in keys]

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float, now_s: float) -> list[bool]:
        """Pin all present and future copies of these keys: "soft" for ttl_s, "hard" until "none".
        False for a key that got only a soft pin on a holder, because hard pins would exceed
        hard_pin_fraction_max there. If RequestInvalid or StoreFull is raised, no key changes."""
        table = self._copies
        table.advance(now_s)
        pin = table.pins.checked(keys, kind, ttl_s)
        done = []
        for key in keys:
            table.pins.set(key, pin, now_s + ttl_s)
            done.append(table.set_pin(key, pin))
        return done

    @property
    def pins(self) -> PinTable:
        """The pinned keys, for the journal in etcd that the next directory reads."""
        return self._copies.pins

    @property
    def tenants(self) -> TenantTable:
        return self._copies.tenants

    def set_quota(self, tenant: str, quota_bytes: int, now_s: float) -> None:
        """Limit the bytes that `tenant` may store on all holders together; 0 removes the quota."""
        self._copies.advance(now_s)
        self._copies.tenants.set_quota(tenant, quota_bytes)

    # ---- time

    def tick(self, now_s: float) -> None:
        """End due leases, soft pins and quarantines; remove silent nodes and workers."""
        self._copies.advance(now_s)
        for node_id in self._nodes.silent(now_s):
            self._copies.lose(self._nodes.take(node_id))
        for holder in self._nodes:
            holder.pool.end_quarantines(now_s)
        self._copies.events.extend(self._workers.expire(now_s))

    def check(self) -> None:
        self._nodes.check()
        self._workers.check()
        self._copies.check(self._nodes)
