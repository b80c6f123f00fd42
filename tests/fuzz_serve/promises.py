"""What the directory has promised to whom, kept apart from it: the oracle of leases and slots.

A `WatchedDirectory` stands where the directory does and passes everything on. Meanwhile it notes
what each answer promises: a leased copy stays until its lease ends, a slot is one writer's until
it is committed or given back, and rests when its writer vanished. What breaks a promise is told to
the loop, because an error here would be caught where product code is careful.

Not here: tokens (clients.py), what must hold at rest (judge.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_store.directory.core.directory import Directory
from mooncake_store.layout import STATE_READY
from mooncake_store.records.blocks import STORED, Allocation, Copy, ReservedCommit, Slot
from mooncake_store.records.events import BlockRemoved, NodeDown
from tests.fuzz_serve.green import loop

Place = tuple[str, bytes]  # node, key
Use = tuple[str, int, int]  # node, slot, generation


@dataclass
class Grants:
    """What one owner was given, all until one time."""

    until_s: float
    copies: set[Place] = field(default_factory=set)  # ready, and leased
    slots: dict[Use, bytes] = field(default_factory=dict)  # being written, for this key


class WatchedDirectory(Directory):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        loop().seen["directories"] += 1
        self._grants: dict[str, Grants] = {}
        self._resting: dict[tuple[str, int], float] = {}  # slots, and until when
        self._seen = 0  # events

    # ---- verbs that promise something

    def lookup(
        self, keys: Sequence[bytes], owner: str, lease_s: float, now_s: float, *rest: Any, **of: Any
    ) -> list[tuple[Copy, ...]]:
        self._begin(now_s)
        found = super().lookup(keys, owner, lease_s, now_s, *rest, **of)
        self._follow("lookup")
        if lease_s > 0 and any(found):
            grants = self._granted(owner, now_s, lease_s)
            grants.copies |= {
                (copy.node_id, key)
                for key, copies in zip(keys, found, strict=False)
                for copy in copies
            }
        return found

    def allocate(
        self,
        node_id: str,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool,
        now_s: float,
        *rest: Any,
        **of: Any,
    ) -> Allocation:
        self._begin(now_s)
        evictions = self._copies.totals.evictions
        given = super().allocate(node_id, keys, owner, lease_s, ephemeral, now_s, *rest, **of)
        loop().seen["evictions"] += self._copies.totals.evictions - evictions
        self._follow("allocate")
        if ephemeral:
            loop().objects.update(keys)
        for key, slot in zip(keys, given.slots, strict=True):
            if slot is not None:
                self._refuse_taken(slot, now_s)
                self._granted(owner, now_s, lease_s).slots[slot[:3]] = key
        return given

    def commit(
        self,
        node_id: str,
        blocks: Sequence[tuple[bytes, int, int, int]],
        owner: str,
        lease_s: float,
        now_s: float,
        *rest: Any,
        **of: Any,
    ) -> list[bool]:
        self._begin(now_s)
        seen = loop().seen
        done = super().commit(node_id, blocks, owner, lease_s, now_s, *rest, **of)
        self._follow("commit")
        for (key, slot, generation, _), is_done in zip(blocks, done, strict=True):
            seen["commits" if is_done else "late commits"] += 1
            if not is_done:
                continue
            self._note_complete(node_id, key, slot)
            grants = self._grants.get(owner)
            use = node_id, slot, generation
            if grants is None or grants.slots.pop(use, None) != key:
                loop().fail(f"a commit of {use} was accepted that nobody may write any more")
            elif lease_s > 0:
                grants.copies.add((node_id, key))
        if lease_s > 0 and any(done):
            self._granted(owner, now_s, lease_s)
        return done

    def commit_reserved(
        self, node_id: str, blocks: Sequence[tuple[bytes, int, int, int]], *rest: Any, **of: Any
    ) -> ReservedCommit:
        answer = super().commit_reserved(node_id, blocks, *rest, **of)
        for (key, slot, _, _), verdict in zip(blocks, answer.verdicts, strict=True):
            if verdict == STORED:
                loop().seen["commits into reserved slots"] += 1
                self._note_complete(node_id, key, slot)
        return answer

    def _note_complete(self, node_id: str, key: bytes, slot: int) -> None:
        loop().completed.add(key)
        loop().on_complete(self._nodes.registered(node_id).info, key, slot)

    def adopt(self, node_id: str, incarnation: str, blocks: Any, *rest: Any, **of: Any) -> int:
        adopted = super().adopt(node_id, incarnation, blocks, *rest, **of)
        loop().completed.update(block[0] for block in blocks if block[5] == STATE_READY)
        loop().seen["blocks adopted"] += adopted
        return adopted

    def drop_copy(self, *arguments: Any, **of: Any) -> bool:
        is_gone = super().drop_copy(*arguments, **of)
        loop().seen["bad copies"] += is_gone
        return is_gone

    def renew(self, owner: str, lease_s: float, now_s: float, *rest: Any, **of: Any) -> bool:
        self._begin(now_s)
        is_known = super().renew(owner, lease_s, now_s, *rest, **of)
        if is_known and owner in self._grants:
            self._granted(owner, now_s, lease_s)
        return is_known

    def release(self, owner: str, now_s: float, *rest: Any, **of: Any) -> bool:
        self._begin(now_s)
        found = super().release(owner, now_s, *rest, **of)
        self._follow("release")
        self._end(owner, now_s)
        return found

    def abandon(
        self, slots: Sequence[Slot], owner: str, now_s: float, *rest: Any, **of: Any
    ) -> int:
        self._begin(now_s)
        found = super().abandon(slots, owner, now_s, *rest, **of)
        for slot in slots if owner in self._grants else ():
            self._grants[owner].slots.pop(tuple(slot)[:3], None)
        return found

    # ---- the promises

    def _granted(self, owner: str, now_s: float, lease_s: float) -> Grants:
        until_s = now_s + min(lease_s, self.config.lease_s_max)
        grants = self._grants.setdefault(owner, Grants(until_s))
        grants.until_s = max(grants.until_s, until_s)
        return grants

    def _begin(self, now_s: float) -> None:
        """What has happened since the last verb, also in those that are not watched."""
        for owner, one in list(self._grants.items()):
            if one.until_s <= now_s:
                loop().seen["leases that ran out"] += 1
                self._end(owner, one.until_s)
        self._follow("")

    def _end(self, owner: str, at_s: float) -> None:
        if (grants := self._grants.pop(owner, None)) is not None:
            for node_id, slot, _ in grants.slots:
                self._resting[node_id, slot] = at_s + self.config.quarantine_s

    def _follow(self, verb: str) -> None:
        """`verb`: of those that may make room, and never at the cost of who has a lease."""
        for event in self.events_since(self._seen) or ():
            if isinstance(event, BlockRemoved):
                for owner, grants in self._grants.items():
                    if (event.node_id, event.key) in grants.copies:
                        grants.copies.discard((event.node_id, event.key))
                        if verb:
                            loop().fail(
                                f"{verb}: {event.key.hex()[:8]} on {event.node_id} is gone, and "
                                f"{owner} leases it"
                            )
            elif isinstance(event, NodeDown):
                self._lose(event.node_id)
        self._seen = self.sequence

    def _lose(self, node_id: str) -> None:
        for grants in self._grants.values():
            grants.slots = {use: key for use, key in grants.slots.items() if use[0] != node_id}
        self._resting = {at: until for at, until in self._resting.items() if at[0] != node_id}

    def _refuse_taken(self, slot: Slot, now_s: float) -> None:
        for owner, grants in self._grants.items():
            for other in grants.slots:
                if other[:2] == slot[:2]:
                    loop().fail(f"{slot} is given away, and {owner} writes there")
        if self._resting.get(slot[:2], 0.0) > now_s:
            loop().fail(f"{slot} is given away before it has rested")
