"""What goes into the conductor and what comes out: requests, routes, rejections, suggestions.

Records only: frozen, without behaviour, so that a shell can log them, send them over a wire or
make them rows of a report. Every decision carries the prediction that led to it.

Not here: directory events and worker reports (mooncake_store), knobs (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have (admission/tenant_quotas.py); None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_in_flight_max: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, already tokenised and cut into keyed blocks by the frontend."""

    request_id: str
    prompt_tokens: int
    block_keys: Sequence[bytes]  # full blocks only; key i names blocks 0..i of this prompt
    output_tokens_max: int
    priority: int = 0  # below 0: rejected earlier under load, see low_priority_load_max
    # (worker_id, incarnation) of those that just failed this very request: a retry goes elsewhere.
    excluded_workers: frozenset[tuple[str, str]] = frozenset()
    tenant: str = ""  # who asks; under overload each tenant has its share, see fair_share.py
    is_resumed: bool = False  # it was admitted before, and lost its workers: it is not shed now
    # Of its tenant; None where nobody counts, and for further attempts of what was counted.
    limits: TenantLimits | None = None


@dataclass(frozen=True, slots=True, order=True)
class WorkerRef:
    """Enough to call a worker: its name and incarnation, its node, inbox and Triton."""

    worker_id: str
    incarnation: str
    node_id: str
    inbox: str
    grpc_address: str = ""


class Prediction(NamedTuple):
    """The terms of one pair. ttft_s is the sum of the four above it."""

    queue_s: float  # prefill work that goes before this request
    transfer_s: (
        float  # fetching and restoring cached blocks; adaptive: only what the queue does not hide
    )
    prefill_s: float  # computing what is not cached
    handover_s: float  # the decode worker reading the prompt's KV
    ttft_s: float
    tbt_s: float  # one decode step when the prefill ends, this request included
    decode_sequences: float  # requests in that step
    delay_s: float = 0.0  # what this request adds to the wait of others at the prefill worker
    # Of prefill_s: the last chunk's way through the other stages of a pipeline group.
    fill_s: float = 0.0
    eviction_cost_s: float = 0.0  # what the copies of its fetch cost those who come later


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is not taken. `kind` is for machines, `reason` for people.

    Kinds: no_prefill_worker, no_decode_worker (nothing alive to call), too_large (no worker could
    ever hold it), prefill_full, decode_full (bounded queues and batches), ttft_slo, tbt_slo (a
    prediction against its limit), fair_share (overload: turned away so that others keep theirs);
    request_rate, token_rate, tenant_full (its tenant has used up what it may have).
    """

    request_id: str
    kind: str
    reason: str
    predicted: Prediction | None  # of the best pair; None when there was no pair to predict
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes and what was predicted for it.

    `order_key_s` orders it in the prefill worker's queue (queue_order.py), on the clock of
    `now_s`. A worker with another clock makes its own key by the same formula, from when the
    request arrived there and from predicted.prefill_s.
    """

    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    cached_tokens: int  # expected at the prefill worker, after the fetch if there is one
    local_blocks: int  # leading blocks that the prefill worker's node has, on its SSD too
    fetch_blocks: int  # blocks local_blocks .. local_blocks + fetch_blocks come from fetch_node
    fetch_node: str | None
    predicted: Prediction
    advice: Reject | None = None  # advisory mode: the rejection that was not carried out
    order_key_s: float = 0.0
    restore_blocks: int = 0  # the last ones of local_blocks are on the node's SSD
    second_fetch_node: str | None = None  # who is asked when fetch_node fails

    @property
    def fetch_nodes(self) -> tuple[str, ...]:
        """Where the worker takes the prefix from, in this order."""
        return tuple(node for node in (self.fetch_node, self.second_fetch_node) if node)


@dataclass(frozen=True, slots=True)
class Replicate:
    """A suggestion: copy these blocks of one prefix, in this order, from source to target."""

    block_keys: tuple[bytes, ...]
    source_node: str
    target_node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoleFlip:
    """A suggestion: this worker drains and takes the other role."""

    worker: WorkerRef
    role: str  # that it shall take
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pair that was considered, as `Conductor.explain` shows it."""

    prefill: WorkerRef
    decode: WorkerRef
    cached_tokens: int
    local_blocks: int
    fetch_blocks: int
    fetch_node: str | None
    predicted: Prediction
    verdict: str  # "chosen", "slower", or the kind of rejection it would meet
    pipeline_stages: int = 1  # more: `prefill` is the first stage of a group that is one candidate


@dataclass(frozen=True, slots=True)
class Explanation:
    """The best pairs, best first, and how many more there were."""

    candidates: tuple[Candidate, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What the conductor believes of one worker, for `mooncake status` and the metrics page."""

    worker: WorkerRef
    role: str
    takes_requests: bool
    why_not: str  # "" when it takes requests
    queue_s: float  # prefill: predicted work; decode: 0
    requests: float  # prefill: reserved there; decode: in the batch, reported or reserved
    speed_ratio: float  # measured seconds / estimated seconds, 1.0 = as calibrated
    pipeline_stages: int = 1  # of the group that this prefill worker is the first stage of


@dataclass(frozen=True, slots=True)
class ErrorPercentiles:
    """|actual - predicted| / actual over recent requests; 0.0 before the first."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class HeatClass:
    """Hot blocks of about the same rate, and how many copies of them are in DRAM."""

    heat: int  # hits per second of each, in units of hot_hits_per_s: at least so much
    blocks: int
    copies: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that requests found again lately, and who has it in DRAM."""

    key: bytes  # of its last block
    blocks: int
    hits_per_s: float
    blocks_on: Mapping[str, int]  # node -> leading blocks of it


@dataclass(frozen=True, slots=True)
class ConductorStats:
    """Totals since the conductor was made. Counters only grow."""

    requests: int
    routed: int
    rejected: Mapping[str, int]  # by kind
    advised: Mapping[str, int]  # advisory mode: would have been rejected, by kind
    fetches: int
    fetched_blocks: int
    prompt_tokens: int  # of routed requests
    cached_tokens: int  # of those, predicted to be cached
    replicated_blocks: int  # suggested
    in_flight: int  # a gauge: requests routed and not finished
    prefill_error: float  # mean |actual - predicted| / actual of prefill seconds, recent
    ttft_error: float  # the same, from routing to the end of prefill
    prefill_errors: ErrorPercentiles
    ttft_errors: ErrorPercentiles
    frontends_known: int = 0  # a gauge: others than this one, heard of lately
    routed_elsewhere: int = 0  # a gauge: their requests, as far as they said
    note_batches_received: int = 0
    note_batches_missed: int = 0
    # As seen by the role controller (roles/); empty while it is off.
    workers_wanted: Mapping[str, float] = field(default_factory=dict)  # by role: gauges
    flips_proposed: Mapping[str, int] = field(default_factory=dict)  # by the role to take
