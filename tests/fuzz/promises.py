"""What the directory has promised: who may write where, who may read what, until when.

This is the oracle of the walk. It is told every call and every answer, and says which memory the
directory may not give out again, which copies it may not lose, and which reads must be right. It
knows nothing of how the directory does that.

Not here: the bytes (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.directory.core.copies import BAD_QUARANTINE_S

if TYPE_CHECKING:
    from tests.fuzz.memory import Memory

Incarnation = tuple[int, str]  # epoch of the directory, incarnation of the holder
NEVER = float("-inf")
NO_KEY = bytes(16)  # of a slot that is reserved ahead


@dataclass(slots=True, eq=False)
class Use:
    """One block in one slot, from its allocation on."""

    key: bytes
    node_id: str
    memory: Memory
    slot: int
    generation: int
    size_bytes: int
    units: int
    incarnation: Incarnation
    owner: str
    is_ephemeral: bool = False
    tenant: str = ""  # that is charged for it
    state: str = "writing"  # | "ready" | "gone"
    checksum: int = 0
    leases: int = 0
    rests_until_s: float = NEVER  # gone, and its writer or readers may still be in it
    is_hard: bool = False  # pinned
    is_reserved: bool = False  # ahead, of no key yet
    is_damaged: bool = False  # its bytes may be wrong, and no promise was broken
    is_bad: bool = False  # reported as such: its readers may still be in it


@dataclass(slots=True, eq=False)
class Owner:
    until_s: float
    uses: dict[Use, None] = field(default_factory=dict)
    is_over: bool = False


class Promises:
    def __init__(self, quarantine_s: float) -> None:
        self.quarantine_s = quarantine_s
        self.owners: dict[str, Owner] = {}
        self.uses: dict[int, Use] = {}  # by generation, the latest of each
        self.ready: dict[tuple[str, bytes], Use] = {}  # (node, key) -> the copy that was announced
        self.quotas: dict[str, int] = {}

    # ---- made

    def grant(self, use: Use, now_s: float) -> None:
        """The directory gave these units to a writer. It must not have promised them otherwise."""
        known = self.uses.get(use.generation)
        assert known is None, f"generation {use.generation} came twice"
        for other in use.memory.overlapping(use.slot, use.units):
            why = self.protects(other, use.incarnation, now_s)
            assert not why, f"{use} was given memory of {other}: {why}"
        self.uses[use.generation] = use
        use.memory.grant(use)

    def protects(self, use: Use, incarnation: Incarnation, now_s: float) -> str:
        """Why these units may not be given away in this incarnation; "" if they may."""
        if use.incarnation != incarnation:
            return ""
        if use.state == "writing":
            return "its writer has a lease"
        if use.rests_until_s > now_s:
            return f"it rests until {use.rests_until_s}"
        if use.is_bad and use.leases:
            return "it is bad, and leased"
        if use.state == "ready" and use.is_ephemeral and use.leases:
            return "it is ephemeral and leased"
        if self.ready.get((use.node_id, use.key)) is use:
            return "it is ready, and its removal was not announced"
        return ""

    def lease(self, name: str, uses: Iterable[Use], until_s: float) -> Owner:
        owner = self.owners.setdefault(name, Owner(until_s))
        owner.until_s = max(owner.until_s, until_s)
        for use in uses:
            if use not in owner.uses:
                owner.uses[use] = None
                use.leases += 1
        return owner

    def renew(self, name: str, until_s: float) -> bool:
        if name in self.owners:
            self.lease(name, (), until_s)
        return name in self.owners

    def publish(self, use: Use, checksum: int) -> None:
        assert use.state == "writing"
        use.state, use.checksum = "ready", checksum

    # ---- kept

    def unlease(self, name: str, use: Use, now_s: float) -> None:
        """One lease ends; what nobody has written to its end rests."""
        owner = self.owners[name]
        del owner.uses[use]
        self._ended(use, now_s)
        if not owner.uses:
            self.release(name, now_s)

    def _ended(self, use: Use, now_s: float) -> None:
        use.leases -= 1
        if use.leases == 0 and use.state == "writing":
            use.state, use.rests_until_s = "gone", now_s + self.quarantine_s
        elif use.leases == 0 and use.is_bad:
            use.rests_until_s = now_s + BAD_QUARANTINE_S
        elif use.leases == 0 and use.is_ephemeral:
            use.state = "gone"

    def release(self, name: str, now_s: float) -> bool:
        owner = self.owners.pop(name, None)
        if owner is None:
            return False
        owner.is_over = True
        for use in owner.uses:
            self._ended(use, now_s)
        return True

    def expire(self, now_s: float) -> None:
        for name in [name for name, owner in self.owners.items() if owner.until_s <= now_s]:
            self.release(name, now_s)

    def abandon(self, name: str, generations: set[int], now_s: float) -> int:
        """Free at once: nothing is in flight to them."""
        owner = self.owners.get(name)
        given_up = [
            use
            for use in (owner.uses if owner else ())
            if use.state == "writing" and use.generation in generations
        ]
        for use in given_up:
            use.state = "gone"
            self.unlease(name, use, now_s)
        return len(given_up)

    def drop(self, use: Use) -> None:
        """A copy was reported as bad: its readers may be in it until their leases end,
        and a little longer."""
        use.is_damaged = use.is_bad = True
        if use.is_ephemeral:
            use.state = "gone"  # never announced, so no event will say so

    def lose(self, node_id: str) -> None:
        """The holder is gone with all promises about it."""
        for use in self.uses.values():
            if use.node_id == node_id:
                use.state = "gone"
                use.rests_until_s = NEVER

    def restart(self) -> dict[str, dict[bytes, Use]]:
        """The directory forgot everything. The copies that it knew, by holder."""
        known: dict[str, dict[bytes, Use]] = {}
        for (node_id, key), use in self.ready.items():
            known.setdefault(node_id, {})[key] = use
        for owner in self.owners.values():
            owner.is_over = True
        self.owners.clear()
        self.ready.clear()
        self.quotas.clear()
        for use in self.uses.values():
            use.state, use.leases, use.is_hard = "gone", 0, False
        return known

    # ---- counted

    @property
    def leases(self) -> int:
        return sum(len(owner.uses) for owner in self.owners.values())

    def writing(self, node_id: str) -> int:
        uses = {use for owner in self.owners.values() for use in owner.uses}
        return sum(
            use.state == "writing" and use.node_id == node_id and not use.is_reserved
            for use in uses
        )

    def reserved_units(self, node_id: str) -> int:
        uses = {use for owner in self.owners.values() for use in owner.uses}
        return sum(
            use.units
            for use in uses
            if use.state == "writing" and use.node_id == node_id and use.is_reserved
        )

    @property
    def ephemeral(self) -> int:
        uses = {use for owner in self.owners.values() for use in owner.uses}
        return sum(use.state == "ready" and use.is_ephemeral for use in uses)
