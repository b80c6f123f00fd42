"""The decode workers in columnar form: the step time with one more request, and room for it.

All columns describe the *reserved* load (decode_batch.py): all requests that decode on the worker
or are still in prefill. Workers are compared by this load, because a comparison by the current load
would send a whole burst to one worker. `has_room` checks room beside the reserved load. Workers
without such room are checked again by the load that the admission policy predicts (routing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from conductor.load.decode_batch import DecodeLoad
from conductor.load.pool import REQUESTS_RANK, Column, Mask, Path, Pool
from conductor.load.worker import WorkerState


class DecodePool(Pool):
    def _allocate(self, count: int) -> None:
        estimates = [worker.decode_estimate.coefficients for worker in self.workers]
        self._coefficients = np.array(estimates, np.float64).reshape(count, 3)
        self._sequences, self._context_tokens = self._zeros(), self._zeros()
        # A step with one more request takes _step_s + _per_token_s x its prompt tokens.
        self._per_token_s, self._step_s = self._zeros(), self._zeros()
        self._pages_free = self._zeros()  # -1 without a free slot, so that no request fits
        self.rank = self._zeros()  # among equal costs, the least rank is chosen
        self.least_step_s = 0.0  # least step time that the last call of `costs_s` found
        self.loads = [DecodeLoad(0, 0, 0)] * count  # reserved load of each worker

    def refresh(self, worker: WorkerState) -> None:
        if worker.row >= 0:
            self._set(worker, worker.batch.load_reserved())

    def reserve_one(self, worker: WorkerState, context_tokens: int, pages: int) -> None:
        """Add one routed request. The result is that of `refresh`, but the batch is not read."""
        if worker.row >= 0:
            self._set(worker, self.loads[worker.row].plus(1, context_tokens, pages))

    def _set(self, worker: WorkerState, load: DecodeLoad) -> None:
        row, info = worker.row, worker.info
        sequences, context_tokens, pages = load
        self.loads[row] = load
        self._sequences[row], self._context_tokens[row] = sequences, context_tokens
        estimate = worker.decode_estimate
        self._step_s[row] = self.ratio.item(row) * estimate.step_s(sequences + 1, context_tokens)
        self._pages_free[row] = info.pages_max - pages if sequences < info.slots_max else -1
        self.rank[row] = sequences * REQUESTS_RANK + self.routed(worker)

    def _scale(self, rows: slice | int) -> None:
        ratio, (base_s, per_sequence_s, per_token_s) = self.ratio[rows], self._coefficients[rows].T
        self._per_token_s[rows] = per_token_s * ratio
        self._step_s[rows] = ratio * (
            base_s
            + per_sequence_s * (self._sequences[rows] + 1)
            + per_token_s * self._context_tokens[rows]
        )

    def costs_s(self, path: Path, prompt_tokens: int, tokens: int) -> Column:
        """Seconds per output token at each worker: the time of a step with this request, plus the
        hand-over time / `tokens`. `tokens`: expected number of output tokens."""
        costs_s = self._per_token_s * prompt_tokens
        costs_s += self._step_s
        self.least_step_s = costs_s.item(costs_s.argmin())
        handover_s = path.block_s * self.blocks(prompt_tokens)
        handover_s += path.latency_s
        handover_s *= 1.0 / tokens
        costs_s += handover_s
        return costs_s

    def has_room(self, tokens: int) -> Mask:
        """Mask of the workers with room for one more request. `tokens`: prompt and max_tokens."""
        return self._pages_free >= self.blocks(tokens)

    def compared(self) -> dict[str, Column]:
        """The columns that a compiled decision reads, by their names in native.c."""
        return {
            "decode_per_token_s": self._per_token_s,
            "decode_step_s": self._step_s,
            "pages_free": self._pages_free,
            "decode_rank": self.rank,
            "decode_block_tokens": self.block_tokens_of,
        }

    def check(self, now_s: float, why_not: Callable[[WorkerState, float], str]) -> None:
        super().check(now_s, why_not)
        has_room, step_s = self.has_room(700), self._per_token_s * 500 + self._step_s
        for row, worker in enumerate(self.workers):
            load, info = worker.batch.load_reserved(), worker.info
            assert self.loads[row] == load, worker.key
            expected_s = float(self.ratio[row]) * worker.decode_estimate.step_s(
                load.sequences + 1, load.context_tokens + 500
            )
            assert math.isclose(step_s[row], expected_s, rel_tol=1e-6), worker.key
            fits = load.pages + -(-700 // info.block_tokens) <= info.pages_max
            assert has_room[row] == (fits and load.sequences < info.slots_max), worker.key
            rank = load.sequences * REQUESTS_RANK + self.routed(worker)
            assert self.rank[row] == rank, worker.key
