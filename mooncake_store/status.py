"""What the directory says of itself: numbers for operators and tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_store.block_index import BlockIndex
from mooncake_store.holder import Holder
from mooncake_store.leases import LeaseTable


@dataclass(slots=True)
class Totals:
    """Counters of one epoch."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    commits: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class NodeStats:
    node_id: str
    incarnation: str
    segment_bytes: int
    fingerprint: str  # of the worker that attached first; empty until then
    block_bytes: int  # 0 until a worker attached
    slots: int
    used_slots: int  # ready and writing
    ready_slots: int
    writing_slots: int
    quarantined_slots: int
    idle_slots: int  # ready and not leased: what eviction may take
    evictions: int

    @property
    def free_slots(self) -> int:
        return self.slots - self.used_slots - self.quarantined_slots


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    epoch: int
    sequence: int  # of the latest event
    blocks: int  # distinct keys that are announced
    copies: int  # of those, over all nodes
    ephemeral: int  # copies of ephemeral objects
    used_bytes: int  # slots in use, writing ones included
    leases: int
    owners: int
    workers: int
    lookups: int  # since this epoch began, as all below
    lookup_blocks: int
    hit_blocks: int
    commits: int
    evictions: int
    nodes: tuple[NodeStats, ...]


def node_stats(holder: Holder) -> NodeStats:
    return NodeStats(
        node_id=holder.info.node_id,
        incarnation=holder.info.incarnation,
        segment_bytes=holder.info.segment_bytes,
        fingerprint=holder.fingerprint,
        block_bytes=holder.block_bytes,
        slots=holder.pool.slots,
        used_slots=holder.pool.used_slots,
        ready_slots=holder.ready,
        writing_slots=holder.writing,
        quarantined_slots=holder.pool.quarantined_slots,
        idle_slots=len(holder.idle),
        evictions=holder.evictions,
    )


def directory_stats(
    epoch: int,
    sequence: int,
    totals: Totals,
    holders: Iterable[Holder],
    blocks: BlockIndex,
    leases: LeaseTable,
    workers: int,
) -> DirectoryStats:
    nodes = tuple(node_stats(holder) for holder in holders)
    announced = [len(node_ids) for _, node_ids in blocks.announced()]
    return DirectoryStats(
        epoch=epoch,
        sequence=sequence,
        blocks=len(announced),
        copies=sum(announced),
        ephemeral=sum(node.ready_slots for node in nodes) - sum(announced),
        used_bytes=sum(node.used_slots * node.block_bytes for node in nodes),
        leases=len(leases),
        owners=leases.owners,
        workers=workers,
        lookups=totals.lookups,
        lookup_blocks=totals.lookup_blocks,
        hit_blocks=totals.hit_blocks,
        commits=totals.commits,
        evictions=totals.evictions,
        nodes=nodes,
    )
