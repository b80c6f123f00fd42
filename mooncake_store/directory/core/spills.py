"""Which cold blocks get a copy on SSD before eviction takes them.

Spilling runs ahead of need: once a segment is fuller than spill_fraction, its coldest idle blocks
that have no copy on the node's SSD are written there. Eviction stays what it was, instant; what it
drops is then on SSD already. When blocks come faster than the SSD writes, some are dropped unspilt:
a cache may lose them, a request must not wait.

The block in DRAM is not leased meanwhile: a lease would make a cold block the most recent one. If
it is evicted and overwritten while the node writes it out, its header has another generation
afterwards, and the node gives the copy up.

Not here: writing (the node), eviction (copies.py).
"""

from __future__ import annotations

from typing import NamedTuple

from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.holder import HeldCopy, Holder

LOOKED_AT_MAX = 512  # of the coldest blocks of a size, per question


class Spill(NamedTuple):
    """Copy this block: from `slot` of the segment to `ssd_slot` of the SSD."""

    key: bytes
    slot: int
    generation: int
    checksum: int
    size_bytes: int
    ssd_slot: int
    ssd_generation: int


def candidates(table: CopyTable, dram: Holder, ssd: Holder, blocks_max: int) -> list[HeldCopy]:
    """The coldest idle blocks of `dram` that `ssd` neither has nor gets."""
    if dram.pool.used_units < table.config.spill_fraction * dram.pool.units:
        return []
    found: list[HeldCopy] = []
    # More than fit there would push each other out, to be written again and again.
    left_units = ssd.pool.units // 2
    for shelf in dram.shelves.values():
        for key in shelf.idle.coldest_keys(LOOKED_AT_MAX):
            left_units -= shelf.units
            if len(found) >= blocks_max or left_units < 0:
                return found
            if table.blocks.on(key, ssd) is None and key not in ssd.writing:
                copy = table.blocks.on(key, dram)
                assert copy is not None
                if _may_count(table, copy):
                    found.append(copy)
    return found


def _may_count(table: CopyTable, copy: HeldCopy) -> bool:
    """Has the tenant that the block counts for room for a copy of it?"""
    return table.tenants.has_room(table.payer(copy.key), copy.size_bytes)


def take(
    table: CopyTable, dram: Holder, ssd: Holder, owner: str, blocks_max: int, until_s: float
) -> list[Spill]:
    """Slots on the SSD for such blocks, leased to `owner`. Stops when the SSD has no room."""
    chosen = candidates(table, dram, ssd, blocks_max)
    if not chosen:
        return []
    table.leases.refuse_too_many(owner, len(chosen))
    spills: list[Spill] = []
    pairs: list[tuple[int, HeldCopy]] = []
    for depth, copy in enumerate(reversed(chosen)):  # coldest deepest: it is idle first again
        if not _may_count(table, copy):  # those before it have filled the quota
            continue
        target = table.reserve(ssd, copy.key, owner, copy.size_bytes, tenant=table.payer(copy.key))
        if target is None:
            break
        pairs.append((depth, target))
        spills.append(
            Spill(
                copy.key,
                copy.slot,
                copy.generation,
                copy.place.checksum,
                copy.size_bytes,
                target.slot,
                target.generation,
            )
        )
    if pairs:
        table.leases.hold(owner, pairs, until_s)
    return spills
