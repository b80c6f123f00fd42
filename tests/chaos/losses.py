"""What is known of blocks that could not be read: by the directory, in the segment, in the logs.

A test that fails by chance once in a hundred runs must explain itself the first time. So this asks
for everything that tells the causes apart: does the directory know a copy, does a header in the
segment still name the block, and what lies over it.

Not here: whether a block that could not be read is a fault (verdict.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.client.client import StoreClient
from mooncake_store.errors import StoreError
from mooncake_store.layout import STATE_EPHEMERAL, STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.segment import Segment
from mooncake_store.memory.slot_memory import Block, SlotMemory
from mooncake_store.records.blocks import Copy
from mooncake_store.records.membership import UNIT_BYTES
from tests.chaos.blocks import is_block_of, size_of
from tests.chaos.site import ChaosSite

BATCH = 16
STATES = {STATE_WRITING: "writing", STATE_READY: "ready", STATE_EPHEMERAL: "ephemeral"}


def unreadable(site: ChaosSite, keys: Sequence[bytes]) -> list[bytes]:
    """Those that a process of s0's host cannot read now. AssertionError: one has wrong bytes."""
    missing: list[bytes] = []
    try:
        with StoreClient(site.address, "s0", "mapped") as store:
            for start in range(0, len(keys), BATCH):
                batch = keys[start : start + BATCH]
                for key, block in zip(batch, store.get(batch, deadline_s=30.0), strict=True):
                    if block is None:
                        missing.append(key)
                    else:
                        assert is_block_of(key, block), f"{key.hex()} has wrong bytes"
    except StoreError:  # the directory is busy, say
        return list(keys)
    return missing


def explained(site: ChaosSite, keys: Sequence[bytes]) -> str:
    """Some lines for people: what the directory and the segment of s0 say of each key."""
    lines = [directory_state(site)]
    places = _places(site, keys)
    with Segment.open(site.segment_path("s0")) as segment:
        memory = SlotMemory(segment.view, geometry(segment.size_bytes, UNIT_BYTES))
        headers = memory.blocks()
        for key in keys:
            copies = ", ".join(map(str, places[key])) if key in places else "not known"
            ours = [block for block in headers if block[0] == key]
            lines.append(f"{key.hex()}, {size_of(key)} bytes; in the directory: {copies or 'none'}")
            lines += [f"    s0 has {_described(memory, block)}" for block in ours]
            lines += [f"    over it {_described(memory, block)}" for block in _over(ours, headers)]
        del memory
    for name in ("directory", "s0"):
        lines += [f"{name}:", site.members[name].tail()]
    return "\n".join(lines)


def _places(site: ChaosSite, keys: Sequence[bytes]) -> dict[bytes, tuple[Copy, ...]]:
    try:
        found = site.directory.lookup(keys, "", 0.0, prefix_only=False)
    except StoreError:
        return {}
    return dict(zip(keys, found, strict=True))


def directory_state(site: ChaosSite) -> str:
    try:
        stats = site.directory.stats()
    except StoreError as error:
        return f"the directory does not answer: {error}"
    nodes = [
        f"{node.node_id} ({node.incarnation}) is {'open' if node.is_open else 'closed'}, "
        f"{node.ready_blocks} blocks, {node.writing_blocks} being written, "
        f"{node.adopted} adopted, {node.evictions} evicted"
        for node in stats.nodes
    ]
    return f"the directory of epoch {stats.epoch} has " + ("; ".join(nodes) or "no nodes")


def _units(block: Block) -> range:
    _, slot, _, _, size_bytes, _ = block
    return range(slot, slot + max(1, -(-size_bytes // UNIT_BYTES)))


def _over(ours: Sequence[Block], headers: Sequence[Block]) -> list[Block]:
    """Of other keys, whose slots overlap one of these."""
    units = {unit for block in ours for unit in _units(block)}
    return [block for block in headers if block not in ours and not units.isdisjoint(_units(block))]


def _described(memory: SlotMemory, block: Block) -> str:
    key, slot, generation, _, size_bytes, state = block
    is_right = is_block_of(key, memory.payload(slot, size_bytes))
    return (
        f"slot {slot}, generation {generation}, {STATES.get(state, str(state))}, {key.hex()}, "
        f"{size_bytes} bytes, {'right ones' if is_right else 'not its own'}"
    )
