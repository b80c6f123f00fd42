"""One walk: which step is next, what must be true after each, and what must be left at the end.

Not here: the steps (requests.py, admin.py, orders.py), the oracle (promises.py).
"""

from __future__ import annotations

from mooncake_store.records.blocks import Slot
from mooncake_store.records.membership import SSD_SUFFIX
from tests.fuzz import admin, ahead, orders, requests
from tests.fuzz.jobs import WRITE_LEASE_MS
from tests.fuzz.world import KEYS, Allowed, World

STEPS = {**requests.STEPS, **ahead.STEPS, **admin.STEPS, **orders.STEPS}
_CHOICES, _WEIGHTS = list(STEPS), list(STEPS.values())


class Walk:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps = 0
        self.world = World(seed)
        for _ in self.world.nodes:
            admin.come_up(self.world)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        world = self.world
        world.allowed = Allowed()
        chosen = world.rng.choices(_CHOICES, _WEIGHTS)[0]
        try:
            chosen(world)
            self.compare()
        except AssertionError as error:
            where = f"seed {self.seed}, step {self.steps} ({chosen.__name__})"
            raise AssertionError(f"{where}: {error}") from error
        self.steps += 1

    def compare(self) -> None:
        """The directory, its events and what was promised agree."""
        world, directory, promises = self.world, self.world.directory, self.world.promises
        world.follow()
        directory.check()
        snapshot = directory.snapshot(world.now_s)
        known = {key: nodes for key, nodes in world.replica.holders.items() if nodes}
        assert {key: set(nodes) for key, nodes in snapshot.holders} == known
        nodes = {info.node_id: info.incarnation for info in snapshot.nodes}
        assert nodes == world.replica.nodes
        found = {
            (node_id, key): copy
            for node_id in nodes
            for key, copy in directory.blocks_on(node_id, 10**6, False, world.now_s)
        }
        assert found.keys() == promises.ready.keys(), "what is ready was never announced"
        assert found == world.replica.copies, "it was announced in another place"
        first = world.rng.randrange(len(snapshot.holders) + 1)
        for key, copies in directory.index_page(first, 5, world.now_s)[0]:
            for copy in copies:
                assert found[copy.node_id, key] == copy, "a page says otherwise"
        for place, copy in found.items():
            use = promises.ready[place]
            assert Slot(*copy[:3]) == world.slot(use), f"{copy} is not {use}"
            assert (copy.checksum, copy.size_bytes) == (use.checksum, use.size_bytes)
        stats = directory.stats(world.now_s)
        promised = promises.leases, len(promises.owners)
        assert (stats.leases, stats.owners) == promised, f"{stats}: promised are {promised}"
        assert stats.ephemeral == promises.ephemeral
        for node in stats.nodes:
            assert node.writing_blocks == promises.writing(node.node_id)
            assert node.reserved_units == promises.reserved_units(node.node_id)

    def finish(self) -> None:
        """Everybody leaves: all memory comes back, in one piece."""
        world, directory = self.world, self.world.directory
        world.jobs, world.frozen, world.allowed = [], [], Allowed()
        for owner in list(world.promises.owners):
            directory.release(owner, world.now_s)
            world.promises.release(owner, world.now_s)
        while not all(node.is_up for node in world.nodes.values()):
            admin.come_up(world)
        while not all(world.is_open(holder.node_id) for holder in world.holders):
            for node in world.nodes.values():
                admin.report(world, node)
        rest_s = WRITE_LEASE_MS / 1_000 + world.config.quarantine_s
        orders.pass_time(world, rest_s, reported=1.0)
        self.compare()
        stats = directory.stats(world.now_s)
        assert (stats.leases, stats.owners, stats.ephemeral, stats.pins) == (0, 0, 0, stats.pins)
        for node in stats.nodes:
            assert (node.writing_blocks, node.quarantined_units) == (0, 0)
        keys = list(dict.fromkeys([*KEYS, *(key for _, key in world.promises.ready)]))
        world.allowed.copies = set(world.promises.ready)
        assert all(directory.remove(keys, world.now_s)), "something is in use by nobody"
        self.compare()
        for holder in world.holders:
            node_id, units = holder.node_id, holder.memory.units
            directory.drain(node_id, False, world.now_s)
            if not node_id.endswith(SSD_SUFFIX):
                given = directory.allocate(
                    node_id,
                    [b"everything".ljust(16)],
                    "last",
                    1.0,
                    False,
                    world.now_s,
                    units * 4096,
                )
                assert given.slots[0] is not None, f"{node_id} is empty and in pieces"
                directory.abandon([given.slots[0]], "last", world.now_s)
        for node in directory.stats(world.now_s).nodes:
            assert (node.used_units, node.used_bytes, node.pinned_units) == (0, 0, 0)
            assert node.free_units == node.units
        directory.check()
