"""Inputs and outputs of the conductor: requests, routes, rejections, suggestions.

All records are immutable. Every decision about a pair carries the prediction that led to it.

Not here: directory events and worker reports (mooncake_store), options (config.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant (admission/tenant_quotas.py); None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_in_flight_max: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, already tokenised and divided into keyed blocks by the frontend."""

    request_id: str
    prompt_tokens: int  # > 0
    block_keys: Sequence[bytes]  # full blocks only; block key i names blocks 0..i of this prompt
    output_tokens_max: int  # max_tokens of the client, >= 0
    # Below 0, service levels are multiplied by low_priority_load_max. Above 0, the TTFT limit has
    # no margin for prediction errors. Fair shares prefer a higher priority (fair_share.py).
    priority: int = 0
    # (worker_id, incarnation) of workers on which an attempt failed; a retry excludes them.
    excluded_workers: frozenset[tuple[str, str]] = frozenset()
    tenant: str = ""  # has a share of the capacity under overload (fair_share.py)
    is_resumed: bool = False  # True if it was admitted and lost its workers; never shed for load
    # True: a further answer to the prompt of an admitted request. Only its decode is left to do.
    is_prefilled: bool = False
    answers: int = 1  # with its further answers, each of which is a request of its own later
    # None if the tenant has no limits, or if an earlier attempt of the request was counted.
    limits: TenantLimits | None = None

    @property
    def is_decoded(self) -> bool:
        """False for an answer of one token: prefill computes it, and no decode worker is called."""
        return self.output_tokens_max > 1


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """Name and addresses of a worker."""

    worker_id: str  # its name
    incarnation: str  # random id of one start of the worker's process
    node_id: str  # storage node whose memory it maps
    inbox: str  # ZeroMQ address for messages
    grpc_address: str = ""  # HOST:PORT of its Triton; "" without one


class AppliedLimits(NamedTuple):
    """The limits of one request, in seconds. The predicted limits are those of admission."""

    ttft_slo_s: float  # service level of the time to first token
    tbt_slo_s: float  # service level of the time between tokens
    ttft_predicted_s: float  # most predicted TTFT: the service level, by margin and priority
    tbt_predicted_s: float  # most predicted TBT: the service level, by priority


UNLIMITED = AppliedLimits(math.inf, math.inf, math.inf, math.inf)


class Prediction(NamedTuple):
    """The predicted times on one pair of workers. ttft_s is the sum of the four before it."""

    queue_s: float  # prefill work that runs before this request
    # Time to fetch blocks from another node and to restore blocks from SSD. With policy adaptive,
    # only the part that overlaps neither with the queue nor with the computation.
    transfer_s: float
    prefill_s: float  # computing the tokens that are not cached
    handover_s: float  # transfer of the prompt's KV cache to the decode worker
    ttft_s: float
    tbt_s: float  # one decode step with this request, in the batch that admission predicts
    decode_sequences: float  # sequences in that batch, this request included
    delay_s: float = 0.0  # sum of the delays of the queued requests that this request overtakes
    fill_s: float = 0.0  # part of prefill_s beyond the work of a pipeline group's slowest stage
    eviction_cost_s: float = 0.0  # cost to later requests of the blocks that the fetch evicts


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is rejected. Programs read `kind`, people read `reason`.

    no_prefill_worker, no_decode_worker     no worker of the role can take the request now
    too_large                               longer than any worker or tokens_per_minute allows
    prefill_full, decode_full               all prefill queues, or all decode batches, are full
    ttft_slo, tbt_slo                       a prediction exceeds its limit
    fair_share                              rejected under overload to keep the load fair
    request_rate, token_rate, tenant_full   a limit of the tenant is exceeded
    """

    request_id: str
    kind: str
    reason: str
    predicted: Prediction | None  # of the best pair; None if no pairs were compared
    retry_after_s: float  # too_large: 0.0, because a retry cannot help
    limits: AppliedLimits | None = None  # None if no pairs were compared


@dataclass(frozen=True, slots=True)
class Route:
    """The destination of a request, and the predictions for it."""

    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    cached_tokens: int  # expected at the prefill worker, including the fetched blocks
    local_blocks: int  # leading blocks in DRAM or on the SSD of the prefill worker's node
    fetch_blocks: int  # number of blocks after local_blocks that fetch_node sends
    fetch_node: str | None  # None: nothing is fetched
    predicted: Prediction
    advice: Reject | None = None  # in advisory mode, the rejection that was not applied
    # Order key in the prefill queue (queue_order.py), on the clock of `on_request`'s `now_s`. The
    # frontend sends the worker the order key minus the current time, because clocks differ.
    order_key_s: float = 0.0
    restore_blocks: int = 0  # the last blocks of local_blocks, which are on the node's SSD
    second_fetch_node: str | None = None  # the node to fetch from if fetch_node fails
    limits: AppliedLimits = UNLIMITED

    @property
    def fetch_nodes(self) -> tuple[str, ...]:
        """Nodes to fetch the prefix from, in the order of preference."""
        return tuple(node for node in (self.fetch_node, self.second_fetch_node) if node)


def prefilled(route: Route, request: Request) -> Route:
    """The route of a request whose prompt is computed. One token is left to compute, because a
    prefill queue holds no work without tokens."""
    predicted = route.predicted._replace(queue_s=0.0, transfer_s=0.0, prefill_s=0.0)
    return replace(
        route,
        cached_tokens=request.prompt_tokens - 1,
        fetch_blocks=0,
        fetch_node=None,
        predicted=predicted,
    )


@dataclass(frozen=True, slots=True)
class Replicate:
    """A suggestion to copy these blocks of one prefix, in this order, from source to target."""

    block_keys: tuple[bytes, ...]
    source_node: str
    target_node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoleFlip:
    """A suggestion to drain this worker and change its role."""

    worker: WorkerRef
    role: str  # the new role
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pair of workers, as `Conductor.explain` shows it."""

    prefill: WorkerRef
    decode: WorkerRef
    cached_tokens: int
    local_blocks: int
    fetch_blocks: int
    fetch_node: str | None
    predicted: Prediction
    verdict: str  # the kind of rejection of this pair, else "chosen" or "slower" (not chosen)
    pipeline_stages: int = 1  # above 1: `prefill` is stage 0 of a pipeline group


@dataclass(frozen=True, slots=True)
class Explanation:
    """The pairs that were compared. There are none if a role has no usable worker."""

    candidates: tuple[Candidate, ...]  # the chosen pair, and then other pairs by TTFT
    left_out: int  # number of pairs not in `candidates`
    limits: AppliedLimits | None = None  # None without candidates


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of one worker in the conductor, for `mooncake status` and the metrics page."""

    worker: WorkerRef
    role: str
    takes_requests: bool
    why_not: str  # "" when it takes requests
    queue_s: float  # predicted prefill work in seconds at the calibrated speed; 0 for decode
    requests: float  # waiting or running at a prefill worker; in the batch of a decode worker
    speed_ratio: float  # measured / estimated seconds; 1.0: as fast as calibrated
    pipeline_stages: int = 1  # stages of its pipeline group if it is stage 0, else 1


@dataclass(frozen=True, slots=True)
class HeatClass:
    """Hot blocks with similar hit rates, and the number of their copies in DRAM."""

    heat: int  # least hits per second of a block in this class, in units of hot_hits_per_s
    blocks: int
    copies: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix of recent requests, and the nodes that hold it in DRAM."""

    key: bytes  # block key of its last block
    blocks: int
    hits_per_s: float
    blocks_on: Mapping[str, int]  # node -> number of leading blocks of the prefix there


@dataclass(frozen=True, slots=True)
class ConductorStats:
    """Totals since the conductor was created. Counters never decrease."""

    requests: int  # routed or rejected, including rejections before parsing (on_arrival)
    routed: int
    rejected: Mapping[str, int]  # by kind
    advised: Mapping[str, int]  # rejections not applied in advisory mode, by kind
    fetches: int
    fetched_blocks: int
    prompt_tokens: int  # of routed requests
    cached_tokens: int  # of prompt_tokens, predicted to be cached
    replicated_blocks: int  # suggested
    in_flight: int  # gauge of this frontend's requests that are routed and not finished
    prefill_error: float  # recent mean |actual - predicted| / actual prefill time; 0.0 before any
    ttft_error: float  # the same mean for the time from routing to the end of prefill
    ttft_slo_s: float  # gauge of the service level; with `auto`, the mean of recent requests
    tbt_slo_s: float  # the same for the time between tokens
    frontends_known: int = 0  # gauge of the other frontends that sent notes recently
    routed_elsewhere: int = 0  # gauge of the known in-flight requests of other frontends
    note_batches_received: int = 0
    note_batches_missed: int = 0
    # Both are empty while role_flips is "off".
    workers_wanted: Mapping[str, float] = field(default_factory=dict)  # gauges by role
    flips_proposed: Mapping[str, int] = field(default_factory=dict)  # counters by the new role
