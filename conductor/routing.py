"""Algorithm 1 of the Mooncake paper: which prefill worker, which decode worker, fetch or compute.

For each prefill worker, two ways to get the prompt's KV are compared:

    compute   what the worker's own node has cached is loaded, the rest is computed
    fetch     if another node holds more than kvcache_balancing_threshold times as many leading
              blocks, those are copied here first and less is computed

    ttft = queue + transfer + prefill + handover           all predicted, all in seconds

The best holder is the one with the longest prefix; among equals the one whose sends end first.
A fetch leaves the blocks on the worker's node, so being routed here is also how hot prefixes
spread; and so is computing them, when the best holder is not much better than this node.

Then the pair. The decode worker is the one with the least time between tokens once everything
that was routed there has arrived, among those with room. Reading the prompt's KV costs once what a
slow step costs at every token, so the hand-over is spread over the tokens it will serve:

    cost of a decode worker = tbt + handover / expected output tokens

Predictions within tie_ratio of each other are equal, because the estimates are no better than
that. Equal decode workers: the one with fewer requests, where the node of the prefill worker
counts as one fewer (it reads mapped memory), so that locality outweighs at most one request of
imbalance. Equal prefill workers: fewer requests, then the one that got its last request
longest ago, then the smaller name. So an idle cluster is used evenly, and in a fixed order.

Everything here is a function of the cluster's state and changes nothing. Not here: whether the
winner is good enough (admission.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.cluster import Cluster, Worker
from conductor.config import ConductorConfig
from conductor.decode_batch import Load
from conductor.estimates import transfer_s
from conductor.messages import Prediction, Request
from mooncake_store.layout import blocks_touched
from mooncake_store.prefix_index import PrefixMatch


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker and what the request would meet there."""

    worker: Worker
    queue_s: float
    local_blocks: int
    fetch_blocks: int
    fetch_node: str | None
    cached_tokens: int
    transfer_s: float
    prefill_s: float
    start_s: float  # queue + transfer + prefill: the first token, before the hand-over
    has_room: bool  # its queue is bounded


@dataclass(slots=True)
class DecodeOption:
    """One decode worker and its step when this request would join it."""

    worker: Worker
    load: Load  # as the admission policy sees it, without this request
    tbt_s: float  # with it
    has_room: bool
    reserved: float  # requests in the batch or on their way to it
    reserved_tbt_s: float  # the step of all those; ranks, or a burst would pile onto one worker


@dataclass(slots=True)
class Options:
    """What every worker that may take the request would mean for it."""

    prefills: list[PrefillOption]
    decodes: list[DecodeOption]


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction


def cached_tokens(blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """At least one token is always computed: its logits are the first output token."""
    return max(0, min(blocks * block_tokens, prompt_tokens - 1))


def prefill_option(
    cluster: Cluster, worker: Worker, request: Request, match: PrefixMatch, now_s: float
) -> PrefillOption:
    """Fetch or compute at this worker, by the balancing threshold."""
    config, info, prompt_tokens = cluster.config, worker.info, request.prompt_tokens
    ratio = worker.speed_ratio(now_s, config)
    local = match.blocks_by_holder.get(info.node_id, 0)
    cached = cached_tokens(local, info.block_tokens, prompt_tokens)
    prefill_s = ratio * worker.prefill_estimate.seconds(prompt_tokens - cached, cached)
    move_s, fetch_blocks, fetch_node = 0.0, 0, None
    fetches = config.policy == "kvcache_centric"
    if fetches and match.best_blocks > local * config.kvcache_balancing_threshold:
        fetched = cached_tokens(match.best_blocks, info.block_tokens, prompt_tokens)
        rest_s = ratio * worker.prefill_estimate.seconds(prompt_tokens - fetched, fetched)
        source = best_source(cluster, worker, match, match.best_blocks - local, now_s)
        pays = source is not None and source[0] + rest_s < prefill_s
        if source is not None and fetched > cached and (pays or not config.fetch_must_pay):
            move_s, fetch_node = source
            fetch_blocks, cached, prefill_s = match.best_blocks - local, fetched, rest_s
    queue_s = ratio * worker.queue.work_s(now_s)
    return PrefillOption(
        worker, queue_s, local, fetch_blocks, fetch_node, cached, move_s, prefill_s,
        start_s=queue_s + move_s + prefill_s, has_room=worker.queue.requests < info.slots_max,
    )  # fmt: skip


def best_source(
    cluster: Cluster, worker: Worker, match: PrefixMatch, blocks: int, now_s: float
) -> tuple[float, str] | None:
    """(seconds, node) of the quickest of the holders with the longest prefix."""
    info = worker.info
    found: tuple[float, str] | None = None
    for node_id, held in match.blocks_by_holder.items():
        if held < match.best_blocks or node_id == info.node_id or node_id not in cluster.nodes:
            continue
        rate = info.transfer_bytes_per_s.get(node_id) or cluster.config.transfer_bytes_per_s
        seconds = transfer_s(blocks * info.block_bytes, rate, info.transfer_latency_s)
        source = (cluster.send_wait_s(node_id, now_s) + seconds, node_id)
        found = source if found is None else min(found, source)
    return found


def handover_s(decode: Worker, node_id: str, prompt_tokens: int, config: ConductorConfig) -> float:
    """Time for the decode worker to read the prompt's KV from the prefill worker's node."""
    info = decode.info
    blocks = blocks_touched(prompt_tokens, info.block_tokens)
    is_local = info.node_id == node_id
    default = config.local_bytes_per_s if is_local else config.transfer_bytes_per_s
    rate = info.transfer_bytes_per_s.get(node_id) or default
    latency_s = 0.0 if is_local else info.transfer_latency_s
    return transfer_s(blocks * info.block_bytes, rate, latency_s)


def decode_option(
    worker: Worker, request: Request, load: Load, now_s: float, config: ConductorConfig
) -> DecodeOption:
    """The step of this batch with the request in it, and whether it fits."""
    info, tokens, step_s = worker.info, request.prompt_tokens, worker.decode_estimate.step_s
    ratio, reserved = worker.speed_ratio(now_s, config), worker.batch.load_reserved()
    pages = blocks_touched(tokens + request.output_tokens_max, info.block_tokens)
    return DecodeOption(
        worker,
        load,
        tbt_s=ratio * step_s(load.sequences + 1, load.context_tokens + tokens),
        # Rounded: 3.999 of 4 slots are 4. The worker itself makes sure, and queues when need be.
        has_room=round(load.sequences) < info.slots_max and load.pages + pages <= info.pages_max,
        reserved=reserved.sequences,
        reserved_tbt_s=ratio * step_s(reserved.sequences + 1, reserved.context_tokens + tokens),
    )


def pair_up(
    prefill: PrefillOption, decode: DecodeOption, request: Request, config: ConductorConfig
) -> Pair:
    handover = handover_s(decode.worker, prefill.worker.info.node_id, request.prompt_tokens, config)
    predicted = Prediction(
        queue_s=prefill.queue_s,
        transfer_s=prefill.transfer_s,
        prefill_s=prefill.prefill_s,
        handover_s=handover,
        ttft_s=prefill.start_s + handover,
        tbt_s=decode.tbt_s,
        decode_sequences=decode.load.sequences + 1,
    )
    return Pair(prefill, decode, predicted)


def finalists(
    options: Sequence[PrefillOption], request: Request, config: ConductorConfig
) -> list[PrefillOption]:
    """The prefill workers worth pairing: the quickest, and those that are as good."""
    assert options, "admission rejects before routing when no worker takes requests"
    if config.policy == "random":
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        by_name = sorted(options, key=lambda o: o.worker.key)
        return [by_name[int.from_bytes(digest, "big") % len(by_name)]]
    if config.policy == "load_balance":
        return [min(options, key=lambda o: (o.queue_s, *_spread(o)))]
    limit_s = within(min(option.start_s for option in options), config)
    equal = [option for option in options if option.start_s <= limit_s]
    equal.sort(key=_spread)
    return equal[: config.finalists_max]


def within(least_s: float, config: ConductorConfig) -> float:
    """Predictions up to this are as good as the least one."""
    return least_s + max(least_s * config.tie_ratio, config.tie_s)


def _spread(option: PrefillOption) -> tuple[int, int, str]:
    worker = option.worker
    return (worker.queue.requests, worker.routed_at, worker.info.worker_id)


def choose_decode(
    prefill: PrefillOption,
    decodes: Sequence[DecodeOption],
    request: Request,
    config: ConductorConfig,
) -> DecodeOption:
    """The least cost; among equals the emptier one, the prefill worker's node ahead by one."""
    node_id = prefill.worker.info.node_id
    tokens = max(1, min(request.output_tokens_max, config.output_tokens_expected))
    best_s, costs = math.inf, []
    for decode in decodes:
        handover = handover_s(decode.worker, node_id, request.prompt_tokens, config)
        cost_s = decode.reserved_tbt_s + handover / tokens
        best_s = min(best_s, cost_s)
        costs.append((cost_s, decode))
    limit_s = best_s * (1 + config.tie_ratio)
    return min(
        (decode for cost_s, decode in costs if cost_s <= limit_s),
        key=lambda d: (
            d.reserved - (d.worker.info.node_id == node_id),
            d.worker.routed_at,
            d.worker.info.worker_id,
        ),
    )


def choose_pair(options: Options, request: Request, config: ConductorConfig) -> Pair:
    """Each finalist with its decode worker; the least TTFT wins, equal ones in their order.

    Without room anywhere a pair is chosen all the same: admission says what is wrong with it.
    """
    prefills = [prefill for prefill in options.prefills if prefill.has_room] or options.prefills
    decodes = [decode for decode in options.decodes if decode.has_room] or options.decodes
    pairs = [
        pair_up(prefill, choose_decode(prefill, decodes, request, config), request, config)
        for prefill in finalists(prefills, request, config)
    ]
    limit_s = within(min(pair.predicted.ttft_s for pair in pairs), config)
    return next(pair for pair in pairs if pair.predicted.ttft_s <= limit_s)
