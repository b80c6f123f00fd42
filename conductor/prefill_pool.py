"""The prefill workers as columns: what each would need for a prompt, and what is queued there.

The same formulas as estimates.py and prefill_queue.py, for all workers at once. With
new = tokens - cached, prefill.seconds(new, cached) is

    base + new * (per_token + per_token_pair / 2 * (tokens + cached))

The queue behind the head is two padded matrices, a column for each worker: `keys` in order, and the
work that has gone by after each of them. How many keys are smaller than that of a request is where
it would stand, and that entry of the work is its wait.

Not here: fetching (fetching.py), which worker is best (routing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from conductor.pool import REQUESTS_RANK, Column, Counts, Pool
from conductor.worker import Worker

PLACES_MIN = 8  # of the matrices; they grow to the longest queue there ever was


class Place(NamedTuple):
    """What a request would find at each worker."""

    queue_s: Column  # all predicted work
    wait_s: Column  # of it, what goes before the request
    behind: Counts  # requests that it overtakes


class PrefillPool(Pool):
    def _allocate(self, count: int) -> None:
        estimates = [worker.prefill_estimate.coefficients for worker in self.workers]
        self._coefficients = np.array(estimates, np.float64).reshape(count, 3)
        self._base_s, self._per_token_s, self._half_pair_s = (self._zeros() for _ in range(3))
        self._foreign_until_s, self._busy_until_s = self._zeros(), self._zeros()
        self._head_key_s, self._half_step_s = self._zeros(), self._zeros()
        self._waiting_s, self._length = self._zeros(), np.zeros(count, np.int64)
        self._keys_s = np.full((PLACES_MIN, count), math.inf)
        self._work_s = np.zeros((PLACES_MIN + 1, count))
        self.rank = self._zeros()  # equal workers: fewer requests first, then the longest idle
        self.has_room = np.zeros(count, bool)  # queues are bounded
        self._slots_max = [worker.info.slots_max for worker in self.workers]

    def refresh(self, worker: Worker) -> None:
        row = worker.row
        if row < 0:
            return
        queue, requests = worker.queue, worker.queue.requests
        self._foreign_until_s[row] = queue.foreign_until_s
        self._busy_until_s[row] = queue.busy_until_s
        self._head_key_s[row] = queue.head_key_s
        self._half_step_s[row] = queue.step_s / 2
        self.rank[row] = requests * REQUESTS_RANK + self.routed(worker)
        self.has_room[row] = requests < self._slots_max[row]
        places = queue.places()
        length = len(places)
        self._length[row] = length
        if length > len(self._keys_s):
            self._grow(length)
        self._keys_s[length:, row] = math.inf
        if length:
            self._keys_s[:length, row] = [key_s for key_s, _ in places]
            work = list(accumulate(work_s for _, work_s in places))
            self._work_s[1 : length + 1, row] = work
            self._waiting_s[row] = work[-1]
        else:
            self._waiting_s[row] = 0.0

    def _grow(self, length: int) -> None:
        more = length  # at least twice as many
        self._keys_s = np.vstack((self._keys_s, np.full((more, len(self.workers)), math.inf)))
        self._work_s = np.vstack((self._work_s, np.zeros((more, len(self.workers)))))

    def _scale(self, rows: slice | int) -> None:
        ratio = self.ratio[rows]
        self._base_s[rows] = self._coefficients[rows, 0] * ratio
        self._per_token_s[rows] = self._coefficients[rows, 1] * ratio
        self._half_pair_s[rows] = self._coefficients[rows, 2] * ratio / 2

    def prefill_s(self, tokens: int, cached: int | Counts) -> Column:
        """Seconds at each worker with so many of the prompt's tokens cached there."""
        rate_s = self._half_pair_s * (tokens + cached) + self._per_token_s
        return rate_s * (tokens - cached) + self._base_s

    def place(self, prefill_s: Column, now_s: float) -> Place:
        """Where a request with so much work at each worker would stand in its queue."""
        busy_s = np.maximum(self._busy_until_s - now_s, 0.0)
        queue_s = (busy_s + self._waiting_s) * self.ratio
        order = self.order
        if order.stretch == 0:  # it goes behind all
            return Place(queue_s, queue_s, self.none)
        keys_s = np.minimum(prefill_s * order.stretch, order.wait_s_max) + now_s
        wait_s, behind = busy_s, self.none
        if longest := self._length.item(self._length.argmax()):
            ahead = np.add.reduce(self._keys_s[:longest] <= keys_s, 0)
            wait_s = busy_s + self._work_s[ahead, self.rows]
            behind = self._length - ahead
        is_first = keys_s < self._head_key_s  # never where the head is not overtaken
        if is_first[is_first.argmax()]:
            foreign_s = np.maximum(self._foreign_until_s - now_s, 0.0)
            step_s = np.minimum(busy_s - foreign_s, self._half_step_s)
            wait_s = np.where(is_first, foreign_s + step_s, wait_s)
            behind = behind + is_first
        return Place(queue_s, wait_s * self.ratio, behind)

    def check(self, now_s: float, why_not: Callable[[Worker, float], str]) -> None:
        """Prove that every row is what its worker says."""
        super().check(now_s, why_not)
        close = math.isclose
        prefill_s = self.prefill_s(1_000, 300)
        queue_s, wait_s, behind = self.place(prefill_s, now_s)
        for row, worker in enumerate(self.workers):
            queue, ratio = worker.queue, float(self.ratio[row])
            key_s = self.order.key_s(now_s, float(prefill_s[row]))
            expected_s = (
                queue.work_s(now_s),
                worker.prefill_estimate.seconds(700, 300),
                queue.ahead_s(key_s, now_s),
            )
            for found, seconds in zip((queue_s, prefill_s, wait_s), expected_s, strict=True):
                assert close(found[row], ratio * seconds, rel_tol=1e-6, abs_tol=1e-6), worker.key
            assert behind[row] == queue.behind(key_s), worker.key
            has_room = queue.requests < worker.info.slots_max
            assert self.has_room[row] == has_room, worker.key
            rank = queue.requests * REQUESTS_RANK + self.routed(worker)
            assert self.rank[row] == rank, worker.key
