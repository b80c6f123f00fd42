"""How many workers of each role does the load need, so that both service levels are kept?

In workers of the pool as it is, so that both roles compare:

    prefill   seconds of prefill that are asked for in a second
              + what is queued / the TTFT limit: within that time the queue should be gone
    decode    the greater of what is there and what is asked for
              there      sum over workers of batch / the largest that keeps the TBT limit
              asked for  answers in a second x mean tokens x step / that largest batch

The largest batch is bounded by slots and pages too. What is there says what answers really are;
what is asked for says it before prompts that wait in a prefill queue come out of it. Rates fade
with a half-life, and begin at zero: a few prompts after a start are no load.

Requests that were rejected count: they are what one more worker would serve. Of those that another
frontend has rejected nothing is known.

Not here: what follows from it (controller.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from conductor.config import ConductorConfig
from conductor.estimates.forward_decay import ForwardDecay
from conductor.load.worker import WorkerState
from mooncake_store.layout import blocks_touched

# Long enough for several prompts of the longest kind, which take seconds each; short beside the
# minutes for which a change of the load must last to be worth a flip.
HALF_LIFE_S = 15.0


class RoleDemand:
    """What was asked for lately."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._decay = ForwardDecay(HALF_LIFE_S)
        self._prefill_s = self._answers = self._step_shares_s = 0.0  # sums that fade
        self._ended = self._output_tokens = 0.0

    def asked(
        self, prefill_s: float, prompt_tokens: int, decode: WorkerState, now_s: float
    ) -> None:
        """A request came, whose prefill would take so long, and this worker would decode it."""
        self._rescale(now_s)
        weight = self._decay.weight(now_s)
        self._prefill_s += weight * prefill_s
        self._answers += weight
        self._step_shares_s += weight * self._token_s(decode, prompt_tokens)

    def ended(self, output_tokens: int, now_s: float) -> None:
        """An answer was so long."""
        self._rescale(now_s)
        weight = self._decay.weight(now_s)
        self._ended += weight
        self._output_tokens += weight * output_tokens

    def _rescale(self, now_s: float) -> None:
        if (divisor := self._decay.rescaled(now_s)) != 1.0:
            self._prefill_s /= divisor
            self._answers /= divisor
            self._step_shares_s /= divisor
            self._ended /= divisor
            self._output_tokens /= divisor

    def _per_s(self, amount: float, now_s: float) -> float:
        return amount / self._decay.weight(now_s) / (HALF_LIFE_S / math.log(2.0))

    def _token_s(self, worker: WorkerState, prompt_tokens: int) -> float:
        """Of a worker's time, what one token of such an answer takes in the largest batch."""
        batch = self._largest_batch(worker, prompt_tokens)
        return worker.decode_estimate.step_s(batch, batch * prompt_tokens) / batch

    def _largest_batch(self, worker: WorkerState, prompt_tokens: float) -> float:
        """Of requests with so much context, which keeps the limit and fits the worker."""
        estimate, info = worker.decode_estimate, worker.info
        share_s = estimate.per_sequence_s + estimate.per_context_token_s * prompt_tokens
        left_s = self._config.tbt_slo_s - estimate.base_s
        by_time = left_s / share_s if share_s > 0 else math.inf
        pages = blocks_touched(math.ceil(prompt_tokens), info.block_tokens)
        return max(1.0, min(by_time, info.slots_max, info.pages_max / max(1, pages)))

    def prefills_wanted(self, workers: Sequence[WorkerState], now_s: float) -> float:
        """`workers`: all of the role that there are."""
        queued_s = sum(
            worker.queue.work_s(now_s) * worker.speed_ratio(now_s, self._config)
            for worker in workers
        )
        return self._per_s(self._prefill_s, now_s) + queued_s / self._config.ttft_slo_s

    def decodes_wanted(self, workers: Sequence[WorkerState], now_s: float) -> float:
        there = sum(self._fullness(worker, now_s) for worker in workers)
        mean_tokens = self._output_tokens / self._ended if self._ended else 0.0
        asked = self._per_s(self._step_shares_s, now_s) * mean_tokens
        return max(there, asked)

    def check(self) -> None:
        """Prove the invariants."""
        sums = (self._prefill_s, self._answers, self._step_shares_s, self._ended)
        assert min(*sums, self._output_tokens) >= 0.0, sums

    def _fullness(self, worker: WorkerState, now_s: float) -> float:
        """Its batch in units of the largest that it may have."""
        load, info = worker.batch.load_now(), worker.info
        if not load.sequences:
            return 0.0
        ratio, base_s = worker.speed_ratio(now_s, self._config), worker.decode_estimate.base_s
        step_s = ratio * worker.decode_estimate.step_s(load.sequences, load.context_tokens)
        left_s = max(self._config.tbt_slo_s - ratio * base_s, 1e-3)
        return max(
            (step_s - ratio * base_s) / left_s,
            load.sequences / info.slots_max,
            load.pages / info.pages_max,
        )
