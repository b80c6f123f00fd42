"""Records of slots and copies, as granted by the directory and passed between processes.

Slot and Copy are NamedTuples instead of dataclasses, because a lookup of 1,000 keys creates or
decodes thousands, and a frozen dataclass takes five times as long. On the wire they are arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Each use of a slot has a number, its generation. The wire and headers have 64 bits for it. A value
# from GENERATION_MAX on is damaged: directories start at most at EPOCH_MAX * GENERATIONS_PER_EPOCH.
GENERATION_MAX = 2**62
GENERATIONS_PER_EPOCH = 2**20
# An epoch is the start time of a directory in milliseconds since 1970; this is the year 2074. A
# later epoch is damaged, or from a wrong clock, and must not exhaust the generations.
EPOCH_MAX = (GENERATION_MAX - 2**60) // GENERATIONS_PER_EPOCH


class Slot(NamedTuple):
    """One use of one slot: memory that its writer may fill."""

    node_id: str
    slot: int  # number of its first unit (slots.py)
    generation: int
    epoch: int = 0  # epoch of the directory that granted the slot; 0: unknown


class Copy(NamedTuple):
    """The location of a readable copy of a block."""

    node_id: str
    slot: int
    generation: int
    checksum: int  # of the block's bytes or layer digests (digests.py); 0: not computed
    size_bytes: int


# (block key, its copies) of each block, and whether this page is the last
BlockPage = tuple[list[tuple[bytes, tuple[Copy, ...]]], bool]


def by_node(blocks: Sequence[Slot | Copy]) -> dict[str, list[int]]:
    """Node id -> indices of the blocks on that node."""
    found: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        found.setdefault(block.node_id, []).append(index)
    return found


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to `allocate`."""

    slots: tuple[Slot | None, ...]  # per key; None below `covered`: the key needs no slot
    covered: int  # number of leading keys that are stored, are being written, or got a slot
    # Seconds from the request in which the slot headers must be marked as "writing". After this
    # time, the lease must be renewed before the first byte. 0: no limit (no elected directories).
    begin_s: float = 0.0
    asked_s: float = 0.0  # CLOCK_BOOTTIME of the client's request; 0 in the directory
    # Indices into `slots` of slots that an earlier transfer may still write into. The checksum of
    # such a block must be computed from the writer's buffer instead of the slot.
    late: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        """Whether the keys from `covered` on got no slot: no room, or the node takes no blocks."""
        return self.covered < len(self.slots)


# Verdicts on a block in a reserved slot: see Directory.commit_reserved
REFUSED, STORED, THERE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ReservedCommit:
    """The answer to `commit_reserved`."""

    verdicts: tuple[int, ...]  # per block; without STORED, the owner's slot stays reserved
    is_held: bool  # whether this owner had reserved slots; False: all its earlier slots are lost
    most: int  # slots that the owner may have reserved now; the owner returns slots above that
    slots: tuple[tuple[int, int], ...]  # newly reserved slots: (slot, generation)
    epoch: int  # of the directory that granted these slots
    begin_s: float = 0.0  # as in Allocation; unmarked slots must not be used after this time


class Spill(NamedTuple):
    """A block to copy from `slot` of the segment to `ssd_slot` of the SSD."""

    key: bytes
    slot: int
    generation: int  # of `slot`
    checksum: int  # as in Copy
    size_bytes: int
    ssd_slot: int
    ssd_generation: int
    epoch: int = 0  # of the directory that granted `ssd_slot`
