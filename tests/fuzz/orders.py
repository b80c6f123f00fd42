"""Steps of operators (pins, quotas, draining, removing), of workers, and of time.

Not here: clients (requests.py), nodes (admin.py).
"""

from __future__ import annotations

from mooncake_store.errors import FingerprintMismatch, NodeUnknown
from tests.fuzz.admin import report
from tests.fuzz.requests import LEASE_S
from tests.fuzz.world import KEYS, TENANTS, World
from tests.mooncake_store.makers import report as worker_report
from tests.mooncake_store.makers import worker_info


def pin(world: World) -> None:
    key, kind = world.rng.choice(KEYS), world.rng.choice(["soft", "hard", "none", "none"])
    ttl_s = world.rng.choice([0.5, 5.0])
    (done,) = world.directory.pin([key], kind, ttl_s, world.now_s)
    assert done or kind == "hard"
    copies = [use for (_, each), use in world.promises.ready.items() if each == key]
    for use in copies:
        use.is_hard = kind == "hard" and done
    world.seen[f"pinned {kind}" if done else "no room to pin"] += bool(copies)


def set_quota(world: World) -> None:
    tenant = world.rng.choice([*TENANTS])
    quota_bytes = world.rng.choice([0, TENANTS[tenant], TENANTS[tenant] // 2])
    world.directory.set_quota(tenant, quota_bytes, world.now_s)
    if quota_bytes:
        world.promises.quotas[tenant] = quota_bytes
        return
    world.promises.quotas.pop(tenant, None)
    for use in world.promises.uses.values():
        if use.tenant == tenant:
            use.tenant = ""


def drain(world: World) -> None:
    node_id, is_on = world.rng.choice(world.holders).node_id, world.chance(0.3)
    try:
        world.directory.drain(node_id, is_on, world.now_s)
    except NodeUnknown:
        assert node_id not in world.replica.nodes
        return
    (world.draining.add if is_on else world.draining.discard)(node_id)
    world.seen["drains"] += is_on


def remove(world: World) -> None:
    """Give up blocks by name, everywhere or on one node. What is leased stays."""
    keys = world.rng.sample(KEYS, 2)
    node_id = world.rng.choice(["", *world.nodes])
    meant = {
        key: [
            use
            for (where, each), use in world.promises.ready.items()
            if each == key and node_id in ("", where)
        ]
        for key in keys
    }
    world.allowed.copies |= {
        (use.node_id, key) for key in keys for use in meant[key] if not use.leases
    }
    gone = world.directory.remove(keys, world.now_s, node_id)
    assert gone == [not any(use.leases for use in meant[key]) for key in keys]
    world.follow()
    assert all((use.state == "gone") == (not use.leases) for uses in meant.values() for use in uses)
    world.seen["removed"] += sum(use.state == "gone" for uses in meant.values() for use in uses)


def drop(world: World) -> None:
    """A transfer flipped a bit, so a reader reports a copy that is whole."""
    uses = list(world.promises.ready.values())
    if uses:
        use = world.rng.choice(uses)
        world.allowed.copies.add((use.node_id, use.key))
        assert world.directory.drop_copy(use.key, use.node_id, use.generation, world.now_s)
        world.promises.drop(use)
        world.follow()


def rot(world: World) -> None:
    """A disk, or memory, changes a byte."""
    uses = list(world.promises.ready.values())
    if uses:
        use = world.rng.choice(uses)
        unit = use.slot + world.rng.randrange(use.units)
        use.memory.cells[unit] = (b"rot", 0)
        use.memory.damaged |= use.memory.claiming(unit)
        use.is_damaged = True


def worker(world: World) -> None:
    worker_id, incarnation = world.rng.choice(["p", "d"]), world.rng.choice(["w1", "w2"])
    action = world.rng.choice(["register", "report", "deregister"])
    if action == "register":
        weights_id = "v2" if world.chance(0.1) else "v1"
        try:
            world.directory.register_worker(
                worker_info(worker_id, incarnation, weights_id=weights_id), world.now_s
            )
        except FingerprintMismatch as error:
            assert "weights_id" in str(error)
    elif action == "report":
        world.directory.worker_report(worker_report(worker_id, incarnation), world.now_s)
    else:
        world.directory.deregister_worker(worker_id, incarnation, world.now_s)


def time(world: World) -> None:
    """A moment passes; nearly every node reports meanwhile."""
    pass_time(world, world.rng.choice([0.0, 0.1, 0.5, 1.0]), reported=0.9)


def long_time(world: World) -> None:
    """A minute passes at once, with or without reports of the nodes."""
    pass_time(world, 60.0, reported=world.rng.choice([0.0, 1.0]))


def pass_time(world: World, seconds: float, reported: float) -> None:
    world.now_s += seconds
    world.promises.expire(world.now_s)
    for node in world.nodes.values():
        if node.is_up and world.chance(reported):
            report(world, node)
    ttl_s = world.config.node_ttl_s
    silent = {each.node_id for each in world.holders if world.now_s - each.seen_s > ttl_s}
    world.allowed.lost |= silent
    world.directory.tick(world.now_s)


STEPS = {
    pin: 2,
    set_quota: 0.3,
    drain: 0.6,
    remove: 1,
    drop: 0.3,
    rot: 0.15,
    worker: 0.5,
    time: 9,
    long_time: 0.1,
}
assert LEASE_S < 60.0
