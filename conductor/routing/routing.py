"""Which prefill worker, which decode worker: the terms of every pair, and the best of them.

For each prefill worker (Algorithm 1 of the Mooncake paper, with the queue order of queue_order.py):

    plan     how much of the prefix is fetched, and from where (fetching.py)
    wait     the work there that goes before this request (prefill_queue.py)
    ttft     wait + transfer + prefill + handover          all predicted, all in seconds
    delay    prefill x the requests there that it overtakes (of a pipeline group: without what its
             other stages do while those begin)

and the policy (policies.py) says what of it is to be least. Then the pair. One objective, in
seconds: when the expected answer will be done, and what that costs others. Over all pairs (p, d) of
prefill and decode workers that have room

    J(p, d) = cost(p) + handover(p, d) + n x tbt(d)

is to be least, with cost(p) the policy's (of `adaptive` ttft + delay + eviction cost, of
`kvcache_centric` ttft, each before the hand-over), tbt(d) the step once everything that was routed
to d has arrived, and n the tokens that are expected: max_tokens, at most output_tokens_expected.

Not every pair is looked at, and predictions within tie_ratio are equal; which pair is chosen then,
and by how much its J may miss the least, is in docs/reference/conductor.md ("The best pair").

All workers are compared as columns (pool.py); only what is looked at one by one becomes an object.
Everything here is a function of the cluster's state and changes nothing. Not here: whether the
winner is good enough (admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.config import ConductorConfig
from conductor.load.cluster import Cluster
from conductor.load.decode_batch import DecodeLoad
from conductor.load.pool import REQUESTS_RANK, Column, Mask, Path
from conductor.load.worker import SLOWER, WorkerState
from conductor.messages import Prediction, Request
from conductor.queue_order import QueueOrder
from conductor.routing.compiled import Answer, CompiledDecision
from conductor.routing.fetching import (
    FetchSource,
    cached_tokens,
    make_plans,
    second_source,
    worth_asking,
)
from conductor.routing.policies import POLICIES, Terms, at_random
from conductor.routing.tiers import Holdings, Tiers
from mooncake_store.layout import blocks_touched


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker and what the request would meet there."""

    worker: WorkerState
    local_blocks: int  # its node has them, on its SSD too
    restore_blocks: int  # of these, on the SSD
    cached_tokens: int
    source: FetchSource | None  # of what is fetched
    queue_s: float  # all work there
    wait_s: float  # of it, what goes before this request
    fetch_s: float  # restoring and fetching
    transfer_s: float  # of that, what neither the wait nor its own computing hides
    prefill_s: float
    fill_s: float  # of that, what holds up nobody behind it (estimates/pipeline.py)
    delay_s: float  # what it does to others there
    eviction_cost_s: float  # ... and to those who come later, by the copies of its fetch
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

    worker: WorkerState
    load: DecodeLoad  # as the admission policy sees it, without this request
    tbt_s: float  # with it
    has_room: bool


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction


# (cluster, decode workers, when the prefill will end, now) -> their loads without the request
Loads = Callable[[Cluster, Sequence[WorkerState], float, float], list[DecodeLoad]]


class Options:
    """What every worker that may take the request would mean for it."""

    def __init__(
        self,
        cluster: Cluster,
        tiers: Tiers,
        request: Request,
        usable: tuple[Mask, Mask],
        loads: Loads | None,
        order: QueueOrder,
        ttft_limit_s: float,
        now_s: float,
        compiled: CompiledDecision | None = None,
    ) -> None:
        """`usable`: the prefill and the decode workers in question, at least one of each.
        `loads`: what admission takes the decode loads to be; None for the reserved ones.
        `compiled`: what computes the same; its columns are good until it is asked again."""
        self._cluster, self._config = cluster, cluster.config
        self._policy = POLICIES[cluster.config.policy]
        self._request, self._now_s = request, now_s
        self._is_prefill, self._is_decode = usable
        self._loads = loads
        expected = cluster.config.output_tokens_expected
        self._spread = max(1, min(request.output_tokens_max, expected))
        self.ttft_limit_s = ttft_limit_s  # predicted to take longer, it is not admitted
        self.order = order  # what gives this request its place in a queue
        held = Holdings(tiers, request.block_keys, cluster.prefills)
        sources = worth_asking(cluster, held, self._policy, now_s)
        self._compiled = compiled
        self._answer: Answer | None = None  # of `compiled`, where it said the pair
        if compiled is None:
            self._meet_prefills(held, sources)
            self._has_room = self._rooms()
        else:
            self._read(compiled, held, sources)

    def _read(
        self, compiled: CompiledDecision, held: Holdings, sources: Sequence[FetchSource]
    ) -> None:
        """Everything, and the best pair, where room is all that is reserved."""
        is_usual = self._config.policy != "random"
        if not is_usual or self._cluster.warming_up("prefill", self._now_s):
            is_usual, self._compiled = False, None
        may_join = self._is_decode
        for worker in self._cluster.overloaded(self._now_s):
            if may_join is self._is_decode:
                may_join = may_join.copy()
            may_join[worker.row] = False
        is_reserved = self._loads is None
        answer = compiled.decide(
            self._request,
            held,
            sources,
            (self._is_prefill, self._is_decode),
            may_join,
            is_usual and is_reserved,
            self.order,
            self._spread,
            self.ttft_limit_s,
            self._now_s,
        )
        self._terms, self._plans = compiled.terms, compiled.plans
        self.backlog_s = answer[2]
        if is_usual and is_reserved:
            self._answer = answer
        self._has_room = compiled.has_room if is_reserved else self._rooms()

    def _meet_prefills(self, held: Holdings, sources: Sequence[FetchSource]) -> None:
        pool, request, policy = self._cluster.prefills, self._request, self._policy
        queues = pool.queues(self._now_s, self.order)
        plans = make_plans(self._cluster, held, policy, sources, request.prompt_tokens, queues)
        self._plans = plans
        prefill_s, transfer_s = plans.prefill_s, plans.fetch_s
        counts_behind = policy.spares_others
        wait_s, behind = plans.position or pool.position(queues, prefill_s, counts_behind)
        if transfer_s is pool.zeros:
            start_s = wait_s + prefill_s
        else:
            if policy.fetch == "times":  # fetching runs beside the work in front
                transfer_s = transfer_s - wait_s
                if plans.beside_s is not pool.zeros:  # ... and beside its own layers
                    transfer_s -= plans.beside_s
                np.maximum(transfer_s, pool.zeros, transfer_s)
            start_s = wait_s + transfer_s
            start_s += prefill_s
        delay_s = pool.zeros
        if behind is not pool.none:
            delay_s = (prefill_s - plans.fill_s) * behind if pool.has_groups else prefill_s * behind
        self._terms = Terms(
            queues.queue_s, wait_s, transfer_s, prefill_s, delay_s, start_s, plans.eviction_cost_s
        )
        # Predicted work of a prefill worker, on average.
        self.backlog_s = pool.mean(queues.queue_s, self._is_prefill)

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
        """Add to `has_room` who has room by the loads that admission looks at."""
        pool = self._cluster.decodes
        # Loads are taken at one moment for all pairs, because the prefills of the finalists end
        # within tie_ratio of each other.
        self._at_s = self._now_s + float(self._terms.start_s[self._is_prefill].min())
        # What admission takes a load to be is mostly less than what is reserved, so a worker with
        # room for the latter is not asked. Where it can be more, the chosen worker is asked later.
        rows = (self._is_decode & ~has_room).nonzero()[0].tolist()
        for row, load in zip(rows, self._loads_of(rows), strict=True):
            has_room[row] = _fits(pool.workers[row], load, tokens)

    def _loads_of(self, rows: Sequence[int]) -> list[DecodeLoad]:
        workers = [self._cluster.decodes.workers[row] for row in rows]
        assert self._loads is not None, "the pool knows the reserved ones"
        return self._loads(self._cluster, workers, self._at_s, self._now_s)

    # Choosing the best pair

    def best(self) -> Pair:
        """The pair that minimises J, as the module docstring defines it and up to its ties.

        Without room anywhere a pair is chosen all the same: admission says what is wrong with it.
        """
        pair = self._best()
        if self._may_be_more and self._leave_those_with_room(pair.decode):
            self._answer = None
            pair = self._best()
        return pair

    def _best(self) -> Pair:
        if self._compiled is None:
            row, decode_row = self._pairing(*self._first())
            return self.pair(self.prefill(row), self.decode(decode_row))
        answer = self._answer or self._compiled.choose(self._has_room)
        row, decode_row, _, handover_s, *of_prefill = answer
        return self._pair(self._option(row, *of_prefill), self.decode(decode_row), handover_s)

    @property
    def _may_be_more(self) -> bool:
        """Whether what admission expects of a batch may be more than what is reserved there."""
        return self._config.admission == "predictive_lengths"

    def _leave_those_with_room(self, chosen: DecodeOption) -> bool:
        """A worker with room for what is reserved was not asked for its forecast, and `chosen` may
        have no room by that. Then only the workers with room remain, if there are any: True.

        Its time between tokens is not asked for here: of many forecasts the best is mostly the one
        that is most wrong, and prompts were computed for nothing (bench/RESULTS.md)."""
        if chosen.has_room:
            return False
        has_room = np.zeros_like(self._has_room)
        for row in (self._has_room & self._is_decode).nonzero()[0].tolist():
            has_room[row] = self.decode(row).has_room
        if not np.count_nonzero(has_room):
            return False
        self._has_room = has_room
        return True

    def _pairing(self, first: int, least_s: float, cost_s: Column) -> tuple[int, int]:
        """The rows of the best pair: `first` and its partner, unless another prefill worker is
        better by more than a tie once what follows its prefill counts too."""
        pool, prompt_tokens = self._cluster.decodes, self._request.prompt_tokens
        nodes, rank = self._cluster.prefills.node_ids, self._cluster.prefills.rank
        decode, rest_s = self._partner(nodes[first])
        if self._policy.is_blind:
            return first, decode
        tie_s = within(least_s, self._config) - least_s
        total_s = cost_s.item(first) + rest_s
        # No pair is done sooner than the quickest batch after the quickest hand-over. Most often
        # this bound says already that no other prefill worker is better.
        steps_s = self._spread * pool.least_step_s
        near_s, far_s = pool.paths_s_least(prompt_tokens)
        nearest_s = near_s if near_s < far_s else far_s
        if total_s - tie_s <= least_s + steps_s + nearest_s:
            return first, decode
        bounds_s = np.where(self._cluster.is_beside_decode, steps_s + nearest_s, steps_s + far_s)
        bounds_s += cost_s
        rows = (bounds_s < total_s - tie_s).nonzero()[0]
        partners = {nodes[first]: (decode, rest_s)}
        found = [(total_s, rank.item(first), first, decode)]
        for row in rows[bounds_s[rows].argsort(kind="stable")].tolist():
            if bounds_s.item(row) >= total_s - tie_s:
                break
            node_id = nodes[row]
            if node_id not in partners:
                if len(partners) >= self._config.finalists_max:
                    break
                partners[node_id] = self._partner(node_id)
            decode, rest_s = partners[node_id]
            handover_s = self._handover_s(decode, pool.path(node_id))
            if self._terms.start_s.item(row) + handover_s > self.ttft_limit_s:
                continue  # not at the price of the request's own service level
            found.append((cost_s.item(row) + rest_s, rank.item(row), row, decode))
            total_s = min(total_s, found[-1][0])
        equal = [pair for pair in found if pair[0] <= total_s + tie_s]
        _, _, row, decode = equal[0] if equal[0] is found[0] else min(equal, key=lambda e: e[1])
        return row, decode

    def _first(self) -> tuple[int, float, Column]:
        """The prefill worker that the policy prefers, the least cost, and the cost of all of them:
        infinite for those that are no choice."""
        pool, config, policy = self._cluster.prefills, self._config, self._policy
        is_choice, choices = self._is_prefill, pool.count(self._is_prefill)
        if pool.full:
            is_choice = is_choice & pool.has_room
            choices = np.count_nonzero(is_choice)
            if not choices:
                is_choice, choices = self._is_prefill, pool.count(self._is_prefill)
        cost_s = policy.cost(self._terms)
        warming_up = self._cluster.warming_up("prefill", self._now_s)
        if warming_up and not policy.is_blind:
            cost_s = cost_s.copy()
            for worker, share in warming_up:
                row = worker.row
                work_s = self._terms.wait_s.item(row) + self._terms.prefill_s.item(row)
                cost_s[row] += share * SLOWER * work_s
        if config.policy == "random":
            row_of = {pool.workers[row].key: row for row in is_choice.nonzero()[0].tolist()}
            return row_of[at_random(self._request.request_id, list(row_of))], 0.0, cost_s
        start_s = self._terms.start_s
        # What is best for all must not cost this request its own service level.
        if (policy.spares_others or warming_up) and (
            start_s.item(start_s.argmax()) > self.ttft_limit_s
        ):
            is_in_time = is_choice & (start_s <= self.ttft_limit_s)
            if in_time := np.count_nonzero(is_in_time):
                is_choice, choices = is_in_time, in_time
            else:
                cost_s = start_s
        if choices < len(cost_s):
            cost_s = np.where(is_choice, cost_s, math.inf)
        least = int(cost_s.argmin())
        least_s = cost_s.item(least)
        rows = (cost_s <= within(least_s, config)).nonzero()[0]
        first = rows.item(pool.rank.take(rows).argmin()) if len(rows) > 1 else least
        return first, least_s, cost_s

    def _partner(self, node_id: str) -> tuple[int, float]:
        """The row of the decode worker for a prefill worker of this node, and the least of
        handover + n x tbt from there.

        The least cost; among equals the emptier one, where this node's own are ahead by one.
        """
        pool, request = self._cluster.decodes, self._request
        path, prompt_tokens = pool.path(node_id), request.prompt_tokens
        costs_s = pool.costs_s(path, prompt_tokens, self._spread)
        is_choice = self._has_room if np.count_nonzero(self._has_room) else self._is_decode
        costs_s = np.where(is_choice, costs_s, math.inf)
        least, row = self._least(costs_s, path)
        return row, self._spread * costs_s.item(least)

    def _least(self, costs_s: Column, path: Path) -> tuple[int, int]:
        """The decode worker of least cost, and the first of its equals."""
        pool, least = self._cluster.decodes, int(costs_s.argmin())
        limit_s = costs_s.item(least) * (1 + self._config.tie_ratio)
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

    # Single workers and pairs as objects

    def prefill(self, row: int) -> PrefillOption:
        pool, plans, terms = self._cluster.prefills, self._plans, self._terms
        prefill_s, fill_s = terms.prefill_s.item(row), plans.fill_s.item(row)
        delay_s = (prefill_s - fill_s) * pool.behind(self.order, self._now_s, row, prefill_s)
        return self._option(
            row,
            plans.held.blocks.item(row),
            plans.held.dram_blocks.item(row),
            plans.source.item(row),
            terms.queue_s.item(row),
            terms.wait_s.item(row),
            plans.fetch_s.item(row),
            terms.transfer_s.item(row),
            prefill_s,
            fill_s,
            delay_s,
            plans.eviction_cost_s.item(row),
        )

    def _option(
        self,
        row: int,
        blocks: float,
        dram_blocks: float,
        source_number: int,
        queue_s: float,
        wait_s: float,
        fetch_s: float,
        transfer_s: float,
        prefill_s: float,
        fill_s: float,
        delay_s: float,
        eviction_cost_s: float,
    ) -> PrefillOption:
        pool = self._cluster.prefills
        worker, local_blocks = pool.workers[row], int(blocks)
        source = self._plans.sources[source_number] if source_number >= 0 else None
        used = local_blocks if source is None else source.blocks
        return PrefillOption(
            worker=worker,
            local_blocks=local_blocks,
            restore_blocks=local_blocks - int(dram_blocks),
            cached_tokens=cached_tokens(
                used, worker.info.block_tokens, self._request.prompt_tokens
            ),
            source=source,
            queue_s=queue_s,
            wait_s=wait_s,
            fetch_s=fetch_s,
            transfer_s=transfer_s,
            prefill_s=prefill_s,
            fill_s=fill_s,
            delay_s=delay_s,
            eviction_cost_s=eviction_cost_s,
            has_room=pool.has_room.item(row),
        )

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
        has_room = self._has_room.item(row)
        if self._may_be_more:
            has_room = has_room and _fits(worker, load, longest)
        return DecodeOption(worker, load, pool.ratio.item(row) * step_s, has_room)

    def pair(self, prefill: PrefillOption, decode: DecodeOption) -> Pair:
        return self._pair(prefill, decode, self.handover_s(prefill, decode))

    def _pair(self, prefill: PrefillOption, decode: DecodeOption, handover_s: float) -> Pair:
        predicted = Prediction(
            queue_s=prefill.wait_s,
            transfer_s=prefill.transfer_s,
            prefill_s=prefill.prefill_s,
            handover_s=handover_s,
            ttft_s=prefill.start_s + handover_s,
            tbt_s=decode.tbt_s,
            decode_sequences=decode.load.sequences + 1,
            delay_s=prefill.delay_s,
            eviction_cost_s=prefill.eviction_cost_s,
            fill_s=prefill.fill_s,
        )
        return Pair(prefill, decode, predicted)

    def handover_s(self, prefill: PrefillOption, decode: DecodeOption) -> float:
        path = self._cluster.decodes.path(prefill.worker.info.node_id)
        return self._handover_s(decode.worker.row, path)

    @property
    def prefills(self) -> list[PrefillOption]:
        return [self.prefill(row) for row in self._is_prefill.nonzero()[0].tolist()]

    @property
    def decodes(self) -> list[DecodeOption]:
        return [self.decode(row) for row in self._is_decode.nonzero()[0].tolist()]

    @property
    def prefill_count(self) -> int:
        return self._cluster.prefills.count(self._is_prefill)


def _fits(worker: WorkerState, load: DecodeLoad, tokens: int) -> bool:
    """Whether a request of so many tokens, its longest answer included, finds room beside it."""
    pages = blocks_touched(tokens, worker.info.block_tokens)
    # Forecasts are fractions, so 3.999 of 4 slots count as 4. The worker itself makes sure, and
    # queues a request that finds no slot.
    has_slot = round(load.sequences) < worker.info.slots_max
    return has_slot and load.pages + pages <= worker.info.pages_max


def within(least_s: float, config: ConductorConfig) -> float:
    """Predictions up to this are as good as the least one."""
    return least_s + max(least_s * config.tie_ratio, config.tie_s)
