"""A client that reserves slots ahead, as ReservedSlots and Putter do: marked, confirmed, written.

The client sends no request before it writes. Until its lease ends by its own clock, a write into a
confirmed slot must not reach a block of another client, even if directory or node have restarted.

Not here: writers that ask for each slot (jobs.py).
"""

from __future__ import annotations

from mooncake_store.errors import EpochPassed
from mooncake_store.records.blocks import REFUSED, STORED, THERE, ReservedCommit, Slot
from tests.fuzz.jobs import is_of_another_epoch, note, note_header
from tests.fuzz.memory import STATE_READY, STATE_WRITING, UNIT_BYTES
from tests.fuzz.promises import NO_KEY, Use
from tests.fuzz.requests import LEASE_S, payer, refuse_over_quota
from tests.fuzz.world import CHAINS, World

ROUNDS_MAX = 6  # puts of one client


class Ahead:
    """The slots of one client on one node, of blocks of one unit."""

    node = ""

    def __init__(self, world: World, node_id: str, number: int) -> None:
        self.node_id, self.owner = node_id, f"ahead{number}"
        self.raw: list[Use] = []
        self.marked: list[Use] = []
        self.ready: list[Use] = []
        self.written: Use | None = None
        self.until_s = 0.0
        self.epoch = world.epoch
        self.rounds = 0
        self.ask(world, 2)

    def step(self, world: World) -> bool:
        if self.raw:
            use = self.raw.pop()
            note_header(world, use, use.memory.write_header(use, STATE_WRITING, int(LEASE_S * 1e3)))
            self.marked.append(use)
        elif self.marked and not self.ready:
            return not self.ask(world, 0)
        elif self.written is not None:
            return not self._finish(world, self.written)
        elif self.ready and self.rounds < ROUNDS_MAX:
            if world.now_s >= self.until_s:  # as ReservedSlots.take
                return True
            self.written = self.ready.pop()
            self.written.key = world.rng.choice(self._being_written(world) or CHAINS["a"])
            self._write(world, self.written)
        else:
            self._give_back(world, self.ready)
            return True
        return False

    def _being_written(self, world: World) -> list[bytes]:
        """In every third put: the keys that other owners are writing on this node."""
        if world.rng.random() > 1 / 3:
            return []
        return [
            use.key
            for use in world.promises.uses.values()
            if (use.node_id, use.state) == (self.node_id, "writing")
            and not use.is_reserved
            and use.key in CHAINS["a"]
        ]

    def _write(self, world: World, use: Use) -> None:
        is_stray = use.memory.write(use, 0, (use.key, 0))
        assert not is_stray or use.memory.is_lost, f"{use} was reserved, and is another's"
        note(world, use, is_stray)
        world.seen["reserved slots written"] += 1
        if is_of_another_epoch(world, use):
            world.seen["reserved slots written for an earlier epoch"] += 1

    def _finish(self, world: World, use: Use) -> bool:
        """The rest of a put. False: nothing that it reserved counts any more."""
        checksum = world.checksums.of([(use.key, 0)])
        note(world, use, use.memory.write_header(use, STATE_READY, checksum))
        self.written = None
        self.rounds += 1
        is_held = self.ask(world, world.rng.choice([0, 1, 1]), use, checksum)
        if is_held and use.state == "writing":  # it was there, or the quota is used up
            self._give_back(world, [use])
        return is_held

    def ask(self, world: World, wished: int, use: Use | None = None, checksum: int = 0) -> bool:
        """Commit what was written, confirm what is marked, reserve more. False: it is all over."""
        rows = [(use.key, use.slot, use.generation, checksum)] if use else []
        expected = self._expected(world, use) if use else set()
        world.allowed.holders.update([self.node_id] if wished else [])
        arguments = self.node_id, rows, self.owner, UNIT_BYTES, wished, LEASE_S, world.now_s
        had = [*self.marked, *self.ready, *([use] if use else [])]
        owner = world.promises.owners.get(self.owner)
        is_held = (
            world.is_open(self.node_id)
            and owner is not None
            and any(each.is_reserved and each.state == "writing" for each in owner.uses)
        )
        try:
            answer = world.directory.commit_reserved(*arguments, self.epoch)
        except EpochPassed:
            assert self.epoch != world.epoch
            world.seen["reservations of an earlier epoch"] += 1
            return False
        assert self.epoch == world.epoch == answer.epoch
        if use is not None:
            self._note_verdict(world, use, checksum, answer, expected)
        assert answer.is_held == is_held, f"a reservation that {is_held=} is said otherwise"
        if world.is_open(self.node_id):
            world.promises.renew(self.owner, world.now_s + LEASE_S)
        world.follow()
        self._take(world, answer)
        if had and not answer.is_held:
            world.seen["reservations lost"] += 1
            self._release(world)
            return False
        self.ready, self.marked = self.ready + self.marked, []
        self.until_s = world.now_s + LEASE_S
        return True

    def _expected(self, world: World, use: Use) -> set[int]:
        """Which verdicts can be right."""
        promises, place = world.promises, (self.node_id, use.key)
        owner = promises.owners.get(self.owner)
        if not world.is_open(self.node_id) or use.state != "writing" or not owner:
            return {REFUSED}
        others = [
            each
            for each in promises.uses.values()
            if each is not use
            and each.state == "writing"
            and not each.is_reserved
            and (each.node_id, each.key) == place
        ]
        if place in promises.ready:
            return {THERE}
        if others or self.node_id in world.draining:  # another owner may give up what it writes
            return {REFUSED}
        payers = payer(world, use.key)
        world.allowed.tenants.add(payers)
        return {STORED, REFUSED} if payers in promises.quotas else {STORED}

    def _note_verdict(
        self, world: World, use: Use, checksum: int, answer: ReservedCommit, expected: set[int]
    ) -> None:
        (verdict,) = answer.verdicts
        assert verdict in expected, f"{use} was answered by {verdict}, not {expected}"
        if verdict != STORED:
            is_late = use.state != "writing" or self.owner not in world.promises.owners
            kind = "late commits" if is_late else "reserved slots refused"
            world.seen["reserved slots not needed" if verdict == THERE else kind] += 1
            return
        name = payer(world, use.key)
        use.tenant = name if name in world.promises.quotas else ""
        use.is_reserved = False
        world.promises.publish(use, checksum)
        world.promises.ready[use.node_id, use.key] = use
        world.promises.unlease(self.owner, use, world.now_s)
        world.follow()  # room for further slots may have cost even this block
        refuse_over_quota(world, use)
        world.seen["reserved slots committed"] += 1

    def _take(self, world: World, answer: ReservedCommit) -> None:
        uses = [world.new_use(NO_KEY, Slot(self.node_id, *use), self.owner) for use in answer.slots]
        for use in uses:
            use.is_reserved = True
            world.promises.grant(use, world.now_s)
        if uses:
            world.promises.lease(self.owner, uses, world.now_s + LEASE_S)
        self.raw += uses

    def _give_back(self, world: World, uses: list[Use]) -> None:
        generations = {use.generation for use in uses}
        expected = world.promises.abandon(self.owner, generations, world.now_s)
        slots = [world.slot(use) for use in uses]
        assert world.directory.abandon(slots, self.owner, world.now_s) == expected

    def _release(self, world: World) -> None:
        assert world.directory.release(self.owner, world.now_s) == world.promises.release(
            self.owner, world.now_s
        )


def reserve(world: World) -> None:
    """A client begins to reserve ahead on some node."""
    node_id = world.rng.choice([*world.nodes])
    if world.is_open(node_id) and world.promises.leases + 8 < world.config.leases_max:
        world.reserved += 1
        job = Ahead(world, node_id, world.reserved)
        if job.raw:
            world.add(job)


STEPS = {reserve: 3}
