"""Options of the conductor, with the reason for each default.

The fields are flat. The frontend reads them from `parameters` of config.pbtxt, and the simulator
sweeps them. `problems` lists all invalid values at once, each with its remedy.

Not here: options of the frontend (requests in flight, tokenizer) and of workers (chunk size).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

from conductor.messages import AppliedLimits
from conductor.queue_order import FIFO, QueueOrder

POLICIES = ("adaptive", "kvcache_centric", "cache_aware", "load_balance", "random")
ADMISSIONS = ("reserved", "predictive_lengths", "predictive", "early", "baseline", "none")
PREDICTIVE = ("predictive", "predictive_lengths")  # admission policies that predict future load
SHEDDINGS = ("fair_share", "limit")
CHOICES = {
    "policy": POLICIES,
    "admission": ADMISSIONS,
    "shedding": SHEDDINGS,
    "queue_order": ("fifo", "shortest_first"),
    "role_flips": ("off", "dry_run", "on"),
}
AUTO: Final = "auto"
SecondsOrAuto: TypeAlias = float | Literal["auto"]
OVERLOAD_STRETCH = 20.0  # queue_stretch under overload; most prompts then reach queue_wait_s_max


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """Defaults suit the demo (a tiny model on two CPU cores). Times are in seconds."""

    # Service levels. By default, a request predicted to exceed one of them is rejected at once.
    # auto: 10x and 5x of what the request takes on an unloaded system (admission/limits.py).
    ttft_slo_s: SecondsOrAuto = AUTO  # time to first token
    tbt_slo_s: SecondsOrAuto = AUTO  # time between tokens
    # If True, a rejection for a service level, for room or for fair shares becomes Route.advice.
    advisory: bool = False
    # The decode load that admission checks (admission.py). reserved: all requests that decode or
    # are in prefill. predictive: the load at the end of this prefill. predictive_lengths: as
    # predictive, but from output lengths learned online. early: the current load. baseline: decode
    # load is not checked. none: no service level is checked.
    admission: str = "reserved"
    low_priority_load_max: float = 0.8  # share of an SLO up to which priority < 0 is admitted
    # The requests to reject under overload. fair_share: the costliest requests first, with a floor
    # for each class of prompt length and a share for each tenant (fair_share.py). limit: only
    # requests that exceed a limit, as in the paper.
    shedding: str = "fair_share"
    # Target length of the prefill queues under overload, as a share of ttft_slo_s. The remaining
    # time is for bursts, for overtaking and for errors of prediction.
    backlog_share: float = 0.4
    length_share_min: float = 0.5  # least admitted share of a length class / that of all classes
    priority_weight: float = 8.0  # one more level of priority divides the cost by this factor
    tenant_shares: str = ""  # weights such as "a:2,b:1"; other tenants have weight 1
    demand_half_life_s: float = 60.0  # decay of offered and admitted work
    # The TTFT limit is divided by this quantile of actual / predicted (measured.py). 0: no margin.
    ttft_margin_quantile: float = 0.9
    decode_room_sigma: float = 1.0  # standard deviations added to batches by predictive_lengths
    # Room is kept for this share of the expected arrivals (later requests that decode earlier). At
    # 0, a slow prefill takes their room. At 1, few long prompts are admitted under overload.
    expected_arrivals_share: float = 0.7
    overload_mark_s: float = 2.0  # time for which a decode worker counts as full after a refusal
    retry_after_s_min: float = 0.5  # an earlier retry only adds load
    retry_after_s_max: float = 60.0  # a prediction beyond it is a guess

    # Routing. kvcache_centric is Algorithm 1 of the paper, which compares it with cache_aware,
    # load_balance and random. adaptive also counts the cost to other requests. See policies.py.
    policy: str = "kvcache_centric"
    # kvcache_centric fetches if another node's cached leading blocks are more than this factor
    # times those of the worker's node. adaptive compares the times instead (fetching.py).
    kvcache_balancing_threshold: float = 1.5
    fetch_must_pay: bool = True  # kvcache_centric also requires that the fetch saves time
    tie_ratio: float = 0.02  # relative difference up to which predictions are equal
    tie_s: float = 0.001  # absolute difference up to which predictions are equal
    # Time in which the share of requests of a new worker grows to a full one; 0: no slow start.
    slow_start_s: float = 30.0
    finalists_max: int = 4  # nodes of prefill workers for which a decode partner is searched
    # Upper bound of the decode steps in a pair's cost, and initial median of output lengths.
    output_tokens_expected: int = 128
    decode_s_expected: float = 10.0  # mean decode time of a request, until requests are measured
    learn_speed: bool = True  # scale a worker's estimates by its measured speed ratio

    # Order of a prefill worker's queue (queue_order.py). Workers and conductor must agree.
    queue_order: str = "shortest_first"
    queue_stretch: float = 2.0  # seconds added to an order key per second of predicted work
    # No request overtakes another one that arrived more than these seconds before it. Under
    # overload, the bound is at most backlog_share * ttft_slo_s.
    queue_wait_s_max: float = 30.0

    # Transfers between nodes that no worker has measured.
    transfer_bytes_per_s: float = 1e9  # about 10 Gb/s
    transfer_latency_s: float = 0.001  # of one transfer between nodes
    local_bytes_per_s: float = 4e9  # within a node: a copy from mapped memory
    ssd_bytes_per_s: float = 1e9  # restoring from SSD; measured on a virtual disk. NVMe: about 3e9

    # Liveness. Workers report every 0.5 s.
    report_s_max: float = 3.0  # a worker without a report for longer gets no requests
    report_lag_s: float = 0.2  # a report may lack requests that were routed so shortly before it
    # Another frontend is dropped after this silence. Its requests are then known only from worker
    # reports. Each frontend sends notes every second.
    frontend_silent_s_max: float = 3.0
    failed_mark_s: float = 10.0  # after a failed call, time without requests or until a report
    # Age at which an unfinished request is dropped, unless its frontend still holds it. Without a
    # timeout of the client, a request without new tokens is also retried for at most this time.
    request_s_max: float = 600.0

    # Whether workers change roles after a lasting change of the load. dry_run: proposals are only
    # counted and logged. See roles/controller.py.
    role_flips: str = "off"

    # Memory and hot spots.
    index_blocks_max: int = 4_000_000  # about 100 B each; above it, the oldest blocks are dropped
    replicate: bool = True
    hot_hits_per_s: float = 1.0  # hits per copy from which one more copy is suggested
    hot_half_life_s: float = 60.0  # decay of hits
    hot_keys_max: int = 65_536  # counted block keys; above it, the coldest are dropped
    hot_copies_max: int = 4  # copies of a hot block, including the first
    hot_blocks_per_tick_max: int = 64  # blocks suggested per tick
    hot_blocks_in_flight_max: int = 256  # blocks suggested and not arrived yet
    hot_target_blocks_max: int = 128  # blocks suggested and not arrived yet, to one node
    replicate_s_max: float = 30.0  # time after which a suggestion counts as not carried out

    @property
    def order(self) -> QueueOrder:
        """The queue order of every prefill worker."""
        if self.queue_order == "fifo":
            return FIFO
        return QueueOrder(self.queue_stretch, self.queue_wait_s_max)

    def overload_order(self, ttft_slo_s: float) -> QueueOrder:
        """The order while requests are shed: nearly first come, first served. Only the shortest
        prompts overtake, since they delay others little. No request overtakes another one that
        arrived earlier by more than `backlog_share` of its service level `ttft_slo_s`."""
        if self.queue_order == "fifo":
            return FIFO
        wait_s_max = min(self.queue_wait_s_max, self.backlog_share * ttft_slo_s)
        return QueueOrder(max(self.queue_stretch, OVERLOAD_STRETCH), wait_s_max)

    def arrival_tbt_slo_s(self, limits: AppliedLimits) -> float:
        """Limit of the re-check at decode workers (arrival_check.py), in seconds; 0: no check."""
        return 0.0 if self.advisory or self.admission == "none" else limits.tbt_slo_s

    def problems(self) -> list[str]:
        """All invalid values, each with its remedy; empty if there are none."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "SecondsOrAuto" and isinstance(value, str) and value != AUTO:
                found.append(f"{field.name} is {value!r}; set a number of seconds, or {AUTO}")
            if isinstance(value, (bool, str)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in MAY_BE_0):
                found.append(f"{field.name} is {value}; set a positive, finite number")
        for name, known in CHOICES.items():
            if (chosen := getattr(self, name)) not in known:
                found.append(f"{name} is {chosen!r}; use one of {', '.join(known)}")
        for name, otherwise in AT_LEAST_1.items():
            if getattr(self, name) < 1:
                found.append(
                    f"{name} is {getattr(self, name)}; below 1 {otherwise}: use 1.0 or more"
                )
        if not self.retry_after_s_min <= self.retry_after_s_max:
            found.append(
                f"retry_after_s_min ({self.retry_after_s_min}) is above retry_after_s_max "
                f"({self.retry_after_s_max}); swap them"
            )
        for name, of in SHARES.items():
            if getattr(self, name) > 1:
                found.append(f"{name} is {getattr(self, name)}; it is {of}, use at most 1.0")
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
AT_LEAST_1 = {
    "kvcache_balancing_threshold": "a shorter prefix would be fetched over a longer local one",
    "priority_weight": "a higher priority would be rejected sooner",
}
SHARES = {
    "low_priority_load_max": "a share of the service level",
    "backlog_share": "a share of the service level",
    "length_share_min": "a share of what all classes get",
    "expected_arrivals_share": "a share of the expected arrivals",
    "ttft_margin_quantile": "a quantile",
}


def parse_shares(text: str) -> dict[str, float]:
    """Weights of tenants from "a:2,b:1"; raises ValueError with the remedy."""
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
            raise ValueError(f"{name!r} is listed twice; keep one of them")
        found[name] = weight
    return found
