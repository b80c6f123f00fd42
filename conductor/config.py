"""What an operator may set about deciding, with the reason for each default.

The fields are flat and plain, so a shell reads them from `parameters` of config.pbtxt, and a
simulator sweeps them. `problems` lists every mistake at once, each with its remedy.

Not here: knobs of the frontend (requests in flight, tokenizer) and of workers (chunk size, pages).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from conductor.queue_order import FIFO, QueueOrder

POLICIES = ("adaptive", "kvcache_centric", "cache_aware", "load_balance", "random")
POLICIES = ("adaptive", "kvcache_centric", "cache_aware", "load_balance", "random")
ADMISSIONS = ("reserved", "predictive_lengths", "predictive", "early", "baseline", "none")
PREDICTIVE = ("predictive", "predictive_lengths")  # of them, those that look ahead
SHEDDINGS = ("fair_share", "limit")
QUEUE_ORDERS = ("fifo", "shortest_first")
ROLE_FLIPS = ("off", "dry_run", "on")
CHOICES = {
    "policy": POLICIES,
    "admission": ADMISSIONS,
    "shedding": SHEDDINGS,
    "queue_order": QUEUE_ORDERS,
    "role_flips": ROLE_FLIPS,
}
OVERLOAD_STRETCH = 20.0  # nearly all prompts reach the bound


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """Defaults suit the demo (a tiny model on two CPU cores); times are seconds."""

    # Service levels. A request whose prediction exceeds one of them is rejected at once.
    ttft_slo_s: float = 30.0  # time to first token
    tbt_slo_s: float = 1.0  # time between tokens
    advisory: bool = False  # True: decide, count and report, but never reject for a service level
    # Which decode load is judged. reserved: all that is decoding or on its way. predictive: the
    # load when this prefill will end. early: the load now. baseline: no decode load is judged.
    # predictive_lengths: the same from output lengths learned online. none: no service level at
    # all. See admission.py.
    admission: str = "reserved"
    low_priority_load_max: float = 0.8  # priority < 0 is admitted up to this share of an SLO
    # Under overload, which of those that would meet their limits are turned away so that the others
    # do. fair_share: the costliest first, with a floor for each class of prompt length and a share
    # for each tenant. limit: nobody before a limit is reached, as in the paper. See fair_share.py.
    shedding: str = "fair_share"
    # Of ttft_slo_s: the queue that overload is held at; the rest of it is for bursts, for being
    # overtaken and for errors of prediction.
    backlog_share: float = 0.4
    length_share_min: float = 0.5  # a length class is admitted at least so often, relative to all
    priority_weight: float = 8.0  # one level of priority is worth so many times the work
    tenant_shares: str = ""  # weights such as "a:2,b:1"; a tenant that is not named weighs 1
    demand_half_life_s: float = 60.0  # how fast what was offered and admitted is forgotten
    # Of actual / predicted TTFT, which the limit is divided by; 0: as it is (measured.py).
    ttft_margin_quantile: float = 0.9
    decode_room_sigma: float = 1.0  # predicted batches get so many standard deviations
    # For how many of the requests that will arrive meanwhile, and join before this one, room is
    # kept. 0: a slow prefill books room ahead of all that come meanwhile; 1: long prompts hardly
    # come in under overload (conductor/load/decode_forecast.py).
    expected_arrivals_share: float = 0.7
    overload_mark_s: float = 2.0  # a decode worker that refused on arrival is full for so long
    retry_after_s_min: float = 0.5  # a client that comes back sooner only adds load
    retry_after_s_max: float = 60.0  # predictions further out are guesses

    # Routing. kvcache_centric is Algorithm 1 of the paper; cache_aware, load_balance and random are
    # its comparisons; adaptive also counts what a request does to others. See policies.py.
    policy: str = "kvcache_centric"
    # Of kvcache_centric: fetch when another node has more than this times the own prefix, and only
    # when that is predicted to be quicker. adaptive compares the times instead (fetching.py).
    kvcache_balancing_threshold: float = 1.5
    fetch_must_pay: bool = True
    tie_ratio: float = 0.02  # predictions this close are equal: estimates are no better than that
    tie_s: float = 0.001  # ... or this close in absolute terms
    # A worker that joins others gets its share little by little; 0: at once.
    slow_start_s: float = 30.0
    finalists_max: int = 4  # nodes of prefill workers for which a decode partner is looked up
    output_tokens_expected: int = 128  # so many steps of decoding count, where max_tokens is more
    decode_s_expected: float = 10.0  # first guess of a request's decode time; then measured
    learn_speed: bool = True  # scale a worker's estimates by what it was measured to need

    # Order inside a prefill worker's queue; see queue_order.py. Workers and conductor must agree.
    queue_order: str = "shortest_first"
    queue_stretch: float = 2.0  # seconds of waiting in the queue per second of predicted work
    # Nobody is overtaken by what came so much later; while overload is shed, the queue that it is
    # held at (backlog_share) is the bound.
    queue_wait_s_max: float = 30.0
    # A prompt that has begun is overtaken too, between two chunks, as the engine of this project
    # does it; False for engines that finish what they have begun.
    queue_preempts: bool = True

    # Transfers between nodes that no worker has measured.
    transfer_bytes_per_s: float = 1e9  # between nodes: about 10 Gb/s
    transfer_latency_s: float = 0.001  # of one transfer between nodes
    local_bytes_per_s: float = 4e9  # within a node: a copy out of mapped memory
    ssd_bytes_per_s: float = 1e9  # restoring from an SSD, as measured on a virtual disk; NVMe 3e9

    # Liveness. Workers report every second and at changes.
    report_s_max: float = 3.0  # three missed reports: not routed to
    report_lag_s: float = 0.2  # a report cannot know requests routed less than this before it
    # Another frontend that tells nothing for so long is gone: its requests are known from reports
    # only. Each says something every second.
    frontend_silent_s_max: float = 3.0
    failed_mark_s: float = 10.0  # after a failed call; lifted earlier by the next report
    # A request that was not finished for this time, and that its frontend does not hold any more,
    # is forgotten, and known from reports only. A request that lost its workers is retried for so
    # long without a decoded token, unless its client set a timeout.
    request_s_max: float = 600.0

    # Whether workers that can take both roles change theirs when the load lastingly wants it.
    # dry_run: it is only counted and logged. See roles/controller.py.
    role_flips: str = "off"

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
        """The queue order of every prefill worker."""
        if self.queue_order == "fifo":
            return FIFO
        return QueueOrder(self.queue_stretch, self.queue_wait_s_max)

    @property
    def overload_order(self) -> QueueOrder:
        """The same while overload is shed: close to first come, first served, but for the shortest,
        which cost the others nothing. Nobody who was let in is overtaken for longer than the queue
        is held at."""
        if self.queue_order == "fifo":
            return FIFO
        wait_s_max = min(self.queue_wait_s_max, self.backlog_share * self.ttft_slo_s)
        return QueueOrder(max(self.queue_stretch, OVERLOAD_STRETCH), wait_s_max)

    @property
    def arrival_tbt_slo_s(self) -> float:
        """What a decode worker checks once more (arrival_check.py); 0 where nobody is rejected."""
        return 0.0 if self.advisory or self.admission == "none" else self.tbt_slo_s

    def tbt_limit_s(self, priority: int) -> float:
        """What the predicted time between tokens of such a request may be."""
        return self.tbt_slo_s * (self.low_priority_load_max if priority < 0 else 1.0)

    def problems(self) -> list[str]:
        """Every mistake, each with what to write instead; empty when all is well."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (bool, str)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in MAY_BE_0):
                found.append(f"{field.name} is {value}; set a positive, finite number")
        for name, known in CHOICES.items():
            if (chosen := getattr(self, name)) not in known:
                found.append(f"{name} is {chosen!r}; use one of {', '.join(known)}")
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
        for name, of in SHARES.items():
            if getattr(self, name) > 1:
                found.append(f"{name} is {getattr(self, name)}; it is {of}, use at most 1.0")
        if self.priority_weight < 1:
            found.append(
                f"priority_weight is {self.priority_weight}; below 1 a higher priority would be "
                "rejected sooner: use 1.0 or more"
            )
        try:
            parse_shares(self.tenant_shares)
        except ValueError as error:
            found.append(f"tenant_shares is {self.tenant_shares!r}: {error}")
        if self.report_lag_s >= self.report_s_max:
            found.append(
                f"report_lag_s ({self.report_lag_s}) must be below report_s_max "
                f"({self.report_s_max}), or no report ever counts"
            )
        return found


MAY_BE_0 = {
    "tie_ratio",
    "tie_s",
    "retry_after_s_min",
    "report_lag_s",
    "failed_mark_s",
    "overload_mark_s",
    "length_share_min",
    "decode_room_sigma",
    "expected_arrivals_share",
    "slow_start_s",
    "ttft_margin_quantile",
    "transfer_latency_s",
}
SHARES = {
    "low_priority_load_max": "a share of the service level",
    "backlog_share": "a share of the service level",
    "length_share_min": "a share of what all classes get",
    "expected_arrivals_share": "a share of those who come",
    "ttft_margin_quantile": "a quantile",
}


def parse_shares(text: str) -> dict[str, float]:
    """Weights of tenants from "a:2,b:1"; raises ValueError with what to write instead."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, number = part.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not colon or not name or not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"write {part!r} as name:weight with a weight above 0, such as a:2")
        if name in found:
            raise ValueError(f"{name!r} is there twice; keep one of them")
        found[name] = weight
    return found
