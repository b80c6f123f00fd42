"""Checks which blocks of a holder's inventory a restarted directory may adopt.

A restarted directory is empty while the nodes still hold their blocks. Each holder reports its
inventory: the blocks that its slot headers, or the manifest of an SSD, name. The rules:
1. Overlapping blocks: an evicted block keeps its header until its first unit is overwritten. Of two
   blocks that overlap, the one with the higher generation was written later. The other block is
   torn, even if a third block has overwritten the later one since.
2. A slot that was being written is quarantined, because its writer may still rely on the lease,
   which the restart ended. The quarantine is the length of the lease, plus quarantine_s. If
   directories are elected, no other slot has a writer. After another directory leads, a writer must
   not mark a header as "writing" any more (Allocation.begin_s).
3. An ephemeral block serves a single request, so it is not indexed again. Its slot is quarantined,
   because that request may still read it.
4. A header that cannot be true is ignored, for instance one with a generation that no directory can
   have reached. It makes no other block torn and does not affect the choice of later generations.

A reader checks by checksum whether the bytes match the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.layout import STATE_EPHEMERAL, STATE_READY, STATE_WRITING
from mooncake_store.records.blocks import GENERATION_MAX


class InventoryBlock(NamedTuple):
    """A block that a holder reports from before this directory's start."""

    key: bytes
    slot: int
    generation: int
    checksum: int  # of the block; in STATE_WRITING: the writer's lease, in milliseconds
    size_bytes: int
    state: int  # layout.STATE_*


def writers_lease_s(block: InventoryBlock, lease_s_max: float) -> float:
    """The longest time that the writer may still rely on its lease; 0 for a finished block."""
    return min(block.checksum / 1_000, lease_s_max) if block.state == STATE_WRITING else 0.0


def sound(blocks: Sequence[InventoryBlock], pool: SlotPool) -> list[InventoryBlock]:
    """The blocks with a plausible state, size, generation and slot. Each block is judged alone."""
    return [
        block
        for block in blocks
        if block.state in (STATE_READY, STATE_WRITING, STATE_EPHEMERAL)
        and block.size_bytes > 0
        and 0 <= block.generation < GENERATION_MAX
        and block.slot >= 0
        and block.slot + pool.units_for(block.size_bytes) <= pool.units
    ]


def consistent(blocks: Sequence[InventoryBlock], pool: SlotPool) -> list[InventoryBlock]:
    """The `blocks` that no block with a higher generation overlaps, sorted by slot. Of several such
    ready blocks with one key, only the newest is returned. `blocks` must be `sound`."""

    def end_of(block: InventoryBlock) -> int:
        return block.slot + pool.units_for(block.size_bytes)

    sane = sorted(blocks, key=lambda block: block.slot)
    is_torn = [False] * len(sane)
    reaching: list[int] = []  # indices of blocks at lower slots that may overlap the next one
    for i, block in enumerate(sane):
        reaching = [j for j in reaching if end_of(sane[j]) > block.slot]
        for j in reaching:
            is_torn[i if block.generation <= sane[j].generation else j] = True
        reaching.append(i)
    # Key -> newest generation: a block may have been evicted and stored again.
    newest: dict[bytes, int] = {}
    whole = [block for block, is_bad in zip(sane, is_torn, strict=True) if not is_bad]
    for block in whole:
        if block.state == STATE_READY:
            newest[block.key] = max(block.generation, newest.get(block.key, 0))
    return [
        block
        for block in whole
        if block.state != STATE_READY or newest[block.key] == block.generation
    ]
