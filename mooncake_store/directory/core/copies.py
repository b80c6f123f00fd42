"""Table of all copies, and everything that must change together with a copy.

A copy is a block in a slot of a holder (the DRAM or the SSD of a node). `reserve` creates it in
state writing, Holder.publish and `show` make it ready, and `remove` ends it. Each step keeps the
index, the holder, the leases, the pins, the quotas and the event log consistent.

Eviction: room for a block comes from the coldest idle block of the same size. Without such a block,
soft-pinned blocks of this size are next. Then other sizes release slabs (adjacent slots) in which
all blocks are idle. An idle block has neither a lease nor a hard pin.

Spilling precedes eviction. When DRAM is fuller than spill_fraction, its coldest idle blocks are
copied to the node's SSD. Their later eviction loses nothing and waits for no write. If blocks
arrive faster than the SSD writes, some are evicted without an SSD copy, so that no request waits.

Not here: verbs and their errors (directory.py), the index (block_index.py), eviction (eviction/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mooncake_store.directory.core.block_index import BlockIndex, Held, copies_of
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.holder import (
    CopyKind,
    CopyState,
    HeldCopy,
    Holder,
    Pin,
    SizeClass,
    become_idle,
)
from mooncake_store.directory.core.inventory import InventoryBlock
from mooncake_store.directory.core.leases import LeaseTable, PinTable
from mooncake_store.directory.core.tenants import TenantTable
from mooncake_store.errors import QuotaExceeded
from mooncake_store.records.blocks import (
    EPOCH_MAX,
    GENERATION_MAX,
    GENERATIONS_PER_EPOCH,
    Slot,
    Spill,
)
from mooncake_store.records.events import BlockAdded, BlockRemoved, EventLog, NodeDown

# Generations start at epoch * GENERATIONS_PER_EPOCH and count up over all nodes. An epoch is a
# start time in milliseconds. So the generations of a restarted directory are new if the earlier one
# granted fewer than 10**9 per second. If the clock was set back, `outgrow` moves the counter above
# the generations in the inventories of the nodes.

# Seconds from the last lease of a corrupt copy until its slot is free, because a read may still be
# in flight when its lease ends.
BAD_QUARANTINE_S = 2.0
LOOK_AGAIN_S = 1e-4  # pause after a failed slab search, per idle block (a visit takes 1e-6 s)
_made = tuple.__new__  # creates a NamedTuple in half the time of its constructor
SPILLS_LOOKED_AT_MAX = 512  # coldest blocks of one size examined per call of spill


@dataclass(slots=True)
class DirectoryTotals:
    """Counters since the start of this epoch; DirectoryStats describes them."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    commits: int = 0
    evictions: int = 0
    spills: int = 0
    bad_copies: int = 0
    hit_ssd_blocks: int = 0


class CopyTable:
    """All copies of all holders. `now_s` is the time of the last `advance`, in seconds."""

    def __init__(self, epoch: int, config: DirectoryConfig) -> None:
        self.epoch, self.config = epoch, config
        self.now_s = float("-inf")
        self.blocks = BlockIndex()
        self.leases = LeaseTable(config)
        self.pins = PinTable()
        self.tenants = TenantTable()
        self.events = EventLog(config.events_max)
        self.totals = DirectoryTotals()
        self.ephemeral = 0  # number of ready copies of kind EPHEMERAL
        self.next_generation = min(epoch, EPOCH_MAX) * GENERATIONS_PER_EPOCH

    # ---- creation

    def reserve(
        self,
        holder: Holder,
        key: bytes,
        owner: str,
        size_bytes: int,
        kind: CopyKind = CopyKind.COMMITTED,
        tenant: str = "",
    ) -> HeldCopy | None:
        """Reserve a slot for one key, which counts for `tenant`; None if the holder has no room.
        Raises QuotaExceeded if the quota has no room, even after evicting the tenant's blocks."""
        assert key not in holder.writing, f"{key.hex()} is being written already"
        self.make_tenant_room(tenant, size_bytes)
        copies = self.reserve_chain(holder, [key], owner, size_bytes, kind)
        if copies and tenant:
            self.tenants.charge(tenant, copies[0])
        return copies[0] if copies else None

    def make_tenant_room(self, tenant: str, size_bytes: int) -> None:
        """Evict idle blocks of `tenant` until `size_bytes` fit its quota. Raises QuotaExceeded."""
        for victim in self.tenants.victims(tenant, size_bytes) if tenant else ():
            self.evict(victim)

    def grant(
        self,
        holder: Holder,
        keys: Sequence[bytes],
        present: Sequence[HeldCopy | None],
        owner: str,
        size_bytes: int,
        kind: CopyKind,
        first: int,
        until_s: float,
        tenant: str,
    ) -> list[Slot | None]:
        """A leased slot for each key that is not being written and has no copy in `present` (the
        holder's copy per key, or None); None for the other keys. The result ends before the first
        key without room. `first`: position of keys[0] among the blocks of the owner's prompt.
        Raises QuotaExceeded if the tenant has no room for keys[0]."""
        writing, epoch = holder.writing, self.epoch
        is_limited, made = self.tenants.are_limited, dict[bytes, HeldCopy]()
        if not is_limited:
            new = [
                key
                for key, held in zip(keys, present, strict=True)
                if held is None and key not in writing
            ]
            if len(new) > 1:
                new = list(dict.fromkeys(new))
            copies = self.reserve_chain(holder, new, owner, size_bytes, kind)
            if len(copies) == len(keys):
                self.leases.write_chain(owner, first, copies, until_s)
                node_id, columns = holder.info.node_id, holder.columns
                at, generations = columns.slot, columns.generation
                return [
                    _made(Slot, (node_id, at[copy.row], generations[copy.row], epoch))
                    for copy in copies
                ]
            made = {copy.key: copy for copy in copies}
        payers = dict.fromkeys(keys, tenant)
        if is_limited and not tenant and kind is not CopyKind.EPHEMERAL:
            payers = {key: self.payer(key) for key in keys}
        slots: list[Slot | None] = []
        for depth, (key, held) in enumerate(zip(keys, present, strict=True), first):
            copy = made.pop(key, None)
            if is_limited and held is None and key not in writing:
                # One key at a time, because each may require evictions of the tenant's own blocks.
                try:
                    copy = self.reserve(holder, key, owner, size_bytes, kind, payers[key])
                except QuotaExceeded:
                    if not slots:
                        raise
                    break
            if copy is not None:
                self.leases.write_chain(owner, depth, (copy,), until_s)
                slots.append(copy.use(epoch))
            elif held is not None or key in writing:
                slots.append(None)
            else:
                break
        return slots

    def reserve_chain(
        self, holder: Holder, keys: Sequence[bytes], owner: str, size_bytes: int, kind: CopyKind
    ) -> list[HeldCopy]:
        """Reserve slots for the leading keys that have room; no quota counts them. Each copy has a
        lease count of 1, and the caller must add this lease to the lease table."""
        pool, units = holder.pool, holder.pool.units_for(size_bytes)
        size_class = holder.size_class(units)
        slots = pool.take_many(units, len(keys))
        if len(slots) < len(keys) and pool.end_quarantines(self.now_s):
            slots += pool.take_many(units, len(keys) - len(slots))
        copies: list[HeldCopy] = []
        if slots:
            copies = holder.hold_chain(
                size_class, keys[: len(slots)], owner, slots, self.next_generation, size_bytes, kind
            )
            self.next_generation += len(copies)
        if len(copies) < len(keys):
            more = keys[len(copies) :]
            copies += self._take_over(size_class, more, owner, size_bytes, kind)
        while len(copies) < len(keys):
            slot = pool.take(units)
            if slot is None and self._make_room(size_class):
                slot = pool.take(units)
            if slot is None:
                break
            key = keys[len(copies)]
            copies += holder.hold_chain(
                size_class, [key], owner, [slot], self.next_generation, size_bytes, kind
            )
            self.next_generation += 1
        return copies

    def _take_over(
        self,
        size_class: SizeClass,
        keys: Sequence[bytes],
        owner: str,
        size_bytes: int,
        kind: CopyKind,
    ) -> list[HeldCopy]:
        """Evict the coldest idle blocks of this size, and reuse their slots and their rows in
        ColumnStore for these keys. This is the usual path when the memory is full."""
        holder, columns = size_class.holder, size_class.columns
        generations, checksums = columns.generation, columns.checksum
        held, made, generation = self.blocks.held, [], self.next_generation
        victims = size_class.idle.take_coldest(len(keys))
        for victim, key in zip(victims, keys, strict=False):
            gone = held[victim]
            if gone.__class__ is HeldCopy:
                del held[victim]
            else:
                gone = self._on(victim, holder)
                self.blocks.remove(gone)
            assert not gone.leases, f"{victim.hex()} is leased and must not be evicted"
            gone.state, row = CopyState.GONE, gone.row
            holder.used_bytes -= gone.size_bytes
            generations[row], checksums[row] = generation, 0
            made.append(HeldCopy(key, size_class, row, size_bytes, kind, 1))
            generation += 1
            if self.tenants:
                self.tenants.discharge(gone)
        holder.begin(made, owner, self.next_generation)
        self.next_generation = generation
        holder.ready -= len(made)
        holder.evictions += len(made)
        self.totals.evictions += len(made)
        self.events.extend([BlockRemoved(victim, size_class.node_id) for victim in victims])
        return made

    def show(self, copies: Sequence[HeldCopy]) -> None:
        """Index ready copies, announce those that are not ephemeral, and apply the keys' pins."""
        known, events = self.blocks.held.setdefault, []
        for copy in copies:
            if known(copy.key, copy) is not copy:
                self.blocks.add(copy)
            if copy.kind is CopyKind.EPHEMERAL:
                self.ephemeral += 1
            else:
                events.append(BlockAdded(copy.key, copy.size_class.node_id, copy.record))
        self.events.extend(events)
        for copy in copies if self.pins else ():
            copy.holder.mark_pin(copy, self._possible(copy, self.pins.get(copy.key)))

    def adopt(self, holder: Holder, block: InventoryBlock) -> bool:
        """Index a block that a holder had before it registered. False: the holder has another copy
        of the block, or the slot is in use or does not exist."""
        units = holder.pool.units_for(block.size_bytes)
        if self.blocks.on(block.key, holder) is not None or block.key in holder.writing:
            return False
        if not holder.pool.adopt(block.slot, units):
            return False
        (copy,) = holder.hold_chain(
            holder.size_class(units),
            [block.key],
            "",
            [block.slot],
            block.generation,
            block.size_bytes,
            CopyKind.ADOPTED,
        )
        copy.leases = 0
        holder.adopted += 1
        holder.publish(copy, block.checksum)
        self.show((copy,))
        become_idle((copy,))
        return True

    def outgrow(self, generation: int) -> None:
        """Make all later generations larger than this one, which a holder already uses."""
        assert generation < GENERATION_MAX, generation
        self.next_generation = max(self.next_generation, generation + 1)

    def payer(self, key: bytes) -> str:
        """The tenant that a further copy of this block counts for; "" for no tenant."""
        return self.tenants.payer(copies_of(self.blocks.held.get(key))) if self.tenants else ""

    # ---- room

    def _make_room(self, size_class: SizeClass) -> bool:
        """Evict a soft-pinned copy of this size, or else slabs of other sizes. Returns False if
        nothing was evicted."""
        holder = size_class.holder
        if soft := size_class.soft.take_coldest(1):
            self.evict(self._on(soft[0], holder))
            return True
        return self._free_slabs(holder, size_class.units)

    def _free_slabs(self, holder: Holder, units: int) -> bool:
        """Evict all blocks of adjacent slabs of other sizes, so that a slot of `units` fits there.

        Only slabs whose blocks are all idle qualify. The size with the most idle memory is emptied
        first, and within a size the slab with the coldest block. Slabs in which all blocks are
        soft-pinned are last. Returns False if nothing was evicted.
        The search visits every idle block of the holder, but is rarely needed. After a failure, the
        next search waits LOOK_AGAIN_S per idle block, so that searches cannot delay all requests.
        """
        if self.now_s < holder.look_again_s:
            return False
        pool = holder.pool
        in_slab: dict[int, list[HeldCopy]] = {}  # first unit of a slab -> idle copies in it
        every = holder.size_classes.values()
        classes = sorted(every, key=lambda each: -len(each.idle) * each.units)
        for keys in (
            *(each.idle.keys() for each in classes),
            *(each.soft.keys() for each in classes),
        ):
            for key in keys:
                copy = self._on(key, holder)
                in_slab.setdefault(pool.slab_of(copy.slot).start, []).append(copy)
        free = [at for at, copies in in_slab.items() if pool.slab_of(at).used == len(copies)]
        chosen = pool.neighbours(units, free)
        if chosen is None:
            holder.look_again_s = self.now_s + LOOK_AGAIN_S * holder.idle_blocks
            return False
        for start in chosen:
            for copy in in_slab[start]:
                self.evict(copy)
        return True

    def _on(self, key: bytes, holder: Holder) -> HeldCopy:
        copy = self.blocks.on(key, holder)
        assert copy is not None, f"{key.hex()} is idle on {holder.info.node_id} but not indexed"
        return copy

    def touch(self, copy: HeldCopy) -> None:
        """Record a use of an idle copy. The use of a leased copy counts when its leases end."""
        if copy.leases == 0:
            copy.touch()
            self.tenants.used(copy)

    def evict(self, copy: HeldCopy) -> None:
        """Remove an idle copy to make room, and count the eviction."""
        assert copy.leases == 0, f"{copy.key.hex()} is leased and must not be evicted"
        copy.holder.evictions += 1
        self.totals.evictions += 1
        self.remove(copy, is_evicted=True)

    # ---- spilling

    def spill(
        self, dram: Holder, ssd: Holder, owner: str, blocks_max: int, until_s: float
    ) -> list[Spill]:
        """Reserve SSD slots for cold DRAM blocks, leased to `owner`, as far as the SSD has room.

        The block in DRAM gets no lease, because a lease would make it the most recently used one.
        So the block may be evicted and overwritten while the node writes it to the SSD. The node
        then finds another generation in the DRAM slot's header, and abandons the SSD slot.
        """
        chosen = self._spillable(dram, ssd, blocks_max)
        if not chosen:
            return []
        self.leases.refuse_too_many(owner, len(chosen))
        spills: list[Spill] = []
        # The coldest block gets the greatest depth. So it is idle first, and is coldest on the SSD.
        for depth, copy in enumerate(reversed(chosen)):
            if not self._tenant_has_room(copy):  # earlier blocks have filled the quota
                continue
            target = self.reserve(
                ssd, copy.key, owner, copy.size_bytes, tenant=self.payer(copy.key)
            )
            if target is None:
                break
            self.leases.write_chain(owner, depth, (target,), until_s)
            spills.append(
                Spill(
                    key=copy.key,
                    slot=copy.slot,
                    generation=copy.generation,
                    checksum=copy.record.checksum,
                    size_bytes=copy.size_bytes,
                    ssd_slot=target.slot,
                    ssd_generation=target.generation,
                )
            )
        return spills

    def _spillable(self, dram: Holder, ssd: Holder, blocks_max: int) -> list[HeldCopy]:
        """The coldest idle blocks of `dram` that are neither on `ssd` nor being written there."""
        if dram.pool.used_units < self.config.spill_fraction * dram.pool.units:
            return []
        found: list[HeldCopy] = []
        # More blocks than half of the SSD would evict each other there and be written repeatedly.
        left_units = ssd.pool.units // 2
        for size_class in dram.size_classes.values():
            for key in size_class.idle.keys(SPILLS_LOOKED_AT_MAX):
                left_units -= size_class.units
                if len(found) >= blocks_max or left_units < 0:
                    return found
                if self.blocks.on(key, ssd) is None and key not in ssd.writing:
                    copy = self._on(key, dram)
                    if self._tenant_has_room(copy):
                        found.append(copy)
        return found

    def _tenant_has_room(self, copy: HeldCopy) -> bool:
        """Whether one more copy of the block fits the quota of the tenant that it counts for."""
        return self.tenants.has_room(self.payer(copy.key), copy.size_bytes)

    # ---- removal

    def remove(self, copy: HeldCopy, quarantine_s: float = 0.0, is_evicted: bool = False) -> None:
        """Remove a copy without leases, in any state. Its slot is free after `quarantine_s`."""
        if copy.state is CopyState.READY:
            self._forget(copy)
        until_s = self.now_s + quarantine_s if quarantine_s else None
        copy.holder.remove(copy, until_s, is_evicted)
        self.tenants.discharge(copy)

    def reject(self, copy: HeldCopy) -> None:
        """Remove a corrupt ready copy from the index and from its tenant's usage. A leased copy
        keeps its slot until BAD_QUARANTINE_S after its last lease."""
        self.totals.bad_copies += 1
        if not copy.leases:
            self.remove(copy)
            return
        self._forget(copy)
        self.tenants.discharge(copy)
        copy.holder.reject(copy)

    def unleased(self, copies: Iterable[HeldCopy]) -> None:
        """Of the copies without a lease, make the ready ones idle; remove writing, corrupt and
        ephemeral ones. The first of `copies` becomes the coldest; it is the end of a prompt."""
        writing, bad, ephemeral = CopyState.WRITING, CopyState.BAD, CopyKind.EPHEMERAL
        idle: list[HeldCopy] = []
        for copy in copies:
            if copy.leases > 0:
                continue
            if copy.state is writing:
                self.remove(copy, self.config.quarantine_s)
            elif copy.state is bad:
                self.remove(copy, BAD_QUARANTINE_S)
            elif copy.kind is ephemeral:
                self.remove(copy)
            else:
                idle.append(copy)
        become_idle(idle)
        for copy in idle if self.tenants else ():
            self.tenants.used(copy)

    def lose(self, holder: Holder) -> None:
        """Forget all copies of a holder whose memory is gone, and announce NodeDown."""
        for copy in list(self.of(holder)):
            self._forget(copy)
            copy.state = CopyState.GONE
            self.tenants.discharge(copy)
        for copy in holder.unready():
            copy.state = CopyState.GONE
            self.tenants.discharge(copy)
        self.events.append(NodeDown(holder.info.node_id, holder.info.incarnation))

    def of(self, holder: Holder) -> Iterator[HeldCopy]:
        """The ready copies of this holder, found through eviction orders, leases and pins."""
        for key in holder.idle_keys():
            yield self._on(key, holder)
        for copy in self.leases.copies():
            if copy.state is CopyState.READY and copy.size_class.holder is holder:
                yield copy
        yield from (copy for copy in holder.pinned.values() if copy.leases == 0)

    def listed(self, holder: Holder, only_here: bool) -> Iterator[HeldCopy]:
        """The ready copies that are not ephemeral. `only_here`: only copies of blocks that no other
        holder in the same tier has."""
        for copy in self.of(holder):
            others = copies_of(self.blocks.held[copy.key]) if only_here else ()
            tiers = [other.holder.info.tier for other in others if other is not copy]
            if not copy.is_ephemeral and holder.info.tier not in tiers:
                yield copy

    def _forget(self, copy: HeldCopy) -> None:
        self.blocks.remove(copy)
        if copy.kind is CopyKind.EPHEMERAL:
            self.ephemeral -= 1
        else:
            self.events.append(BlockRemoved(copy.key, copy.size_class.node_id))

    # ---- uses

    def used(self, keys: Sequence[bytes]) -> None:
        """Record reads of these keys without a lookup, in this order. Unknown keys are misses."""
        hits = [held for key in keys if (held := self.blocks.held.get(key)) is not None]
        self.totals.lookup_blocks += len(keys)
        self.totals.hit_blocks += len(hits)
        self.touch_all(hits)

    def touch_all(self, blocks: Iterable[Held]) -> None:
        for held in blocks:
            for copy in copies_of(held):
                self.touch(copy)

    # ---- pins

    def _possible(self, copy: HeldCopy, pin: Pin) -> Pin:
        """`pin`, or SOFT if hard pins would exceed hard_pin_fraction_max of the holder."""
        holder = copy.holder
        allowed = holder.pool.units * self.config.hard_pin_fraction_max
        is_hard = pin is Pin.HARD and copy.pin is not Pin.HARD
        is_too_much = is_hard and holder.pinned_units + copy.size_class.units > allowed
        return Pin.SOFT if is_too_much else pin

    def set_pin(self, key: bytes, pin: Pin) -> bool:
        """Pin the ready copies of `key`, if any. False: on some holder only a soft pin was set."""
        done = True
        for copy in copies_of(self.blocks.held.get(key)):
            possible = self._possible(copy, pin)
            done &= possible is pin
            if copy.pin is not possible:
                copy.holder.set_pin(copy, possible)
        return done

    # ---- time

    def advance(self, now_s: float) -> None:
        """Set the time, and end the leases and the soft pins that are due."""
        assert now_s >= self.now_s, f"the clock moved back from {self.now_s} to {now_s}"
        self.now_s = now_s
        while (owner := self.leases.due(now_s)) is not None:
            self.unleased(self.leases.release(owner))
        if len(self.pins):
            for key in self.pins.due(now_s):
                self.set_pin(key, Pin.NONE)

    def check(self, holders: Iterable[Holder]) -> None:
        for part in (self.blocks, self.leases, self.events, self.pins, self.tenants):
            part.check()
        counts = self.leases.counts()
        ephemeral = sum(copy.is_ephemeral for copy in self.blocks.copies())
        assert ephemeral == self.ephemeral, "the ephemeral copies are miscounted"
        by_holder: dict[Holder, list[HeldCopy]] = {holder: [] for holder in holders}
        for copy in self.blocks.copies():
            by_holder[copy.holder].append(copy)
            pin = self.pins.get(copy.key)
            assert copy.pin is pin or (pin, copy.pin) == (Pin.HARD, Pin.SOFT), "a pin is lost"
        for holder, copies in by_holder.items():
            holder.check(copies)
            assert set(self.of(holder)) == set(copies), "a copy would survive its holder"
            for copy in (*copies, *holder.unready()):
                assert copy.leases == counts.get(copy, 0)
                if copy.state is CopyState.WRITING:
                    assert copy.leases == 1, "a slot has no writer or two"
