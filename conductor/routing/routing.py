"""Pair selection: the predicted costs of every prefill and decode worker, and the best pair.

For each prefill worker (Algorithm 1 of the Mooncake paper, with the queue order of queue_order.py):

    plan     how much of the prefix is fetched, and from where (fetching.py)
    wait     the queued work that runs before this request (prefill_queue.py)
    ttft     wait + transfer + prefill + handover          all predicted, in seconds
    delay    prefill x the number of requests that this request overtakes. The fill time of a
             pipeline group (estimates/pipeline.py) delays no request and is not counted.

The policy (policies.py) combines these terms into a cost. The chosen pair of a prefill worker p and
a decode worker d, both with room, minimises one objective in seconds: the time until the expected
answer is complete, plus the cost to other requests:

    J(p, d) = cost(p) + handover(p, d) + n x tbt(d)

- cost(p) is the policy's cost without the hand-over: wait + transfer + prefill for
  `kvcache_centric`, and delay + eviction cost in addition for `adaptive`.
- tbt(d) is the step time of d once all requests routed to d have arrived.
- n is the expected number of output tokens: max_tokens, at most output_tokens_expected.

The search skips pairs that a bound excludes, and treats predictions within tie_ratio as equal.
docs/reference/conductor.md ("The best pair") gives the order among equals and the possible error.

Workers are compared as columns, with one element per worker (pool.py). Objects describe only single
workers, such as the chosen pair. All functions read the cluster's state and do not change it. Not
here: whether the best pair is good enough (admission.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conductor.config import ConductorConfig
from conductor.load.decode_batch import DecodeLoad
from conductor.load.pool import REQUESTS_RANK, Column, Mask, Path
from conductor.load.worker import SLOWER, WorkerState
from conductor.messages import Prediction
from conductor.routing.compiled import Answer, CompiledDecision, RouteQuery
from conductor.routing.fetching import (
    FetchSource,
    Plans,
    cached_tokens,
    make_plans,
    second_source,
    worth_asking,
)
from conductor.routing.policies import POLICIES, Terms, at_random
from conductor.routing.tiers import Holdings, Tiers
from mooncake_store.layout import blocks_touched


class PrefillTerms(NamedTuple):
    """Predicted terms of the request at one prefill worker, in the order of native.c's answer."""

    blocks: float  # leading blocks in DRAM or on the SSD of the worker's node
    dram_blocks: float  # number of these blocks in DRAM, which come before those on the SSD
    source: int  # index in Plans.sources; negative if nothing is fetched
    queue_s: float  # all predicted work in the queue
    wait_s: float  # the part of queue_s that runs before this request
    fetch_s: float  # time to restore from the SSD and to fetch
    transfer_s: float  # the part of fetch_s that overlaps neither the wait nor the computation
    prefill_s: float
    fill_s: float  # the part of prefill_s that delays no later request (estimates/pipeline.py)
    delay_s: float  # sum of the delays of the queued requests that this request overtakes
    eviction_cost_s: float  # cost to later requests of the blocks that the fetch evicts


@dataclass(slots=True)
class PrefillOption:
    """One prefill worker, and the predicted terms of the request at this worker."""

    worker: WorkerState
    terms: PrefillTerms
    local_blocks: int  # leading blocks in DRAM or on the SSD of the worker's node
    restore_blocks: int  # the last blocks of local_blocks, which are on the SSD
    cached_tokens: int
    source: FetchSource | None  # node from which blocks are fetched; None if nothing is fetched
    has_room: bool  # True if the queue has fewer than slots_max requests

    @property
    def start_s(self) -> float:
        """Seconds from now to the first token, without the hand-over."""
        return self.terms.wait_s + self.terms.transfer_s + self.terms.prefill_s

    @property
    def fetch_blocks(self) -> int:
        return self.source.blocks - self.local_blocks if self.source else 0

    @property
    def fetch_node(self) -> str | None:
        return self.source.node_id if self.source else None


@dataclass(slots=True)
class DecodeOption:
    """One decode worker and its step time with this request in the batch."""

    worker: WorkerState
    load: DecodeLoad  # load without this request, as the admission policy predicts it
    tbt_s: float  # step time with this request
    has_room: bool  # True if the request fits beside `load`


@dataclass(slots=True)
class Pair:
    prefill: PrefillOption
    decode: DecodeOption
    predicted: Prediction


class Options:
    """The predicted terms of one request at every worker that may take it."""

    _terms: Terms
    _plans: Plans
    _has_room: Mask  # decode workers with room, by the loads that admission checks
    backlog_s: float  # mean seconds of queued work of the candidate prefill workers

    def __init__(self, query: RouteQuery, compiled: CompiledDecision | None) -> None:
        """Only `predicted` may call this, because it then computes the terms."""
        self._query, self._compiled = query, compiled
        self._cluster, self._config = query.cluster, query.cluster.config
        self._policy = POLICIES[self._config.policy]
        self._request, self._now_s = query.request, query.now_s
        self._is_prefill, self._is_decode = query.usable
        self._loads, self.order, self.limits = query.loads, query.order, query.limits
        expected = self._config.output_tokens_expected
        self._spread = max(1, min(query.request.output_tokens_max, expected))  # n of the objective
        self._answer: Answer | None = None  # answer of `compiled`, if that chose the pair

    @classmethod
    def predicted(
        cls, query: RouteQuery, tiers: Tiers, compiled: CompiledDecision | None = None
    ) -> Options:
        """The terms of every worker, computed by `compiled`, or with numpy if that is None. Terms
        from `compiled` are valid until its next decision, which reuses the columns."""
        options = cls(query, compiled)
        held = Holdings(tiers, query.request.block_keys, query.cluster.prefills)
        sources = worth_asking(query.cluster, held, options._policy, query.now_s)
        if compiled is None:
            options._meet_prefills(held, sources)
            options._has_room = options._rooms()
        else:
            options._read(compiled, held, sources)
        return options

    def _read(
        self, compiled: CompiledDecision, held: Holdings, sources: Sequence[FetchSource]
    ) -> None:
        """Compute the terms with compiled code. Compute also the best pair, if admission checks the
        reserved loads."""
        is_usual = self._config.policy != "random"
        if not is_usual or self._cluster.warming_up("prefill", self._now_s):
            is_usual, self._compiled = False, None
        may_join = self._is_decode
        for worker in self._cluster.overloaded(self._now_s):
            if may_join is self._is_decode:
                may_join = may_join.copy()
            may_join[worker.row] = False
        is_reserved = self._loads is None
        wants_pair = is_usual and is_reserved
        answer = compiled.decide(self._query, held, sources, may_join, self._spread, wants_pair)
        self._terms, self._plans = compiled.terms, compiled.plans
        self.backlog_s = answer[2]
        if wants_pair:
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
            if policy.fetch == "times":  # the transfer overlaps with the queued work
                transfer_s = transfer_s - wait_s
                # with layer-wise prefill, it also overlaps with computation
                if plans.beside_s is not pool.zeros:
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
        self.backlog_s = pool.mean(queues.queue_s, self._is_prefill)

    def _rooms(self) -> Mask:
        """Mask of the candidate decode workers with room, by the loads that admission checks."""
        pool, request = self._cluster.decodes, self._request
        tokens = request.prompt_tokens + request.output_tokens_max
        has_room = pool.has_room(tokens) & self._is_decode
        if self._loads is not None:
            self._ask_loads(tokens, has_room)
        for worker in self._cluster.overloaded(self._now_s):
            has_room[worker.row] = False
        return has_room

    def _ask_loads(self, tokens: int, has_room: Mask) -> None:
        """Set `has_room` for workers that have room by the predicted loads."""
        pool = self._cluster.decodes
        # The loads of all pairs are predicted for the earliest end of a prefill, because the best
        # pairs end their prefills at almost the same time.
        self._at_s = self._now_s + float(self._terms.start_s[self._is_prefill].min())
        # A predicted load is mostly lower than the reserved load, so a worker with room beside the
        # reserved load counts as having room. `best` checks the exceptions (`_may_be_more`).
        rows = (self._is_decode & ~has_room).nonzero()[0].tolist()
        for row, load in zip(rows, self._loads_of(rows), strict=True):
            has_room[row] = _fits(pool.workers[row], load, tokens)

    def _loads_of(self, rows: Sequence[int]) -> list[DecodeLoad]:
        workers = [self._cluster.decodes.workers[row] for row in rows]
        assert self._loads is not None, "reserved loads are columns of the pool"
        return self._loads(self._cluster, workers, self._at_s, self._now_s)

    # Choosing the best pair

    def best(self) -> Pair:
        """The pair that minimises J, up to ties (see the module docstring). If no worker has room,
        the result is the best pair without room, which admission rejects."""
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
        prefill = self._option(row, PrefillTerms._make(of_prefill))
        return self._pair(prefill, self.decode(decode_row), handover_s)

    @property
    def _may_be_more(self) -> bool:
        """Whether a predicted load may exceed the reserved load, so that `best` must check it."""
        return self._config.admission == "predictive_lengths"

    def _leave_those_with_room(self, chosen: DecodeOption) -> bool:
        """If `chosen` has no room by its predicted load, restrict the search to workers that have
        room by theirs. Return True if the search changed.

        The choice of a pair does not use predicted loads for the time between tokens. The lowest of
        many predictions is mostly the one with the largest error, and such choices wasted prefills
        (bench/RESULTS.md)."""
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
        """The rows of the best pair. Another pair replaces `first` and its best decode worker only
        if its J is lower by more than a tie. `least_s` and `cost_s` are those of `_first`."""
        pool, prompt_tokens = self._cluster.decodes, self._request.prompt_tokens
        nodes, rank = self._cluster.prefills.node_ids, self._cluster.prefills.rank
        decode, rest_s = self._partner(nodes[first])
        if self._policy.is_blind:
            return first, decode
        tie_s = within(least_s, self._config) - least_s
        total_s = cost_s.item(first) + rest_s
        # A lower bound of every pair has the fastest hand-over and the fastest batch. This bound
        # mostly excludes all other prefill workers.
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
            if self._terms.start_s.item(row) + handover_s > self.limits.ttft_predicted_s:
                continue  # a better total must not break the TTFT limit of this request
            found.append((cost_s.item(row) + rest_s, rank.item(row), row, decode))
            total_s = min(total_s, found[-1][0])
        equal = [pair for pair in found if pair[0] <= total_s + tie_s]
        _, _, row, decode = equal[0] if equal[0] is found[0] else min(equal, key=lambda e: e[1])
        return row, decode

    def _first(self) -> tuple[int, float, Column]:
        """The row of the prefill worker that the policy prefers, the least cost, and all costs. A
        worker that cannot be chosen has an infinite cost, except with the policy `random`."""
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
        # A cost with more terms than start_s must not choose a worker that exceeds the TTFT limit.
        if (policy.spares_others or warming_up) and (
            start_s.item(start_s.argmax()) > self.limits.ttft_predicted_s
        ):
            is_in_time = is_choice & (start_s <= self.limits.ttft_predicted_s)
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
        """The row of the best decode worker for prefill workers of this node, and the least
        handover + n x tbt. The worker with the fewest requests is chosen among equals. Workers on
        this node count one request less."""
        pool, request = self._cluster.decodes, self._request
        path, prompt_tokens = pool.path(node_id), request.prompt_tokens
        costs_s = pool.costs_s(path, prompt_tokens, self._spread)
        is_choice = self._has_room if np.count_nonzero(self._has_room) else self._is_decode
        costs_s = np.where(is_choice, costs_s, math.inf)
        least, row = self._least(costs_s, path)
        return row, self._spread * costs_s.item(least)

    def _least(self, costs_s: Column, path: Path) -> tuple[int, int]:
        """The row of the decode worker of least cost, and that of the worker chosen among its
        equals."""
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
        found = PrefillTerms(
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
        return self._option(row, found)

    def _option(self, row: int, found: PrefillTerms) -> PrefillOption:
        pool = self._cluster.prefills
        worker, local_blocks = pool.workers[row], int(found.blocks)
        source = self._plans.sources[found.source] if found.source >= 0 else None
        used = local_blocks if source is None else source.blocks
        return PrefillOption(
            worker=worker,
            terms=found,
            local_blocks=local_blocks,
            restore_blocks=local_blocks - int(found.dram_blocks),
            cached_tokens=cached_tokens(
                used, worker.info.block_tokens, self._request.prompt_tokens
            ),
            source=source,
            has_room=pool.has_room.item(row),
        )

    def second_fetch_node(self, chosen: PrefillOption) -> str | None:
        """A node to fetch the blocks from if the chosen source fails; None if there is none."""
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
        terms = prefill.terms
        predicted = Prediction(
            queue_s=terms.wait_s,
            transfer_s=terms.transfer_s,
            prefill_s=terms.prefill_s,
            handover_s=handover_s,
            ttft_s=prefill.start_s + handover_s,
            tbt_s=decode.tbt_s,
            decode_sequences=decode.load.sequences + 1,
            delay_s=terms.delay_s,
            eviction_cost_s=terms.eviction_cost_s,
            fill_s=terms.fill_s,
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
    """Whether a request of `tokens` (prompt and max_tokens) fits beside this load."""
    pages = blocks_touched(tokens, worker.info.block_tokens)
    # Forecast loads are fractions, so 3.999 sequences count as 4. A request that finds no free slot
    # waits in the worker's queue.
    has_slot = round(load.sequences) < worker.info.slots_max
    return has_slot and load.pages + pages <= worker.info.pages_max


def within(least_s: float, config: ConductorConfig) -> float:
    """Upper bound in seconds of the predictions that count as equal to the least one."""
    return least_s + max(least_s * config.tie_ratio, config.tie_s)
