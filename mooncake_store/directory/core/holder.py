"""One holder from the directory's view: its memory, and the copies in it.

A holder is the DRAM segment or the SSD file of a storage node. A copy is first *writing* (its owner
fills the slot), then *ready* (other requests may read it), then *gone*. A corrupt copy with leases
is *bad* in between: it is not indexed, and keeps its slot until its leases end. Except for bad
copies, a holder has at most one copy of a block. The lease table may still refer to a gone copy, so
each copy has its state. The slot, generation and checksum of a gone copy are void, because another
copy may use its row in ColumnStore.

The copies of one size form a *size class* with its own order of eviction, because room for a block
comes from a block of the same size. Soft-pinned copies are in a second order, which is used when
the first one is empty. Hard-pinned copies are in no order.

Ten million copies must fit into 4 GiB. So slots, generations and checksums are in columns, a holder
has no dict of its ready copies, and owners are recorded only until a copy is ready.

Not here: the index over all holders (block_index.py), leases, events (copies.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mooncake_store.directory.core.eviction.lru import Lru
from mooncake_store.directory.core.eviction.policies import EvictionOrder, make_eviction
from mooncake_store.directory.core.inventory import InventoryBlock
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.layout import Geometry
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.records.membership import NodeInfo
from mooncake_store.records.status import HolderStats

_made = tuple.__new__  # creates a NamedTuple in half the time of its constructor


class CopyState(Enum):
    WRITING = "writing"
    READY = "ready"
    BAD = "bad"
    GONE = "gone"


class CopyKind(Enum):
    """Origin of a copy, which also decides what happens at the end of its last lease."""

    COMMITTED = "committed"  # committed, or allocated to be committed
    EPHEMERAL = "ephemeral"  # freed with its last lease
    ADOPTED = "adopted"  # in the node's inventory: stored before the node registered
    RESERVED = "reserved"  # a slot reserved ahead, without a key (reservations.py)


class Pin(Enum):
    """Protection of a copy against eviction."""

    NONE = "none"
    SOFT = "soft"  # evicted when no other candidate is left
    HARD = "hard"  # never evicted


class ColumnStore:
    """Columns of the slot, generation and checksum of each copy of one holder.

    As attributes, the three Python integers would take 32 to 48 bytes each; in columns they take 24
    bytes together. At ten million copies the difference is almost a gigabyte. Free rows are reused,
    so the number of rows is the highest number of copies so far.
    """

    def __init__(self) -> None:
        self.slot = array("L")
        self.generation = array("Q")
        self.checksum = array("Q")
        self._free = array("L")

    def __len__(self) -> int:
        return len(self.slot) - len(self._free)

    def take(self, slot: int, generation: int) -> int:
        """A row for a new copy, with checksum 0."""
        if self._free:
            row = self._free.pop()
            self.slot[row], self.generation[row], self.checksum[row] = slot, generation, 0
            return row
        self.slot.append(slot)
        self.generation.append(generation)
        self.checksum.append(0)
        return len(self.slot) - 1

    def give(self, row: int) -> None:
        self._free.append(row)

    def check(self) -> None:
        assert len(self.slot) == len(self.generation) == len(self.checksum)
        assert len(set(self._free)) == len(self._free), "a row is free twice"
        assert all(row < len(self.slot) for row in self._free)


@dataclass(slots=True, eq=False)
class SizeClass:
    holder: Holder
    units: int  # per slot, at least 1
    node_id: str  # copied from the holder, like `columns`, because every lookup reads both
    columns: ColumnStore
    idle: EvictionOrder  # ready copies without a lease or a pin
    is_ssd: bool  # whether the holder is an SSD
    soft: EvictionOrder = field(default_factory=Lru)  # soft-pinned ready copies without a lease

    def forget(self, key: bytes, is_evicted: bool) -> None:
        """Drop a key from both orders. `is_evicted`: the policy may remember it (ghost entry)."""
        self.soft.forget(key)
        if is_evicted:
            self.idle.evicted(key)
        else:
            self.idle.forget(key)


@dataclass(slots=True, eq=False)
class HeldCopy:
    """One block in one slot. Compared by identity, because a key may return to the same slot."""

    key: bytes
    size_class: SizeClass
    row: int  # row of slot, generation and checksum in the size class's columns
    size_bytes: int  # of the block, at most the bytes of the slot
    kind: CopyKind
    leases: int  # number of owners that lease the copy
    state: CopyState = CopyState.WRITING
    pin: Pin = Pin.NONE

    @property
    def is_ephemeral(self) -> bool:
        return self.kind is CopyKind.EPHEMERAL

    @property
    def holder(self) -> Holder:
        return self.size_class.holder

    @property
    def slot(self) -> int:
        return self.size_class.columns.slot[self.row]

    @property
    def generation(self) -> int:
        return self.size_class.columns.generation[self.row]

    @property
    def node_id(self) -> str:
        return self.size_class.node_id

    @property
    def record(self) -> Copy:
        columns, row = self.size_class.columns, self.row
        use = self.size_class.node_id, columns.slot[row], columns.generation[row]
        return _made(Copy, (*use, columns.checksum[row], self.size_bytes))

    def use(self, epoch: int = 0) -> Slot:
        """The slot with this copy's generation, as granted by the directory of `epoch`."""
        columns, row = self.size_class.columns, self.row
        return Slot(self.size_class.node_id, columns.slot[row], columns.generation[row], epoch)

    def touch(self) -> None:
        """Record a use without a lease, for a ready copy that has no lease."""
        if self.pin is Pin.NONE:
            self.size_class.idle.touch(self.key)
        elif self.pin is Pin.SOFT:
            self.size_class.soft.touch(self.key)


def _by_order(copies: Iterable[HeldCopy]) -> Iterable[tuple[EvictionOrder, list[bytes]]]:
    """Group the keys of these copies by order of eviction, without hard-pinned copies. So one call
    per order handles a whole prompt. Keys of the same order keep their sequence."""
    found: dict[SizeClass, list[bytes]] = {}
    soft: dict[SizeClass, list[bytes]] = {}
    for copy in copies:
        if copy.pin is Pin.NONE:
            keys = found.get(copy.size_class)
            if keys is None:
                found[copy.size_class] = [copy.key]
            else:
                keys.append(copy.key)
        elif copy.pin is Pin.SOFT:
            soft.setdefault(copy.size_class, []).append(copy.key)
    yield from ((size_class.idle, keys) for size_class, keys in found.items())
    yield from ((size_class.soft, keys) for size_class, keys in soft.items())


def leave_idle(copies: Iterable[HeldCopy]) -> None:
    """Remove copies from the candidates for eviction, before a lease or a change of their pin."""
    for order, keys in _by_order(copies):
        order.discard(keys)


def become_idle(copies: Iterable[HeldCopy]) -> None:
    """Make copies without leases candidates for eviction, the first copy as the coldest."""
    for order, keys in _by_order(copies):
        order.add(keys)


@dataclass(slots=True, eq=False)
class Holder:
    """A registered holder. It takes blocks once it is *open*: its inventory has been adopted."""

    info: NodeInfo
    seen_s: float  # time of the last registration or report, by the directory's clock
    geometry: Geometry
    pool: SlotPool
    registered_s: float  # time of the registration, by the directory's clock
    eviction: str = "lru"  # name of the eviction policy, see eviction/
    is_open: bool = True
    is_draining: bool = False  # True: it takes no new blocks, and its blocks stay readable
    is_attached: bool = False  # whether `attach` was called for this incarnation
    fingerprint: str = ""  # of the first worker that attached; "": no worker has attached
    block_bytes: int = 0  # block size of the first worker that attached; 0: none has attached
    columns: ColumnStore = field(default_factory=ColumnStore)
    writing: dict[bytes, tuple[HeldCopy, str]] = field(default_factory=dict)  # key -> (copy, owner)
    # generation -> (copy, owner) of slots reserved without a key
    reserved: dict[int, tuple[HeldCopy, str]] = field(default_factory=dict)
    reserved_units: dict[str, int] = field(default_factory=dict)  # owner -> units
    bad: dict[int, HeldCopy] = field(default_factory=dict)  # slot -> corrupt copy with leases
    size_classes: dict[int, SizeClass] = field(default_factory=dict)  # units per slot -> class
    pinned: dict[bytes, HeldCopy] = field(default_factory=dict)  # key -> hard-pinned copy
    pinned_units: int = 0  # units of hard-pinned copies
    ready: int = 0  # number of ready copies
    used_bytes: int = 0  # bytes of writing, ready and bad copies; reserved slots do not count
    evictions: int = 0  # copies evicted since the registration
    adopted: int = 0  # copies adopted from the inventory
    look_again_s: float = float("-inf")  # earliest time of the next search for slabs of other sizes
    # The part of the inventory received so far; empty once the holder is open.
    inventory: list[InventoryBlock] = field(default_factory=list)

    def size_class(self, units: int) -> SizeClass:
        found = self.size_classes.get(units)
        if found is None:
            order = make_eviction(self.eviction)
            found = SizeClass(
                self, units, self.info.node_id, self.columns, order, is_ssd=self.info.is_ssd
            )
            self.size_classes[units] = found
        return found

    @property
    def idle_blocks(self) -> int:
        """The number of candidates for eviction, soft-pinned ones included."""
        return sum(len(each.idle) + len(each.soft) for each in self.size_classes.values())

    def unready(self) -> list[HeldCopy]:
        """Copies with a slot that are not indexed: being written, reserved ahead, or bad."""
        begun = (*self.writing.values(), *self.reserved.values())
        return [*(copy for copy, _ in begun), *self.bad.values()]

    def idle_keys(self) -> Iterator[bytes]:
        for size_class in self.size_classes.values():
            yield from size_class.idle.keys()
            yield from size_class.soft.keys()

    def hold_chain(
        self,
        size_class: SizeClass,
        keys: Sequence[bytes],
        owner: str,
        slots: Sequence[int],
        generation: int,
        size_bytes: int,
        kind: CopyKind,
    ) -> list[HeldCopy]:
        """Create copies in state writing, each leased once, in these slots, which the caller took
        from the pool. The generations count up from `generation`."""
        take = self.columns.take
        held = [
            HeldCopy(key, size_class, take(slot, generation + number), size_bytes, kind, 1)
            for number, (key, slot) in enumerate(zip(keys, slots, strict=True))
        ]
        self.begin(held, owner, generation)
        return held

    def begin(self, copies: Sequence[HeldCopy], owner: str, generation: int) -> None:
        """Record `owner` as the writer of copies of one kind and size, whose generations count up
        from `generation`."""
        if not copies:
            return
        if copies[0].kind is CopyKind.RESERVED:
            for number, copy in enumerate(copies, generation):
                self.reserved[number] = copy, owner
            self._count_reserved(owner, len(copies) * copies[0].size_class.units)
            return
        for copy in copies:
            self.writing[copy.key] = copy, owner
        self.used_bytes += len(copies) * copies[0].size_bytes

    def name_reserved(self, named: dict[bytes, tuple[HeldCopy, int]], owner: str) -> None:
        """Turn reserved slots into ready copies; `named`: block key -> (copy, checksum)."""
        checksums, generations = self.columns.checksum, self.columns.generation
        units = 0
        for key, (copy, checksum) in named.items():
            del self.reserved[generations[copy.row]]
            copy.key, copy.kind, copy.state = key, CopyKind.COMMITTED, CopyState.READY
            checksums[copy.row] = checksum
            self.used_bytes += copy.size_bytes
            units += copy.size_class.units
        self.ready += len(named)
        self._count_reserved(owner, -units)

    def _count_reserved(self, owner: str, units: int) -> None:
        left = self.reserved_units.pop(owner, 0) + units
        if left:
            self.reserved_units[owner] = left

    def writing_copy(self, key: bytes, owner: str, slot: int, generation: int) -> HeldCopy | None:
        """The copy that `owner` is writing in this slot under this generation, or None."""
        copy, writer = self.writing.get(key, (None, ""))
        if copy is None or writer != owner:
            return None
        columns, row = self.columns, copy.row
        return copy if columns.slot[row] == slot and columns.generation[row] == generation else None

    def publish(self, copy: HeldCopy, checksum: int) -> None:
        assert copy.state is CopyState.WRITING
        del self.writing[copy.key]
        self.columns.checksum[copy.row] = checksum
        copy.state = CopyState.READY
        self.ready += 1

    def reject(self, copy: HeldCopy) -> None:
        """Mark a leased copy as corrupt. It keeps its slot until its leases end."""
        assert copy.state is CopyState.READY and copy.leases
        self._leave_ready(copy, is_evicted=False)
        copy.state, copy.pin = CopyState.BAD, Pin.NONE
        self.bad[copy.slot] = copy

    def set_pin(self, copy: HeldCopy, pin: Pin) -> None:
        if copy.leases == 0:
            leave_idle((copy,))
        self.mark_pin(copy, pin)
        if copy.leases == 0:
            become_idle((copy,))

    def mark_pin(self, copy: HeldCopy, pin: Pin) -> None:
        """Change the pin of a copy that is in no order of eviction."""
        assert copy.state is CopyState.READY and copy.holder is self
        if copy.pin is Pin.HARD:
            del self.pinned[copy.key]
            self.pinned_units -= copy.size_class.units
        copy.pin = pin
        if pin is Pin.HARD:
            self.pinned[copy.key] = copy
            self.pinned_units += copy.size_class.units

    def remove(
        self, copy: HeldCopy, quarantine_until_s: float | None, is_evicted: bool = False
    ) -> None:
        """Remove a copy without leases. Its slot is free at `quarantine_until_s`; None: at once."""
        if copy.kind is CopyKind.RESERVED:
            _, owner = self.reserved.pop(copy.generation)
            self._count_reserved(owner, -copy.size_class.units)
        elif copy.state is CopyState.WRITING:
            del self.writing[copy.key]
        elif copy.state is CopyState.BAD:
            del self.bad[copy.slot]
        else:
            self._leave_ready(copy, is_evicted)
        if copy.kind is not CopyKind.RESERVED:
            self.used_bytes -= copy.size_bytes
        copy.state = CopyState.GONE
        slot = copy.slot
        self.columns.give(copy.row)
        if quarantine_until_s is None:
            self.pool.free(slot)
        else:
            self.pool.quarantine(slot, quarantine_until_s)

    def _leave_ready(self, copy: HeldCopy, is_evicted: bool) -> None:
        self.ready -= 1
        if copy.pin is Pin.HARD:
            del self.pinned[copy.key]
            self.pinned_units -= copy.size_class.units
        copy.size_class.forget(copy.key, is_evicted)

    def stats(self) -> HolderStats:
        info, pool = self.info, self.pool
        return HolderStats(
            node_id=info.node_id,
            incarnation=info.incarnation,
            tier=info.tier,
            segment_bytes=info.segment_bytes,
            fingerprint=self.fingerprint,
            block_bytes=self.block_bytes,
            unit_bytes=info.unit_bytes,
            units=pool.units,
            used_units=pool.used_units,
            quarantined_units=pool.quarantined_units,
            pinned_units=self.pinned_units,
            used_bytes=self.used_bytes,
            ready_blocks=self.ready,
            writing_blocks=len(self.writing),
            idle_blocks=self.idle_blocks,
            evictions=self.evictions,
            adopted=self.adopted,
            reserved_units=sum(self.reserved_units.values()),
            is_open=self.is_open,
            is_draining=self.is_draining,
        )

    def check(self, copies: list[HeldCopy]) -> None:
        """Assert the invariants; `copies` are this holder's ready copies, from the index."""
        self.pool.check()
        self.columns.check()
        reserved = [copy for copy, _ in self.reserved.values()]
        every = [*copies, *self.unready()]
        assert len({copy.slot for copy in every}) == len(every), "two copies in one slot"
        assert len({copy.row for copy in every}) == len(every) == len(self.columns)
        used_units = sum(copy.size_class.units for copy in every)
        assert self.pool.used_units == used_units, "a slot is lost"
        assert {copy.slot for copy in every} <= set(self.pool.used_slots())
        assert self.ready == len(copies)
        assert self.used_bytes == sum(
            copy.size_bytes for copy in every if copy.kind is not CopyKind.RESERVED
        )
        assert all(copy.generation == number for number, (copy, _) in self.reserved.items())
        assert all(copy.kind is CopyKind.RESERVED and copy.leases == 1 for copy in reserved)
        by_owner: dict[str, int] = {}
        for copy, owner in self.reserved.values():
            by_owner[owner] = by_owner.get(owner, 0) + copy.size_class.units
        assert self.reserved_units == by_owner, "reserved units are miscounted"
        assert all(copy.state is CopyState.WRITING for copy, _ in self.writing.values())
        assert all(copy.slot == slot for slot, copy in self.bad.items())
        bad = self.bad.values()
        assert all(copy.state is CopyState.BAD and copy.leases for copy in bad), "a slot is kept"
        pinned = {copy.key: copy for copy in copies if copy.pin is Pin.HARD}
        assert self.pinned == pinned, "the hard pins are miscounted"
        assert self.pinned_units == sum(copy.size_class.units for copy in pinned.values())
        candidates = 0
        for copy in every:
            size_class = copy.size_class
            assert copy.holder is self and self.size_classes[size_class.units] is size_class
            assert self.pool.slab_of(copy.slot).units == size_class.units
            if copy.state is CopyState.BAD:  # its key may have a newer copy, which may be idle
                continue
            is_idle = copy.state is CopyState.READY and copy.leases == 0
            expected = is_idle and copy.pin is Pin.NONE
            assert (copy.key in size_class.idle) == expected, f"{copy.key.hex()}: {copy.leases}"
            assert (copy.key in size_class.soft) == (is_idle and copy.pin is Pin.SOFT)
            assert not (is_idle and copy.is_ephemeral), "an ephemeral copy without a lease"
            candidates += is_idle and copy.pin is not Pin.HARD
        assert candidates == self.idle_blocks, "a candidate for eviction has no copy"
        for size_class in self.size_classes.values():
            size_class.idle.check()
            size_class.soft.check()
