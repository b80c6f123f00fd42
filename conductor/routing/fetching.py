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
                max(wait, transfer) + prefill + eviction cost. Fetching runs in parallel with the
                work that is queued ahead of the request, so the share of it within that wait is
                free. With layer-wise prefill, fetching also runs in parallel with the computing
                of all layers after the first. A shorter run at an idle node can beat the longest
                run at a busy node. A part of one run cannot beat the whole run: each further
                block costs the same to fetch and more to compute.

The second rule is Eq. 2 of the paper plus what Eq. 2 leaves out: queues, latency, the sender and
later requests. Fetched blocks are kept, so where memory is full the same number of other blocks are
evicted, and some of those will be computed again. Where memory is full, the *eviction cost* is
EVICTION_COST_SHARE of what the fetch saves.

Not every holder is looked at. Of equal runs the one that can send soonest counts, and a shorter run
only if it can be sent sooner than every longer one, as far as SOURCES_MAX of them. Where workers
measured different rates the soonest sender need not be the quickest, so there all runs are looked
at, up to that many.

Not here: the work in front (prefill_queue.py), choosing the worker (routing.py).
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

SOURCES_MAX = 4  # holders that are compared for one prompt
# Of the seconds that a fetch saves, what its copies cost others: the chance that a block which had
# to go would have been used once more.
EVICTION_COST_SHARE = 0.1
NAMES_MAX = 64  # of equal holders that are asked when they can send


class FetchSource(NamedTuple):
    """A node that could send its run."""

    node_id: str
    blocks: int
    dram_blocks: int  # the first ones; the others are on its SSD
    wait_s: float  # for the sends already reserved there


@dataclass(slots=True)
class Plans:
    """How each prefill worker would get the prompt's KV, as columns."""

    held: Holdings  # what the worker's own node has
    sources: Sequence[FetchSource]  # those that are compared
    fetch_s: Seconds  # restoring and fetching
    prefill_s: Seconds  # computing the rest
    source: Counts  # the number of the one that each worker fetches from; -1: it does not
    fill_s: Seconds  # of prefill_s, what does not hold up those behind: a group's other stages
    eviction_cost_s: Seconds  # what the copies of those fetches will cost others
    beside_s: Seconds  # of prefill_s, what the fetch runs beside
    position: QueuePosition | None = None  # in the queues with that work, if known already


def cached_tokens(blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """At least one token is always computed: its logits are the first output token."""
    return max(0, min(blocks * block_tokens, prompt_tokens - 1))


def worth_asking(
    cluster: Cluster, held: Holdings, policy: Policy, now_s: float
) -> list[FetchSource]:
    """The sources that are compared, longest run first; none where nobody lacks enough."""
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
    """Fetch or compute, at each worker."""
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
    """The paper's rule: the longest run, where it is much longer than the own one."""
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
    """Ours: whatever lets the first token come soonest, beside the work in front."""
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
    """Each worker fetches from the source with which its prefill ends soonest, if that is before
    `least_s`. `is_wanted`: who may fetch at all; otherwise whoever has less than the source.
    `hidden_s`: so much of the transfer costs nothing, and what runs beside the computing."""
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
    """(computing, restoring and fetching) at each worker with this source. Of use only where its
    run is longer than the own one."""
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
    """Cached at each worker without fetching; one number if that is known to be the same."""
    if held.is_same and pool.block_tokens:
        return min(held.longest * pool.block_tokens, prompt_tokens - 1)
    cached: Column = held.blocks * pool.block_tokens_of
    if held.longest * pool.block_tokens_max >= prompt_tokens:
        cached = np.minimum(cached, prompt_tokens - 1)
    return cached


def _tokens(pool: PrefillPool, blocks: int, prompt_tokens: int) -> int | Column:
    """`cached_tokens` at each worker; one number while their blocks are of one size."""
    if pool.block_tokens:
        return min(blocks * pool.block_tokens, prompt_tokens - 1)
    return np.minimum(blocks * pool.block_tokens_of, prompt_tokens - 1)


def _sources(
    cluster: Cluster, held: Holdings, is_longest_only: bool, now_s: float
) -> list[FetchSource]:
    """The holders worth comparing, longest run first."""
    are_alike = not (cluster.prefills.paths_differ or held.has_ssd)
    if are_alike:  # mostly the first of the longest run is idle, and then nobody is better
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
    """Whom to ask when `first` fails: the holder that lacks least of its run, and of equal ones the
    one that can send soonest. None when nobody else has more than the worker's own node."""
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
    """(when it can send, node), soonest first."""
    found = []
    for node_id in islice(nodes, NAMES_MAX):
        if node_id in cluster.nodes:
            wait_s = cluster.send_wait_s(node_id, now_s)
            if are_alike and wait_s == 0:
                return [(wait_s, node_id)]
            found.append((wait_s, node_id))
    return sorted(found)
