"""Fetch or compute: how much of a prompt's prefix is brought to a prefill worker, and from where.

A node holds a run of leading blocks in DRAM and, behind it, some more on its SSD. Prices:

    own DRAM      nothing: it is mapped
    own SSD       bytes / ssd rate; always restored, that is what a worker does (backends)
    remote DRAM   the sender's queue + latency + bytes / link rate
    remote SSD    the same, at the slower of the link and the sender's SSD

What is beyond the own run may be fetched from one other node, and the rest is computed. Two rules:

    threshold   the paper's: the longest run, if it is more than kvcache_balancing_threshold times
                the own one (and, with fetch_must_pay, if that is predicted to be quicker)
    times       ours: of no fetch and one from each holder, as deep as it goes, the least
                max(wait, transfer) + prefill. Fetching runs beside the work in front of it, so
                as much of it as the request would wait anyway costs nothing. A shorter run at an
                idle node can beat the longest one at a busy node; a part of one run cannot beat
                the whole: each further block costs the same to fetch and more to compute.

The second is Eq. 2 of the paper with what it leaves out: queues, latency, and the sender.

Not here: the work in front (prefill_queue.py), choosing the worker (routing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conductor.cluster import Cluster, Worker
from conductor.estimates import transfer_s
from conductor.policies import Policy
from conductor.tiers import NOTHING, Runs


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to get the prompt's prefix to a worker; the rest is computed."""

    cached_tokens: int
    restore_blocks: int  # from the own SSD
    fetch_blocks: int  # from fetch_node, after all that the own node has
    fetch_node: str | None
    transfer_s: float
    prefill_s: float  # as calibrated, times the worker's speed ratio


def cached_tokens(blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """At least one token is always computed: its logits are the first output token."""
    return max(0, min(blocks * block_tokens, prompt_tokens - 1))


def best_plan(
    cluster: Cluster, worker: Worker, runs: Runs, policy: Policy,
    prompt_tokens: int, wait_s: Callable[[float], float], now_s: float,
) -> Plan:  # fmt: skip
    """Fetch or compute at this worker. `wait_s` tells the work in front of seconds of prefill."""
    config = cluster.config
    own = runs.get(worker.info.node_id, NOTHING)
    compute = _plan(cluster, worker, runs, None, own.blocks, prompt_tokens, now_s)
    if policy.fetch == "never":
        return compute
    depth_min = own.blocks + 1
    longest = max((run.blocks for run in runs.values()), default=0)
    if policy.fetch == "threshold":
        if longest <= own.blocks * config.kvcache_balancing_threshold:
            return compute
        depth_min = longest
    plans = [
        _plan(cluster, worker, runs, node_id, blocks, prompt_tokens, now_s)
        for node_id, run in runs.items()
        if node_id != worker.info.node_id and node_id in cluster.nodes
        for blocks in {run.dram_blocks, run.blocks}
        if blocks >= depth_min
    ]
    plans = [plan for plan in plans if plan.cached_tokens > compute.cached_tokens]
    if policy.fetch == "times":
        hidden_s = wait_s(compute.prefill_s)
        return min((compute, *plans), key=lambda p: (
            max(hidden_s, p.transfer_s) + p.prefill_s, p.fetch_node or ""
        ))  # fmt: skip
    if not plans:
        return compute
    best = min(plans, key=lambda p: (p.transfer_s + p.prefill_s, p.fetch_node))
    pays = best.transfer_s + best.prefill_s < compute.transfer_s + compute.prefill_s
    return best if pays or not config.fetch_must_pay else compute


def _plan(
    cluster: Cluster, worker: Worker, runs: Runs, source: str | None, blocks: int,
    prompt_tokens: int, now_s: float,
) -> Plan:  # fmt: skip
    """The first `blocks` blocks cached: the own ones, and those beyond from `source`."""
    config, info = cluster.config, worker.info
    own = runs.get(info.node_id, NOTHING)
    cached = cached_tokens(blocks, info.block_tokens, prompt_tokens)
    seconds = worker.prefill_estimate.seconds(prompt_tokens - cached, cached)
    restore = own.blocks - own.dram_blocks
    move_s = transfer_s(restore * info.block_bytes, config.ssd_bytes_per_s, 0.0)
    if source is not None:
        rate = info.transfer_bytes_per_s.get(source) or config.transfer_bytes_per_s
        fetched = blocks - own.blocks
        slow = min(fetched, max(0, blocks - runs[source].dram_blocks))  # on the sender's SSD
        move_s += cluster.send_wait_s(source, now_s) + info.transfer_latency_s
        move_s += (fetched - slow) * info.block_bytes / rate
        move_s += slow * info.block_bytes / min(rate, config.ssd_bytes_per_s)
    return Plan(
        cached, restore, blocks - own.blocks if source else 0, source, move_s,
        worker.speed_ratio(now_s, config) * seconds,
    )  # fmt: skip
