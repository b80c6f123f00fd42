"""What a holder had before this directory began, taken over without trusting it blindly.

A directory that restarts is empty, while the nodes still hold their blocks. Each node says what its
headers (or the manifest of its SSD) claim. Claims may overlap: an evicted block keeps its header
until a unit of it is written again. Of two that overlap, the higher generation is the one that was
written later, so the other is torn, even when a third one has overwritten the later one since. A
slot that was being written rests in quarantine: its writer may not know yet that its lease is void.
A claim that cannot be true, of a generation that nobody can have reached for instance, counts for
nothing: neither against the others nor for the generations to come.

Whether the bytes are what the claim says is found out by the checksum, at the first read.

Not here: reading headers (the node), what an adopted block becomes (copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_store.directory.core.holder import Claim
from mooncake_store.directory.core.slots import SlotPool
from mooncake_store.layout import STATE_READY, STATE_WRITING
from mooncake_store.records.blocks import GENERATION_MAX


def sound(claims: Sequence[Claim], pool: SlotPool) -> list[Claim]:
    """The claims that can be true of this memory, each taken by itself."""
    return [claim for claim in claims
            if claim.state in (STATE_READY, STATE_WRITING) and claim.size_bytes > 0
            and 0 <= claim.generation < GENERATION_MAX and claim.slot >= 0
            and claim.slot + pool.units_for(claim.size_bytes) <= pool.units]  # fmt: skip


def consistent(claims: Sequence[Claim], pool: SlotPool) -> list[Claim]:
    """Of sound claims, those that do not contradict a later one, in order of their slots."""

    def end_of(claim: Claim) -> int:
        return claim.slot + pool.units_for(claim.size_bytes)

    sane = sorted(claims, key=lambda claim: claim.slot)
    is_torn = [False] * len(sane)
    reaching: list[int] = []  # earlier ones that may reach into the next; nearly always none
    for i, claim in enumerate(sane):
        reaching = [j for j in reaching if end_of(sane[j]) > claim.slot]
        for j in reaching:
            is_torn[i if claim.generation <= sane[j].generation else j] = True
        reaching.append(i)
    newest: dict[bytes, int] = {}  # of a block that was evicted and came back
    whole = [claim for claim, is_bad in zip(sane, is_torn, strict=True) if not is_bad]
    for claim in whole:
        if claim.state == STATE_READY:
            newest[claim.key] = max(claim.generation, newest.get(claim.key, 0))
    return [claim for claim in whole
            if claim.state == STATE_WRITING or newest[claim.key] == claim.generation]  # fmt: skip
