"""Slots that a writer reserves ahead, before it knows which blocks it will put there.

A put would ask for its slots, wait, write, and ask again to commit. A writer that puts all the time
reserves instead: slots of one size, with generations, leased to it, of no key. It marks them in its
own time ("writing" in their headers) and a put is then its bytes and one commit, which names the
keys. What goes with a slot of a vanished writer goes with these: the lease runs out, it rests.

Nobody else can use what is reserved, so it is bounded by what the holder could give: of its free
and idle memory all reservations together take a quarter, those of one owner half of that.

Whether a block is there already is found out by the commit: then its slot stays reserved. A block
that another owner is still writing is not there yet: that owner may die.

Not here: the lease (leases.py), where the slots come from and what a commit changes (copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.directory.core.copies import CopyTable
from mooncake_store.directory.core.holder import CopyKind, HeldCopy, Holder
from mooncake_store.errors import QuotaExceeded, StoreFull
from mooncake_store.records.blocks import REFUSED, STORED, THERE

RESERVED_PART = 4


def slots_max(holder: Holder, owner: str, units: int) -> int:
    """How many slots of so many units this owner may have reserved."""
    reserved = holder.reserved_units
    every, own = sum(reserved.values()), reserved.get(owner, 0)
    idle = sum(len(each.idle) * each.units for each in holder.size_classes.values())
    most = (holder.pool.free_units + idle + every) // RESERVED_PART
    return max(0, min(most - (every - own), most // 2)) // units


def reserve(
    table: CopyTable, holder: Holder, owner: str, size_bytes: int, wished: int, until_s: float
) -> list[tuple[int, int]]:
    """(slot, generation) of slots for blocks of that size, up to so many, leased to `owner`."""
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
    """(key, slot, generation, checksum) were written into reserved slots: STORED, THERE, REFUSED.

    REFUSED: the slot is not this owner's (any more), another owner is still writing the block, the
    tenant has no room, or the node drains. A refused slot that is this owner's stays reserved.
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
    """STORED, and charged; REFUSED where it may not be."""
    payer = tenant or table.payer(key)
    if holder.is_draining:
        return REFUSED
    try:
        table.make_tenant_room(payer, copy.size_bytes)
    except QuotaExceeded:
        return REFUSED
    table.tenants.charge(payer, copy)
    return STORED
