"""Decisions and the state of the cluster as JSON. Pure.

The `decision` output of a request:

    policy, admission          the conductor's parameters of these names
    prefill, decode            the chosen pair of workers
    predicted                  the pair's Prediction, described in conductor/messages.py
    limits                     the request's AppliedLimits, in seconds, described there too; null
                               in a rejection without a pair
    predicted_cached_tokens, local_blocks, restore_blocks, fetch_blocks, fetch_node,
    second_fetch_node          the predicted sources of the prefix; nodes are storage nodes
    queue_order                name of the prefill queue's order
    place_s                    seconds: the request's order key in that queue, minus decision time
    candidates                 the best pairs of workers, the chosen pair first, each with its
                               Prediction and a verdict: chosen, slower, or a kind of rejection
    candidates_left_out        number of further pairs
    advice                     in advisory mode: the rejection that was not applied
    cached_tokens, fetched_blocks, fetched_bytes, queue_ahead, queue_s, load_s, prefill_s, put_s
                               measured by the prefill worker
    fetched_from               bytes that each node sent for the prefix
    ttft_s                     seconds from the parsed request to the first token at the frontend
    decode_queue_s, decode_load_s, loaded_early_blocks, decode_read_bytes
                               measured by the decode worker before its first step

The state of the cluster, for the parameter `describe` with the value `cluster`:

    served                     block_tokens, context_tokens_max; null without workers
    limits                     ttft_slo_s, tbt_slo_s in seconds, both above 0, with `auto` the mean
                               of recent requests; auto: names of those that are `auto`
    workers                    each with its load as routing uses it; if it takes no requests, why
    hot_prefixes               hottest first: hash, blocks, hits per second, leading blocks by node
    decisions                  the latest decisions, newest first

The state contains numbers, names and hashes. Its only text from a client is the name of a tenant,
and that only without API keys.

Not here: access control (frontend.py, tenants/principal.py), display (gateway/page).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from backends.frontend.decisions.latest import Decided, DecisionRecord, short_hash
from backends.workers.protocol import DecodeReply, PrefillReply
from conductor.config import AUTO, ConductorConfig
from conductor.messages import Candidate, Explanation, HotPrefix, Reject, WorkerStatus

SLOS = ("ttft_slo_s", "tbt_slo_s")


def copied(record: object, *names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}


def route_fields(decided: Decided, config: ConductorConfig) -> dict[str, object]:
    route = decided.route
    found: dict[str, object] = {
        "policy": config.policy,
        "admission": config.admission,
        "prefill": route.prefill.worker_id,
        "decode": route.decode.worker_id,
        "predicted": route.predicted._asdict(),
        "limits": route.limits._asdict(),
        "predicted_cached_tokens": route.cached_tokens,
        **copied(route, "local_blocks", "restore_blocks", "fetch_blocks"),
        **copied(route, "fetch_node", "second_fetch_node"),
        "queue_order": config.queue_order,
        "place_s": route.order_key_s - decided.decided_at_s,
    }
    if decided.explained.candidates:
        found |= candidates_fields(decided.explained)
    if route.advice is not None:
        found["advice"] = copied(route.advice, "kind", "reason", "retry_after_s")
    return found


def reject_fields(rejected: Reject, config: ConductorConfig) -> dict[str, object]:
    """Fields of a rejection, for its span and for the list of the latest decisions."""
    return {
        "policy": config.policy,
        "admission": config.admission,
        "rejected": rejected.kind,
        "predicted": rejected.predicted._asdict() if rejected.predicted is not None else None,
        "limits": rejected.limits._asdict() if rejected.limits is not None else None,
    }


def candidates_fields(explained: Explanation) -> dict[str, object]:
    return {
        "candidates": [candidate_fields(candidate) for candidate in explained.candidates],
        "candidates_left_out": explained.left_out,
    }


def candidate_fields(candidate: Candidate) -> dict[str, object]:
    return {
        "prefill": candidate.prefill.worker_id,
        "pipeline_stages": candidate.pipeline_stages,
        "decode": candidate.decode.worker_id,
        **copied(candidate, "verdict", "cached_tokens"),
        **copied(candidate, "local_blocks", "fetch_blocks", "fetch_node"),
        "predicted": candidate.predicted._asdict(),
    }


def prefill_fields(reply: PrefillReply) -> dict[str, object]:
    return {
        **copied(reply, "cached_tokens", "fetched_blocks", "fetched_bytes", "fetched_from"),
        **copied(reply, "queue_ahead", "queue_s", "load_s"),
        "prefill_s": reply.compute_s,
        "put_s": reply.put_s,
    }


def decode_fields(end: DecodeReply) -> dict[str, object]:
    return {
        "decode_queue_s": end.queue_s,
        "decode_load_s": end.load_s,
        "loaded_early_blocks": end.loaded_early_blocks,
        "decode_read_bytes": end.read_bytes,
    }


def record_fields(
    record: DecisionRecord, config: ConductorConfig, now_s: float
) -> dict[str, object]:
    """Fields of a recorded decision, for the list of the latest decisions."""
    decision, request = record.decision, record.request
    found: dict[str, object] = {
        "age_s": now_s - record.at_s,
        **copied(request, "request_id", "tenant", "prompt_tokens", "output_tokens_max"),
        **copied(request, "priority", "is_resumed"),
        "blocks": record.blocks,
        "prefix": record.prefix,
    }
    if isinstance(decision, Reject):
        found |= reject_fields(decision, config)
        found |= {"reason": decision.reason, "retry_after_s": decision.retry_after_s}
    else:
        found |= route_fields(decision, config)
    found |= candidates_fields(record.explained)
    if record.cached_tokens is not None:
        found["came"] = {
            "cached_tokens": record.cached_tokens,
            "prefill_s": record.prefill_s,
            "first_token_s": record.first_token_s,
        }
    return found


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """A snapshot of the cluster's state."""

    now_s: float
    workers: Sequence[WorkerStatus]
    hot_prefixes: Sequence[HotPrefix]
    decisions: Sequence[DecisionRecord]
    block_tokens: int = 0  # 0 without workers
    context_tokens_max: int = 0  # 0 without workers
    slo_s: tuple[float, float] = (math.inf, math.inf)  # (TTFT, TBT), as in ConductorStats


def overview(reading: ClusterReading, config: ConductorConfig) -> dict[str, object]:
    served = None
    if reading.block_tokens:
        served = {
            "block_tokens": reading.block_tokens,
            "context_tokens_max": reading.context_tokens_max,
        }
    return {
        "served": served,
        "limits": {
            "ttft_slo_s": reading.slo_s[0],
            "tbt_slo_s": reading.slo_s[1],
            "auto": [name for name in SLOS if getattr(config, name) == AUTO],
        },
        "workers": [worker_fields(each) for each in reading.workers],
        "hot_prefixes": [hot_prefix_fields(each) for each in reading.hot_prefixes],
        "decisions": [record_fields(each, config, reading.now_s) for each in reading.decisions],
    }


def worker_fields(status: WorkerStatus) -> dict[str, object]:
    return {
        "name": status.worker.worker_id,
        "role": status.role,
        "node": status.worker.node_id,
        **copied(status, "takes_requests", "why_not", "queue_s", "requests"),
        **copied(status, "speed_ratio", "pipeline_stages"),
    }


def hot_prefix_fields(prefix: HotPrefix) -> dict[str, object]:
    return {
        "prefix": short_hash(prefix.key),
        "blocks": prefix.blocks,
        "hits_per_s": prefix.hits_per_s,
        "blocks_on": dict(prefix.blocks_on),
    }
