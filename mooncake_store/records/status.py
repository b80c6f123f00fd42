"""What the directory says of itself: numbers for operators and tests."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_store.directory.core.holder import Holder


@dataclass(slots=True)
class Totals:
    """Counters of one epoch."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    commits: int = 0
    evictions: int = 0
    spills: int = 0
    bad_copies: int = 0
    hit_ssd_blocks: int = 0


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One holder."""

    node_id: str
    incarnation: str
    tier: str
    segment_bytes: int
    fingerprint: str  # of the worker that attached first; empty until then
    block_bytes: int  # of that worker; 0 until one attached
    unit_bytes: int
    units: int
    used_units: int  # by ready and writing blocks
    quarantined_units: int
    pinned_units: int  # hard
    used_bytes: int  # of blocks, without what rounding up to units costs
    ready_blocks: int
    writing_blocks: int
    idle_blocks: int  # ready and not leased: what eviction may take
    evictions: int
    adopted: int  # blocks taken over from before this directory began
    is_open: bool
    is_draining: bool

    @property
    def free_units(self) -> int:
        return self.units - self.used_units - self.quarantined_units


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    epoch: int
    sequence: int  # of the latest event
    blocks: int  # distinct keys that are announced
    copies: int  # of those, over all holders
    ephemeral: int  # copies of ephemeral objects
    used_bytes: int  # of blocks, writing ones included
    leases: int
    owners: int
    workers: int
    pins: int  # keys
    tenants: tuple[tuple[str, int, int], ...]  # (name, used bytes, quota bytes)
    lookups: int  # since this epoch began, as all below
    lookup_blocks: int
    hit_blocks: int
    hit_ssd_blocks: int  # of those, blocks that only an SSD had
    commits: int
    evictions: int
    spills: int
    bad_copies: int  # reported as missing or corrupt
    nodes: tuple[NodeStats, ...]


def node_stats(holder: Holder) -> NodeStats:
    info, pool = holder.info, holder.pool
    return NodeStats(
        node_id=info.node_id,
        incarnation=info.incarnation,
        tier=info.tier,
        segment_bytes=info.segment_bytes,
        fingerprint=holder.fingerprint,
        block_bytes=holder.block_bytes,
        unit_bytes=info.unit_bytes,
        units=pool.units,
        used_units=pool.used_units,
        quarantined_units=pool.quarantined_units,
        pinned_units=holder.pinned_units,
        used_bytes=holder.used_bytes,
        ready_blocks=holder.ready,
        writing_blocks=len(holder.writing),
        idle_blocks=holder.idle_blocks,
        evictions=holder.evictions,
        adopted=holder.adopted,
        is_open=holder.is_open,
        is_draining=holder.is_draining,
    )
