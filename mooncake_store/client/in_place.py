"""Blocks used in place in a mapped segment: verified first, and checked again after the read.

A normal read copies a block and verifies the copy. Some readers copy from the block's slot
themselves and later, for example by a GPU's copy engine. Such a reader receives the result of a
verification in place, and the headers of the slot (one per unit of its memory). A writer changes
the headers before it refills the slot, and a lease keeps writers away. If the headers are unchanged
after the read, the bytes read are the bytes that were verified.

Slots that were allocated here can be filled in place too. Their digests are then computed in place,
but only for slots that no earlier transfer can still write (Store.slots_in_place).

Limit: a late byte of an abandoned transfer changes no header. Such a byte is not detected if it
arrives between the verification of a block and the read in place.

Not here: leases (the directory), how a header is made (slot_memory.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from mooncake_store.layout import HEADER_BYTES, STATE_READY, Geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.digests import layer_digests, unpack_digests
from mooncake_store.memory.slot_memory import SlotMemory, begun_prefix, ready_prefix
from mooncake_store.records.blocks import Copy, Slot


class PlacedBlock(NamedTuple):
    offset_bytes: int
    headers_offset_bytes: int
    headers_bytes: int  # size of the headers of all units; all but the first header must be zeros
    first: bytes  # expected first bytes of the first header


class PlacedBlocks(NamedTuple):
    incarnation: str  # of the node whose segment it is
    blocks: list[PlacedBlock | None]  # None: must not be used in place


NOTHING_PLACED = PlacedBlocks("", [])


def placed_blocks(
    view: ByteArray, shape: Geometry, copies: Sequence[Copy], layers: int, until_s: float
) -> list[PlacedBlock | None]:
    """Verify blocks until `until_s`, by time.monotonic(). None: corrupt, or not verified in
    time."""
    memory = SlotMemory(view, shape)
    return [
        _placed(memory, copy, layers) if time.monotonic() <= until_s else None for copy in copies
    ]


def _placed(memory: SlotMemory, copy: Copy, layers: int) -> PlacedBlock | None:
    shape = memory.shape
    if not copy.checksum or not shape.holds(copy.slot, copy.size_bytes):
        return None
    header = memory.header(copy.slot)
    if header is None or (header.state, header.generation) != (STATE_READY, copy.generation):
        return None
    if memory.checksum(copy.slot, copy.size_bytes, layers) != copy.checksum:
        return None
    first = ready_prefix(copy.generation, header.key)
    block = _block(shape, copy.slot, copy.size_bytes, first)
    return block if is_still(memory.view, block) else None


def _block(shape: Geometry, slot: int, size_bytes: int, first: bytes) -> PlacedBlock:
    heads = shape.headers(slot, size_bytes)
    offset_bytes = shape.slot_offset_bytes(slot)
    return PlacedBlock(offset_bytes, heads.start, heads.stop - heads.start, first)


def begun_blocks(
    shape: Geometry, slots: Sequence[Slot], size_bytes: int
) -> list[PlacedBlock | None]:
    """The positions of slots whose headers are "writing", for other processes to fill."""
    return [_block(shape, slot.slot, size_bytes, begun_prefix(slot.generation)) for slot in slots]


def digests_in_place(
    memory: SlotMemory, slots: Sequence[Slot], size_bytes: int, layers: int
) -> list[tuple[int, ...] | None]:
    """Layer digests of slots that other processes have filled. None: the header is not "writing"
    in the slot's generation."""
    found: list[tuple[int, ...] | None] = []
    for slot in slots:
        packed = b""
        if memory.is_being_written(slot.slot, slot.generation):
            packed = layer_digests(memory.payload(slot.slot, size_bytes), layers)
        found.append(unpack_digests(packed) or None)
    return found


def is_still(view: ByteArray, block: PlacedBlock) -> bool:
    """True while no writer has begun to refill any of the block's units."""
    start = block.headers_offset_bytes
    raw = view[start : start + block.headers_bytes].tobytes()
    return raw.startswith(block.first) and not any(raw[HEADER_BYTES:])
