"""Steps of clients: allocate and write, look up and read, copy, restore, release; also too late.

Not here: what goes on over several steps (jobs.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.errors import NodeUnknown, QuotaExceeded, RequestInvalid, StoreError, StoreFull
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.records.membership import SSD_SUFFIX
from tests.fuzz.jobs import Read, Write, abandon
from tests.fuzz.memory import UNIT_BYTES
from tests.fuzz.promises import Owner, Use
from tests.fuzz.world import KEYS, OWNERS, TENANTS, World, size_of

LEASE_S = 3.0


def allocate(world: World) -> None:
    """A few blocks of a chain are computed, somewhere."""
    node_id, owner = world.rng.choice([*world.nodes]), world.rng.choice(OWNERS)
    tenant = world.rng.choice(["", "", *TENANTS])
    if world.chance(0.1):
        world.tails += 1
        keys = [f"tail{world.tails}".encode().ljust(16)]
        uses = grant(world, node_id, keys, owner, is_ephemeral=True)
    else:
        uses = grant(world, node_id, world.some_keys(), owner, tenant=tenant)
    for use in uses:
        world.add(Write(use))


def grant(
    world: World,
    node_id: str,
    keys: Sequence[bytes],
    owner: str,
    is_ephemeral: bool = False,
    tenant: str = "",
) -> list[Use]:
    """Allocate; the uses that were granted, by now written nowhere."""
    promises, size_bytes = world.promises, size_of(keys[0])
    world.allowed.holders.add(node_id)
    payers = [tenant or ("" if is_ephemeral else payer(world, key)) for key in keys]
    world.allowed.tenants.update(payers)
    there = [promises.ready[node_id, key] for key in keys if (node_id, key) in promises.ready]
    arguments = (node_id, keys, owner, LEASE_S, is_ephemeral, world.now_s, size_bytes, tenant)
    until_s = world.now_s + LEASE_S
    try:
        given = world.directory.allocate(*arguments)
    except QuotaExceeded:
        used_bytes = sum(use.size_bytes for use in charged(world, payers[0]))
        assert used_bytes + size_bytes > promises.quotas[payers[0]], "the quota is not used up"
        if there:
            promises.lease(owner, there, until_s)
        world.seen["quota exceeded"] += 1
        return []
    except StoreFull:
        assert promises.leases + len(keys) > world.config.leases_max
        world.seen["too many leases"] += 1
        return []
    except NodeUnknown:
        assert node_id not in world.replica.nodes, f"{node_id} is registered"
        return []
    assert len(given.slots) == len(keys) and not any(given.slots[given.covered :])
    if not world.is_open(node_id) and world.holder(node_id).unsaid is not None:
        assert given.covered == 0, "a node that still says what it holds takes no blocks"
    if node_id in world.draining:
        assert given.covered == 0, "a draining node takes no blocks"
        return []
    if given.covered == 0 and not any(given.slots):
        world.seen["full"] += 1
    if world.is_open(node_id) and there:
        promises.lease(owner, there, until_s)
    return _granted(world, keys, given.slots, owner, is_ephemeral, payers)


def _granted(
    world: World,
    keys: Sequence[bytes],
    slots: Sequence[Slot | None],
    owner: str,
    is_ephemeral: bool,
    payers: Sequence[str],
) -> list[Use]:
    pairs = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
    uses = [world.new_use(key, slot, owner) for key, slot in pairs]
    world.follow()  # what was evicted for them is gone
    paid = [name for name, slot in zip(payers, slots, strict=True) if slot is not None]
    for use, name in zip(uses, paid, strict=True):
        use.is_ephemeral = is_ephemeral
        use.tenant = name if name in world.promises.quotas else ""
        world.promises.grant(use, world.now_s)
    if uses:
        world.promises.lease(owner, uses, world.now_s + LEASE_S)
    for use in uses:
        refuse_over_quota(world, use)
    return uses


def payer(world: World, key: bytes) -> str:
    """For whom a further copy of this block counts."""
    copies = [use for (_, each), use in world.promises.ready.items() if each == key]
    return min((use.tenant for use in copies if use.tenant), default="")


def refuse_over_quota(world: World, use: Use) -> None:
    """A new copy may not have brought its tenant over the quota."""
    if use.tenant:
        used_bytes = sum(use.size_bytes for use in charged(world, use.tenant))
        assert used_bytes <= world.promises.quotas[use.tenant], f"{use.tenant} is over its quota"
        world.seen["copies charged"] += 1


def charged(world: World, tenant: str) -> list[Use]:
    """What counts for this tenant."""
    uses = [use for owner in world.promises.owners.values() for use in owner.uses]
    every = dict.fromkeys([*uses, *world.promises.ready.values()])
    return [use for use in every if use.tenant == tenant and use.state != "gone"]


def look_up(world: World) -> None:
    """Someone reads, with a lease or (too late, or never asked) without."""
    owner, keys = world.rng.choice(OWNERS), world.some_keys()
    lease_s = world.rng.choice([0.0, LEASE_S, LEASE_S])
    found = places(world, keys, owner, lease_s, prefix_only=world.chance(0.7))
    uses = [world.use_of(world.rng.choice(copies)) for copies in found if copies]
    for use in world.rng.sample(uses, min(2, len(uses))):
        world.add(Read(use, world.promises.owners[owner] if lease_s else None))


def places(
    world: World, keys: Sequence[bytes], owner: str, lease_s: float, prefix_only: bool
) -> list[tuple[Copy, ...]]:
    """Look up, and hold what it says against what was announced."""
    promises = world.promises
    try:
        found = world.directory.lookup(keys, owner, lease_s, world.now_s, prefix_only)
    except StoreFull:
        world.seen["too many leases"] += 1
        return []
    assert len(found) == len(keys) or (
        prefix_only and not world.replica.holders.get(keys[len(found)])
    )
    for key, copies in zip(keys, found, strict=False):
        assert {copy.node_id for copy in copies} == world.replica.holders.get(key, set())
    uses = [world.use_of(copy) for copies in found for copy in copies]
    if lease_s and uses:
        promises.lease(owner, uses, world.now_s + lease_s)
    return found


def read_tail(world: World) -> None:
    """An ephemeral object is found by whoever knows its key, for as long as someone leases it."""
    held = [use for owner in world.promises.owners.values() for use in owner.uses]
    tails = [use for use in held if use.is_ephemeral and use.state == "ready"]
    if not tails or world.promises.leases >= world.config.leases_max:
        return
    use, owner = world.rng.choice(tails), world.rng.choice(OWNERS)
    ((copy,),) = world.directory.lookup([use.key], owner, LEASE_S, world.now_s)
    assert world.use_of(copy) is use
    world.add(Read(use, world.promises.lease(owner, [use], world.now_s + LEASE_S)))


def copy(world: World) -> None:
    """Blocks to another node, or from an SSD back into the DRAM of its node."""
    owner, keys = world.rng.choice(OWNERS), world.some_keys()
    found = places(world, keys, owner, LEASE_S, prefix_only=True)
    sources = {
        key: world.use_of(world.rng.choice(copies))
        for key, copies in zip(keys, found, strict=False)
    }
    targets: dict[str, list[bytes]] = {}
    for key, source in sources.items():
        node_id = source.node_id.removesuffix(SSD_SUFFIX)
        if node_id == source.node_id:
            node_id = world.rng.choice([*world.nodes])
        targets.setdefault(node_id, []).append(key)
    lease: Owner | None = world.promises.owners.get(owner)
    for node_id, wanted in targets.items():
        for use in grant(world, node_id, wanted, owner):
            world.add(Write(use, sources[use.key], lease))


def release(world: World) -> None:
    owner = world.rng.choice(OWNERS)
    known = world.directory.release(owner, world.now_s)
    assert known == world.promises.release(owner, world.now_s)


def renew(world: World) -> None:
    owner, lease_s = world.rng.choice(OWNERS), world.rng.choice([0.5, LEASE_S])
    renewed = world.directory.renew(owner, lease_s, world.now_s)
    assert renewed == world.promises.renew(owner, world.now_s + lease_s)


def give_up(world: World) -> None:
    """A writer says that it will not go on. It never writes again."""
    writers = [job for job in world.jobs if isinstance(job, Write)]
    if writers:
        job = world.rng.choice(writers)
        world.jobs.remove(job)
        abandon(world, job.use)


def work(world: World) -> None:
    """What goes on goes on, a little."""
    for _ in range(world.rng.randint(1, 6)):
        if not world.jobs:
            return
        job = world.rng.choice(world.jobs)
        if job.step(world):
            world.jobs.remove(job)


def freeze(world: World) -> None:
    """A process stops in the middle of something, or dies there."""
    if world.jobs:
        job = world.rng.choice(world.jobs)
        world.freeze(job)
        if world.chance(0.3):
            world.frozen.remove(job)


def thaw(world: World) -> None:
    if world.frozen:
        world.jobs.append(world.frozen.pop(world.rng.randrange(len(world.frozen))))


def pretend(world: World) -> None:
    """Somebody commits or abandons what is not his, or reports what he cannot know."""
    uses = [use for owner in world.promises.owners.values() for use in owner.uses]
    if not uses:
        return
    writing = [use for use in uses if use.state == "writing"]
    use = world.rng.choice(writing if writing and world.chance(0.7) else uses)
    other = (use.slot, use.generation + world.rng.choice([-(10**9), 10**9]))
    blocks = [(use.key, *other, 99), (b"other".ljust(16), use.slot, use.generation, 99)]
    assert is_refused(world, use.node_id, blocks, use.owner)
    blocks = [(use.key, use.slot, use.generation, 99)]
    assert is_refused(world, use.node_id, blocks, "stranger")
    slots = [Slot(use.node_id, *other), world.slot(use)]
    assert world.directory.abandon(slots[:1], use.owner, world.now_s) == 0
    assert world.directory.abandon(slots, "stranger", world.now_s) == 0
    args = (use.key, use.node_id, other[1], world.now_s)
    assert not world.directory.drop_copy(*args), "another use of the slot was dropped"
    world.seen["pretences"] += 1


def is_refused(
    world: World, node_id: str, blocks: list[tuple[bytes, int, int, int]], owner: str
) -> bool:
    """Nothing of it was committed, whether it came too late or cannot be right."""
    try:
        return not any(world.directory.commit(node_id, blocks, owner, 3.0, world.now_s))
    except RequestInvalid:
        return True


def exist(world: World) -> None:
    keys = [world.rng.choice([*KEYS, b"nowhere".ljust(16)]) for _ in range(6)]
    known = world.directory.exist(b"".join(keys), world.now_s)
    assert list(known) == [bool(world.replica.holders.get(key)) for key in keys]


def use(world: World) -> None:
    """Somebody read blocks without asking, or says so of what is gone by now."""
    keys = [world.rng.choice([*KEYS, b"nowhere".ljust(16)]) for _ in range(6)]
    world.directory.used(b"".join(keys), world.now_s)


def place(world: World) -> None:
    excluded = world.rng.sample([*world.nodes], world.rng.randint(0, 2))
    names = world.directory.place(world.rng.sample(KEYS, 3), excluded, world.now_s)
    takers = {name for name in world.nodes if world.is_open(name)}
    takers -= world.draining | set(excluded)
    assert all(name in takers if takers else name == "" for name in names), (names, takers)


def too_large(world: World) -> None:
    """A block larger than the whole memory is refused, and nothing changes."""
    node_id = world.rng.choice([*world.nodes])
    size_bytes = (world.holder(node_id).memory.units + 1) * UNIT_BYTES
    try:
        world.directory.allocate(node_id, KEYS[:1], "big", 1.0, False, world.now_s, size_bytes)
    except StoreError as error:
        assert isinstance(error, NodeUnknown) or "larger than the memory" in str(error)
        return
    raise AssertionError("a block larger than the memory was allocated")


STEPS = {
    allocate: 9,
    look_up: 6,
    read_tail: 1,
    copy: 4,
    work: 30,
    release: 3,
    renew: 1,
    give_up: 1,
    freeze: 3,
    thaw: 2,
    pretend: 1,
    exist: 1,
    use: 3,
    place: 1,
    too_large: 0.2,
}
