"""Fetch or compute: how much of a prompt's prefix each prefill worker fetches, and from where.

A node holds a run of leading blocks of the prompt. The first blocks of the run are in its DRAM, and
the others are on its SSD. Predicted seconds until the blocks are available:

    local DRAM    0, because the memory is mapped
    local SSD     bytes / SSD rate; the worker always restores these blocks
    remote DRAM   the sender's queue + latency + bytes / link rate
    remote SSD    as remote DRAM, at the slower of the link and the sender's SSD

Blocks after the local run may be fetched from one other node. The worker computes the rest of the
prompt. There are two rules:

    threshold   The paper's rule: fetch the longest run if it is more than
                kvcache_balancing_threshold times the local run. With fetch_must_pay, the fetch
                must also be predicted to be faster.
    times       This project's rule: of no fetch and a fetch of the whole run of each holder, take
                the one with the least max(wait, transfer) + prefill + eviction cost.
                Fetching overlaps with the work queued before the request. With layer-wise
                prefill, fetching also overlaps with the computation of all layers after the
                first. A shorter run at an idle node can beat the longest run at a busy node.
                A part of a run cannot beat the whole run, because each further block costs the
                same to fetch and saves more computation.

The rule `times` is Eq. 2 of the paper plus terms for queues, latency, sender and evictions. At a
node with full memory, the fetched blocks evict other blocks, of which some will be computed again.
The *eviction cost* is EVICTION_COST_SHARE of the prefill time that such a fetch saves.

At most SOURCES_MAX holders are compared. Of holders with equal runs, only the one that can send
first is compared. A holder of a shorter run is compared only if it can send before all holders of
longer runs. If link rates differ, or blocks are on SSDs, the first sender may not be the fastest.
All holders are then compared, up to SOURCES_MAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from conductor.load.cluster import Cluster
from conductor.load.pool import Column, Counts, Mask
from conductor.load.prefill_pool import PrefillPool, QueuePosition, Queues
from conductor.routing.policies import Policy, Seconds
from conductor.routing.tiers import Holdings

SOURCES_MAX = 4  # holders compared for one prompt
# Eviction cost / prefill seconds that a fetch saves. It is the assumed probability that an evicted
# block would have been used again.
EVICTION_COST_SHARE = 0.1
NAMES_MAX = 64  # equal holders whose send queues are compared


class FetchSource(NamedTuple):
    """A node that could send its run of leading blocks."""

    node_id: str
    blocks: int  # length of the run, in blocks
    dram_blocks: int  # the first blocks of the run; the others are on the sender's SSD
    wait_s: float  # seconds until the sends reserved at this node are predicted to end


@dataclass(slots=True)
class Plans:
    """How each prefill worker would get the prompt's KV cache, as columns."""

    held: Holdings  # the runs of the workers' own nodes
    sources: Sequence[FetchSource]  # the nodes that were compared
    fetch_s: Seconds  # time to restore from SSD and to fetch
    prefill_s: Seconds  # time to compute the remaining tokens
    source: Counts  # index in `sources` of the node that the worker fetches from; -1: no fetch
    fill_s: Seconds  # part of prefill_s in later pipeline stages; it does not delay later prompts
    eviction_cost_s: Seconds  # cost to other requests of the evictions by these fetches
    beside_s: Seconds  # part of prefill_s that overlaps with the fetch (layer-wise prefill)
    position: QueuePosition | None = None  # queue position with this prefill_s, if it is computed


def cached_tokens(blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """Cached prompt tokens. The last one is always computed, because the first output token is
    sampled from its logits."""
    return max(0, min(blocks * block_tokens, prompt_tokens - 1))


def worth_asking(
    cluster: Cluster, held: Holdings, policy: Policy, now_s: float
) -> list[FetchSource]:
    """The sources to compare, longest run first. Empty if no worker would fetch by this policy."""
    if policy.fetch == "threshold":
        if held.least >= held.longest / cluster.config.kvcache_balancing_threshold:
            return []
    elif policy.fetch == "never" or held.is_same:
        return []
    return _sources(cluster, held, policy.fetch == "threshold", now_s)


def make_plans(
    cluster: Cluster,
    held: Holdings,
    policy: Policy,
    sources: Sequence[FetchSource],
    prompt_tokens: int,
    queues: Queues,
) -> Plans:
    """Decide for each worker whether it fetches, and from which source."""
    pool = cluster.prefills
    own_tokens = _own_tokens(pool, held, prompt_tokens)
    own_s = pool.prefill_s(prompt_tokens, own_tokens)
    fill_s = pool.fill_s(prompt_tokens, own_tokens)
    plans = Plans(held, sources, pool.zeros, own_s, pool.nowhere, fill_s, pool.zeros, pool.zeros)
    if held.has_ssd:
        restore_s = pool.block_bytes / cluster.config.ssd_bytes_per_s
        plans.fetch_s = (held.blocks - held.dram_blocks) * restore_s
    if not sources:
        return plans
    if policy.fetch == "threshold":
        _fetch_by_threshold(plans, cluster, prompt_tokens)
    else:
        _fetch_by_times(plans, cluster.prefills, prompt_tokens, queues)
    return plans


def _fetch_by_threshold(plans: Plans, cluster: Cluster, prompt_tokens: int) -> None:
    """The paper's rule: fetch the longest run if the local run is much shorter."""
    config, longest = cluster.config, plans.sources[0].blocks
    is_wanted = plans.held.blocks < longest / config.kvcache_balancing_threshold
    least_s = plans.prefill_s
    if plans.held.has_ssd:
        least_s = least_s + plans.fetch_s
    if not config.fetch_must_pay:
        own_tokens = _own_tokens(cluster.prefills, plans.held, prompt_tokens)
        is_wanted &= own_tokens < _tokens(cluster.prefills, longest, prompt_tokens)
        least_s = np.where(is_wanted, math.inf, least_s)
    _take_the_quickest(plans, cluster.prefills, prompt_tokens, least_s, is_wanted)


def _fetch_by_times(plans: Plans, pool: PrefillPool, prompt_tokens: int, queues: Queues) -> None:
    """This project's rule: the least end of prefill, where the fetch overlaps with the wait."""
    plans.position = pool.position(queues, plans.prefill_s)
    hidden_s = plans.position.wait_s
    least_s = hidden_s
    if plans.held.has_ssd:
        least_s = np.maximum(hidden_s, plans.fetch_s)
    least_s = least_s + plans.prefill_s
    _take_the_quickest(plans, pool, prompt_tokens, least_s, hidden_s=hidden_s)


def _take_the_quickest(
    plans: Plans,
    pool: PrefillPool,
    prompt_tokens: int,
    least_s: Seconds,
    is_wanted: Mask | None = None,
    hidden_s: Seconds | None = None,
) -> None:
    """Let each worker fetch from the source with the earliest end of prefill, if that is before
    `least_s`, the end without a fetch. `is_wanted`: mask of the workers that may fetch; None for
    the workers with a shorter run than the source. `hidden_s`: seconds of queued work, with which a
    transfer overlaps. None if a transfer overlaps neither with queued work nor with computation."""
    held, restore_s, own_s = plans.held, plans.fetch_s, plans.prefill_s
    for number, source in enumerate(plans.sources):
        may_fetch = held.blocks < source.blocks if is_wanted is None else is_wanted
        if not np.count_nonzero(may_fetch):
            continue
        prefill_s, fetch_s = _with(source, pool, held, restore_s, prompt_tokens)
        beside_s = None
        if hidden_s is None:
            total_s = fetch_s + prefill_s
        elif pool.has_layers and source.blocks == source.dram_blocks:
            beside_s = pool.beside_s(prompt_tokens, prefill_s, held.blocks == held.dram_blocks)
            total_s = np.maximum(hidden_s + beside_s, fetch_s) + (prefill_s - beside_s)
        else:
            total_s = np.maximum(hidden_s, fetch_s) + prefill_s
        eviction_cost_s = None
        if hidden_s is not None and held.full is not pool.zeros:
            eviction_cost_s = EVICTION_COST_SHARE * (own_s - prefill_s)
            eviction_cost_s *= held.full
            total_s += eviction_cost_s
        is_better = total_s < least_s
        is_better &= may_fetch
        if np.count_nonzero(is_better):
            if source is not plans.sources[-1]:
                least_s = np.where(is_better, total_s, least_s)
            plans.fetch_s = np.where(is_better, fetch_s, plans.fetch_s)
            plans.prefill_s = np.where(is_better, prefill_s, plans.prefill_s)
            plans.source = np.where(is_better, number, plans.source)
            if beside_s is not None or plans.beside_s is not pool.zeros:
                beside_s = pool.zeros if beside_s is None else beside_s
                plans.beside_s = np.where(is_better, beside_s, plans.beside_s)
            if eviction_cost_s is not None:
                plans.eviction_cost_s = np.where(is_better, eviction_cost_s, plans.eviction_cost_s)
            if pool.has_groups:
                fill_s = pool.fill_s(prompt_tokens, _tokens(pool, source.blocks, prompt_tokens))
                plans.fill_s = np.where(is_better, fill_s, plans.fill_s)
            plans.position = None


def _with(
    source: FetchSource, pool: PrefillPool, held: Holdings, restore_s: Seconds, prompt_tokens: int
) -> tuple[Seconds, Seconds]:
    """Seconds at each worker with this source: (to compute, to restore and fetch). Valid only where
    the run of the source is longer than the local run."""
    prefill_s = pool.prefill_s(prompt_tokens, _tokens(pool, source.blocks, prompt_tokens))
    path, blocks = pool.path(source.node_id), source.blocks - held.blocks
    fixed_s = path.latency_s + source.wait_s if source.wait_s else path.latency_s
    if held.has_ssd:
        fixed_s = fixed_s + restore_s
    if source.blocks == source.dram_blocks:
        blocks *= path.block_s
        blocks += fixed_s
        return prefill_s, blocks
    slow = np.minimum(blocks, source.blocks - source.dram_blocks)
    slow_s = np.maximum(path.block_s, pool.block_bytes / pool.config.ssd_bytes_per_s)
    return prefill_s, (blocks - slow) * path.block_s + slow * slow_s + fixed_s


def _own_tokens(pool: PrefillPool, held: Holdings, prompt_tokens: int) -> int | Column:
    """Cached tokens at each worker without a fetch. One number if all are known to be equal."""
    if held.is_same and pool.block_tokens:
        return min(held.longest * pool.block_tokens, prompt_tokens - 1)
    cached: Column = held.blocks * pool.block_tokens_of
    if held.longest * pool.block_tokens_max >= prompt_tokens:
        cached = np.minimum(cached, prompt_tokens - 1)
    return cached


def _tokens(pool: PrefillPool, blocks: int, prompt_tokens: int) -> int | Column:
    """`cached_tokens` at each worker. One number if all workers have the same block size."""
    if pool.block_tokens:
        return min(blocks * pool.block_tokens, prompt_tokens - 1)
    return np.minimum(blocks * pool.block_tokens_of, prompt_tokens - 1)


def _sources(
    cluster: Cluster, held: Holdings, is_longest_only: bool, now_s: float
) -> list[FetchSource]:
    """The holders to compare, longest run first."""
    are_alike = not (cluster.prefills.paths_differ or held.has_ssd)
    if are_alike:  # no source is better than a holder of the longest run that sends nothing
        node_id = held.longest_holder()
        if node_id in cluster.nodes and not cluster.send_wait_s(node_id, now_s):
            return [FetchSource(node_id, held.longest, held.longest, 0.0)]
    found: list[FetchSource] = []
    soonest_s = math.inf
    for blocks, dram_blocks, nodes in held.groups():
        if found and is_longest_only and blocks < found[0].blocks:
            break
        offers = _offers(cluster, nodes, are_alike, now_s)
        for wait_s, node_id in offers[: 1 if are_alike else SOURCES_MAX]:
            if wait_s < soonest_s or not are_alike:
                found.append(FetchSource(node_id, blocks, dram_blocks, wait_s))
                soonest_s = min(soonest_s, wait_s)
        if len(found) >= SOURCES_MAX or (are_alike and soonest_s == 0):
            break
    return found[:SOURCES_MAX]


def second_source(
    cluster: Cluster, held: Holdings, first: FetchSource, own_blocks: int, now_s: float
) -> str | None:
    """The node to fetch from if `first` fails: the holder that lacks the fewest blocks of the run
    of `first`, and among equal holders the one that can send first. None if no other node has a
    longer run than the worker's own node."""
    least, second = (first.blocks, math.inf), None
    for blocks, _, nodes in held.groups():
        lacking = max(0, first.blocks - blocks)
        if blocks <= own_blocks or lacking > least[0]:
            break
        for node_id in islice(nodes, NAMES_MAX):
            if node_id == first.node_id or node_id not in cluster.nodes:
                continue
            offer = (lacking, cluster.send_wait_s(node_id, now_s))
            if offer < least:
                least, second = offer, node_id
            if offer == (0, 0.0):
                return second
    return second


def _offers(
    cluster: Cluster, nodes: Iterator[str], are_alike: bool, now_s: float
) -> list[tuple[float, str]]:
    """(seconds until the node can send, node) of known nodes, earliest first."""
    found = []
    for node_id in islice(nodes, NAMES_MAX):
        if node_id in cluster.nodes:
            wait_s = cluster.send_wait_s(node_id, now_s)
            if are_alike and wait_s == 0:
                return [(wait_s, node_id)]
            found.append((wait_s, node_id))
    return sorted(found)
