"""The real Directory on the virtual clock, with the few groups of verbs that workers use.

Each group is one call of a worker. Events of the Directory go to the Conductor at once. A block is
one unit here, because the Directory decides by the number of blocks; its real size counts where
bytes move (network.py). Leases last until they are released. Checksums are not computed.

Not here: the value of a block (the Conductor), moving blocks (prefill_node.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.simulator.cluster.clock import VirtualClock
from mooncake_store.block_keys import tail_key
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.layout import memory_bytes_for
from mooncake_store.records.blocks import Copy, Slot, Spill
from mooncake_store.records.events import BlockRemoved, Event
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo, WorkerInfo, WorkerReport

UNIT_BYTES = 4_096
FOREVER_S = 1e12
WORKER_TTL_S = 5.0  # the directory's default
CHECKSUM = 1
# more than a group of verbs makes; the loss of a node and reports are added to it
EVENTS_MAX = 1_024
INCARNATION = "incarnation1"
OWNERS_PER_NODE, LEASES_PER_NODE = 1_000, 100_000  # of a large overloaded fleet


@dataclass(frozen=True, slots=True)
class Found:
    """The stored leading blocks of a chain, leased; the first `own` are on the asking node."""

    copies: Sequence[tuple[Copy, ...]]
    own: int


class SimulatedStore:
    def __init__(
        self,
        clock: VirtualClock,
        on_events: Callable[[Sequence[Event]], None],
        eviction: str,
        nodes: int = 1,
        node_blocks: int = 0,
    ) -> None:
        """A directory for `nodes` nodes with a worker each, never smaller than its defaults.
        `node_blocks`: blocks of the largest node, DRAM and SSD together."""
        bounds = DirectoryConfig()
        config = DirectoryConfig(
            node_ttl_s=FOREVER_S,
            worker_ttl_s=WORKER_TTL_S,
            lease_s_max=FOREVER_S,
            eviction=eviction,
            events_max=EVENTS_MAX + node_blocks + 2 * nodes,
            nodes_max=max(2 * nodes, bounds.nodes_max),
            workers_max=max(nodes, bounds.workers_max),
            owners_max=max(nodes * OWNERS_PER_NODE, bounds.owners_max),
            leases_max=max(nodes * LEASES_PER_NODE, bounds.leases_max),
        )
        self.directory = Directory(1, config)
        self._clock = clock
        self._on_events = on_events
        self._announced = 0
        self._node_ids: set[str] = set()
        self.on_removed: list[Callable[[bytes, str], None]] = []  # receives block key and holder

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def add_node(self, node_id: str, blocks: int, ssd_blocks: int = 0) -> None:
        holders = (node_id, blocks, "dram"), (node_id + SSD_SUFFIX, ssd_blocks, "ssd")
        for holder, size, tier in holders:
            if size:
                memory_bytes = memory_bytes_for(size, UNIT_BYTES, UNIT_BYTES)
                what = (holder, INCARNATION, node_id, "", memory_bytes, "agent", b"", 0)
                info = NodeInfo(*what, unit_bytes=UNIT_BYTES, tier=tier)
                self.directory.register_node(info, self.now_s)
        self.directory.attach(node_id, "print", UNIT_BYTES, self.now_s)
        self._node_ids.add(node_id)
        self.announce()

    def has_node(self, node_id: str) -> bool:
        return node_id in self._node_ids

    def lose_node(self, node_id: str) -> None:
        self._node_ids.discard(node_id)
        for holder in (node_id, node_id + SSD_SUFFIX):
            self.directory.deregister_node(holder, INCARNATION, self.now_s)
        self.announce()

    def add_worker(self, info: WorkerInfo) -> None:
        self.directory.register_worker(info, self.now_s)
        self.announce()

    def remove_worker(self, worker_id: str, incarnation: str) -> None:
        self.directory.deregister_worker(worker_id, incarnation, self.now_s)
        self.announce()

    def report(self, reports: Sequence[WorkerReport]) -> None:
        """Send all workers' reports; the directory drops silent workers after its TTL."""
        for report in reports:
            self.directory.worker_report(report, self.now_s)
        self.directory.tick(self.now_s)
        self.announce()

    def find(self, keys: Sequence[bytes], node_id: str, owner: str) -> Found:
        """Look up the leading blocks of this chain and lease them until `release(owner)`."""
        copies = self.directory.lookup(keys, owner, FOREVER_S, self.now_s) if keys else []
        own = 0
        for places in copies:
            for copy in places:
                if copy.node_id == node_id:
                    break
            else:
                break
            own += 1
        return Found(copies, own)

    def put(self, keys: Sequence[bytes], node_id: str, owner: str) -> int:
        """Write consecutive blocks; returns how many leading ones are stored or under way."""
        directory, now_s = self.directory, self.now_s
        allocation = directory.allocate(node_id, keys, owner, FOREVER_S, False, now_s)
        written = [
            (key, slot.slot, slot.generation, CHECKSUM)
            for key, slot in zip(keys, allocation.slots, strict=True)
            if slot is not None
        ]
        if written:
            directory.commit(node_id, written, owner, FOREVER_S, now_s)
        self.announce()
        return allocation.covered

    def put_tail(self, node_id: str, owner: str) -> bool:
        """Write a prompt's partial last block: no lookup finds it, its lease's end frees it."""
        directory, now_s, key = self.directory, self.now_s, tail_key(owner)
        slot = directory.allocate(node_id, [key], owner, FOREVER_S, True, now_s).slots[0]
        if slot is None:
            return False
        blocks = [(key, slot.slot, slot.generation, CHECKSUM)]
        directory.commit(node_id, blocks, owner, FOREVER_S, now_s)
        return True

    def take_spills(self, node_id: str, owner: str, blocks_max: int) -> list[Spill]:
        """Blocks to copy to the node's SSD, leased there until `end_spills`."""
        spills = self.directory.take_spills(node_id, owner, blocks_max, FOREVER_S, self.now_s)
        self.announce()  # the SSD may have dropped other blocks for these
        return spills

    def end_spills(
        self, node_id: str, owner: str, kept: Sequence[Spill], lost: Sequence[Spill]
    ) -> None:
        """`kept` are on the SSD now; `lost` were evicted before they were written."""
        directory, now_s, ssd = self.directory, self.now_s, node_id + SSD_SUFFIX
        if kept:
            written = [(one.key, one.ssd_slot, one.ssd_generation, CHECKSUM) for one in kept]
            directory.commit(ssd, written, owner, 0.0, now_s)
        if lost:
            slots = [Slot(ssd, one.ssd_slot, one.ssd_generation) for one in lost]
            directory.abandon(slots, owner, now_s)
        directory.release(owner, now_s)
        self.announce()

    def release(self, owner: str) -> None:
        self.directory.release(owner, self.now_s)

    def announce(self) -> None:
        """Send the events since the last call to all listeners."""
        if self.directory.sequence == self._announced:
            return
        events = self.directory.events_since(self._announced)
        assert events is not None, "EVENTS_MAX is too small: events were lost"
        self._announced = self.directory.sequence
        if self.on_removed:
            for event in events:
                if event.__class__ is BlockRemoved:
                    for hear in self.on_removed:
                        hear(event.key, event.node_id)
        self._on_events(events)
