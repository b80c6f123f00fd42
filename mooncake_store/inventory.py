"""What a holder had before this directory began, taken over without trusting it blindly.

A directory that restarts is empty, while the nodes still hold their blocks. Each node says what its
headers (or the manifest of its SSD) claim. Claims may overlap: an evicted block keeps its header
until its first unit is written again. Of two that overlap, the higher generation is the one that
was written later, so the other is torn. A slot that was being written rests in quarantine: its
writer may not know yet that its lease is void.

Whether the bytes are what the claim says is found out by the checksum, at the first read.

Not here: reading headers (the node), what an adopted block becomes (copies.py).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from mooncake_store.holder import Claim
from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.slots import SlotPool


def consistent(claims: Sequence[Claim], pool: SlotPool) -> list[Claim]:
    """The claims that do not contradict a later one, in order of their slots."""
    starts: list[int] = []  # of the accepted ones, sorted
    ends: dict[int, int] = {}
    keys: set[bytes] = set()
    accepted: list[Claim] = []
    for claim in sorted(claims, key=lambda claim: claim.generation, reverse=True):
        end = claim.slot + pool.units_for(claim.size_bytes)
        is_sane = claim.state in (STATE_READY, STATE_WRITING) and claim.size_bytes > 0
        if not is_sane or claim.slot < 0 or end > pool.units:
            continue
        index = bisect_right(starts, claim.slot)
        after_overlaps = index < len(starts) and starts[index] < end
        before_overlaps = index > 0 and ends[starts[index - 1]] > claim.slot
        if after_overlaps or before_overlaps:
            continue
        if claim.state == STATE_READY:
            if claim.key in keys:
                continue  # an older copy of a block that was evicted and came back
            keys.add(claim.key)
        insort(starts, claim.slot)
        ends[claim.slot] = end
        accepted.append(claim)
    return sorted(accepted, key=lambda claim: claim.slot)
