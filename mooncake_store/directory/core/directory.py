"""The one truth about which blocks are where, who uses them, and who takes part.

A block's life: allocate (a slot in state writing, leased to its writer) -> the writer fills it ->
commit with a checksum (ready, announced by an event) -> lookups lease it to readers -> nobody
leases it: idle -> evicted when its holder needs the room. A lease that runs out ends as one that is
released does. What is uncertain is made harmless, not prevented:

- A writer that vanishes (its lease ran out, or it released a slot it never committed) may still
  have a transfer in flight, so its slot is quarantined before it is used again, under a new
  generation. `abandon` is the writer's word that nothing is in flight: free at once.
- A late commit names a generation that is not current any more: it is refused, nothing changes.
- A late reader finds another generation or checksum: a miss. It says so with `drop_copy`; nobody
  finds that copy any more, and its slot is free soon after the last lease on it.
- A storage node that came back with a new incarnation has lost its memory: its copies go.
- A directory that came back is empty: nodes say what they have (`adopt`), then it is as before.
  What an earlier epoch granted is refused (EpochPassed), and rests where its writer has begun.

Ephemeral copies (the partial last block of a prompt) are never announced and never idle: they are
freed with their last lease.

Purity: no clock, no I/O, no randomness. Every verb takes `now_s`; leases that are due end before it
looks at anything; silent nodes and workers go at `tick`. So a simulator drives this very class, and
the same calls give the same answers. Memory is bounded by the units and by DirectoryConfig.

Not here: how a copy comes and goes (copies.py), the rules behind each verb (leases.py, tenants.py,
inventory.py), which copy to drop (eviction/), who is alive (nodes.py, workers.py), sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice

from mooncake_store.block_keys import split_keys
from mooncake_store.directory.core import inventory, reservations
from mooncake_store.directory.core.block_index import Held, IndexPage, copies_of, records_of
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.holder import CopyKind, CopyState, HeldCopy
from mooncake_store.directory.core.leases import PinTable
from mooncake_store.directory.core.nodes import NodeTable
from mooncake_store.directory.core.tenants import TenantTable
from mooncake_store.directory.core.workers import WorkerTable
from mooncake_store.errors import EpochPassed, NodeUnknown, RequestInvalid, StoreUnavailable
from mooncake_store.layout import STATE_READY, Geometry
from mooncake_store.records.blocks import REFUSED, Allocation, Copy, ReservedCommit, Slot, Spill
from mooncake_store.records.events import Event, FrontendNoted, NodeUp, Snapshot
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.records.status import DirectoryStats

INVENTORY_BLOCKS_MAX = 100_000_000


class Directory:
    """key -> copies, over all storage nodes."""

    def __init__(
        self, epoch: int, config: DirectoryConfig | None = None, begin_s: float = 0.0
    ) -> None:
        """`begin_s`: within so long of asking for a slot its writer begins; see Allocation.

        It is more than 0 exactly where directories are elected.
        """
        assert epoch >= 0
        self.epoch, self.begin_s = epoch, begin_s
        self.config = config or DirectoryConfig()
        assert not self.config.problems(), self.config.problems()
        self._nodes = NodeTable(self.config)
        self._workers = WorkerTable(self.config)
        self._copies = CopyTable(epoch, self.config)

    # ---- storage nodes
    # A node registers, reports every second, and is gone when it is silent for node_ttl_s.

    def register_node(self, info: NodeInfo, now_s: float) -> int:
        """A holder is up; the epoch. A new incarnation replaces the old one and starts empty."""
        self._copies.advance(now_s)
        if self._nodes.alive(info.node_id, info.incarnation, now_s):
            return self.epoch  # a repeated registration: its copies are as good as before
        self._nodes.refuse_misfit(info)
        if self._nodes.get(info.node_id) is not None:
            self._copies.lose(self._nodes.take(info.node_id, is_replaced=True))
        self._nodes.put(info, now_s)
        self._copies.events.append(NodeUp(info))
        return self.epoch

    def node_report(self, node_id: str, incarnation: str, now_s: float, epoch: int = 0) -> bool:
        """The node is alive. False: it is not registered here (any more) and must register.

        EpochPassed when it registered with an earlier directory: likewise.
        """
        self._copies.advance(now_s)
        self._refuse_epoch(epoch)
        return self._nodes.alive(node_id, incarnation, now_s)

    def deregister_node(self, node_id: str, incarnation: str, now_s: float) -> bool:
        self._copies.advance(now_s)
        is_known = self._nodes.alive(node_id, incarnation, now_s)
        if is_known:
            self._copies.lose(self._nodes.take(node_id))
        return is_known

    def nodes(self, now_s: float) -> list[NodeInfo]:
        self._copies.advance(now_s)
        return [holder.info for holder in self._nodes]

    def attach(self, node_id: str, fingerprint: str, block_bytes: int, now_s: float) -> Geometry:
        """Where slots lie in this node; LayoutMismatch when not one such block fits.

        To be called again after NodeNotAttached: the node or the directory has begun anew.
        """
        self._copies.advance(now_s)
        return self._nodes.attach(node_id, fingerprint, block_bytes)

    # ---- blocks
    # What requests ask: slots to write, their commit, lookups, and to drop a copy that is bad.

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
        """A fresh slot for each key that this node neither has nor is being written.

        `keys` are consecutive blocks of a chain, each of `size_bytes` (0: of the worker that
        attached first). What is there already is leased to `owner` as well, so it cannot be
        evicted to make room for the rest. Stops at the first key without room, since blocks behind
        a hole in a chain cannot be found; a node that drains or is not open has no room. They count
        for `tenant`, or else for the tenant of other copies. QuotaExceeded: no room for any key.
        """
        table = self._copies
        table.advance(now_s)
        holder = self._nodes.attached(node_id)
        if lease_s <= 0:
            raise RequestInvalid("allocate needs lease_s > 0: an unleased slot has no writer")
        size_bytes = size_bytes or holder.block_bytes
        if holder.pool.units < holder.pool.units_for(size_bytes):
            raise RequestInvalid(
                f"a block of {size_bytes} bytes is larger than the memory of {node_id} "
                f"({holder.pool.units * holder.pool.unit_bytes} bytes): cut it up"
            )
        table.leases.refuse_too_many(owner, len(keys))
        if not holder.is_open or holder.is_draining:
            return Allocation((None,) * len(keys), 0)
        until_s = table.leases.deadline_s(now_s, lease_s)
        first = table.leases.next_depth(owner)
        there = table.blocks.all_on(keys, holder)
        ready = [(i, copy) for i, copy in enumerate(there, first) if copy is not None]
        if ready:
            table.leases.hold(owner, ready, until_s)
        asked = holder, keys, there, owner, size_bytes, ephemeral, first, until_s
        if table.tenants.are_limited:
            slots = table.grant_by_quota(*asked, tenant)
        else:
            slots = table.grant(*asked)
        covered, late = len(slots), holder.late(slots, size_bytes, now_s)
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
        """(key, slot, generation, checksum) are written: ready now, and still leased to `owner`.

        False, and nothing changes: the slot is not (any more) this owner's to write. lease_s = 0
        ends the lease of these copies. RequestInvalid when that cannot be the doing of time, for
        no block of the request: it was committed already, or never allocated. EpochPassed when an
        earlier directory granted the slots (`epoch`; 0: not said).
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
            for copy in committed:
                table.leases.drop(owner, copy)
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
        """(key, slot, generation, checksum) are written into slots that `owner` has reserved.

        They are ready now, and not leased. Then up to `slots` more of `size_bytes` each are
        reserved, with no key yet, and the lease of all that `owner` has reserved begins anew.
        """
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
        """`epoch`: of the directory that granted what a verb is about; 0: not said.

        Epochs that elections give only grow, so a later one shows a directory that it leads no
        more. Without an election they are times of wall clocks, and any of them may be set back:
        then all that can be said of another epoch is that it is over.
        """
        if epoch in (0, self.epoch):
            return
        is_elected = self.begin_s > 0
        if is_elected and epoch > self.epoch:
            raise StoreUnavailable(
                f"the directory of epoch {epoch} granted this; this one is of {self.epoch} and "
                "cannot lead any more: ask who does"
            )
        raise EpochPassed(
            f"the directory of epoch {epoch} granted this; {self.epoch} leads by now: ask anew"
        )

    def _refuse_misuse(self, node_id: str, blocks: Sequence[tuple[bytes, int, int, int]]) -> None:
        """RequestInvalid when every one of these commits is a mistake of its caller's."""
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
        """Free slots that will not be committed, and to which nothing is in flight. How many."""
        self._copies.advance(now_s)
        abandoned = {slot[:3] for slot in slots}
        writing = [
            copy
            for copy in self._copies.leases.held(owner)
            if copy.state is CopyState.WRITING and copy.use()[:3] in abandoned
        ]
        for copy in writing:
            self._copies.leases.drop(owner, copy)
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
        """The ready copies of each key, up to the first that has none; leased to `owner`.

        lease_s = 0 only marks them as used. prefix_only=False: one entry per key, perhaps empty.
        """
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
        table.touch_all(reversed(hits))  # the end of the chain first: it is the colder one
        return answer

    def exist(self, keys: bytes, now_s: float) -> bytes:
        """Is each of these keys (16 bytes each, joined) anywhere? One byte per key: 0 or 1.

        No lease and no use. Of a thousand keys at a time: neither side makes an object per key.
        """
        self._copies.advance(now_s)
        return bytes(map(self._copies.blocks.held.__contains__, split_keys(keys)))

    def used(self, keys: bytes, now_s: float) -> None:
        """These (16 bytes each, joined) were read without asking; the last one was used last."""
        self._copies.advance(now_s)
        self._copies.used(split_keys(keys))

    def drop_copy(self, key: bytes, node_id: str, generation: int, now_s: float) -> bool:
        """This copy proved missing or corrupt. False when it is not the current one."""
        self._copies.advance(now_s)
        holder = self._nodes.get(node_id)
        copy = self._copies.blocks.on(key, holder) if holder else None
        if copy is None or copy.generation != generation:
            return False
        self._copies.reject(copy)
        return True

    def remove(self, keys: Sequence[bytes], now_s: float, node_id: str = "") -> list[bool]:
        """Give up all copies of these keys, or those on `node_id` only. False: some is in use.

        What is leased stays; ask again when its users are done. Pins do not protect from this.
        """
        self._copies.advance(now_s)
        gone = []
        for key in keys:
            copies = copies_of(self._copies.blocks.held.get(key))
            meant = [copy for copy in copies if node_id in ("", copy.node_id)]
            free = [copy for copy in meant if copy.leases == 0]
            for copy in free:
                self._copies.remove(copy)
            gone.append(len(free) == len(meant))
        return gone

    # ---- leases
    # An owner is one request in one process; its leases share one deadline and end together.

    def renew(self, owner: str, lease_s: float, now_s: float, epoch: int = 0) -> bool:
        """Keep all that `owner` leases for longer. False: it leases nothing (any more).

        EpochPassed when an earlier directory granted it.
        """
        self._copies.advance(now_s)
        self._refuse_epoch(epoch)
        leases = self._copies.leases
        return leases.renew(owner, leases.deadline_s(now_s, lease_s))

    def release(self, owner: str, now_s: float) -> bool:
        """`owner` is done with everything. Slots that it did not commit are quarantined."""
        self._copies.advance(now_s)
        is_known = owner in self._copies.leases
        self._copies.unleased(self._copies.leases.release(owner))
        return is_known

    # ---- workers
    # They register and report here, so that all who follow the events hear of them.

    def register_worker(self, info: WorkerInfo, now_s: float) -> None:
        self._copies.advance(now_s)
        self._copies.events.extend(self._workers.register(info, now_s))

    def worker_report(self, report: WorkerReport, now_s: float) -> bool:
        """False: the worker is not registered here (any more) and must register."""
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
    # They tell each other what they routed. Nothing of it is kept here.

    def note_routed(self, frontend: str, number: int, notes: bytes, now_s: float) -> None:
        """Pass a frontend's notes on to all who follow the events."""
        self._copies.advance(now_s)
        self._copies.events.append(FrontendNoted(frontend, number, notes))

    # ---- what others are shown
    # A snapshot and then events for replicas of the index, and numbers for operators.

    @property
    def sequence(self) -> int:
        return self._copies.events.sequence

    def events_since(self, sequence: int) -> list[Event] | None:
        """Events after number `sequence`; None when they are gone: take a snapshot."""
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

    def index_page(self, first: int, blocks_max: int, now_s: float) -> IndexPage:
        """Announced blocks from number `first` on, and whether they are the last ones."""
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
    # Storage nodes and operators ask these, requests never do: rare, so they may look at more.

    def adopt(
        self,
        node_id: str,
        incarnation: str,
        blocks: Sequence[tuple[bytes, int, int, int, int, int]],
        is_last: bool,
        now_s: float,
        epoch: int = 0,
    ) -> int:
        """(key, slot, generation, checksum, size_bytes, state) of what this incarnation holds.

        In as many calls as it takes; with the last one the holder opens. How many blocks were
        adopted: 0 until then. NodeUnknown when another incarnation of the node is registered,
        EpochPassed when it registered with an earlier directory. A slot that is being written
        rests: its writer does not know yet that it will not be able to commit (inventory.py). So
        does an ephemeral block: nobody finds it any more, but its request may just be reading it.
        """
        table = self._copies
        table.advance(now_s)
        self._refuse_epoch(epoch)
        holder = self._nodes.registered(node_id)
        if holder.info.incarnation != incarnation:
            raise NodeUnknown(
                f"another incarnation of storage node {node_id} is registered: register"
            )
        if holder.is_open:
            raise RequestInvalid(
                f"storage node {node_id} is open: an inventory comes before the first allocation"
            )
        holder.inventory += [inventory.InventoryBlock(*block) for block in blocks]
        if len(holder.inventory) > min(holder.pool.units, INVENTORY_BLOCKS_MAX):
            holder.inventory.clear()
            raise RequestInvalid(
                f"storage node {node_id} says it has more blocks than its {holder.pool.units} "
                "units can hold; begin the inventory again"
            )
        if not is_last:
            return 0
        said, holder.inventory = inventory.sound(holder.inventory, holder.pool), []
        table.outgrow(max((block.generation for block in said), default=0))
        adopted = 0
        for block in inventory.consistent(said, holder.pool):
            if block.state == STATE_READY:
                adopted += table.adopt(holder, block)
            elif holder.pool.adopt(block.slot, holder.pool.units_for(block.size_bytes)):
                rest_s = inventory.writers_lease_s(block, table.config.lease_s_max)
                holder.pool.quarantine(block.slot, now_s + rest_s + table.config.quarantine_s)
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
        """Blocks of the DRAM of `node_id` to be copied to its SSD, and where to."""
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
        """A draining node gets no new blocks; what it has stays readable."""
        self._copies.advance(now_s)
        self._nodes.registered(node_id).is_draining = is_on

    def blocks_on(
        self, node_id: str, blocks_max: int, only_here: bool, now_s: float
    ) -> list[tuple[bytes, Copy]]:
        """Ready blocks of a node; `only_here`: those that no other node of its tier has."""
        self._copies.advance(now_s)
        found = self._copies.listed(self._nodes.registered(node_id), only_here)
        return [(copy.key, copy.record) for copy in islice(found, blocks_max)]

    def place(self, keys: Sequence[bytes], excluded: Sequence[str], now_s: float) -> list[str]:
        """The node that each key (the first of a chain) should be put on; "" when none takes any.

        By free memory, and a new node fills slowly: see nodes.py.
        """
        self._copies.advance(now_s)
        without = set(excluded)
        return [self._nodes.placed(key, now_s, without) for key in keys]

    def pin(self, keys: Sequence[bytes], kind: str, ttl_s: float, now_s: float) -> list[bool]:
        """Pin these keys: "soft" for ttl_s, "hard" until "none" is asked for.

        False: a hard pin found no room under hard_pin_fraction_max on some holder; the key's
        other copies, present and future, are pinned.
        """
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
        """Which keys are pinned, for whoever keeps that beyond this directory."""
        return self._copies.pins

    @property
    def tenants(self) -> TenantTable:
        return self._copies.tenants

    def set_quota(self, tenant: str, quota_bytes: int, now_s: float) -> None:
        """The most that `tenant` may store, over all holders; 0 takes the quota away."""
        self._copies.advance(now_s)
        self._copies.tenants.set_quota(tenant, quota_bytes)

    # ---- time
    # Nothing happens by itself: whoever owns the directory calls `tick`.

    def tick(self, now_s: float) -> None:
        """End what is due: leases, quarantines, silent nodes and workers. Ten times a second."""
        self._copies.advance(now_s)
        for node_id in self._nodes.silent(now_s):
            self._copies.lose(self._nodes.take(node_id))
        for holder in self._nodes:
            holder.pool.end_quarantines(now_s)
        self._copies.events.extend(self._workers.expire(now_s))

    def check(self) -> None:
        """Prove the invariants. Tests call it after every step."""
        self._nodes.check()
        self._workers.check()
        self._copies.check(self._nodes)
