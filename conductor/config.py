"""What an operator may set about deciding, with the reason for each default.

The fields are flat and plain, so a shell reads them from `parameters` of config.pbtxt, and a
simulator sweeps them. `problems` lists every mistake at once, each with its remedy.

Not here: knobs of the front (ports, tokenizer) and of workers (chunk size, pages).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from conductor.queue_order import FIFO, QueueOrder

POLICIES = ("kvcache_centric", "cache_aware", "load_balance", "random")
ADMISSIONS = ("reserved", "predictive", "early", "baseline", "none")
QUEUE_ORDERS = ("fifo", "shortest_first")


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """Defaults suit the demo (a tiny model on two CPU cores); times are seconds."""

    # Service levels. A request whose prediction exceeds one of them is rejected at once.
    ttft_slo_s: float = 30.0  # time to first token
    tbt_slo_s: float = 1.0  # time between tokens
    advisory: bool = False  # True: decide, count and tell, but never reject for a service level
    # Which decode load is judged. reserved: all that is decoding or on its way. predictive: the
    # load when this prefill will end. early: the load now. baseline: no decode load is judged.
    # none: no service level at all. See admission.py.
    admission: str = "reserved"
    low_priority_load_max: float = 0.8  # priority < 0 is admitted up to this share of an SLO
    retry_after_s_min: float = 0.5  # a client that comes back sooner only adds load
    retry_after_s_max: float = 60.0  # predictions further out are guesses

    # Routing. The three others are the paper's comparisons: cache_aware never fetches,
    # load_balance ignores caches when choosing, random spreads by a hash of the request id.
    policy: str = "kvcache_centric"
    # Fetch when another node has more than this times the prefix that the worker's node has.
    kvcache_balancing_threshold: float = 1.5
    fetch_must_pay: bool = True  # and only when fetching is predicted to beat computing
    tie_ratio: float = 0.02  # predictions this close are equal: estimates are no better than that
    tie_s: float = 0.001  # ... or this close in absolute terms
    finalists_max: int = 4  # prefill workers for which a decode partner is looked up
    output_tokens_expected: int = 128  # spreads the one-off hand-over over the tokens it serves
    decode_s_expected: float = 10.0  # first guess of a request's decode time; then measured
    learn_speed: bool = True  # scale a worker's estimates by what it was measured to need

    # Order inside a prefill worker's queue; see queue_order.py.
    queue_order: str = "shortest_first"
    queue_stretch: float = 20.0  # seconds of place in the queue per second of predicted work
    queue_wait_s_max: float = 5.0  # nobody is overtaken by what came so much later

    # Transfers between nodes that no worker has measured.
    transfer_bytes_per_s: float = 1e9  # between nodes: about 10 Gb/s
    local_bytes_per_s: float = 4e9  # within a node: a copy out of mapped memory

    # Liveness. Workers report every second and at changes.
    report_s_max: float = 3.0  # three missed reports: not routed to
    report_lag_s: float = 0.2  # a report cannot know requests routed less than this before it
    failed_mark_s: float = 10.0  # after a failed call; lifted earlier by the next report
    request_s_max: float = 600.0  # one that nobody finished is then known from reports only

    # Memory and hot spots.
    index_blocks_max: int = 4_000_000  # about 100 B each; beyond, the oldest are forgotten
    replicate: bool = True
    hot_hits_per_s: float = 1.0  # per copy; above it one more copy is suggested
    hot_half_life_s: float = 60.0  # how fast old hits fade
    hot_keys_max: int = 65_536  # counted keys; the coldest are forgotten
    hot_copies_max: int = 4  # copies of a hot block, the first included
    hot_blocks_per_tick_max: int = 64  # suggested at once
    hot_blocks_in_flight_max: int = 256  # suggested and not seen to arrive yet
    hot_target_blocks_max: int = 128  # of those, to one target
    replicate_s_max: float = 30.0  # a suggestion that has not arrived by then did not happen

    @property
    def order(self) -> QueueOrder:
        """Of the queue inside each prefill worker."""
        if self.queue_order == "fifo":
            return FIFO
        return QueueOrder(self.queue_stretch, self.queue_wait_s_max)

    def problems(self) -> list[str]:
        """Every mistake, each with what to write instead; empty when all is well."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (bool, str)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in MAY_BE_0):
                found.append(f"{field.name} is {value}; set a positive, finite number")
        if self.policy not in POLICIES:
            found.append(_unknown("policy", self.policy, POLICIES))
        if self.admission not in ADMISSIONS:
            found.append(_unknown("admission", self.admission, ADMISSIONS))
        if self.queue_order not in QUEUE_ORDERS:
            found.append(_unknown("queue_order", self.queue_order, QUEUE_ORDERS))
        if self.kvcache_balancing_threshold < 1:
            found.append(
                f"kvcache_balancing_threshold is {self.kvcache_balancing_threshold}; below 1 a "
                "shorter prefix would be fetched over a longer local one: use 1.0 or more"
            )
        if not self.retry_after_s_min <= self.retry_after_s_max:
            found.append(
                f"retry_after_s_min ({self.retry_after_s_min}) is above retry_after_s_max "
                f"({self.retry_after_s_max}); swap them"
            )
        if not self.low_priority_load_max <= 1:
            found.append(
                f"low_priority_load_max is {self.low_priority_load_max}; it is a share of the "
                "service level, use at most 1.0"
            )
        if self.report_lag_s >= self.report_s_max:
            found.append(
                f"report_lag_s ({self.report_lag_s}) must be below report_s_max "
                f"({self.report_s_max}), or no report ever counts"
            )
        return found


MAY_BE_0 = {"tie_ratio", "tie_s", "retry_after_s_min", "report_lag_s", "failed_mark_s"}


def _unknown(name: str, value: str, known: tuple[str, ...]) -> str:
    return f"{name} is {value!r}; use one of {', '.join(known)}"
