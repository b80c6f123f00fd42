"""What a holder had before this directory began, taken over without trusting it blindly.

A directory that restarts is empty, while the nodes still hold their blocks. Each node says what its
headers (or the manifest of its SSD) name. Such blocks may overlap: an evicted block keeps its
header until a unit of it is written again. Of two that overlap, the higher generation is the one
that was written later, so the other is torn, even when a third one has overwritten the later one
since. A slot that was being written rests in quarantine: its writer may not know yet that its lease
is void, so it rests for as long as that lease can last, and then as any slot whose writer vanished.
Every writer writes such a header before it is too late to be seen here (Allocation.begin_s), so no
other slot can have one. What only one request was to read (an ephemeral block) is not found again,
and rests for a while, for it may just be read. A header that cannot be true, of a generation that
nobody can have reached for instance, counts for nothing: neither against the others nor for the
generations to come.

Whether the bytes are what the header says is found out by the checksum, at the first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.layout import STATE_EPHEMERAL, STATE_READY, STATE_WRITING
from mooncake_store.records.blocks import GENERATION_MAX


class InventoryBlock(NamedTuple):
    """A block that a holder says it has, from before this directory began."""

    key: bytes
    slot: int
    generation: int
    checksum: int  # while it is being written: its writer's lease, in milliseconds
    size_bytes: int
    state: int  # layout.STATE_*


def writers_lease_s(block: InventoryBlock, lease_s_max: float) -> float:
    """How long its writer may believe in its slot from now on; 0 where the header does not say."""
    return min(block.checksum / 1_000, lease_s_max) if block.state == STATE_WRITING else 0.0


def sound(blocks: Sequence[InventoryBlock], pool: SlotPool) -> list[InventoryBlock]:
    """Those that can be true of this memory, each taken by itself."""
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
    """Of sound blocks, those that do not contradict a later one, in order of their slots."""

    def end_of(block: InventoryBlock) -> int:
        return block.slot + pool.units_for(block.size_bytes)

    sane = sorted(blocks, key=lambda block: block.slot)
    is_torn = [False] * len(sane)
    reaching: list[int] = []  # earlier ones that may reach into the next; nearly always none
    for i, block in enumerate(sane):
        reaching = [j for j in reaching if end_of(sane[j]) > block.slot]
        for j in reaching:
            is_torn[i if block.generation <= sane[j].generation else j] = True
        reaching.append(i)
    newest: dict[bytes, int] = {}  # of a block that was evicted and came back
    whole = [block for block, is_bad in zip(sane, is_torn, strict=True) if not is_bad]
    for block in whole:
        if block.state == STATE_READY:
            newest[block.key] = max(block.generation, newest.get(block.key, 0))
    return [
        block
        for block in whole
        if block.state != STATE_READY or newest[block.key] == block.generation
    ]
