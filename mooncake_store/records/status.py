"""Statistics of the directory, for operators and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HolderStats:
    node_id: str
    incarnation: str
    tier: str
    segment_bytes: int
    fingerprint: str  # of the first worker that attached; "": none has attached
    block_bytes: int  # block size of the first worker that attached; 0: none has attached
    unit_bytes: int
    units: int
    used_units: int  # units of ready, writing and leased corrupt blocks, and of reserved slots
    quarantined_units: int
    pinned_units: int  # units of hard-pinned blocks
    used_bytes: int  # bytes of the blocks in used_units, not rounded up, without reserved slots
    ready_blocks: int
    writing_blocks: int
    idle_blocks: int  # ready blocks without leases or hard pins: candidates for eviction
    evictions: int
    adopted: int  # blocks adopted from before this directory's start
    is_open: bool
    is_draining: bool
    reserved_units: int = 0  # used units that writers have reserved ahead

    @property
    def free_units(self) -> int:
        return self.units - self.used_units - self.quarantined_units


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    epoch: int
    sequence: int  # number of the latest event
    blocks: int  # distinct announced keys
    copies: int  # copies of these keys, over all holders
    ephemeral: int  # copies for a single request, which are freed with their last lease
    used_bytes: int  # sum over all holders
    leases: int  # one per copy and owner
    owners: int  # owners of leases
    workers: int
    pins: int  # pinned keys
    tenants: tuple[tuple[str, int, int], ...]  # (name, used bytes, quota bytes)
    lookups: int  # this and the counts below: since the start of this epoch
    lookup_blocks: int
    hit_blocks: int
    hit_ssd_blocks: int  # hit blocks with a copy on SSDs only
    commits: int
    evictions: int
    spills: int
    bad_copies: int  # copies reported as missing or corrupt
    nodes: tuple[HolderStats, ...]
