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

from conductor.pool import REQUESTS_RANK, Column, Mask, Pool
from conductor.worker import Worker


class DecodePool(Pool):
    def _allocate(self, count: int) -> None:
        estimates = [worker.decode_estimate.coefficients for worker in self.workers]
        self._coefficients = np.array(estimates, np.float64).reshape(count, 3)
        self._sequences, self._context_tokens = self._zeros(), self._zeros()
        self._step_s, self._per_token_s = self._zeros(), self._zeros()
        self._pages_free = np.zeros(count, np.int64)
        self._has_slot = np.zeros(count, bool)
        self.rank = self._zeros()  # equal workers: fewer requests first, then the longest idle

    def refresh(self, worker: Worker) -> None:
        row = worker.row
        if row < 0:
            return
        load, info = worker.batch.load_reserved(), worker.info
        self._sequences[row], self._context_tokens[row] = load.sequences, load.context_tokens
        base_s, per_sequence_s, per_token_s = worker.decode_estimate.coefficients
        self._step_s[row] = float(self.ratio[row]) * (
            base_s + per_sequence_s * (load.sequences + 1) + per_token_s * load.context_tokens
        )
        self._pages_free[row] = info.pages_max - load.pages
        self._has_slot[row] = load.sequences < info.slots_max
        self.rank[row] = load.sequences * REQUESTS_RANK + self.routed(worker)

    def _scale(self, rows: slice | int) -> None:
        ratio, (base_s, per_sequence_s, per_token_s) = self.ratio[rows], self._coefficients[rows].T
        self._per_token_s[rows] = per_token_s * ratio
        self._step_s[rows] = ratio * (
            base_s
            + per_sequence_s * (self._sequences[rows] + 1)
            + per_token_s * self._context_tokens[rows]
        )

    def step_s(self, prompt_tokens: int) -> Column:
        """The step of each batch with this request in it."""
        return self._per_token_s * prompt_tokens + self._step_s

    def has_room(self, tokens: int) -> Mask:
        """For one more request with so many tokens, the longest answer included."""
        pages = -(-tokens // self.block_tokens)
        return self._has_slot & (self._pages_free >= pages)

    def check(self, now_s: float, why_not: Callable[[Worker, float], str]) -> None:
        """Prove that every row is what its worker says."""
        super().check(now_s, why_not)
        step_s, has_room = self.step_s(500), self.has_room(700)
        for row, worker in enumerate(self.workers):
            load, info = worker.batch.load_reserved(), worker.info
            expected_s = float(self.ratio[row]) * worker.decode_estimate.step_s(
                load.sequences + 1, load.context_tokens + 500
            )
            assert math.isclose(step_s[row], expected_s, rel_tol=1e-6), worker.key
            fits = load.pages + -(-700 // info.block_tokens) <= info.pages_max
            assert has_room[row] == (fits and load.sequences < info.slots_max), worker.key
            rank = load.sequences * REQUESTS_RANK + self.routed(worker)
            assert self.rank[row] == rank, worker.key
