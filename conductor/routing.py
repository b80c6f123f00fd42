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

All workers are compared as columns (pool.py); only what is looked at one by one becomes an object.
Everything here is a function of the cluster's state and changes nothing. Not here: whether the
winner is good enough (admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.cluster import Cluster
from conductor.config import ConductorConfig
from conductor.decode_batch import Load
from conductor.decode_pool import COST_ROUNDING
from conductor.fetching import Source, cached_tokens, make_plans, second_source
from conductor.messages import Prediction, Request
from conductor.policies import POLICIES, Terms, at_random
from conductor.pool import REQUESTS_RANK, Column, Mask, Path
from conductor.queue_order import QueueOrder
from conductor.slow_start import SLOWER
from conductor.tiers import Holdings, Tiers
from conductor.worker import Worker
from mooncake_store.layout import blocks_touched

# (cluster, decode workers, when the prefill will end, now) -> their loads without the request
Loads = Callable[[Cluster, Sequence[Worker], float, float], list[Load]]


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker and what the request would meet there."""

    worker: Worker
    local_blocks: int  # its node has them, on its SSD too
    restore_blocks: int  # of these, on the SSD
    cached_tokens: int
    source: Source | None  # of what is fetched
    queue_s: float  # all work there
    wait_s: float  # of it, what goes before this request
    fetch_s: float  # restoring and fetching
    transfer_s: float  # of that, what the wait does not hide
    prefill_s: float
    delay_s: float  # what it does to others there
    has_room: bool  # its queue is bounded

    @property
    def start_s(self) -> float:
        """The first token, before the hand-over."""
        return self.wait_s + self.transfer_s + self.prefill_s

    @property
    def fetch_blocks(self) -> int:
        return self.source.blocks - self.local_blocks if self.source else 0

    @property
    def fetch_node(self) -> str | None:
        return self.source.node_id if self.source else None


@dataclass(slots=True)
class DecodeOption:
    """One decode worker and its step when this request would join it."""

    worker: Worker
    load: Load  # as the admission policy sees it, without this request
    tbt_s: float  # with it
    has_room: bool


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction


class Options:
    """What every worker that may take the request would mean for it."""

    def __init__(
        self, cluster: Cluster, tiers: Tiers, request: Request, usable: tuple[Mask, Mask],
        loads: Loads | None, order: QueueOrder, ttft_limit_s: float, now_s: float,
    ) -> None:  # fmt: skip
        """`usable`: the prefill and the decode workers in question, at least one of each.
        `loads`: what admission takes the decode loads to be; None for the reserved ones."""
        self._cluster, self._config = cluster, cluster.config
        self._policy = POLICIES[cluster.config.policy]
        self._request, self._now_s = request, now_s
        self._is_prefill, self._is_decode = usable
        self._loads = loads
        self.ttft_limit_s = ttft_limit_s  # predicted to take longer, it is not admitted
        self.order = order  # what gives this request its place in a queue
        self._meet_prefills(tiers)
        # Of the decode workers; None while nothing but their reserved loads can tell.
        decodes, is_plain = cluster.decodes, loads is None and not cluster.has_refused
        is_plain = is_plain and decodes.count(self._is_decode) == len(decodes.workers)
        self._has_room = None if is_plain else self._rooms()

    def _meet_prefills(self, tiers: Tiers) -> None:
        pool, request, policy = self._cluster.prefills, self._request, self._policy
        held = Holdings(tiers, request.block_keys, pool)
        queues = pool.queues(self._now_s, self.order)
        plans = make_plans(self._cluster, held, policy, request.prompt_tokens, queues)
        self._plans = plans
        prefill_s, transfer_s = plans.prefill_s, plans.transfer_s
        counts_behind, self._queues = policy.spares_others, queues
        wait_s, behind = plans.place or pool.place(queues, prefill_s, counts_behind)
        if transfer_s is pool.zeros:
            start_s = wait_s + prefill_s
        else:
            if policy.fetch == "times":  # fetching runs beside the work in front
                transfer_s = transfer_s - wait_s
                np.maximum(transfer_s, pool.zeros, transfer_s)
            start_s = wait_s + transfer_s
            start_s += prefill_s
        delay_s = pool.zeros if behind is pool.none else prefill_s * behind
        self._terms = Terms(queues.queue_s, wait_s, transfer_s, prefill_s, delay_s, start_s)

    def _rooms(self) -> Mask:
        """Who of the decode workers in question has room, as admission takes the loads to be."""
        pool, request = self._cluster.decodes, self._request
        tokens = request.prompt_tokens + request.output_tokens_max
        has_room = pool.has_room(tokens) & self._is_decode
        if self._loads is not None:
            self._ask_loads(tokens, has_room)
        for worker in self._cluster.overloaded(self._now_s):
            has_room[worker.row] = False
        return has_room

    def _ask_loads(self, tokens: int, has_room: Mask) -> None:
        """Put in who has room for other loads than the reserved ones."""
        pool = self._cluster.decodes
        # One moment for all pairs: the finalists' prefills end within tie_ratio of each other.
        starts_s = np.where(self._is_prefill, self._terms.start_s, math.inf)
        self._at_s = self._now_s + starts_s.item(starts_s.argmin())
        # Mostly less than is reserved, so who has room for that need not be asked: where it can be
        # more, the one that is chosen is.
        rows = (self._is_decode & ~has_room).nonzero()[0].tolist()
        for row, load in zip(rows, self._loads_of(rows), strict=True):
            has_room[row] = _fits(pool.workers[row], load, tokens)

    def _loads_of(self, rows: Sequence[int]) -> list[Load]:
        workers = [self._cluster.decodes.workers[row] for row in rows]
        assert self._loads is not None, "the pool knows the reserved ones"
        return self._loads(self._cluster, workers, self._at_s, self._now_s)

    # The best of them

    def best(self) -> Pair:
        """Each finalist with its decode worker; the least cost wins, equal ones in their order.

        Without room anywhere a pair is chosen all the same: admission says what is wrong with it.
        """
        rows, cost_s = self._finalists()
        costs_s = [cost_s.item(row) for row in rows]
        row, decode = self._pairing(rows, costs_s)
        if self._loads is not None and self._leave_better_ones(self.decode(decode)):
            row, decode = self._pairing(rows, costs_s)
        return self.pair(self.prefill(row), self.decode(decode))

    def _leave_better_ones(self, chosen: DecodeOption) -> bool:
        """Decode workers are compared by what is reserved there; `chosen` may be predicted to have
        no room, or to miss the limit on TBT. Then only those remain that are as they should be, if
        there are any: True."""
        assert self._has_room is not None, "they were asked"
        if self._is_good(chosen):
            return False
        good = np.zeros_like(self._has_room)
        for row in (self._has_room & self._is_decode).nonzero()[0].tolist():
            good[row] = self._is_good(self.decode(row))
        if not np.count_nonzero(good):
            return False
        self._has_room = good
        return True

    def _is_good(self, option: DecodeOption) -> bool:
        limit_s = self._config.tbt_limit_s(self._request.priority)
        return option.has_room and (option.tbt_s <= limit_s or option.load.sequences <= 0)

    def _pairing(self, rows: Sequence[int], costs_s: Sequence[float]) -> tuple[int, int]:
        """The rows of the best pair of one of these prefill workers."""
        nodes, pool = self._cluster.prefills.node_ids, self._cluster.decodes
        prompt_tokens, least_s = self._request.prompt_tokens, min(costs_s)
        decode, handover_s = self._partner(nodes[rows[0]])
        total_s = costs_s[0] + handover_s
        # No pair can be better than this; most often the first finalist is as good.
        if total_s <= within(least_s + pool.path_s_least(prompt_tokens), self._config):
            return rows[0], decode
        bound_s = within(least_s + prompt_tokens * pool.token_s_least, self._config)
        found = [(total_s, rows[0], decode)]
        for row, own_s in zip(rows[1:], costs_s[1:], strict=True):
            if found[-1][0] <= bound_s:
                break
            decode, handover_s = self._partner(nodes[row])
            found.append((own_s + handover_s, row, decode))
        limit_s = within(min(total_s for total_s, _, _ in found), self._config)
        return next((row, decode) for total_s, row, decode in found if total_s <= limit_s)

    def _finalists(self) -> tuple[list[int], Column]:
        """The prefill workers worth pairing, and what the policy makes of all of them."""
        pool, config, policy = self._cluster.prefills, self._config, self._policy
        is_choice, choices = self._is_prefill, pool.count(self._is_prefill)
        if pool.full:
            is_choice = is_choice & pool.has_room
            choices = np.count_nonzero(is_choice)
            if not choices:
                is_choice, choices = self._is_prefill, pool.count(self._is_prefill)
        cost_s = policy.cost(self._terms)
        newcomers = self._cluster.newcomers("prefill", self._now_s)
        if newcomers and not policy.is_blind:
            cost_s = cost_s.copy()
            for worker, new in newcomers:
                row = worker.row
                work_s = self._terms.wait_s.item(row) + self._terms.prefill_s.item(row)
                cost_s[row] += new * SLOWER * work_s
        if config.policy == "random":
            row_of = {pool.workers[row].key: row for row in is_choice.nonzero()[0].tolist()}
            return [row_of[at_random(self._request.request_id, list(row_of))]], cost_s
        start_s = self._terms.start_s
        # ... but not at the price of the request's own service level
        if (policy.spares_others or newcomers) and (
            start_s.item(start_s.argmax()) > self.ttft_limit_s
        ):
            is_in_time = is_choice & (start_s <= self.ttft_limit_s)
            if in_time := np.count_nonzero(is_in_time):
                is_choice, choices = is_in_time, in_time
            else:
                cost_s = start_s
        if choices < len(cost_s):
            cost_s = np.where(is_choice, cost_s, math.inf)
        rows = (cost_s <= within(cost_s.item(cost_s.argmin()), config)).nonzero()[0]
        if len(rows) > 1:
            rows = rows[pool.rank.take(rows).argsort(kind="stable")]
        return rows[: 1 if policy.is_blind else config.finalists_max].tolist(), cost_s

    def _partner(self, node_id: str) -> tuple[int, float]:
        """The decode worker for a prefill worker of this node, and the seconds of the hand-over.

        The least cost; among equals the emptier one, where this node's own are ahead by one.
        """
        pool, config, request = self._cluster.decodes, self._config, self._request
        path, prompt_tokens = pool.path(node_id), request.prompt_tokens
        spread = max(1, min(request.output_tokens_max, config.output_tokens_expected))
        costs_s = pool.costs_s(path, prompt_tokens, spread)
        if self._has_room is None:  # mostly who is chosen from all has it
            least, row = self._least(costs_s, path)
            tokens = prompt_tokens + request.output_tokens_max
            if pool.has_room_at(row, tokens) and (row == least or pool.has_room_at(least, tokens)):
                return row, self._handover_s(row, path)
            self._has_room = self._rooms()
        is_choice = self._has_room if np.count_nonzero(self._has_room) else self._is_decode
        _, row = self._least(np.where(is_choice, costs_s, math.inf), path)
        return row, self._handover_s(row, path)

    def _least(self, costs_s: Column, path: Path) -> tuple[int, int]:
        """The decode worker of least cost, and the first of its equals."""
        pool, least = self._cluster.decodes, int(costs_s.argmin())
        limit_s = costs_s.item(least) * ((1 + self._config.tie_ratio) * (1 + COST_ROUNDING))
        rows = (costs_s <= limit_s).nonzero()[0]
        row = rows.item(pool.rank[rows].argmin()) if len(rows) > 1 else least
        rank = pool.rank.item(row)
        for own in path.own:
            own_rank = pool.rank.item(own) - REQUESTS_RANK
            if costs_s.item(own) <= limit_s and (own_rank, own) < (rank, row):
                row, rank = own, own_rank
        return least, row

    def _handover_s(self, row: int, path: Path) -> float:
        pool = self._cluster.decodes
        block_tokens = pool.block_tokens or pool.workers[row].info.block_tokens
        blocks = -(-self._request.prompt_tokens // block_tokens)
        return path.block_s.item(row) * blocks + path.latency_s.item(row)

    # One by one

    def prefill(self, row: int) -> PrefillOption:
        pool, plans, terms = self._cluster.prefills, self._plans, self._terms
        source, held, worker = plans.fetched(row), plans.held, pool.workers[row]
        blocks = int(held.blocks.item(row))
        restore = blocks - int(held.dram_blocks.item(row)) if held.has_ssd else 0
        used, prompt_tokens = source.blocks if source else blocks, self._request.prompt_tokens
        prefill_s = terms.prefill_s.item(row)
        delay_s = prefill_s * pool.behind(self._queues, row, prefill_s)
        return PrefillOption(
            worker, blocks, restore, cached_tokens(used, worker.info.block_tokens, prompt_tokens),
            source, terms.queue_s.item(row), terms.wait_s.item(row), plans.transfer_s.item(row),
            terms.transfer_s.item(row), prefill_s, delay_s,
            pool.has_room.item(row),
        )  # fmt: skip

    def second_fetch_node(self, chosen: PrefillOption) -> str | None:
        """Who else could send what this worker fetches."""
        if chosen.source is None:
            return None
        held, own_blocks = self._plans.held, chosen.local_blocks
        return second_source(self._cluster, held, chosen.source, own_blocks, self._now_s)

    def decode(self, row: int) -> DecodeOption:
        pool, tokens = self._cluster.decodes, self._request.prompt_tokens
        worker = pool.workers[row]
        load = pool.loads[row] if self._loads is None else self._loads_of([row])[0]
        step_s = worker.decode_estimate.step_s(load.sequences + 1, load.context_tokens + tokens)
        longest = tokens + self._request.output_tokens_max
        if self._has_room is not None:
            has_room = self._has_room.item(row)
        else:
            has_room = pool.has_room_at(row, longest)
        if self._config.admission == "predictive_lengths":  # this may be more than is reserved
            has_room = has_room and _fits(worker, load, longest)
        return DecodeOption(worker, load, pool.ratio.item(row) * step_s, has_room)

    def pair(self, prefill: PrefillOption, decode: DecodeOption) -> Pair:
        path = self._cluster.decodes.path(prefill.worker.info.node_id)
        handover_s = self._handover_s(decode.worker.row, path)
        predicted = Prediction(
            prefill.wait_s, prefill.transfer_s, prefill.prefill_s, handover_s,
            prefill.start_s + handover_s, decode.tbt_s, decode.load.sequences + 1, prefill.delay_s,
        )  # fmt: skip
        return Pair(prefill, decode, predicted)

    @property
    def prefills(self) -> list[PrefillOption]:
        return [self.prefill(row) for row in self._is_prefill.nonzero()[0].tolist()]

    @property
    def decodes(self) -> list[DecodeOption]:
        return [self.decode(row) for row in self._is_decode.nonzero()[0].tolist()]

    @property
    def prefill_count(self) -> int:
        return self._cluster.prefills.count(self._is_prefill)

    @property
    def backlog_s(self) -> float:
        """Predicted work of a prefill worker, on average."""
        return self._cluster.prefills.mean(self._terms.queue_s, self._is_prefill)


def _fits(worker: Worker, load: Load, tokens: int) -> bool:
    """Whether a request of so many tokens, its longest answer included, finds room beside it."""
    pages = blocks_touched(tokens, worker.info.block_tokens)
    # Rounded: 3.999 of 4 slots are 4. The worker itself makes sure, and queues if need be.
    has_slot = round(load.sequences) < worker.info.slots_max
    return has_slot and load.pages + pages <= worker.info.pages_max


def within(least_s: float, config: ConductorConfig) -> float:
    """Predictions up to this are as good as the least one."""
    return least_s + max(least_s * config.tie_ratio, config.tie_s)
