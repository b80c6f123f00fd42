"""Thousands of random steps of everybody at once, with every invariant proved after each."""

from __future__ import annotations

import random

from mooncake_store.directory import Directory
from mooncake_store.errors import StoreError
from mooncake_store.events import BlockAdded, BlockRemoved, Event, NodeDown, NodeUp
from mooncake_store.slots import Slot
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info, report, worker_info

NODES = ["s0", "s1", "s2"]
OWNERS = [f"r{i}" for i in range(8)]
CHAINS = [chain(10, name) for name in "abcd"]


class Replica:
    """What a listener knows after following the events."""

    def __init__(self) -> None:
        self.holders: dict[bytes, set[str]] = {}
        self.nodes: dict[str, str] = {}

    def follow(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlockAdded):
                assert event.node_id in self.nodes
                nodes = self.holders.setdefault(event.key, set())
                assert event.node_id not in nodes, "announced twice"
                nodes.add(event.node_id)
            elif isinstance(event, BlockRemoved):
                self.holders[event.key].remove(event.node_id)
            elif isinstance(event, NodeUp):
                assert event.info.node_id not in self.nodes
                self.nodes[event.info.node_id] = event.info.incarnation
            elif isinstance(event, NodeDown):
                assert self.nodes.pop(event.node_id) == event.incarnation
                held = [key for key, nodes in self.holders.items() if event.node_id in nodes]
                assert not held, "a node left without its copies"


class Walk:
    """Random calls, and what must be true of their answers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = Directory(3)
        self.replica = Replica()
        self.now_s = 0.0
        self.lives = dict.fromkeys(NODES, 0)
        self.writing: list[tuple[bytes, Slot, str]] = []
        self.leased: dict[str, tuple[float, set[tuple[bytes, Slot]]]] = {}  # owner -> until, what
        self.generations: set[int] = set()

    def step(self) -> None:
        actions = {
            self.allocate: 5, self.commit: 6, self.lookup: 6, self.release: 3, self.renew: 1,
            self.abandon: 1, self.drop: 1, self.time: 4, self.node: 1, self.worker: 1,
        }  # fmt: skip
        sequence = self.directory.sequence
        self.rng.choices(list(actions), list(actions.values()))[0]()
        events = self.directory.events_since(sequence)
        assert events is not None
        self.replica.follow(events)
        self.directory.check()
        self.compare()

    def compare(self) -> None:
        """Replica, snapshot and lookups agree; what is leased is still there."""
        snapshot = self.directory.snapshot(self.now_s)
        known = {key: nodes for key, nodes in self.replica.holders.items() if nodes}
        assert {key: set(nodes) for key, nodes in snapshot.holders} == known
        assert {info.node_id: info.incarnation for info in snapshot.nodes} == self.replica.nodes
        for owner, (until_s, leased) in list(self.leased.items()):
            if until_s <= self.now_s:
                del self.leased[owner]
                continue
            keys = sorted({key for key, _ in leased})
            found = self.directory.lookup(keys, "watcher", 0.0, self.now_s, prefix_only=False)
            there = {
                (key, Slot(*copy[:3]))
                for key, places in zip(keys, found, strict=True)
                for copy in places
            }
            assert leased <= there, f"{owner} lost {leased - there}"

    def some_keys(self) -> list[bytes]:
        keys = self.rng.choice(CHAINS)
        return keys[self.rng.choice([0, 0, 0, 3]) : self.rng.randint(1, 10)]

    def allocate(self) -> None:
        node_id, owner = self.rng.choice(NODES), self.rng.choice(OWNERS)
        keys, ephemeral = self.some_keys(), self.rng.random() < 0.1
        if ephemeral:
            keys = [f"tail{self.rng.randrange(10**9)}".encode().ljust(16)]
        try:
            allocation = self.directory.allocate(node_id, keys, owner, 4.0, ephemeral, self.now_s)
        except StoreError:
            assert node_id not in self.replica.nodes or not ephemeral
            return
        assert len(allocation.slots) == len(keys)
        assert not any(allocation.slots[allocation.covered :])
        for key, slot in zip(keys, allocation.slots, strict=True):
            if slot is not None:
                assert slot.generation not in self.generations, "a generation came twice"
                self.generations.add(slot.generation)
                self.writing.append((key, slot, owner))

    def commit(self) -> None:
        self.rng.shuffle(self.writing)
        for key, slot, owner in self.writing[:4]:
            block = (key, slot.slot, slot.generation, self.rng.randrange(2**64))
            done = self.directory.commit(slot.node_id, [block], owner, 4.0, self.now_s)
            again = self.directory.commit(slot.node_id, [block], owner, 4.0, self.now_s)
            assert not again[0], "committed twice"
            if done[0]:
                self.note_leases(owner, 4.0, {(key, slot)})
        del self.writing[:4]

    def lookup(self) -> None:
        owner, keys = self.rng.choice(OWNERS), self.some_keys()
        lease_s = self.rng.choice([0.0, 2.0, 5.0])
        found = self.directory.lookup(keys, owner, lease_s, self.now_s)
        for key, places in zip(keys, found, strict=False):
            assert {copy.node_id for copy in places} == self.replica.holders[key]
        assert len(found) == len(keys) or not self.replica.holders.get(keys[len(found)])
        if lease_s:
            pairs = zip(keys, found, strict=False)
            self.note_leases(
                owner, lease_s, {(key, Slot(*copy[:3])) for key, places in pairs for copy in places}
            )

    def note_leases(self, owner: str, lease_s: float, copies: set[tuple[bytes, Slot]]) -> None:
        if not copies:
            return
        until_s, leased = self.leased.get(owner, (0.0, set()))
        self.leased[owner] = max(until_s, self.now_s + lease_s), leased | copies

    def release(self) -> None:
        owner = self.rng.choice(OWNERS)
        self.directory.release(owner, self.now_s)
        self.leased.pop(owner, None)

    def renew(self) -> None:
        owner = self.rng.choice(OWNERS)
        renewed = self.directory.renew(owner, 3.0, self.now_s)
        if owner in self.leased:
            assert renewed, "leases that run cannot be renewed"
            until_s, leased = self.leased[owner]
            self.leased[owner] = max(until_s, self.now_s + 3.0), leased

    def abandon(self) -> None:
        self.rng.shuffle(self.writing)
        for _, slot, owner in self.writing[:2]:
            self.directory.abandon([slot], owner, self.now_s)
        del self.writing[:2]

    def drop(self) -> None:
        key = self.rng.choice(self.rng.choice(CHAINS))
        for places in self.directory.lookup([key], "watcher", 0.0, self.now_s):
            copy = self.rng.choice(places)
            assert self.directory.drop_copy(key, copy.node_id, copy.generation, self.now_s)
            for _, leased in self.leased.values():
                leased.discard((key, Slot(*copy[:3])))

    def time(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.1, 0.5, 1.0])
        for node_id, life in self.lives.items():
            if self.rng.random() < 0.95:
                self.directory.node_report(node_id, f"life{life}", self.now_s)
        self.directory.tick(self.now_s)
        if self.rng.random() < 0.01:
            self.now_s += 60.0
            self.directory.tick(self.now_s)
        self.forget_lost_nodes()

    def node(self) -> None:
        node_id = self.rng.choice(NODES)
        action = self.rng.choice(["up", "up", "up", "restart", "down"])
        if action == "down":
            life = f"life{self.lives[node_id]}"
            self.directory.deregister_node(node_id, life, self.now_s)
        else:
            self.lives[node_id] += action == "restart"
            info = node_info(node_id, f"life{self.lives[node_id]}", slots=9)
            self.directory.register_node(info, self.now_s)
            self.directory.attach(node_id, "print", BLOCK_BYTES, self.now_s)
        self.forget_lost_nodes()

    def forget_lost_nodes(self) -> None:
        """A lost node takes leased copies along; that is no broken promise."""
        up = {info.node_id: info.incarnation for info in self.directory.nodes(self.now_s)}
        for node_id in NODES:
            if up.get(node_id) != self.replica.nodes.get(node_id):
                for _, leased in self.leased.values():
                    leased -= {pair for pair in leased if pair[1].node_id == node_id}

    def worker(self) -> None:
        worker_id, life = self.rng.choice(["p", "d"]), self.rng.choice(["w1", "w2"])
        action = self.rng.choice(["register", "report", "deregister"])
        if action == "register":
            weights_id = "v2" if self.rng.random() < 0.1 else "v1"
            try:
                info = worker_info(worker_id, life, weights_id=weights_id)
                self.directory.register_worker(info, self.now_s)
            except StoreError as error:
                assert "weights_id" in str(error)
        elif action == "report":
            self.directory.worker_report(report(worker_id, life), self.now_s)
        else:
            self.directory.deregister_worker(worker_id, life, self.now_s)


def test_random_life_keeps_every_invariant_and_every_promise(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(4_000):
        walk.step()
    stats = walk.directory.stats(walk.now_s)
    assert stats.commits > 100 and stats.evictions > 5, f"a walk that went nowhere: {stats}"


def test_the_same_calls_give_the_same_answers(seed: int) -> None:
    first, second = Walk(seed), Walk(seed)
    for _ in range(500):
        first.step()
        second.step()
    assert first.directory.snapshot(first.now_s) == second.directory.snapshot(second.now_s)
    assert first.directory.events_since(0) == second.directory.events_since(0)


def test_everything_is_free_when_everybody_has_left(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(1_000):
        walk.step()
    for owner in OWNERS:
        walk.directory.release(owner, walk.now_s)
    walk.now_s += walk.directory.config.quarantine_s
    for node_id, life in walk.lives.items():
        walk.directory.node_report(node_id, f"life{life}", walk.now_s)
    walk.directory.tick(walk.now_s)
    walk.directory.check()
    stats = walk.directory.stats(walk.now_s)
    assert (stats.leases, stats.owners, stats.ephemeral) == (0, 0, 0)
    for node in stats.nodes:
        assert (node.writing_blocks, node.quarantined_units) == (0, 0)
        assert node.idle_blocks + node.free_units == node.units
