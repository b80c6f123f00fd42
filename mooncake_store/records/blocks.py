"""Where a block is, or may be written: what the directory hands out and everybody passes on.

Slot and Copy are NamedTuples, not dataclasses: a lookup of 1,000 keys makes or decodes thousands,
and a frozen dataclass costs five times as much to build. On the wire they are short arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# On the wire and in headers a generation is a number below 2**64. What names more than this is
# damaged: a directory counts from its wall clock (copies.py) and passes it in the year 2109.
GENERATION_MAX = 2**62
GENERATIONS_PER_EPOCH = 2**20
# Of a directory, in milliseconds since 1970: the year 2074. What is later than this is damaged, or
# of a clock that runs in another century, which must not use the generations up.
EPOCH_MAX = (GENERATION_MAX - 2**60) // GENERATIONS_PER_EPOCH


class Slot(NamedTuple):
    """Memory that its writer may fill: one use of one slot."""

    node_id: str
    slot: int
    generation: int
    epoch: int = 0  # of the directory that granted it; 0: not said


class Copy(NamedTuple):
    """Where a block can be read."""

    node_id: str
    slot: int
    generation: int
    checksum: int  # xxh3_64 of the block's bytes
    size_bytes: int


def by_node(blocks: Sequence[Slot | Copy]) -> dict[str, list[int]]:
    """The numbers of these blocks, by the node that has them."""
    found: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        found.setdefault(block.node_id, []).append(index)
    return found


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to `allocate`: per key a fresh slot, or None because the key needs none here."""

    slots: tuple[Slot | None, ...]
    covered: int  # leading keys that are there, are being written, or got a slot
    # Where directories are elected: the headers of the slots must say "writing" within so long of
    # asking, or the lease must be renewed before the first byte. 0: whenever.
    begin_s: float = 0.0
    asked_s: float = 0.0  # when its client asked, by CLOCK_BOOTTIME; the directory says 0
    # Indices into `slots` of those that a transfer of an earlier use may still write into: their
    # writer must hash what it writes, not what lies in the slot.
    late: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        """Room ran out at key `covered`: this key and all after it got nothing."""
        return self.covered < len(self.slots)


REFUSED, STORED, THERE = 0, 1, 2  # of a block in a reserved slot: see Directory.commit_reserved


@dataclass(frozen=True, slots=True)
class ReservedCommit:
    """The answer to `commit_reserved`."""

    verdicts: tuple[int, ...]  # per block; a slot that is not STORED stays reserved
    is_held: bool  # had this owner any slot reserved when it asked? Else all that it had are gone
    most: int  # slots that it may have reserved now; it gives back what is over that
    slots: tuple[tuple[int, int], ...]  # newly reserved: slot, generation
    epoch: int  # of the directory that granted them
    begin_s: float = (
        0.0  # as in Allocation: they are marked within so long of asking, or not at all
    )


class Spill(NamedTuple):
    """Copy this block: from `slot` of the segment to `ssd_slot` of the SSD."""

    key: bytes
    slot: int
    generation: int
    checksum: int
    size_bytes: int
    ssd_slot: int
    ssd_generation: int
    epoch: int = 0  # of the directory that granted the slot
