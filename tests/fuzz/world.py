"""One walk's world: the directory, the nodes, the clock, what goes on, and what was announced.

Not here: the steps themselves (requests.py, admin.py, orders.py), jobs (jobs.py).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.eviction import POLICIES
from mooncake_store.layout import memory_bytes_for
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.records.events import BlockAdded, BlockRemoved, Event, NodeDown, NodeUp
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from tests.fuzz.memory import UNIT_BYTES, Block, Checksums, Memory, units_of
from tests.fuzz.promises import Incarnation, Promises, Use
from tests.mooncake_store.makers import chain

if TYPE_CHECKING:
    from tests.fuzz.jobs import Job

UNITS = {"s0": (12, 22), "s1": (18, 8), "s2": (9, 0)}  # of DRAM and SSD; 9 and 8 are always tight
OWNERS = [f"r{i}" for i in range(8)]
CHAIN_BYTES = {"a": 4096, "b": 4000, "c": 8192, "d": 3 * 4096 - 100}  # blocks of 1, 1, 2, 3 units
CHAINS = {name: chain(7, name) for name in CHAIN_BYTES}
KEYS = [key for keys in CHAINS.values() for key in keys]
TENANTS = {"rich": 20 * UNIT_BYTES, "poor": 4 * UNIT_BYTES}


def size_of(key: bytes) -> int:
    return CHAIN_BYTES.get(key.decode()[0], UNIT_BYTES)


@dataclass(slots=True)
class Holder:
    """A holder as its node runs it."""

    node_id: str
    memory: Memory
    incarnation: str = ""
    headers: list[Block] = field(default_factory=list)  # what its memory said at registration
    whole: set[int] = field(default_factory=set)  # generations of which that was true
    unsaid: list[Block] | None = None  # of that, still to be said to the directory
    seen_s: float = 0.0

    @property
    def is_ssd(self) -> bool:
        return self.node_id.endswith(SSD_SUFFIX)

    def info(self, has_inventory: bool) -> NodeInfo:
        units = self.memory.units
        size_bytes = (
            units * UNIT_BYTES if self.is_ssd else memory_bytes_for(units, UNIT_BYTES, UNIT_BYTES)
        )
        return NodeInfo(
            self.node_id,
            self.incarnation,
            "host",
            "/dev/shm/x",
            size_bytes,
            "",
            b"",
            0,
            tier="ssd" if self.is_ssd else "dram",
            has_inventory=has_inventory,
        )


@dataclass(slots=True)
class Node:
    """A storage node process."""

    name: str
    holders: list[Holder]
    is_up: bool = False
    starts: int = 0


class Replica:
    """What a listener knows after following the events."""

    def __init__(self) -> None:
        self.holders: dict[bytes, set[str]] = {}
        self.copies: dict[tuple[str, bytes], Copy] = {}
        self.nodes: dict[str, str] = {}

    def follow(self, event: Event) -> None:
        if isinstance(event, BlockAdded):
            assert event.node_id in self.nodes, "a block came before its node"
            nodes = self.holders.setdefault(event.key, set())
            assert event.node_id not in nodes, "announced twice"
            nodes.add(event.node_id)
            assert event.copy is not None and event.copy.node_id == event.node_id
            self.copies[event.node_id, event.key] = event.copy
        elif isinstance(event, BlockRemoved):
            assert event.node_id in self.holders.get(event.key, ()), "removed and was not there"
            self.holders[event.key].remove(event.node_id)
            del self.copies[event.node_id, event.key]
        elif isinstance(event, NodeUp):
            assert event.info.node_id not in self.nodes, "a node came twice"
            self.nodes[event.info.node_id] = event.info.incarnation
        elif isinstance(event, NodeDown):
            assert self.nodes.pop(event.node_id, None) == event.incarnation
            held = [key for key, nodes in self.holders.items() if event.node_id in nodes]
            assert not held, "a node left without its copies"


@dataclass(slots=True)
class Allowed:
    """Which copies may go in this step, and why."""

    holders: set[str] = field(default_factory=set)  # room is needed there
    tenants: set[str] = field(default_factory=set)  # they may lose their own blocks anywhere
    copies: set[tuple[str, bytes]] = field(default_factory=set)  # asked for by name
    lost: set[str] = field(default_factory=set)  # holders that may be taken for gone


class World:
    """See the module docstring. All randomness comes from `seed`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = DirectoryConfig(
            quarantine_s=3.0,
            spill_fraction=self.rng.choice([0.3, 0.7]),
            hard_pin_fraction_max=self.rng.choice([0.2, 0.5]),
            slow_start_s=10.0,
            eviction=self.rng.choice(POLICIES),
            leases_max=self.rng.choice([60, 4_000_000]),
            events_max=512,
        )
        self.epoch = 3
        self.directory = Directory(self.epoch, self.config)
        self.replica = Replica()
        self.sequence = 0  # of the latest event that was taken in
        self.promises = Promises(self.config.quarantine_s)
        self.checksums = Checksums()
        self.now_s = 0.0
        self.allowed = Allowed()
        self.jobs: list[Job] = []
        self.frozen: list[Job] = []
        self.awaited: dict[str, dict[bytes, Use]] = {}  # a restarted directory must learn of these
        self.draining: set[str] = set()
        self.seen: Counter[str] = Counter()  # what this walk went through
        self.nodes = {name: self._node(name, *units) for name, units in UNITS.items()}
        self.tails = self.reserved = 0

    def _node(self, name: str, dram_units: int, ssd_units: int) -> Node:
        holders = [Holder(name, Memory(dram_units, is_ssd=False))]
        if ssd_units:
            holders.append(Holder(name + SSD_SUFFIX, Memory(ssd_units, is_ssd=True)))
        return Node(name, holders)

    # ---- who there is

    @property
    def holders(self) -> list[Holder]:
        return [holder for node in self.nodes.values() for holder in node.holders]

    def holder(self, node_id: str) -> Holder:
        return next(holder for holder in self.holders if holder.node_id == node_id)

    def incarnation(self, node_id: str) -> Incarnation:
        """The incarnation of this holder that the directory knows."""
        return self.epoch, self.replica.nodes.get(node_id, "")

    def is_open(self, node_id: str) -> bool:
        """Is it registered with all that it holds?"""
        holder = self.holder(node_id)
        is_known = self.replica.nodes.get(node_id) == holder.incarnation
        return is_known and holder.unsaid is None

    def new_use(self, key: bytes, slot: Slot, owner: str) -> Use:
        size_bytes = size_of(key)
        return Use(
            key,
            slot.node_id,
            self.holder(slot.node_id).memory,
            slot.slot,
            slot.generation,
            size_bytes,
            units_of(size_bytes),
            self.incarnation(slot.node_id),
            owner,
        )

    def slot(self, use: Use) -> Slot:
        return Slot(use.node_id, use.slot, use.generation)

    def use_of(self, copy: Copy) -> Use:
        """What was promised of a copy that the directory named."""
        use = self.promises.uses.get(copy.generation)
        assert use is not None and use.state == "ready", f"{copy} was never committed, or is gone"
        assert (use.node_id, use.slot, use.checksum, use.size_bytes) == (
            copy.node_id,
            copy.slot,
            copy.checksum,
            copy.size_bytes,
        ), f"{copy} is not {use}"
        return use

    # ---- what was announced

    def follow(self) -> None:
        """Take in the new events: nothing may go that nobody had to give up."""
        events = self.directory.events_since(self.sequence)
        assert events is not None
        self.sequence += len(events)
        down = {event.node_id for event in events if isinstance(event, NodeDown)}
        for event in events:
            self.replica.follow(event)
            if isinstance(event, BlockRemoved):
                use = self.promises.ready.pop((event.node_id, event.key))
                use.state = "gone"
                if event.node_id not in down:
                    self._may_go(use)
            elif isinstance(event, NodeDown):
                assert event.node_id in self.allowed.lost, f"{event.node_id} lives and was dropped"
                self.promises.lose(event.node_id)
                self.draining.discard(event.node_id)
                self.seen["holders lost"] += 1

    def _may_go(self, use: Use) -> None:
        if (use.node_id, use.key) in self.allowed.copies:
            return
        assert not use.leases, f"{use} was evicted while leased"
        assert not use.is_hard, f"{use} was evicted though pinned"
        is_own = use.tenant != "" and use.tenant in self.allowed.tenants
        assert is_own or use.node_id in self.allowed.holders, f"{use} is lost, and nothing asked"
        self.seen["evictions by quota" if is_own else "evictions"] += 1

    # ---- choices

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def some_keys(self) -> list[bytes]:
        keys = self.rng.choice(list(CHAINS.values()))
        start = self.rng.choice([0, 0, 0, 3])
        return keys[start : self.rng.randint(start + 1, len(keys))]

    def add(self, job: Job) -> None:
        """At most 24 jobs go on; the oldest one freezes."""
        self.jobs.append(job)
        if len(self.jobs) > 24:
            self.freeze(self.jobs[0])

    def freeze(self, job: Job) -> None:
        """Its process stops; it may go on much later, or never."""
        self.jobs.remove(job)
        self.frozen.append(job)
        if len(self.frozen) > 12:
            self.frozen.pop(0)
