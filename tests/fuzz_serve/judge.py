"""What must hold: after steps while faults go on, and at rest when all is healed.

Tokens are judged as they come (clients.py) and leases at each allocation (promises.py). Here:
every `check()` of the product's own, the replica of the index against the directory, and at the end
that everybody was answered and nobody holds anything.

Not here: when it is asked (simulation.py).
"""

from __future__ import annotations

from typing import Any

from backends.frontend.lifecycle.attempts import Loss
from mooncake_store.directory.core.directory import Directory
from mooncake_store.layout import geometry
from mooncake_store.memory.digests import checksum_of
from mooncake_store.memory.slot_memory import SlotMemory
from mooncake_store.records.blocks import Copy
from tests.fuzz_serve.clients import Client, Clients
from tests.fuzz_serve.engine import LAYOUT
from tests.fuzz_serve.green import looking_into
from tests.fuzz_serve.loop import Process
from tests.fuzz_serve.memory import Memories
from tests.fuzz_serve.site import Deployment
from tests.fuzz_serve.users import Users

DEADLY = {"kill", "stub", "leave", "reload", "freeze", "pause"}  # to a worker, as others see it


def directory_of(process: Process) -> Directory | None:
    """While it leads."""
    server = process.state.get("server")
    if server is None:
        return None
    with looking_into(process):
        if not server._may_serve():
            return None
    found: Directory = server.directory
    return found


def leader(site: Deployment) -> tuple[Process, Directory] | None:
    for process in site.alive("directory"):
        if (directory := directory_of(process)) is not None:
            return process, directory
    return None


def check_all(site: Deployment) -> None:
    """The invariants that the product itself proves, of every process whose locks are free."""
    for process in site.alive():
        if (directory := directory_of(process)) is not None:
            directory.check()
        worker, cluster = process.state.get("worker"), process.state.get("cluster")
        if worker is not None and not worker.lock._lock.locked():
            worker.check()
        if cluster is not None and not cluster._lock.locked():
            cluster._conductor.check()


def check_one_leader(site: Deployment) -> None:
    """Two directories never serve at one time, whatever was frozen or cut off."""
    leaders = [
        process
        for process in site.alive("directory")
        if not (process.is_frozen or process.has_stood_still) and directory_of(process) is not None
    ]
    assert len(leaders) <= 1, f"{leaders} lead at one time"


def check_index(site: Deployment, must_be_current: bool) -> None:
    """A replica that is current knows exactly what the directory announces."""
    found = leader(site)
    if found is None:
        assert not must_be_current, "nobody leads"
        return
    _, directory = found
    for process in site.alive("frontend"):
        cluster = process.state.get("cluster")
        if cluster is None or cluster._lock.locked():
            continue
        feed, latest = cluster._feed, (directory.epoch, directory.sequence)
        if feed.position != latest or not feed.is_current:
            assert not must_be_current, (
                f"{process.name} is at {feed.position}, the directory at {latest}"
            )
            continue
        compare_index(process, cluster._conductor, directory)


def compare_index(process: Process, conductor: Any, directory: Directory) -> None:
    index, announced = conductor._tiers.dram, dict(directory._copies.blocks.announced())
    for key, nodes in announced.items():
        known = index.holders(key)
        assert known == sorted(nodes), (
            f"{process.name} believes {key.hex()[:8]} on {known}, it is on {sorted(nodes)}"
        )
    assert len(index) == len(announced), (
        f"{process.name} knows {len(index)} blocks, the directory has {len(announced)}"
    )
    for start in list(announced)[:4]:
        depth = index.match([start, b"nowhere".ljust(16)])
        assert set(depth.values()) <= {1}, f"{process.name} counts blocks that are nowhere: {depth}"


def check_rest(site: Deployment, clients: Clients, users: Users, deadline_s: float) -> None:
    """All is healed, and time enough has passed."""
    users.check_rest()
    check_answers(clients.all, deadline_s)
    check_all(site)
    check_index(site, must_be_current=True)
    for role in site.roles.values():
        assert role.process.is_alive, f"{role.name} is not there again"
    found = leader(site)
    assert found is not None
    _check_directory(site, found[1])
    for process in site.alive("frontend"):
        _check_frontend(process)
    for process in [*site.alive("prefill"), *site.alive("decode")]:
        _check_worker(process)


def check_memory(
    site: Deployment, memories: Memories, clients: Clients, users: Users, is_damaged: bool
) -> None:
    """What lies in the nodes: whatever passes for a block by its checksum has the KV of its key.

    `is_damaged`: bits have fallen over, so that blocks may fail their checksum.
    """
    found = leader(site)
    assert found is not None
    expected = clients.expected_blocks(found[1]._workers.infos[0].fingerprint)
    for info in found[1].nodes(found[1]._copies.now_s):
        shape = geometry(info.segment_bytes, info.unit_bytes)
        slots = SlotMemory(memories.views[info.segment_path], shape)
        blocks = found[1].blocks_on(info.node_id, 10**6, False, found[1]._copies.now_s)
        for key, copy in blocks:
            payload = slots.payload(copy.slot, copy.size_bytes)
            if key in site.world.objects:
                continue  # adopted by a later directory, which cannot tell it from a block
            if key in users.expected:
                _check_user_block(key, copy, slots, users)
                continue
            is_whole = checksum_of(payload, LAYOUT.layers) == copy.checksum
            assert key in expected, f"{copy} has a key of tokens that nobody asked for"
            assert is_whole or is_damaged, f"{copy} was overwritten: {slots.header(copy.slot)}"
            assert not is_whole or payload.tobytes() == expected[key], (
                f"{copy} of {key.hex()[:8]} has the KV of other tokens"
            )


def _check_user_block(key: bytes, copy: Copy, slots: SlotMemory, users: Users) -> None:
    """A block that was stored without a checksum has one in each further copy."""
    if users.is_damaged:
        return
    header, payload = slots.header(copy.slot), slots.payload(copy.slot, copy.size_bytes)
    assert slots.is_ready(copy.slot, copy.generation, key), f"{copy} is ready, its slot: {header}"
    assert payload.tobytes() == users.expected[key], f"{copy} has the bytes of another key"
    assert copy.checksum in (0, checksum_of(payload, 0)), f"{copy} has another checksum"


def check_answers(every: list[Client], deadline_s: float) -> None:
    waiting = [client.number for client in every if not client.end]
    assert not waiting, f"requests {waiting} never end"
    late = [client.number for client in every if client.ended_s > client.asked_s + deadline_s]
    assert not late, f"requests {late} ended more than {deadline_s} s after they came"


def check_losses(every: list[Client], faults: set[str]) -> None:
    """A link that is cut is no fault of the request's. (That a worker died says the directory,
    also of one that was cut off from it; so those may be blamed.)"""
    blamed = [client.number for client in every if Loss.WORKER_FAILED.value in client.words]
    assert faults & DEADLY or not blamed, f"requests {blamed} are blamed for what links did"


def _check_directory(site: Deployment, directory: Directory) -> None:
    stats = directory.stats(directory._copies.now_s)
    assert not stats.owners, f"{directory._copies.leases._owners.keys()} lease what nobody reads"
    assert not stats.ephemeral, f"{stats.ephemeral} ephemeral copies of nobody"
    assert {node.node_id for node in stats.nodes} == set(site.shape.units), "a node is missing"
    for node in stats.nodes:
        assert not node.writing_blocks, f"{node.node_id}: slots are written by nobody"
        assert not node.quarantined_units, f"{node.node_id}: a quarantine does not end"
        pool = directory._nodes.registered(node.node_id).pool
        assert pool.used_units + pool.free_units == pool.units == site.shape.units[node.node_id]
        assert node.ready_blocks == node.used_units, f"{node.node_id}: slots are lost: {node}"
    workers = {worker.worker_id for worker in directory._workers.infos}
    expected = {name for name in site.roles if name.startswith(("prefill", "decode"))}
    assert workers == expected, f"workers {workers} are registered, {expected} are there"


def _check_frontend(process: Process) -> None:
    frontend, cluster = process.state["frontend"], process.state["cluster"]
    stats = cluster.stats()
    assert stats.in_flight == 0, f"{process.name} reserves work for {stats.in_flight} requests"
    assert len(frontend.live) == 0, f"{process.name} has {len(frontend.live)} requests left"
    streams = cluster_streams(frontend)
    assert not streams._streams, f"{process.name} listens for {list(streams._streams)}"
    for status in cluster._conductor.status(process.now_s):
        assert status.takes_requests, f"{status.worker.worker_id}: {status.why_not}"


def cluster_streams(frontend: Any) -> Any:
    return frontend._services.streams


def _check_worker(process: Process) -> None:
    worker = process.state["worker"]
    name = process.name
    assert not worker.jobs, f"{name} still has {list(worker.jobs)}"
    assert worker.batching.admitted == worker.batching.waiting == 0, f"{name}: places are lost"
    assert worker._pages.used_pages == 0, f"{name}: {worker._pages.used_pages} pages are lost"
    assert not len(worker.process.owners), f"{name} renews leases of nobody"
    if hasattr(worker, "_arrivals"):
        assert not len(worker._arrivals), f"{name} keeps a place for nobody"
    else:
        assert not len(worker._single_flight), f"{name}: a block is brought by nobody"
