"""The state of the cluster as JSON, for the parameter `describe` with the value `cluster`.

    served                     block_tokens, context_tokens_max; null without workers
    limits                     ttft_slo_s, tbt_slo_s; 0: none
    workers                    each with its load as routing uses it, and why it takes no requests
    hot_prefixes               hottest first: hash, blocks, hits per second, leading blocks by node
    decisions                  the latest, newest first (fields.py)

It contains numbers, names and hashes. The only client input is the tenant's name, without API
keys. Pure. Not here: access control (frontend.py, tenants/principal.py), display (gateway/page).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.frontend.decisions.fields import record_fields
from backends.frontend.decisions.latest import DecisionRecord, short_hash
from conductor.config import ConductorConfig
from conductor.messages import HotPrefix, WorkerStatus


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """A snapshot of the cluster's state."""

    now_s: float
    workers: Sequence[WorkerStatus]
    hot_prefixes: Sequence[HotPrefix]
    decisions: Sequence[DecisionRecord]
    block_tokens: int = 0  # 0: no workers
    context_tokens_max: int = 0


def overview(reading: ClusterReading, config: ConductorConfig) -> dict[str, object]:
    served = None
    if reading.block_tokens:
        served = {
            "block_tokens": reading.block_tokens,
            "context_tokens_max": reading.context_tokens_max,
        }
    return {
        "served": served,
        "limits": {"ttft_slo_s": config.ttft_slo_s, "tbt_slo_s": config.tbt_slo_s},
        "workers": [worker_fields(each) for each in reading.workers],
        "hot_prefixes": [hot_prefix_fields(each) for each in reading.hot_prefixes],
        "decisions": [record_fields(each, config, reading.now_s) for each in reading.decisions],
    }


def worker_fields(status: WorkerStatus) -> dict[str, object]:
    return {
        "name": status.worker.worker_id,
        "role": status.role,
        "node": status.worker.node_id,
        "takes_requests": status.takes_requests,
        "why_not": status.why_not,
        "queue_s": status.queue_s,
        "requests": status.requests,
        "speed_ratio": status.speed_ratio,
        "pipeline_stages": status.pipeline_stages,
    }


def hot_prefix_fields(prefix: HotPrefix) -> dict[str, object]:
    return {
        "prefix": short_hash(prefix.key),
        "blocks": prefix.blocks,
        "hits_per_s": prefix.hits_per_s,
        "blocks_on": dict(prefix.blocks_on),
    }
