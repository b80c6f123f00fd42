"""Blocks of a mapped segment that are used where they lie: verified, and recognised afterwards.

A copy is verified while it is made, so what arrived is known to be whole. Who reads a slot itself,
later (a GPU's copy engine, say), is told instead that the block is whole now, and how its headers
look: a slot is filled anew only after they were changed. So as long as a lease keeps the slot they
stay, and whoever finds them unchanged behind its reading has read what was verified.

Not here: leases (the directory), how a header is made (slot_memory.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from mooncake_store.layout import HEADER_BYTES, STATE_READY, Geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.slot_memory import SlotMemory, ready_prefix
from mooncake_store.records.blocks import Copy


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
    heads = shape.headers(copy.slot, copy.size_bytes)
    block = PlacedBlock(
        shape.slot_offset_bytes(copy.slot), heads.start, heads.stop - heads.start,
        ready_prefix(copy.generation, header.key),
    )  # fmt: skip
    return block if is_still(memory.view, block) else None


def is_still(view: ByteArray, block: PlacedBlock) -> bool:
    """Has nobody begun to fill any of its units since?"""
    start = block.headers_offset_bytes
    raw = view[start : start + block.headers_bytes].tobytes()
    return raw.startswith(block.first) and not any(raw[HEADER_BYTES:])
