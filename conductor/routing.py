"""Which prefill worker, which decode worker: the terms of every pair, and the best of them.

For each prefill worker (Algorithm 1 of the Mooncake paper, with the queue order of queue_order.py):

    plan     how much of the prefix is fetched, and from where (fetching.py)
    wait     the work there that goes before this request (prefill_queue.py)
    ttft     wait + transfer + prefill + handover          all predicted, all in seconds
    delay    prefill x the requests there that it overtakes

and the policy (policies.py) says what of it is to be least. A fetch leaves the blocks on the
worker's node, so being routed here is also how hot prefixes spread; and so is computing them.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conductor.cluster import Cluster, Worker
from conductor.config import ConductorConfig
from conductor.decode_batch import Load
from conductor.estimates import transfer_s
from conductor.fetching import Plan, best_plan
from conductor.messages import Prediction, Request
from conductor.policies import POLICIES, Terms, at_random
from conductor.tiers import NOTHING, Runs
from mooncake_store.layout import blocks_touched


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker and what the request would meet there."""

    worker: Worker
    plan: Plan
    local_blocks: int
    queue_s: float  # all work there
    wait_s: float  # of it, what goes before this request
    transfer_s: float  # of the plan's, what is not hidden by the wait
    delay_s: float
    has_room: bool  # its queue is bounded

    @property
    def start_s(self) -> float:
        """The first token, before the hand-over."""
        return self.wait_s + self.transfer_s + self.plan.prefill_s


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
    ttft_limit_s: float  # predicted to take longer, it is not admitted


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction


def prefill_option(
    cluster: Cluster, worker: Worker, request: Request, runs: Runs, now_s: float
) -> PrefillOption:
    """What this worker would do with the request, and when."""
    config, queue, order = cluster.config, worker.queue, cluster.config.order
    policy, ratio = POLICIES[config.policy], worker.speed_ratio(now_s, config)
    local = runs.get(worker.info.node_id, NOTHING).blocks

    def wait_s(prefill_s: float) -> float:
        return ratio * queue.ahead_s(order.key_s(now_s, prefill_s), now_s)

    tokens = request.prompt_tokens
    plan = best_plan(cluster, worker, runs, policy, tokens, wait_s, now_s)
    wait, is_hidden = wait_s(plan.prefill_s), policy.fetch == "times"
    return PrefillOption(
        worker, plan, local, queue_s=ratio * queue.work_s(now_s), wait_s=wait,
        transfer_s=max(0.0, plan.transfer_s - wait) if is_hidden else plan.transfer_s,
        delay_s=plan.prefill_s * queue.behind(order.key_s(now_s, plan.prefill_s)),
        has_room=queue.requests < worker.info.slots_max,
    )  # fmt: skip


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
        queue_s=prefill.wait_s,
        transfer_s=prefill.transfer_s,
        prefill_s=prefill.plan.prefill_s,
        handover_s=handover,
        ttft_s=prefill.start_s + handover,
        tbt_s=decode.tbt_s,
        decode_sequences=decode.load.sequences + 1,
        delay_s=prefill.delay_s,
    )
    return Pair(prefill, decode, predicted)


def costs(options: Sequence[PrefillOption], config: ConductorConfig) -> list[float]:
    """What the policy minimises, of each option."""
    terms = Terms(*(
        np.array([getattr(o.plan if name == "prefill_s" else o, name) for o in options])
        for name in Terms._fields
    ))  # fmt: skip
    found: list[float] = POLICIES[config.policy].cost(terms).tolist()
    return found


def finalists(
    options: Sequence[PrefillOption], request: Request, ttft_limit_s: float, config: ConductorConfig
) -> list[tuple[float, PrefillOption]]:
    """The prefill workers worth pairing, with their costs: the best, and those that are as good."""
    assert options, "admission rejects before routing when no worker takes requests"
    if config.policy == "random":
        chosen = at_random(request.request_id, [o.worker.key for o in options])
        return [(0.0, next(o for o in options if o.worker.key == chosen))]
    found = list(zip(costs(options, config), options, strict=True))
    if not POLICIES[config.policy].is_blind:  # sparing others must not cost the request its level
        in_time = [row for row in found if row[1].start_s <= ttft_limit_s]
        found = in_time or [(option.start_s, option) for option in options]
    limit_s = within(min(cost_s for cost_s, _ in found), config)
    equal = [row for row in found if row[0] <= limit_s]
    equal.sort(key=lambda row: _spread(row[1]))
    return equal[: 1 if POLICIES[config.policy].is_blind else config.finalists_max]


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
    """Each finalist with its decode worker; the least cost wins, equal ones in their order.

    Without room anywhere a pair is chosen all the same: admission says what is wrong with it.
    """
    prefills = [prefill for prefill in options.prefills if prefill.has_room] or options.prefills
    decodes = [decode for decode in options.decodes if decode.has_room] or options.decodes
    found = []
    for cost_s, prefill in finalists(prefills, request, options.ttft_limit_s, config):
        decode = choose_decode(prefill, decodes, request, config)
        pair = pair_up(prefill, decode, request, config)
        found.append((cost_s + pair.predicted.handover_s, pair))
    limit_s = within(min(total_s for total_s, _ in found), config)
    return next(pair for total_s, pair in found if total_s <= limit_s)
