"""The decode workers as columns: the step of each with one more request, and whether it has room.

Everything here is of the *reserved* load (decode_batch.py): all that decodes there or is on its
way. It ranks the workers, or a burst would pile onto one of them. Who has room for that load has
room for what `early` and `predictive` take the load to be, because it is less; so those are asked
one by one, about the others only (routing.py).

Not here: which worker is best (routing.py), limits (admission.py).
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
        # The step with a prompt is its tokens x the first + the second.
        self._per_token_s, self._step_s = self._zeros(), self._zeros()
        self._pages_free = self._zeros()  # less than any request needs: no slot either
        self.rank = self._zeros()  # equal workers: fewer requests first, then the longest idle
        self.least_step_s = 0.0  # the shortest of those that `costs_s` found last
        self.loads = [DecodeLoad(0, 0, 0)] * count  # reserved

    def refresh(self, worker: WorkerState) -> None:
        if worker.row >= 0:
            self._set(worker, worker.batch.load_reserved())

    def reserved_more(self, worker: WorkerState, context_tokens: int, pages: int) -> None:
        """One request more was routed there: as `refresh`, without asking the batch."""
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
        """The step of each batch with this request in it, and its share of the hand-over, which is
        spread over so many tokens."""
        costs_s = self._per_token_s * prompt_tokens
        costs_s += self._step_s
        self.least_step_s = costs_s.item(costs_s.argmin())
        handover_s = path.block_s * self.blocks(prompt_tokens)
        handover_s += path.latency_s
        handover_s *= 1.0 / tokens
        costs_s += handover_s
        return costs_s

    def has_room(self, tokens: int) -> Mask:
        """For one more request with so many tokens, the longest answer included."""
        return self._pages_free >= self.blocks(tokens)

    def compared(self) -> dict[str, Column]:
        """The columns that a compiled decision reads, by their names there."""
        return {
            "decode_per_token_s": self._per_token_s,
            "decode_step_s": self._step_s,
            "pages_free": self._pages_free,
            "decode_rank": self.rank,
            "decode_block_tokens": self.block_tokens_of,
        }

    def check(self, now_s: float, why_not: Callable[[WorkerState, float], str]) -> None:
        """Prove that every row is what its worker says."""
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
