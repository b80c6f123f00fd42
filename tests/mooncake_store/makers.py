"""Makes nodes, workers and keys for tests, with only what matters left to say."""

from __future__ import annotations

from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.core.holder import Holder
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.layout import HEADER_BYTES, KvLayout, describe, fingerprint, geometry
from mooncake_store.records.blocks import Slot
from mooncake_store.records.membership import NodeInfo, WorkerInfo, WorkerReport

BLOCK_BYTES = 4096
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_tokens=16)


def node_info(node_id: str = "s0", incarnation: str = "n1", slots: int = 8) -> NodeInfo:
    """A node with room for exactly `slots` slots of BLOCK_BYTES (up to 64)."""
    assert slots * HEADER_BYTES <= 4096
    segment_bytes = 4096 + slots * BLOCK_BYTES
    return NodeInfo(node_id, incarnation, "host", "/dev/shm/x", segment_bytes, "agent", b"meta", 0)


def worker_info(
    worker_id: str = "prefill_0",
    incarnation: str = "w1",
    node_id: str = "s0",
    layout: KvLayout = LAYOUT,
    model_id: str = "demo",
    weights_id: str = "v1",
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role="prefill",
        node_id=node_id,
        fingerprint=fingerprint(model_id, weights_id, layout),
        description=describe(model_id, weights_id, layout),
        inbox="ipc:///tmp/inbox",
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        context_tokens_max=4096,
        pages_max=64,
        slots_max=8,
        prefill_coefficients=(0.01, 1e-5),
        decode_coefficients=(0.01, 1e-6),
        transfer_bytes_per_s={"s0": 5e9, "s1": 2e9},
        transfer_latency_s={"s0": 0.0001},
    )


def holder(slots: int = 8) -> Holder:
    """A holder on its own, without a directory."""
    info = node_info(slots=slots)
    shape = geometry(info.segment_bytes, info.unit_bytes)
    return Holder(info, 0.0, shape, SlotPool(shape.units, info.unit_bytes), 0.0)


def report(worker_id: str = "prefill_0", incarnation: str = "w1", running: int = 1) -> WorkerReport:
    return WorkerReport(worker_id, incarnation, 2, 300, running, 10, 100, 0.02, False)


def chain(count: int, name: str = "a") -> list[bytes]:
    """Keys of a chain: distinct, 16 bytes, readable in a failure."""
    return [f"{name}{i:03d}".encode().ljust(16, b".") for i in range(count)]


def directory_with(*node_ids: str, slots: int = 8, epoch: int = 7) -> Directory:
    directory = Directory(epoch)
    for node_id in node_ids:
        directory.register_node(node_info(node_id, slots=slots), 0.0)
        directory.attach(node_id, "print", BLOCK_BYTES, 0.0)
    return directory


def put(
    directory: Directory,
    keys: list[bytes],
    node_id: str = "s0",
    owner: str = "writer",
    now_s: float = 0.0,
    is_released: bool = True,
    ephemeral: bool = False,
) -> list[Slot | None]:
    """Allocate and commit `keys`, with their number as checksum; release them by default."""
    allocation = directory.allocate(node_id, keys, owner, 10.0, ephemeral, now_s)
    blocks = [
        (key, slot.slot, slot.generation, number)
        for number, (key, slot) in enumerate(zip(keys, allocation.slots, strict=True))
        if slot is not None
    ]
    assert all(directory.commit(node_id, blocks, owner, 10.0, now_s))
    if is_released:
        directory.release(owner, now_s)
    directory.check()
    return list(allocation.slots)
