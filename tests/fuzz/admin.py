"""Steps of storage nodes (report, spill, die, come back, say what they hold) and of the directory's
own end.

Not here: spilling itself (jobs.py).
"""

from __future__ import annotations

from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import NodeUnknown, RequestInvalid, StoreFull
from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.records.blocks import Slot
from mooncake_store.records.membership import SSD_SUFFIX
from tests.fuzz.jobs import WRITE_LEASE_MS, SpillBatch
from tests.fuzz.memory import Block, Memory, content, units_of
from tests.fuzz.promises import NO_KEY, Use
from tests.fuzz.requests import payer, refuse_over_quota
from tests.fuzz.world import Holder, Node, Replica, World

ADOPT_BLOCKS_MAX = 4  # in one call, so that others come between


def report(world: World, node: Node) -> None:
    """A sign of life of each holder; whoever is not known registers, and says what it holds."""
    for holder in node.holders:
        is_known = world.directory.node_report(holder.node_id, holder.incarnation, world.now_s)
        world.follow()
        expected = world.replica.nodes.get(holder.node_id) == holder.incarnation
        assert is_known == expected, f"{holder.node_id} reported and was told {is_known}"
        if not is_known:
            register(world, holder)
        elif holder.unsaid is not None:
            say(world, holder)
        holder.seen_s = world.now_s


def register(world: World, holder: Holder) -> None:
    """The directory does not know this incarnation of the holder."""
    world.allowed.lost.add(holder.node_id)
    has_inventory = world.chance(0.9) or any(holder.memory.inventory())
    world.directory.register_node(holder.info(has_inventory), world.now_s)
    world.directory.attach(holder.node_id, "print", 4096, world.now_s)
    world.follow()
    holder.headers = holder.memory.inventory()
    holder.unsaid = holder.headers if has_inventory else None
    holder.whole = {
        generation
        for key, slot, generation, _, size_bytes, _ in holder.headers
        if holder.memory.read(slot, units_of(size_bytes)) == content(key, size_bytes)
    }
    await_blocks(world, holder)
    holder.seen_s = world.now_s


def await_blocks(world: World, holder: Holder) -> None:
    """Of what a restarted directory must find again, this is what really is still there."""
    memory, awaited = holder.memory, world.awaited.get(holder.node_id, {})
    for key, use in list(awaited.items()):
        is_there = memory.entry(use) if memory.manifest else memory.is_ready(use)
        is_whole = memory.read(use.slot, use.units) == content(key, use.size_bytes)
        overwritten = any(
            header[2] > use.generation and (header[0] == key or overlap(header, use))
            for header in holder.headers
        )
        if use.memory is not memory or not is_there or not is_whole or overwritten:
            del awaited[key]


def overlap(header: Block, use: Use) -> bool:
    _, slot, _, _, size_bytes, _ = header
    return slot < use.slot + use.units and use.slot < slot + units_of(size_bytes)


def say(world: World, holder: Holder) -> None:
    """A part of the inventory."""
    assert holder.unsaid is not None
    part, rest = holder.unsaid[:ADOPT_BLOCKS_MAX], holder.unsaid[ADOPT_BLOCKS_MAX:]
    arguments = (holder.node_id, holder.incarnation, part, not rest, world.now_s)
    adopted = world.directory.adopt(*arguments)
    if rest:
        assert adopted == 0
        holder.unsaid = rest
        return
    holder.unsaid = None
    take_over(world, holder, adopted)
    rest_writing(world, holder)
    world.seen["inventories"] += 1


def take_over(world: World, holder: Holder, adopted: int) -> None:
    """Promises begin anew with what was adopted; nothing that is whole may be missing."""
    memory, promises = holder.memory, world.promises
    found = dict(world.directory.blocks_on(holder.node_id, 10**6, False, world.now_s))
    assert len(found) == adopted, f"{adopted} adopted, {len(found)} found"
    for key, use in world.awaited.pop(holder.node_id, {}).items():
        is_there = key in found and found[key].generation == use.generation
        assert is_there, f"{use} was whole on {holder.node_id} and is lost"
        world.seen["blocks found again"] += 1
    for key, copy in found.items():
        known = promises.uses[copy.generation]
        assert (known.slot, known.size_bytes) == (copy.slot, copy.size_bytes)
        assert known.key in (key, NO_KEY), "a slot reserved ahead may be written while it rests"
        use = world.new_use(key, Slot(*copy[:3]), "")
        use.state, use.checksum = "ready", copy.checksum
        is_whole = memory.read(use.slot, use.units) == content(key, use.size_bytes)
        has_excuse = known.is_damaged or use.generation in memory.damaged | holder.whole
        assert has_excuse, f"{use} was overwritten, its header believed"
        use.is_damaged = not is_whole
        world.seen["adopted whole" if is_whole else "adopted torn"] += 1
        renewed(world, use)
        promises.ready[holder.node_id, key] = use


def renewed(world: World, use: Use) -> None:
    """The same generation, in a new incarnation of its holder."""
    world.promises.uses[use.generation] = use
    use.memory.grant(use)


def rest_writing(world: World, holder: Holder) -> None:
    """Slots that were being written when the directory began: their writers may go on a while."""
    for key, slot, generation, _, _, state in holder.headers:
        use = world.new_use(key, Slot(holder.node_id, slot, generation), "")
        later = [
            header for header in holder.headers if header[2] > generation and overlap(header, use)
        ]
        if state == STATE_WRITING and not later:
            use.state = "gone"
            lease_s = WRITE_LEASE_MS / 1_000
            use.rests_until_s = world.now_s + lease_s + world.config.quarantine_s
            renewed(world, use)
            world.seen["writers quarantined"] += 1


def reports(world: World) -> None:
    """Time for one node's report."""
    node = world.rng.choice([*world.nodes.values()])
    if node.is_up:
        report(world, node)


def come_up(world: World) -> None:
    """A node starts: its SSD has what it had, its DRAM nothing (or all, when it only re-execs)."""
    down = [node for node in world.nodes.values() if not node.is_up]
    if not down:
        return
    node = world.rng.choice(down)
    node.is_up = True
    node.starts += 1
    for holder in node.holders:
        holder.incarnation = f"start{node.starts}"
        if not holder.is_ssd and world.chance(0.7):
            holder.memory.is_lost = True
            holder.memory = Memory(holder.memory.units, is_ssd=False)
            world.awaited.pop(holder.node_id, None)
        register(world, holder)
    world.seen["nodes up"] += 1


def die(world: World) -> None:
    """kill -9."""
    up = [node for node in world.nodes.values() if node.is_up]
    if len(up) < 2:
        return
    stop(world, world.rng.choice(up))
    world.seen["nodes killed"] += 1


def leave(world: World) -> None:
    """A node ends in good order."""
    up = [node for node in world.nodes.values() if node.is_up]
    if len(up) < 2:
        return
    node = world.rng.choice(up)
    for holder in node.holders:
        world.allowed.lost.add(holder.node_id)
        expected = world.replica.nodes.get(holder.node_id) == holder.incarnation
        arguments = (holder.node_id, holder.incarnation, world.now_s)
        assert world.directory.deregister_node(*arguments) == expected
    world.follow()
    stop(world, node)
    world.seen["nodes left"] += 1


def stop(world: World, node: Node) -> None:
    """Whatever the node itself was doing ends here."""
    node.is_up = False
    world.jobs = [job for job in world.jobs if job.node != node.name]
    world.frozen = [job for job in world.frozen if job.node != node.name]


def spill(world: World) -> None:
    """A node asks what to copy to its SSD, when it is not doing that already."""
    node = world.rng.choice([node for node in world.nodes.values() if len(node.holders) > 1])
    if not node.is_up or any(job.node == node.name for job in [*world.jobs, *world.frozen]):
        return
    ssd_id, owner = node.name + SSD_SUFFIX, f"spill {node.name} {world.directory.sequence}"
    world.allowed.holders.add(ssd_id)
    arguments = (node.name, owner, world.rng.choice([1, 4]), 6.0, world.now_s)
    ready = dict(world.promises.ready)
    try:
        spills = world.directory.take_spills(*arguments)
    except StoreFull:
        world.seen["too many leases"] += 1
        return
    except NodeUnknown:
        assert {node.name, ssd_id} - world.replica.nodes.keys()
        return
    world.follow()
    batch = []
    for each in spills:
        source = world.promises.uses[each.generation]
        assert ready.get((node.name, each.key)) is source, f"{each} is not there"
        assert not source.leases, f"{source} is in use, not cold"
        assert (ssd_id, each.key) not in ready, f"{source} is on SSD already"
        assert (each.slot, each.checksum) == (source.slot, source.checksum)
        target = world.new_use(each.key, Slot(ssd_id, each.ssd_slot, each.ssd_generation), owner)
        target.tenant = payer(world, each.key)
        world.promises.grant(target, world.now_s)
        batch.append((each, source, target))
    if batch:
        world.promises.lease(owner, [target for *_, target in batch], world.now_s + 6.0)
        for *_, target in batch:
            refuse_over_quota(world, target)
        world.add(SpillBatch(node.name, owner, batch))
        world.seen["spills taken"] += len(batch)


def restart_directory(world: World) -> None:
    """The directory dies; another one begins empty, in a later epoch."""
    for node_id, blocks in world.promises.restart().items():
        world.awaited[node_id] = blocks
    world.epoch += 1
    world.directory = Directory(world.epoch, world.config)
    world.replica, world.sequence = Replica(), 0
    world.draining.clear()
    world.seen["directories restarted"] += 1


def repeat_inventory(world: World) -> None:
    """A node that is open says again what it holds: refused, and nothing changes."""
    holder = world.rng.choice(world.holders)
    if not world.is_open(holder.node_id):
        return
    blocks = [(b"x" * 16, 0, 1, 1, 4096, STATE_READY)]
    for incarnation in (holder.incarnation, "another"):
        try:
            world.directory.adopt(holder.node_id, incarnation, blocks, True, world.now_s)
        except (RequestInvalid, NodeUnknown):
            continue
        raise AssertionError("an open node was given blocks")


STEPS = {
    reports: 4,
    come_up: 0.4,
    die: 0.12,
    leave: 0.05,
    spill: 5,
    restart_directory: 0.15,
    repeat_inventory: 0.2,
}
