"""What takes several steps, so that anything may come between two of them.

A writer does as Putter does: header "writing", the bytes, header "ready", commit. Where its
bytes come from is its source: they are computed, or read from another copy (a copy to another node,
a restore from SSD) and then verified before they are committed. A spill does as Spiller does.

Each knows whether it may still be wrong: a promise that ended excuses it, nothing else does.

Not here: how they begin (requests.py, admin.py).
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from mooncake_store.errors import EpochPassed, RequestInvalid, StoreError
from mooncake_store.records.blocks import Spill
from mooncake_store.ssd.entries import SsdEntry
from tests.fuzz.memory import STATE_READY, STATE_WRITING, Cell, content
from tests.fuzz.promises import Owner, Use
from tests.fuzz.world import World

WRITE_LEASE_MS = 3_000


class Job(Protocol):
    node: str  # the process that does it, when that is a storage node; else ""

    def step(self, world: World) -> bool:
        """Do a little. True: it is done."""


class Write:
    """A block into a slot, and its commit. Computed, or read from `source`."""

    node = ""

    def __init__(self, use: Use, source: Use | None = None, lease: Owner | None = None) -> None:
        self.use, self._source, self._lease = use, source, lease
        self._cells: list[Cell | None] = []
        self._has_begun = False

    def step(self, world: World) -> bool:
        use = self.use
        if not self._has_begun:
            self._has_begun = True
            note_header(world, use, use.memory.write_header(use, STATE_WRITING, WRITE_LEASE_MS))
            return is_of_another_epoch(world, use)  # DirectoryClient.may_write
        elif (index := len(self._cells)) < use.units:
            source = self._source
            cell = source.memory.cells[source.slot + index] if source else (use.key, index)
            note(world, use, use.memory.write(use, index, cell))
            self._cells.append(cell)
        else:
            self._finish(world)
            return True
        return False

    def _finish(self, world: World) -> None:
        use, source = self.use, self._source
        if source is not None and not is_verified(world, source, self._lease, self._cells):
            abandon(world, use)
            return
        checksum = world.checksums.of(self._cells)
        note(world, use, use.memory.write_header(use, STATE_READY, checksum))
        if source is not None:
            world.seen["restores" if source.memory.manifest else "copies"] += 1
        commit(world, use, checksum, world.rng.choice([0.0, 3.0, 3.0]))


class Read:
    """A copy out of its slot, verified as BlockReader does."""

    node = ""

    def __init__(self, use: Use, lease: Owner | None) -> None:
        self._use, self._lease = use, lease
        self._cells: list[Cell | None] = []

    def step(self, world: World) -> bool:
        use = self._use
        if len(self._cells) < use.units:
            self._cells += use.memory.read(use.slot + len(self._cells), 1)
            return False
        # A block that a restarted directory adopted is another Use: damage is known by generation.
        is_damaged = use.is_damaged or use.generation in use.memory.damaged
        if use.memory.is_ready(use) and not is_damaged:
            # Whoever has no checksum looks at the header after the bytes, lease or not.
            right = content(use.key, use.size_bytes)
            assert self._cells == right, f"the header of {use} vouched for {self._cells}"
        if is_verified(world, use, self._lease, self._cells):
            world.seen["leased reads" if is_held(self._lease) else "late reads"] += 1
        return True


class SpillBatch:
    """Blocks from DRAM to SSD, one after the other; see Spiller."""

    def __init__(self, node: str, owner: str, spills: list[tuple[Spill, Use, Use]]) -> None:
        self.node, self._owner, self._spills = node, owner, spills
        self._at = 0
        self._cells: list[Cell | None] = []
        self._has_begun = False
        self._is_kept = [False] * len(spills)

    def step(self, world: World) -> bool:
        if self._at == len(self._spills):
            self._tell(world)
            return True
        spill, source, target = self._spills[self._at]
        if not self._has_begun:
            self._has_begun = True
            cells = source.memory.read(spill.slot, source.units)
            is_whole = world.checksums.of(cells) == spill.checksum
            if not (self._is_still_there(source) and is_whole):
                return self._next(False)
            target.memory.make_room(target)
        elif len(self._cells) < target.units:
            index = len(self._cells)
            self._cells += source.memory.read(spill.slot + index, 1)
            note(world, target, target.memory.write(target, index, self._cells[-1]))
        else:
            is_whole = self._is_still_there(source)
            if is_whole:
                self._keep(source, target)
            world.seen["spills kept" if is_whole else "spills overtaken"] += 1
            return self._next(is_whole)
        return False

    def _is_still_there(self, source: Use) -> bool:
        return source.memory.is_ready(source)

    def _keep(self, source: Use, target: Use) -> None:
        if self._cells != content(target.key, target.size_bytes):
            assert source.is_damaged, f"{source} was written to SSD wrongly: {self._cells}"
            target.is_damaged = True
        assert target.memory.manifest is not None
        entry = (target.key, target.slot, target.generation, source.checksum, target.size_bytes)
        target.memory.manifest.put(SsdEntry(*entry))

    def _next(self, is_kept: bool) -> bool:
        self._is_kept[self._at] = is_kept
        self._at, self._cells, self._has_begun = self._at + 1, [], False
        return False

    def _tell(self, world: World) -> None:
        for is_kept, (_, source, target) in zip(self._is_kept, self._spills, strict=True):
            if is_kept:
                commit(world, target, source.checksum, 0.0)
            else:
                abandon(world, target)
        assert world.directory.release(self._owner, world.now_s) == world.promises.release(
            self._owner, world.now_s
        )


# ---- what is true of every job


def note(world: World, use: Use, is_stray: bool) -> None:
    """A write to units that were given to somebody else: only after its own use had ended."""
    if is_stray:
        why = world.promises.protects(use, world.incarnation(use.node_id), world.now_s)
        assert not why, f"{use} is written by two: {why}"
        world.seen["late writes"] += 1


def note_header(world: World, use: Use, is_stray: bool) -> None:
    """A header of a writer that began too late may hit somebody else's: it will go no further."""
    if is_of_another_epoch(world, use):
        world.seen["writers too late to begin"] += 1
    else:
        note(world, use, is_stray)


def is_of_another_epoch(world: World, use: Use) -> bool:
    """Another directory leads than the one that granted it."""
    return use.incarnation[0] != world.epoch


def is_held(lease: Owner | None) -> bool:
    return lease is not None and not lease.is_over


def is_verified(world: World, use: Use, lease: Owner | None, cells: list[Cell | None]) -> bool:
    """Does the checksum let these bytes pass for the block? It must be right about that."""
    is_right = cells == content(use.key, use.size_bytes)
    passes = world.checksums.of(cells) == use.checksum
    assert passes == is_right, f"{use}: {cells} {'passed' if passes else 'did not pass'}"
    if not passes:
        # A lease ends with its holder; the file of an SSD lives on, for the next one to fill.
        is_over = not is_held(lease) or world.incarnation(use.node_id) != use.incarnation
        has_excuse = is_over or use.is_damaged or use.memory.is_lost
        assert has_excuse, f"{use} changed while leased: {cells}"
        world.seen["misses noticed"] += 1
        drop_copy(world, use)
    return passes


# ---- the calls that jobs end with


def commit(world: World, use: Use, checksum: int, lease_s: float) -> None:
    block = (use.key, use.slot, use.generation, checksum)
    owner = world.promises.owners.get(use.owner)
    expected = use.state == "writing" and owner is not None and use in owner.uses
    arguments = (use.node_id, [block], use.owner, lease_s, world.now_s, use.incarnation[0])
    if is_of_another_epoch(world, use):
        try:
            done = world.directory.commit(*arguments)
        except StoreError as error:
            assert isinstance(error, EpochPassed), f"{use} of an earlier epoch: {error}"
            world.seen["commits of an earlier epoch"] += 1
            return
        raise AssertionError(f"{use} of an earlier epoch was committed: {done}")
    (done,) = world.directory.commit(*arguments)
    assert done == expected, f"{use}: commit said {done}, its lease says {expected}"
    with contextlib.suppress(RequestInvalid):  # committed already
        assert world.directory.commit(*arguments) == [False], "committed twice"
    if not done:
        world.seen["late commits"] += 1
        return
    is_whole = use.memory.read(use.slot, use.units) == content(use.key, use.size_bytes)
    assert is_whole or use.is_damaged, f"{use} was overwritten while it was written"
    world.promises.publish(use, checksum)
    if not use.is_ephemeral:
        world.promises.ready[use.node_id, use.key] = use
    if lease_s:
        world.promises.renew(use.owner, world.now_s + lease_s)
    else:
        world.promises.unlease(use.owner, use, world.now_s)
    world.seen["commits"] += 1


def abandon(world: World, use: Use) -> None:
    generations = {use.generation}
    expected = world.promises.abandon(use.owner, generations, world.now_s)
    slot = world.slot(use)
    assert world.directory.abandon([slot], use.owner, world.now_s) == expected
    world.seen["abandoned"] += expected


def drop_copy(world: World, use: Use) -> None:
    """A reader says that this copy is bad. Only that very use may go, and only if it is."""
    known = world.promises.uses.get(use.generation)
    is_there = known is not None and known.state == "ready" and known.generation == use.generation
    if is_there:
        assert known is not None and known.is_damaged, f"{use} is there and read wrongly"
        world.allowed.copies.add((use.node_id, use.key))
    arguments = (use.key, use.node_id, use.generation, world.now_s)
    dropped = world.directory.drop_copy(*arguments)
    assert dropped == is_there, f"{use}: drop_copy said {dropped}"
    if is_there and known is not None:
        world.promises.drop(known)
        world.follow()
    if use.memory.manifest is not None and not use.memory.is_lost:
        use.memory.manifest.drop(use.slot, use.generation)
    world.seen["bad copies dropped"] += dropped
