"""Prefill policies: cost functions over all prefill workers at once.

A policy has a cost function and a rule for fetching a remote prefix (`fetch`). It prefers the
worker of least cost. A blind policy (`is_blind`) chooses the prefill worker by this cost alone. The
other policies add the hand-over and the decode steps of each pair (routing.py). The costs are

    random           zero; a hash of the request id selects the worker
    load_balance     all predicted work of the worker
    cache_aware      wait + restore + prefill              with the blocks cached on its own node
    kvcache_centric  wait + transfer + prefill             Algorithm 1 of the Mooncake paper
    adaptive         wait + transfer + prefill + delay + eviction cost     this project's policy

Figure 5 of the paper compares the first four. `adaptive` minimises the time of all requests
together, instead of the time of this request:

- `delay_s` is the total delay of the queued requests that this request overtakes (queue_order.py).
  Without `delay_s`, a short request would prefer the queue in which it overtakes most requests.
- `eviction_cost_s` is the cost to later requests of the blocks that a fetch evicts (fetching.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]  # one value per prefill worker


class Terms(NamedTuple):
    """Predicted terms of one request at each prefill worker."""

    queue_s: Seconds  # all predicted work in the queue
    wait_s: Seconds  # the part of queue_s that runs before this request
    # Time to fetch and restore. With fetch "times", the part that overlaps with the wait or the
    # computation is not included.
    transfer_s: Seconds
    prefill_s: Seconds  # time to compute the tokens that are not cached
    # Sum of the delays of the requests that this request overtakes; 0 if the policy ignores it.
    delay_s: Seconds
    start_s: Seconds  # wait + transfer + prefill, which is the TTFT without the hand-over
    eviction_cost_s: Seconds  # cost to later requests of the blocks that the fetch evicts


@dataclass(frozen=True, slots=True)
class Policy:
    cost: Callable[[Terms], Seconds]
    fetch: Literal["never", "threshold", "times"]
    is_blind: bool = False
    spares_others: bool = False  # True if the cost includes delay_s and eviction_cost_s


POLICIES: Mapping[str, Policy] = {
    "adaptive": Policy(
        lambda terms: terms.start_s + terms.delay_s + terms.eviction_cost_s,
        fetch="times",
        spares_others=True,
    ),
    "kvcache_centric": Policy(lambda terms: terms.start_s, fetch="threshold"),
    # Without fetches, the only transfer in `start_s` is restoring from the SSD.
    "cache_aware": Policy(lambda terms: terms.start_s, fetch="never"),
    "load_balance": Policy(lambda terms: terms.queue_s, fetch="never", is_blind=True),
    "random": Policy(lambda terms: np.zeros_like(terms.wait_s), fetch="never", is_blind=True),
}


def at_random(request_id: str, names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A worker chosen by a hash. It depends only on the request id and the set of names."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return sorted(names)[int.from_bytes(digest, "big") % len(names)]
