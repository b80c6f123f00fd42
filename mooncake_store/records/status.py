"""What the directory says of itself: numbers for operators and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HolderStats:
    """One holder."""

    node_id: str
    incarnation: str
    tier: str
    segment_bytes: int
    fingerprint: str  # of the worker that attached first; empty until then
    block_bytes: int  # of that worker; 0 until one attached
    unit_bytes: int
    units: int
    used_units: int  # by ready and writing blocks, and reserved
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
    reserved_units: int = 0  # of the used ones: by writers ahead of their blocks

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
    nodes: tuple[HolderStats, ...]
