"""Which holder a block goes to when the caller does not say: free memory, age, distance.

Weights, not a ranking, so that many writers do not all choose the same node. A node's weight is the
share of its memory that is free, or a floor when it is full (a full cache takes blocks too, by
evicting). A new node's weight grows from nothing to that in slow_start_s: otherwise it would get
all new blocks, and all reads of them, at once (users of Mooncake met that: its issue 3688).

Not here: eviction, who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from mooncake_store.directory.core.holder import Holder

FULL_WEIGHT = 0.05
NEW_WEIGHT = 0.01  # at birth: a few blocks, so that its path is tried


def weight(holder: Holder, now_s: float, slow_start_s: float) -> float:
    """0 for a holder that takes no blocks at all."""
    if not holder.is_open or holder.is_draining or holder.info.is_ssd or not holder.pool.units:
        return 0.0
    free = holder.pool.free_units / holder.pool.units
    age = (now_s - holder.registered_s) / slow_start_s
    return max(free, FULL_WEIGHT) * min(1.0, max(NEW_WEIGHT, age))


def place(
    key: bytes, holders: Sequence[Holder], now_s: float, slow_start_s: float, excluded: set[str]
) -> str | None:
    """The holder for the chain that starts with `key`: weighted rendezvous hashing.

    The same key goes to the same node while weights stay alike, so two writers of one prefix do not
    put it in two places. None when no holder takes blocks.
    """
    best, best_score = None, float("-inf")
    for holder in holders:
        node_id = holder.info.node_id
        share = 0.0 if node_id in excluded else weight(holder, now_s, slow_start_s)
        if share <= 0.0:
            continue
        digest = blake2b(key + node_id.encode(), digest_size=8).digest()
        chance = (int.from_bytes(digest, "little") + 1) / 2**64  # (0, 1]
        score = chance ** (1.0 / share)
        if score > best_score:
            best, best_score = node_id, score
    return best
