"""The one truth about which blocks are where, who uses them, and who takes part.

A block's life: allocate (a slot in state writing, leased to its writer) -> the writer fills it ->
commit with a checksum (ready, announced by an event) -> lookups lease it to readers -> nobody
leases it: idle -> evicted when its node needs the slot. A lease that runs out ends as one that is
released does. What is uncertain is made harmless, not prevented:

- A writer that vanishes (its lease ran out, or it released a slot it never committed) may still
  have a transfer in flight, so its slot is quarantined before it is used again, under a new
  generation. `abandon` is the writer's word that nothing is in flight: free at once.
- A late commit names a generation that is not current any more: it is refused, nothing changes.
- A late reader finds another generation or checksum: a miss. It says so with `drop_copy`.
- A storage node that came back with a new incarnation has lost its memory: its copies go.

Ephemeral copies (the partial last block of a prompt) are never announced and never idle: they are
freed with their last lease.

Purity: no clock, no I/O, no randomness. Every verb takes `now_s`; leases that are due end before it
looks at anything; silent nodes and workers go at `tick`. So a simulator drives this very class, and
the same calls give the same answers. Memory is bounded by the slots and by DirectoryConfig.

Not here: which copy to drop (eviction.py), deadlines (leases.py), one node's slots (holder.py),
who is alive and fits (nodes.py, workers.py), sockets (directory_server.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from mooncake_store.block_index import BlockIndex
from mooncake_store.config import DirectoryConfig
from mooncake_store.errors import RequestInvalid
from mooncake_store.events import (
    BlockAdded,
    BlockRemoved,
    Event,
    EventLog,
    NodeDown,
    NodeUp,
    Snapshot,
)
from mooncake_store.holder import CopyState, HeldCopy, Holder
from mooncake_store.layout import Geometry
from mooncake_store.leases import LeaseTable
from mooncake_store.membership import NodeInfo, WorkerInfo, WorkerReport
from mooncake_store.nodes import NodeTable
from mooncake_store.slots import Allocation, Copy, Slot
from mooncake_store.status import DirectoryStats, Totals, directory_stats
from mooncake_store.workers import WorkerTable

# Generations start at epoch * 2**20 and count up over all nodes. The server's epoch is its start in
# milliseconds, so even the generations of a restarted directory are new (below 10**9 per second).
GENERATIONS_PER_EPOCH = 2**20


class Directory:
    """key -> copies, over all storage nodes."""

    def __init__(self, epoch: int, config: DirectoryConfig | None = None) -> None:
        assert epoch >= 0
        self.epoch = epoch
        self.config = config or DirectoryConfig()
        assert not self.config.problems(), self.config.problems()
        self._now_s = float("-inf")
        self._generations = count(epoch * GENERATIONS_PER_EPOCH)
        self._nodes = NodeTable(self.config)
        self._workers = WorkerTable(self.config)
        self._blocks = BlockIndex()
        self._leases = LeaseTable(self.config)
        self._events = EventLog(self.config.events_max)
        self._totals = Totals()

    # ---- storage nodes

    def register_node(self, info: NodeInfo, now_s: float) -> None:
        """A node is up. A new incarnation replaces the old one and starts empty."""
        self._advance(now_s)
        if self._nodes.alive(info.node_id, info.incarnation, now_s):
            return  # a repeated registration: its copies are as good as before
        self._nodes.refuse_misfit(info)
        if self._nodes.get(info.node_id) is not None:
            self._lose(self._nodes.take(info.node_id, is_replaced=True))
        self._nodes.put(info, now_s)
        self._events.append(NodeUp(info))

    def node_report(self, node_id: str, incarnation: str, now_s: float) -> bool:
        """The node is alive. False: it is not registered here (any more) and must register."""
        self._advance(now_s)
        return self._nodes.alive(node_id, incarnation, now_s)

    def deregister_node(self, node_id: str, incarnation: str, now_s: float) -> bool:
        self._advance(now_s)
        is_known = self._nodes.alive(node_id, incarnation, now_s)
        if is_known:
            self._lose(self._nodes.take(node_id))
        return is_known

    def nodes(self, now_s: float) -> list[NodeInfo]:
        self._advance(now_s)
        return [holder.info for holder in self._nodes]

    def attach(self, node_id: str, fingerprint: str, block_bytes: int, now_s: float) -> Geometry:
        """Where slots of `block_bytes` lie in this node. The first attach formats the node.

        To be called again after NodeNotAttached: the node or the directory has restarted.
        """
        self._advance(now_s)
        users = self._workers.block_bytes_on(node_id)
        return self._nodes.attach(node_id, fingerprint, block_bytes, users, self._generations)

    # ---- blocks

    def allocate(
        self,
        node_id: str,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool,
        now_s: float,
    ) -> Allocation:
        """A fresh slot for each key that this node neither has nor is being written.

        `keys` are consecutive blocks of a chain. What is there already is leased to `owner` as
        well, so it cannot be evicted to make room for the rest. Stops at the first key without
        room, since blocks behind a hole in a chain cannot be found.
        """
        self._advance(now_s)
        holder = self._nodes.attached(node_id)
        if lease_s <= 0:
            raise RequestInvalid("allocate needs lease_s > 0: an unleased slot has no writer")
        self._leases.refuse_too_many(owner, len(keys))
        until_s = self._leases.deadline_s(now_s, lease_s)
        depth = self._leases.next_depth(owner)
        there = (
            (i, holder.copies[key]) for i, key in enumerate(keys, depth) if key in holder.copies
        )
        ready = [(i, copy) for i, copy in there if copy.state is CopyState.READY]
        if ready:
            self._leases.hold(owner, ready, until_s)
        slots: list[Slot | None] = []
        taken: list[tuple[int, HeldCopy]] = []
        for i, key in enumerate(keys, depth):
            if key in holder.copies:
                slots.append(None)
                continue
            copy = self._reserve(holder, key, owner, ephemeral)
            if copy is None:
                break
            taken.append((i, copy))
            slots.append(Slot(node_id, copy.place.slot, copy.place.generation))
        if taken:
            self._leases.hold(owner, taken, until_s)
        covered = len(slots)
        return Allocation((*slots, *[None] * (len(keys) - covered)), covered)

    def commit(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        lease_s: float,
        now_s: float,
    ) -> list[bool]:
        """(key, slot, generation, checksum) are written: ready now, and still leased to `owner`.

        False, and nothing changes: the slot is not (any more) this owner's to write. lease_s = 0
        ends the lease of these copies.
        """
        self._advance(now_s)
        holder = self._nodes.get(node_id)
        done: list[bool] = []
        committed: list[HeldCopy] = []
        for key, slot, generation, checksum in blocks:
            copy = holder.writing_copy(key, owner, slot, generation) if holder else None
            if copy is not None:
                copy.holder.publish(copy, checksum)
                self._blocks.add(copy)
                if not copy.is_ephemeral:
                    self._events.append(BlockAdded(key, node_id))
                committed.append(copy)
            done.append(copy is not None)
        if lease_s > 0 and committed:
            self._leases.renew(owner, self._leases.deadline_s(now_s, lease_s))
        elif committed:
            for copy in committed:
                self._leases.drop(owner, copy)
            self._unleased(reversed(committed))
        self._totals.commits += len(committed)
        return done

    def abandon(self, slots: Sequence[Slot], owner: str, now_s: float) -> int:
        """Free slots that will not be committed, and to which nothing is in flight. How many."""
        self._advance(now_s)
        abandoned = set(slots)
        writing = [
            copy
            for copy in self._leases.held(owner)
            if copy.state is CopyState.WRITING and Slot(*copy.place[:3]) in abandoned
        ]
        for copy in writing:
            self._leases.drop(owner, copy)
            copy.holder.remove(copy, quarantine_until_s=None)
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
        self._advance(now_s)
        if prefix_only:
            hits = self._blocks.prefix(keys)
            places = [block.places for block in hits]
        else:
            blocks = self._blocks.each(keys)
            hits = [block for block in blocks if block is not None]
            places = [() if block is None else block.places for block in blocks]
        self._totals.lookups += 1
        self._totals.lookup_blocks += len(keys)
        self._totals.hit_blocks += len(hits)
        if lease_s > 0 and hits:
            pairs = [(depth, copy) for depth, block in enumerate(hits) for copy in block.copies]
            self._leases.refuse_too_many(owner, len(pairs))
            self._leases.hold(owner, pairs, self._leases.deadline_s(now_s, lease_s))
            return places
        for block in reversed(hits):  # the end of the chain first: it is the colder one
            for copy in block.copies:
                if copy.leases == 0:
                    copy.holder.idle.touch(copy.key)
        return places

    def drop_copy(self, key: bytes, node_id: str, generation: int, now_s: float) -> bool:
        """This copy proved missing or corrupt. False when it is not the current one."""
        self._advance(now_s)
        holder = self._nodes.get(node_id)
        copy = holder.copies.get(key) if holder else None
        if copy is None or copy.state is not CopyState.READY or copy.place.generation != generation:
            return False
        self._remove(copy, is_certain=copy.leases == 0)  # other readers may be in the slot
        return True

    # ---- leases

    def renew(self, owner: str, lease_s: float, now_s: float) -> bool:
        """Keep all that `owner` leases for longer. False: it leases nothing (any more)."""
        self._advance(now_s)
        return self._leases.renew(owner, self._leases.deadline_s(now_s, lease_s))

    def release(self, owner: str, now_s: float) -> bool:
        """`owner` is done with everything. Slots that it did not commit are quarantined."""
        self._advance(now_s)
        is_known = owner in self._leases
        self._unleased(self._leases.release(owner))
        return is_known

    # ---- workers

    def register_worker(self, info: WorkerInfo, now_s: float) -> None:
        self._advance(now_s)
        self._events.extend(self._workers.register(info, now_s))

    def worker_report(self, report: WorkerReport, now_s: float) -> bool:
        """False: the worker is not registered here (any more) and must register."""
        self._advance(now_s)
        events = self._workers.report(report, now_s)
        self._events.extend(events)
        return bool(events)

    def deregister_worker(self, worker_id: str, incarnation: str, now_s: float) -> bool:
        self._advance(now_s)
        events = self._workers.deregister(worker_id, incarnation)
        self._events.extend(events)
        return bool(events)

    def workers(self, now_s: float) -> list[WorkerInfo]:
        self._advance(now_s)
        return self._workers.infos

    # ---- the outside view

    @property
    def sequence(self) -> int:
        return self._events.sequence

    def events_since(self, sequence: int) -> list[Event] | None:
        """Events after number `sequence`; None when they are gone: take a snapshot."""
        return self._events.since(sequence)

    def snapshot(self, now_s: float) -> Snapshot:
        self._advance(now_s)
        return Snapshot(
            epoch=self.epoch,
            sequence=self._events.sequence,
            nodes=tuple(holder.info for holder in self._nodes),
            workers=tuple(self._workers.infos),
            reports=tuple(self._workers.reports),
            holders=tuple(self._blocks.announced()),
        )

    def stats(self, now_s: float) -> DirectoryStats:
        self._advance(now_s)
        return directory_stats(
            self.epoch,
            self._events.sequence,
            self._totals,
            self._nodes,
            self._blocks,
            self._leases,
            len(self._workers),
        )

    # ---- time

    def tick(self, now_s: float) -> None:
        """End what is due: leases, quarantines, silent nodes and workers. Ten times a second."""
        self._advance(now_s)
        for node_id in self._nodes.silent(now_s):
            self._lose(self._nodes.take(node_id))
        for holder in self._nodes:
            holder.pool.end_quarantines(now_s)
        self._events.extend(self._workers.expire(now_s))

    def _advance(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"the clock went from {self._now_s} back to {now_s}"
        self._now_s = now_s
        while (owner := self._leases.due(now_s)) is not None:
            self._unleased(self._leases.release(owner))

    # ---- copies come and go

    def _reserve(self, holder: Holder, key: bytes, owner: str, ephemeral: bool) -> HeldCopy | None:
        """A slot for `key`, evicting the coldest idle copy when none is free."""
        copy = holder.reserve(key, owner, ephemeral)
        if copy is not None:
            return copy
        holder.pool.end_quarantines(self._now_s)
        coldest = holder.idle.coldest()
        if holder.pool.free_slots == 0 and coldest is not None:
            self._remove(holder.copies[coldest], is_certain=True)
            holder.evictions += 1
            self._totals.evictions += 1
        return holder.reserve(key, owner, ephemeral)

    def _forget(self, copy: HeldCopy) -> None:
        self._blocks.remove(copy)
        if not copy.is_ephemeral:
            self._events.append(BlockRemoved(copy.key, copy.place.node_id))

    def _remove(self, copy: HeldCopy, is_certain: bool) -> None:
        """Free the slot; after the quarantine when somebody may still be in it."""
        if copy.state is CopyState.READY:
            self._forget(copy)
        until_s = None if is_certain else self._now_s + self.config.quarantine_s
        copy.holder.remove(copy, until_s)

    def _unleased(self, copies: Iterable[HeldCopy]) -> None:
        """These copies lost a lease, deepest first. What becomes of those that lost the last?"""
        for copy in copies:
            if copy.leases > 0:
                continue
            if copy.state is CopyState.WRITING:
                self._remove(copy, is_certain=False)
            elif copy.is_ephemeral:
                self._remove(copy, is_certain=True)
            else:
                copy.holder.idle.add(copy.key)

    def _lose(self, holder: Holder) -> None:
        """The node is gone, and its memory with it."""
        for copy in holder.copies.values():
            if copy.state is CopyState.READY:
                self._forget(copy)
            copy.state = CopyState.GONE
        self._events.append(NodeDown(holder.info.node_id, holder.info.incarnation))

    def check(self) -> None:
        """Prove the invariants. Tests call it after every step."""
        for part in (self._nodes, self._workers, self._blocks, self._leases, self._events):
            part.check()
        indexed = set(self._blocks.copies())
        held = [copy for holder in self._nodes for copy in holder.copies.values()]
        assert indexed == {copy for copy in held if copy.state is CopyState.READY}
        counts = self._leases.counts()
        for copy in held:
            assert copy.leases == counts.get(copy, 0)
            if copy.state is CopyState.WRITING:
                assert copy.leases == 1, "a slot is written by nobody, or by two"
