"""Role balance: the demand and the workers of both pools, as input of the role controller.

The demand is the number of fully used workers of each role that would keep both service levels:

    prefill   seconds of prefill requested per second
              + queued seconds / the TTFT limit, so that the queue drains within the limit
    decode    the greater of present and requested
              present    sum over workers of batch / largest batch
              requested  requests per second x mean output tokens x step time / largest batch

The largest batch is bounded by the TBT limit, slots and pages. The present load has the true
lengths of answers. The requested load reacts earlier, because it includes the prompts in prefill
queues. Rates are decayed sums that start at zero, so a few prompts after a start count little.

Requests that this frontend rejected for load count, because one more worker would serve them.
Rejections of other frontends are unknown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from conductor.admission.limits import ServiceLimits
from conductor.config import ConductorConfig
from conductor.estimates.forward_decay import ForwardDecay
from conductor.load.cluster import Cluster
from conductor.load.worker import WorkerState
from conductor.messages import RoleFlip
from conductor.notes import NoteBatch
from conductor.roles.controller import ROLES, RoleController, RolePool
from mooncake_store.layout import blocks_touched

# Longer than the prefill of several long prompts, which take seconds each. Shorter than the changes
# of load that are worth a flip, which take minutes.
HALF_LIFE_S = 15.0


class RoleDemand:
    """Recent demand, as decayed sums."""

    def __init__(self, config: ConductorConfig, limits: ServiceLimits) -> None:
        self._config, self._limits = config, limits
        self._decay = ForwardDecay(HALF_LIFE_S)
        self._prefill_s = self._step_shares_s = 0.0  # decayed sums of prefill time and `_token_s`
        self._ended = self._output_tokens = 0.0  # decayed sums of ended answers and their tokens

    def asked(
        self, prefill_s: float, prompt_tokens: int, decode: WorkerState, now_s: float
    ) -> None:
        """Count a request with this predicted prefill time. `decode`: its best decode worker."""
        self._rescale(now_s)
        weight = self._decay.weight(now_s)
        self._prefill_s += weight * prefill_s
        self._step_shares_s += weight * self._token_s(decode, prompt_tokens)

    def ended(self, output_tokens: int, now_s: float) -> None:
        """Count a finished answer of this length."""
        self._rescale(now_s)
        weight = self._decay.weight(now_s)
        self._ended += weight
        self._output_tokens += weight * output_tokens

    def _rescale(self, now_s: float) -> None:
        if (divisor := self._decay.rescaled(now_s)) != 1.0:
            self._prefill_s /= divisor
            self._step_shares_s /= divisor
            self._ended /= divisor
            self._output_tokens /= divisor

    def _per_s(self, amount: float, now_s: float) -> float:
        return amount / self._decay.weight(now_s) / (HALF_LIFE_S / math.log(2.0))

    def _token_s(self, worker: WorkerState, prompt_tokens: int) -> float:
        """Step time / sequences, in the worker's largest batch of requests with this context."""
        batch = self._largest_batch(worker, prompt_tokens)
        return worker.decode_estimate.step_s(batch, batch * prompt_tokens) / batch

    def _largest_batch(self, worker: WorkerState, prompt_tokens: float) -> float:
        """Largest batch of requests with this context that keeps the TBT limit and has room."""
        estimate, info = worker.decode_estimate, worker.info
        share_s = estimate.per_sequence_s + estimate.per_context_token_s * prompt_tokens
        left_s = self._limits.step_s_max(prompt_tokens) - estimate.base_s
        by_time = left_s / share_s if share_s > 0 else math.inf
        pages = blocks_touched(math.ceil(prompt_tokens), info.block_tokens)
        return max(1.0, min(by_time, info.slots_max, info.pages_max / max(1, pages)))

    def prefills_wanted(self, workers: Sequence[WorkerState], now_s: float) -> float:
        """Number of prefill workers that the load needs. `workers`: all prefill workers."""
        queued_s = sum(
            worker.queue.work_s(now_s) * worker.speed_ratio(now_s, self._config)
            for worker in workers
        )
        return self._per_s(self._prefill_s, now_s) + queued_s / self._limits.recent[0]

    def decodes_wanted(self, workers: Sequence[WorkerState], now_s: float) -> float:
        there = sum(self._fullness(worker, now_s) for worker in workers)
        mean_tokens = self._output_tokens / self._ended if self._ended else 0.0
        asked = self._per_s(self._step_shares_s, now_s) * mean_tokens
        return max(there, asked)

    def check(self) -> None:
        sums = (self._prefill_s, self._step_shares_s, self._ended)
        assert min(*sums, self._output_tokens) >= 0.0, sums

    def _fullness(self, worker: WorkerState, now_s: float) -> float:
        """Load / limit of a decode worker: the highest of step time, slots and pages."""
        load, info = worker.batch.load_now(), worker.info
        if not load.sequences:
            return 0.0
        ratio, base_s = worker.speed_ratio(now_s, self._config), worker.decode_estimate.base_s
        step_s = ratio * worker.decode_estimate.step_s(load.sequences, load.context_tokens)
        limit_s = self._limits.step_s_max(load.context_tokens / load.sequences)
        left_s = max(limit_s - ratio * base_s, 1e-3)
        return max(
            (step_s - ratio * base_s) / left_s,
            load.sequences / info.slots_max,
            load.pages / info.pages_max,
        )


class RoleBalance:
    """Passes workers and demand of all frontends to the RoleController, and counts proposals."""

    def __init__(self, cluster: Cluster, limits: ServiceLimits) -> None:
        self._cluster = cluster
        self.demand = RoleDemand(cluster.config, limits)
        self._controller = RoleController(cluster.config)
        self._proposed: Counter[str] = Counter()

    def on_batch(self, batch: NoteBatch, now_s: float) -> None:
        """Count the routed requests and finished answers of another frontend."""
        for note in batch.routed:
            decode = self._cluster.workers.get(note.decode)
            if decode is not None:
                tokens = note.new_tokens + note.cached_tokens
                self.demand.asked(note.prefill_s, tokens, decode, now_s)
        for ended in batch.ended:
            if ended.output_tokens >= 0:
                self.demand.ended(ended.output_tokens, now_s)

    def propose(self, is_our_turn: bool, now_s: float) -> RoleFlip | None:
        """A proposed flip, or None. To be called without a turn too (RoleController.propose)."""
        draining = [
            worker
            for worker in self._cluster.workers.values()
            if worker.info.can_flip and worker.is_draining
        ]
        pools = {role: self._pool(role, now_s) for role in ROLES}
        flip = self._controller.propose(pools, draining, self._cluster.decode_s, is_our_turn, now_s)
        if flip is not None:
            self._proposed[flip.role] += 1
        return flip

    def _pool(self, role: str, now_s: float) -> RolePool:
        warming = {worker.key for worker, _ in self._cluster.warming_up(role, now_s)}
        return RolePool(
            self._cluster.takers(role, now_s), self._wanted(role, now_s), frozenset(warming)
        )

    def _wanted(self, role: str, now_s: float) -> float:
        workers = [w for w in self._cluster.workers.values() if w.info.role == role]
        if role == "prefill":
            return self.demand.prefills_wanted(workers, now_s)
        return self.demand.decodes_wanted(workers, now_s)

    def workers_wanted(self, now_s: float) -> dict[str, float]:
        return {role: self._wanted(role, now_s) for role in ROLES}

    @property
    def flips_proposed(self) -> dict[str, int]:
        return {role: self._proposed[role] for role in ROLES}

    def check(self) -> None:
        self._controller.check()
        self.demand.check()
