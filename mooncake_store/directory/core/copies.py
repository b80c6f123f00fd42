"""How copies come and go: the one door through which the state of blocks changes.

reserve (a slot, in state writing) -> publish (ready, indexed, announced) -> remove. Each of these
keeps index, holder, leases, pins, quotas and the event log in step; the verbs that lead here are in
directory.py.

Room for a block of one size is made by dropping the coldest idle block of that size. When there is
none, other sizes give up slabs whose blocks are all idle.

Not here: verbs and their refusals (directory.py), the order of eviction (eviction/order.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mooncake_store.directory.core.block_index import BlockIndex, copies_of
from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.holder import CopyState, HeldCopy, Holder, Kind, Pin
from mooncake_store.directory.core.leases import LeaseTable
from mooncake_store.directory.core.pins import PinTable
from mooncake_store.directory.core.tenants import TenantTable
from mooncake_store.records.blocks import GENERATION_MAX
from mooncake_store.records.events import BlockAdded, BlockRemoved, EventLog, NodeDown

# Generations start at epoch * 2**20 and count up over all nodes. The server's epoch is its start in
# milliseconds, so the generations of a restarted directory are new (below 10**9 per second), unless
# the clock was set back: then what nodes claim to hold moves the count on (outgrow). A clock that
# runs in another century must not use the numbers up.
GENERATIONS_PER_EPOCH = 2**20
FIRST_GENERATION_MAX = GENERATION_MAX - 2**60
LOOK_AGAIN_S = 1e-4  # per idle block; looking at one takes about 1e-6


@dataclass(slots=True)
class DirectoryTotals:
    """Counters of one epoch."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    commits: int = 0
    evictions: int = 0
    spills: int = 0
    bad_copies: int = 0
    hit_ssd_blocks: int = 0


class CopyTable:
    """All copies, and everything that must change with them."""

    def __init__(self, epoch: int, config: DirectoryConfig) -> None:
        self.config = config
        self.now_s = float("-inf")
        self.blocks = BlockIndex()
        self.leases = LeaseTable(config)
        self.pins = PinTable()
        self.tenants = TenantTable()
        self.events = EventLog(config.events_max)
        self.totals = DirectoryTotals()
        self.ephemeral = 0  # ready copies that are
        self.next_generation = min(epoch * GENERATIONS_PER_EPOCH, FIRST_GENERATION_MAX)

    # ---- coming

    def reserve(
        self,
        holder: Holder,
        key: bytes,
        owner: str,
        size_bytes: int,
        is_ephemeral: bool = False,
        tenant: str = "",
    ) -> HeldCopy | None:
        """A slot for `key`, evicting what must go; None when nothing may.

        QuotaExceeded when the tenant has no room and none of its own blocks may go.
        """
        for victim in self.tenants.victims(tenant, size_bytes) if tenant else ():
            self.evict(victim)
        generation, self.next_generation = self.next_generation, self.next_generation + 1
        units = holder.pool.units_for(size_bytes)
        slot = holder.pool.take(units)
        if slot is None and holder.pool.end_quarantines(self.now_s):
            slot = holder.pool.take(units)
        if slot is None and self._make_room(holder, units):
            slot = holder.pool.take(units)
        if slot is None:
            return None
        copy = holder.hold(key, owner, slot, generation, size_bytes, units, is_ephemeral)
        if tenant:
            self.tenants.charge(tenant, copy)
        return copy

    def publish(self, copy: HeldCopy, checksum: int) -> None:
        """The slot is written: others may read it."""
        shelf = copy.shelf
        shelf.holder.publish(copy, checksum)
        self.blocks.add(copy)
        if copy.kind is Kind.EPHEMERAL:
            self.ephemeral += 1
        else:
            self.events.append(BlockAdded(copy.key, shelf.node_id))
        if len(self.pins):
            copy.holder.mark_pin(copy, self._possible(copy, self.pins.get(copy.key)))

    def adopt(
        self, holder: Holder, key: bytes, slot: int, generation: int, checksum: int, size_bytes: int
    ) -> bool:
        """A block that the holder had before this directory began; False when it cannot be kept."""
        units = holder.pool.units_for(size_bytes)
        if self.blocks.on(key, holder) is not None or key in holder.writing:
            return False
        if not holder.pool.adopt(slot, units):
            return False
        copy = holder.hold(key, "", slot, generation, size_bytes, units, is_ephemeral=False)
        copy.kind = Kind.ADOPTED
        holder.adopted += 1
        self.publish(copy, checksum)
        copy.become_idle()
        return True

    def outgrow(self, generation: int) -> None:
        """A holder has used this one before: the next is larger, whatever the clock said."""
        assert generation < GENERATION_MAX, generation
        self.next_generation = max(self.next_generation, generation + 1)

    def payer(self, key: bytes) -> str:
        """Whose quota a further copy of this block counts for; "" for nobody's."""
        return self.tenants.payer(copies_of(self.blocks.held.get(key))) if self.tenants else ""

    # ---- room

    def _make_room(self, holder: Holder, units: int) -> bool:
        coldest = holder.shelf(units).coldest()
        if coldest is not None:
            self.evict(self._on(coldest, holder))
            return True
        return self._free_slabs(holder, units)

    def _free_slabs(self, holder: Holder, units: int) -> bool:
        """Evict all blocks of neighbouring slabs of other sizes, so that `units` fit there.

        Only slabs whose blocks are all idle; first those of the size that has the most idle memory,
        its coldest first. Nothing is evicted when no such neighbours are large enough. Rare (one
        size takes memory from another), so it may look at every idle block; in vain not again for
        LOOK_AGAIN_S for each of them, or a size without room would keep the directory busy.
        """
        if self.now_s < holder.look_again_s:
            return False
        pool = holder.pool
        in_slab: dict[int, list[HeldCopy]] = {}  # start of a slab -> its idle copies
        shelves = sorted(holder.shelves.values(), key=lambda each: -len(each.idle) * each.units)
        for keys in (*(shelf.idle.keys() for shelf in shelves),
                     *(shelf.soft.keys() for shelf in shelves)):  # fmt: skip
            for key in keys:
                copy = self._on(key, holder)
                in_slab.setdefault(pool.slab_of(copy.slot).start, []).append(copy)
        free = [start for start, copies in in_slab.items() if pool.is_all(start, len(copies))]
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
        assert copy is not None, f"{key.hex()} is idle on {holder.info.node_id} and not there"
        return copy

    def evict(self, copy: HeldCopy) -> None:
        """Drop an idle copy for room."""
        assert copy.leases == 0, f"{copy.key.hex()} is leased and would be evicted"
        copy.holder.evictions += 1
        self.totals.evictions += 1
        self.remove(copy, is_certain=True, is_evicted=True)

    # ---- going

    def remove(self, copy: HeldCopy, is_certain: bool, is_evicted: bool = False) -> None:
        """Free the slot; after the quarantine when somebody may still be in it."""
        if copy.state is CopyState.READY:
            self._forget(copy)
        until_s = None if is_certain else self.now_s + self.config.quarantine_s
        copy.holder.remove(copy, until_s, is_evicted)
        self.tenants.discharge(copy)

    def unleased(self, copies: Iterable[HeldCopy]) -> None:
        """These copies lost a lease, deepest first. What becomes of those that lost the last?"""
        writing, ephemeral, counts_tenants = CopyState.WRITING, Kind.EPHEMERAL, len(self.tenants)
        for copy in copies:
            if copy.leases > 0:
                continue
            if copy.state is writing:
                self.remove(copy, is_certain=False)
            elif copy.kind is ephemeral:
                self.remove(copy, is_certain=True)
            else:
                copy.become_idle()
                if counts_tenants:
                    self.tenants.used(copy)

    def lose(self, holder: Holder) -> None:
        """The holder is gone, and its memory with it."""
        for copy in list(self.of(holder)):
            self._forget(copy)
            copy.state = CopyState.GONE
            self.tenants.discharge(copy)
        for copy, _ in holder.writing.values():
            copy.state = CopyState.GONE
            self.tenants.discharge(copy)
        self.events.append(NodeDown(holder.info.node_id, holder.info.incarnation))

    def of(self, holder: Holder) -> Iterator[HeldCopy]:
        """The ready copies of this holder, found without going through the whole index."""
        for key in holder.idle_keys():
            yield self._on(key, holder)
        for copy in self.leases.copies():
            if copy.state is CopyState.READY and copy.shelf.holder is holder:
                yield copy
        yield from (copy for copy in holder.pinned.values() if copy.leases == 0)

    def _forget(self, copy: HeldCopy) -> None:
        self.blocks.remove(copy)
        if copy.kind is Kind.EPHEMERAL:
            self.ephemeral -= 1
        else:
            self.events.append(BlockRemoved(copy.key, copy.shelf.node_id))

    # ---- pins

    def _possible(self, copy: HeldCopy, pin: Pin) -> Pin:
        """A hard pin beyond hard_pin_fraction_max is a soft one."""
        holder = copy.holder
        allowed = holder.pool.units * self.config.hard_pin_fraction_max
        is_hard = pin is Pin.HARD and copy.pin is not Pin.HARD
        is_too_much = is_hard and holder.pinned_units + copy.shelf.units > allowed
        return Pin.SOFT if is_too_much else pin

    def set_pin(self, key: bytes, pin: Pin) -> bool:
        """Pin the copies of `key`; False when a hard pin finds no room on some holder."""
        done = True
        for copy in copies_of(self.blocks.held.get(key)):
            possible = self._possible(copy, pin)
            done &= possible is pin
            if copy.pin is not possible:
                copy.holder.set_pin(copy, possible)
        return done

    # ---- time

    def advance(self, now_s: float) -> None:
        """Leases and soft pins that are due end."""
        assert now_s >= self.now_s, f"the clock went from {self.now_s} back to {now_s}"
        self.now_s = now_s
        while (owner := self.leases.due(now_s)) is not None:
            self.unleased(self.leases.release(owner))
        if len(self.pins):
            for key in self.pins.due(now_s):
                self.set_pin(key, Pin.NONE)

    def check(self, holders: Iterable[Holder]) -> None:
        """Prove the invariants."""
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
            for copy in (*copies, *(copy for copy, _ in holder.writing.values())):
                assert copy.leases == counts.get(copy, 0)
                if copy.state is CopyState.WRITING:
                    assert copy.leases == 1, "a slot is written by nobody, or by two"
