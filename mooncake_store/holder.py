"""One storage node as the directory sees it: its slots, and the copies in them.

A copy is *writing* (its owner fills the slot), then *ready* (others may read it), then *gone*. A
node has at most one copy of a key. Gone copies stay in the lease table until their owners release
them, which is why a copy carries its state.

Not here: the key -> copies index over all nodes, leases, events (directory.py, leases.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from mooncake_store.eviction import EvictionOrder
from mooncake_store.layout import Geometry
from mooncake_store.membership import NodeInfo
from mooncake_store.slots import Copy, SlotPool


class CopyState(Enum):
    WRITING = "writing"
    READY = "ready"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class HeldCopy:
    """One block in one slot. Compared by identity: the same key may come back in the same slot."""

    key: bytes
    holder: Holder
    owner: str  # who writes it, or wrote it
    is_ephemeral: bool
    place: Copy  # its checksum is 0 until the commit
    state: CopyState = CopyState.WRITING
    leases: int = 0  # owners in the lease table that hold it


@dataclass(slots=True, eq=False)
class Holder:
    """A registered storage node. Unformatted (no slots) until a worker attaches to it."""

    info: NodeInfo
    seen_s: float
    block_bytes: int = 0
    fingerprint: str = ""
    geometry: Geometry | None = None
    pool: SlotPool = field(default_factory=lambda: SlotPool(0, iter(())))
    copies: dict[bytes, HeldCopy] = field(default_factory=dict)  # writing and ready
    idle: EvictionOrder = field(default_factory=EvictionOrder)  # ready and not leased
    writing: int = 0
    evictions: int = 0

    def format(
        self, fingerprint: str, block_bytes: int, shape: Geometry, generations: Iterator[int]
    ) -> None:
        assert not self.copies, f"{self.info.node_id} is formatted while it holds copies"
        self.fingerprint, self.block_bytes, self.geometry = fingerprint, block_bytes, shape
        self.pool = SlotPool(shape.slots, generations)

    @property
    def ready(self) -> int:
        return len(self.copies) - self.writing

    def reserve(self, key: bytes, owner: str, is_ephemeral: bool) -> HeldCopy | None:
        """Give `key` a slot to be written; None when no slot is free."""
        assert key not in self.copies, f"{key.hex()} has a slot already"
        taken = self.pool.take()
        if taken is None:
            return None
        place = Copy(self.info.node_id, taken[0], taken[1], 0)
        copy = HeldCopy(key, self, owner, is_ephemeral, place)
        self.copies[key] = copy
        self.writing += 1
        return copy

    def writing_copy(self, key: bytes, owner: str, slot: int, generation: int) -> HeldCopy | None:
        """The copy that `owner` is writing in that slot; None when it is not, or not any more."""
        copy = self.copies.get(key)
        if copy is None or copy.state is not CopyState.WRITING or copy.owner != owner:
            return None
        return copy if copy.place[1:3] == (slot, generation) else None

    def publish(self, copy: HeldCopy, checksum: int) -> None:
        assert copy.state is CopyState.WRITING
        copy.place = Copy(*copy.place[:3], checksum)
        copy.state = CopyState.READY
        self.writing -= 1

    def remove(self, copy: HeldCopy, quarantine_until_s: float | None) -> None:
        """The copy is gone; its slot is free, at once or after the quarantine."""
        held = self.copies.pop(copy.key)
        assert held is copy, f"{copy.key.hex()} is held in another slot"
        self.idle.discard(copy.key)
        self.writing -= copy.state is CopyState.WRITING
        copy.state = CopyState.GONE
        _, slot, generation, _ = copy.place
        if quarantine_until_s is None:
            self.pool.free(slot, generation)
        else:
            self.pool.quarantine(slot, generation, quarantine_until_s)

    def check(self) -> None:
        """Prove the invariants."""
        self.pool.check()
        assert self.pool.used_slots == len(self.copies), "a slot is used without a copy"
        states = [copy.state for copy in self.copies.values()]
        assert CopyState.GONE not in states, "a copy is gone and held"
        assert states.count(CopyState.WRITING) == self.writing
        idle = set(self.idle.keys())
        for key, copy in self.copies.items():
            assert copy.key == key and copy.holder is self
            node_id, slot, generation, _ = copy.place
            assert node_id == self.info.node_id
            assert self.pool.generation(slot) == generation, f"slot {slot} has another owner"
            is_idle = copy.state is CopyState.READY and copy.leases == 0
            assert (key in idle) == is_idle, f"{key.hex()} has {copy.leases} leases"
            assert not (is_idle and copy.is_ephemeral), "an ephemeral copy without a lease"
        assert idle <= self.copies.keys(), "a candidate for eviction is not held"
