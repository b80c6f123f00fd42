"""Slots reserved ahead: granted to a writer before the block keys are known.

A plain put requests slots, waits, writes, and sends a second request to commit. A writer with many
puts reserves slots ahead instead: slots of one size, with generations and a lease, but without a
key. The writer marks their headers as "writing" in advance. A put is then the transfer of its bytes
and one commit, which names the keys. If the writer vanishes, its lease expires, and the slots are
quarantined.

Other owners cannot use reserved slots, so their number is bounded. A holder is the DRAM or the SSD
of a storage node; idle memory has blocks without a lease. All reservations together take at most a
quarter of a holder's free, idle and reserved memory. One owner takes at most half of that quarter.

If the holder has a block already, the commit answers THERE, and the writer's slot stays reserved.
If another owner is still writing the block, the commit answers REFUSED instead, because that owner
may vanish and leave no block.

Not here: the lease (leases.py), the source of the slots and the effect of a commit (copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.holder import CopyKind, HeldCopy, Holder
from mooncake_store.errors import QuotaExceeded, StoreFull
from mooncake_store.records.blocks import REFUSED, STORED, THERE

RESERVED_PART = 4  # 1 / RESERVED_PART of the free, idle and reserved memory may be reserved


def slots_max(holder: Holder, owner: str, units: int) -> int:
    """How many slots of `units` units this owner may have reserved, the present ones included."""
    reserved = holder.reserved_units
    every, own = sum(reserved.values()), reserved.get(owner, 0)
    idle = sum(len(each.idle) * each.units for each in holder.size_classes.values())
    most = (holder.pool.free_units + idle + every) // RESERVED_PART
    return max(0, min(most - (every - own), most // 2)) // units


def reserve(
    table: CopyTable, holder: Holder, owner: str, size_bytes: int, wished: int, until_s: float
) -> list[tuple[int, int]]:
    """Reserve up to `wished` more slots, leased to `owner`. Returns (slot, generation) of each."""
    units = holder.pool.units_for(size_bytes)
    has = holder.reserved_units.get(owner, 0) // units
    wished = min(wished, slots_max(holder, owner, units) - has)
    try:
        table.leases.refuse_too_many(owner, max(0, wished))
    except StoreFull:
        return []
    keys = [b""] * max(0, wished)
    copies = table.reserve_chain(holder, keys, owner, size_bytes, CopyKind.RESERVED)
    table.leases.write_chain(owner, 0, copies, until_s)
    slots, generations = holder.columns.slot, holder.columns.generation
    return [(slots[copy.row], generations[copy.row]) for copy in copies]


def commit(
    table: CopyTable,
    holder: Holder,
    blocks: Sequence[tuple[bytes, int, int, int]],
    owner: str,
    tenant: str,
) -> list[int]:
    """Commit (key, slot, generation, checksum) of written slots: STORED, THERE or REFUSED for each.

    THERE: the holder has the block already, or `blocks` named it before. REFUSED: the slot is not
    reserved by this owner (any more), the block is being written in another slot, the quota is
    full, or the node drains. After THERE or REFUSED, a slot of this owner stays reserved.
    """
    reserved, slots, known = holder.reserved, holder.columns.slot, table.blocks.held
    is_special = holder.is_draining or table.tenants.are_limited
    verdicts: list[int] = []
    named: dict[bytes, tuple[HeldCopy, int]] = {}
    for key, slot, generation, checksum in blocks:
        entry = reserved.get(generation)
        verdict = REFUSED
        if entry is not None and entry[1] == owner and slots[entry[0].row] == slot:
            verdict = STORED
            if key in named:
                verdict = THERE
            elif key in holder.writing:
                verdict = REFUSED
            elif key in known and (held := table.blocks.on(key, holder)) is not None:
                table.touch(held)
                verdict = THERE
            if verdict == STORED and is_special:
                verdict = _payable(table, holder, key, entry[0], tenant)
            if verdict == STORED:
                named[key] = entry[0], checksum
        verdicts.append(verdict)
    holder.name_reserved(named, owner)
    copies = [copy for copy, _ in named.values()]
    table.leases.drop_all(owner, copies)
    table.show(copies)
    table.unleased(reversed(copies))
    table.totals.commits += len(copies)
    return verdicts


def _payable(table: CopyTable, holder: Holder, key: bytes, copy: HeldCopy, tenant: str) -> int:
    """STORED: the tenant's quota now counts the copy. REFUSED: it is full, or the node drains."""
    payer = tenant or table.payer(key)
    if holder.is_draining:
        return REFUSED
    try:
        table.make_tenant_room(payer, copy.size_bytes)
    except QuotaExceeded:
        return REFUSED
    table.tenants.charge(payer, copy)
    return STORED
