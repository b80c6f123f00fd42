"""What each prefill policy minimises, over all prefill workers at once.

A policy says three things: its cost of each worker (the least wins), how a prefix that another
node holds is weighed against computing it (`fetch`), and whether workers of equal cost may be told
apart by what the hand-over to their decode worker adds (`is_blind`: it may not).

    random           nothing: a hash of the request id names the worker
    load_balance     all predicted work that the worker has
    cache_aware      wait + prefill                        with what its own node has cached
    kvcache_centric  wait + transfer + prefill             Algorithm 1 of the Mooncake paper
    adaptive         wait + transfer + prefill + delay + eviction cost     ours

The first four are the comparison of Figure 5 of the paper. The fifth minimises the time of all
requests together, not of this one: `delay_s` is how much later those will start that are queued
there already and that this one overtakes (queue_order.py). Without it a short request picks the
queue that it can jump, and others pay; with it, it goes where there is nobody to overtake.
`eviction_cost_s` is what a fetch costs those who come later (fetching.py): a copy takes the room of
another block.

Every formula is plain arithmetic on `Terms`, whose fields are columns: one float64 per worker, in
seconds. A new policy is a new entry in POLICIES.

Not here: where the terms come from (routing.py), fetch or compute (fetching.py), the decode worker
(routing.py), whether the winner is good enough (admission.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]  # one for each prefill worker


class Terms(NamedTuple):
    """What one request would meet, and cause, at each prefill worker."""

    queue_s: Seconds  # all predicted work there
    wait_s: Seconds  # of it, what will be computed before this request
    transfer_s: Seconds  # bringing cached blocks, as far as the wait does not hide it
    prefill_s: Seconds  # computing what is not cached
    # What this request adds to the waits of those that it overtakes there, summed up; 0 if the
    # policy does not weigh it.
    delay_s: Seconds
    start_s: Seconds  # wait + transfer + prefill: the first token, before the hand-over
    eviction_cost_s: Seconds  # what those who come later lose by the copies that a fetch makes


@dataclass(frozen=True, slots=True)
class Policy:
    cost: Callable[[Terms], Seconds]
    fetch: Literal["never", "threshold", "times"]
    is_blind: bool = False
    spares_others: bool = False  # so its best for all may be too late for this request


def load_balance(terms: Terms) -> Seconds:
    return terms.queue_s


def cache_aware(terms: Terms) -> Seconds:
    return terms.start_s  # nothing is fetched; what the own SSD restores counts


def kvcache_centric(terms: Terms) -> Seconds:
    return terms.start_s


def adaptive(terms: Terms) -> Seconds:
    return terms.start_s + terms.delay_s + terms.eviction_cost_s


def no_cost(terms: Terms) -> Seconds:
    return np.zeros_like(terms.wait_s)


POLICIES: Mapping[str, Policy] = {
    "adaptive": Policy(adaptive, fetch="times", spares_others=True),
    "kvcache_centric": Policy(kvcache_centric, fetch="threshold"),
    "cache_aware": Policy(cache_aware, fetch="never"),
    "load_balance": Policy(load_balance, fetch="never", is_blind=True),
    "random": Policy(no_cost, fetch="never", is_blind=True),
}


def at_random(request_id: str, names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The same worker for the same request and the same workers, in whatever order they come."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return sorted(names)[int.from_bytes(digest, "big") % len(names)]
