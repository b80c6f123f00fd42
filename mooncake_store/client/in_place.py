"""Blocks of a mapped segment that are used where they lie: verified, and recognised afterwards.

A copy is verified while it is made, so the bytes that arrived are known to be whole. A reader that
copies from the slot itself, later (a GPU's copy engine, say), is told two things instead: the block
is whole now, and these are its headers. A writer changes the headers before it fills the slot anew.
A lease keeps the slot, and so the headers. If they are unchanged after the reading, the bytes that
were read are those that were verified. Slots that were allocated here can be filled in place too;
their digests are then computed in place, but only for slots that no earlier transfer can write into
(Store.slots_in_place).

A late byte of a transfer that was given up changes no header. It is not noticed when it lands
between the verification of a block and the reading of it in place.

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
    """Offsets in the segment."""

    offset_bytes: int
    headers_offset_bytes: int
    headers_bytes: int  # its own, and those of its other units, which are zeros
    first: bytes  # how its own header begins


class PlacedBlocks(NamedTuple):
    incarnation: str  # of the node whose segment it is
    blocks: list[PlacedBlock | None]  # None: not whole, or there was no time to look


NOTHING_PLACED = PlacedBlocks("", [])


def placed_blocks(
    view: ByteArray, shape: Geometry, copies: Sequence[Copy], layers: int, until_s: float
) -> list[PlacedBlock | None]:
    """`until_s`: as of time.monotonic()."""
    memory = SlotMemory(view, shape)
    found: list[PlacedBlock | None] = []
    for copy in copies:
        is_late = time.monotonic() > until_s
        found.append(None if is_late else _placed(memory, copy, layers))
    return found


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
    """Slots that are being filled under these generations, which others may fill."""
    return [_block(shape, slot.slot, size_bytes, begun_prefix(slot.generation)) for slot in slots]


def digests_in_place(
    memory: SlotMemory, slots: Sequence[Slot], size_bytes: int, layers: int
) -> list[tuple[int, ...] | None]:
    """Of the layers of what others have filled; None: that slot is not being filled any more."""
    found: list[tuple[int, ...] | None] = []
    for slot in slots:
        packed = b""
        if memory.is_being_written(slot.slot, slot.generation):
            packed = layer_digests(memory.payload(slot.slot, size_bytes), layers)
        found.append(unpack_digests(packed) or None)
    return found


def is_still(view: ByteArray, block: PlacedBlock) -> bool:
    """Has nobody begun to fill any of its units since?"""
    start = block.headers_offset_bytes
    raw = view[start : start + block.headers_bytes].tobytes()
    return raw.startswith(block.first) and not any(raw[HEADER_BYTES:])
