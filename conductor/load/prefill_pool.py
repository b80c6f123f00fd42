"""The prefill workers in columnar form: prefill time of a prompt, and the queued work.

The formulas are those of estimates.py and prefill_queue.py, for all workers at once. A prompt of
`tokens` tokens, of which `cached` are cached and `new` are not, takes

    base + new * (per_token + per_token_pair / 2 * (tokens + cached))

A pipeline group takes `fill_s` in addition (pipeline.py), which does not delay the next prompts.

The *head* of a queue is the prompt that is being computed. The prompts after the head are stored in
two padded matrices with a column for each worker. `_keys_s` has their order keys in ascending
order, and `_work_s` the sum of the work up to each of them. The queue position of a new request is
the number of order keys that are at most its own. `_work_s` at this position is the work between
the head and the request. A request whose order key is above all known keys is last at every worker,
and needs no counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.load.pool import REQUESTS_RANK, Column, Counts, Mask, Pool
from conductor.load.worker import WorkerState
from conductor.queue_order import QueueOrder

Matrix = npt.NDArray[np.float64]

POSITIONS_MIN = 8  # rows of the matrices; they grow to the longest queue so far
FEW_POSITIONS = 4  # up to this queue length, a loop over the rows is faster than the matrix


class Queues(NamedTuple):
    """The queued work at each worker at one moment."""

    now_s: float
    busy_s: Column  # unattributed work and remaining work of the head, at the calibrated speed
    queue_s: Column  # all predicted work, at the measured speed
    order: QueueOrder  # computes the order key of a request


class QueuePosition(NamedTuple):
    """The queue position of a request at each worker."""

    wait_s: Column  # queued work that runs before the request
    # Number of requests that the request overtakes; a mask if that is at most one everywhere.
    # Zeros if the caller did not ask for it.
    behind: Counts | Mask


class PrefillPool(Pool):
    def _allocate(self, count: int) -> None:
        pipelines = [worker.pipeline for worker in self.workers]
        estimates = [pipeline.slowest.coefficients for pipeline in pipelines]
        self._coefficients = np.array(estimates, np.float64).reshape(count, 3)
        # Sums of the coefficients of all pipeline stages except the slowest one.
        others = [pipeline.others.coefficients for pipeline in pipelines]
        self._others = np.array(others, np.float64).reshape(count, 3)
        self._hops_s = np.array([pipeline.hops_s for pipeline in pipelines])
        chunks = [float(pipeline.chunk_tokens or math.inf) for pipeline in pipelines]
        self._chunk_tokens = np.array(chunks)
        self.has_groups = bool(self._others.any() or self._hops_s.any())
        self._base_s, self._per_token_s, self._half_pair_s = (self._zeros() for _ in range(3))
        self._unattributed_until_s, self._busy_until_s = self._zeros(), self._zeros()
        self._head_key_s, self._half_step_s = self._zeros(), self._zeros()
        self._waiting_s, self._length = self._zeros(), np.zeros(count, np.int64)
        self._set_matrices(
            np.full((POSITIONS_MIN, count), math.inf), np.zeros((POSITIONS_MIN + 1, count))
        )
        # Columns of equal elements, because numpy's arithmetic with scalars is slower.
        self._counts, self._now_s = np.full(count, count, np.int64), self._zeros()
        self._stretch = np.full(count, self.order.stretch)
        self._wait_s_max = np.full(count, self.order.wait_s_max)
        # Upper bounds of all order keys and of `_unattributed_until_s`; they never decrease.
        self._key_s_max = self._unattributed_until_s_max = -math.inf
        self.rank = self._zeros()  # among equal costs, the least rank is chosen
        self.has_room = np.zeros(count, bool)  # the queue has fewer than slots_max requests
        self.full = count  # number of workers without room
        self._slots_max = [worker.info.slots_max for worker in self.workers]
        infos = [worker.info for worker in self.workers]
        self._beside_share = np.array([info.load_beside_share for info in infos], np.float64)
        self._beside_from_tokens = np.array([float(info.chunk_tokens) for info in infos])
        self.has_layers = bool(self._beside_share.any())

    def refresh(self, worker: WorkerState) -> None:
        row = worker.row
        if row < 0:
            return
        queue = worker.queue
        requests = queue.requests
        unattributed_until_s, busy_until_s, head_key_s, last_key_s = queue.moments()
        self._unattributed_until_s[row] = unattributed_until_s
        self._busy_until_s[row] = busy_until_s
        self._head_key_s[row] = head_key_s
        if last_key_s > self._key_s_max:
            self._key_s_max = last_key_s
        if unattributed_until_s > self._unattributed_until_s_max:
            self._unattributed_until_s_max = unattributed_until_s
        routed = float(worker.routed_at) or self._unrouted[row]
        self.rank[row] = requests * REQUESTS_RANK + routed
        has_room = requests < self._slots_max[row]
        if has_room != self.has_room.item(row):
            self.full += -1 if has_room else 1
            self.has_room[row] = has_room
        before = self._length.item(row)
        if before or requests > 1:
            self._set_positions(row, queue.positions(), before)

    def _copy_report(self, worker: WorkerState) -> None:
        super()._copy_report(worker)
        self._half_step_s[worker.row] = worker.queue.step_s / 2

    def _set_positions(self, row: int, waiting: list[tuple[float, float]], before: int) -> None:
        """Store the reservations after the head. `before`: their number in the last call."""
        length = len(waiting)
        if length > len(self._keys_s):
            self._grow(length)
        work_s = 0.0
        for position, (key_s, more_s) in enumerate(waiting):
            work_s += more_s
            self._key_rows_s[position][row] = key_s
            self._work_rows_s[position][row] = work_s
        for position in range(length, before):
            self._key_rows_s[position][row] = math.inf
        self._length[row], self._waiting_s[row] = length, work_s

    def _grow(self, length: int) -> None:
        """Add at least `length` positions, and at least double them."""
        more = (length, len(self.workers))
        self._set_matrices(
            np.vstack((self._keys_s, np.full(more, math.inf))),
            np.vstack((self._work_s, np.zeros(more))),
        )

    def _set_matrices(self, keys_s: Matrix, work_s: Matrix) -> None:
        """`work_s` has one more row than `keys_s`: row 0 is the zero work before position 0."""
        self.version += 1
        self._keys_s, self._work_s = keys_s, work_s
        self._key_rows_s, self._work_rows_s = list(keys_s), list(work_s[1:])

    def _scale(self, rows: slice | int) -> None:
        ratio = self.ratio[rows]
        self._base_s[rows] = self._coefficients[rows, 0] * ratio
        self._per_token_s[rows] = self._coefficients[rows, 1] * ratio
        self._half_pair_s[rows] = self._coefficients[rows, 2] * ratio / 2

    def prefill_s(self, tokens: int, cached: int | Column) -> Column:
        """Seconds to the first token at each worker, with `cached` of `tokens` tokens cached."""
        found_s = self._half_pair_s * (cached + float(tokens))
        found_s += self._per_token_s
        found_s *= float(tokens) - cached
        found_s += self._base_s
        if self.has_groups:
            found_s += self.fill_s(tokens, cached)
        return found_s

    def fill_s(self, tokens: int, cached: int | Column) -> Column:
        """The part of `prefill_s` after the slowest stage of a pipeline group has ended. 0 for
        workers outside of pipeline groups."""
        if not self.has_groups:
            return self.zeros
        last = np.minimum(tokens - cached, self._chunk_tokens)
        base_s, per_token_s, per_pair_s = self._others.T
        found_s: Column = base_s + last * (per_token_s + per_pair_s * (tokens - last / 2))
        found_s += self._hops_s
        found_s *= self.ratio
        return found_s

    def beside_s(self, tokens: int, prefill_s: Column, is_in_memory: Mask) -> Column:
        """The part of `prefill_s` that overlaps with the loading of the prefix. Zero without
        layer-wise prefill, and if the prefix is not in DRAM."""
        share = self._beside_share * (self._beside_from_tokens < tokens)
        share *= is_in_memory
        return share * prefill_s

    def queues(self, now_s: float, order: QueueOrder) -> Queues:
        """The queued work at `now_s`. The result is valid until a queue changes."""
        self._now_s.fill(now_s)
        busy_s = self._busy_until_s - self._now_s
        np.maximum(busy_s, self.zeros, busy_s)
        queue_s = busy_s + self._waiting_s
        queue_s *= self.ratio
        return Queues(now_s, busy_s, queue_s, order)

    def position(
        self, queues: Queues, prefill_s: Column, counts_behind: bool = True
    ) -> QueuePosition:
        """The queue position of a request that takes `prefill_s` at each worker."""
        order = queues.order
        least_s = order.stretch * prefill_s.item(prefill_s.argmin())
        if queues.now_s + min(least_s, order.wait_s_max) >= self._key_s_max:
            return QueuePosition(queues.queue_s, self.none)  # last in every queue
        if order is self.order:
            keys_s = prefill_s * self._stretch
            np.minimum(keys_s, self._wait_s_max, keys_s)
        else:
            keys_s = np.minimum(prefill_s * order.stretch, order.wait_s_max)
        keys_s += self._now_s
        wait_s, behind = queues.busy_s, self.none
        if longest := self._length.item(self._length.argmax()):
            work_s, behind = self._ahead(keys_s, longest, counts_behind)
            wait_s = wait_s + work_s
        is_first = keys_s < self._head_key_s  # never true where the head cannot be overtaken
        if np.count_nonzero(is_first):
            step_s = self._half_step_s
            if queues.now_s < self._unattributed_until_s_max:
                unattributed_s = np.maximum(self._unattributed_until_s - self._now_s, self.zeros)
                step_s = np.minimum(queues.busy_s - unattributed_s, step_s) + unattributed_s
            else:
                step_s = np.minimum(queues.busy_s, step_s)
            if wait_s is queues.busy_s:
                wait_s = wait_s.copy()
            np.putmask(wait_s, is_first, step_s)
            if counts_behind:
                behind = is_first if behind is self.none else behind + is_first
        return QueuePosition(wait_s * self.ratio, behind)

    def behind(self, order: QueueOrder, now_s: float, row: int, prefill_s: float) -> int:
        """The `behind` of `position`, for one worker."""
        key_s = order.key_s(now_s, prefill_s)
        count = int(key_s < self._head_key_s.item(row))
        for keys_s in self._key_rows_s[: self._length.item(row)]:
            count += keys_s.item(row) > key_s
        return count

    def _ahead(self, keys_s: Column, longest: int, counts_behind: bool) -> tuple[Column, Counts]:
        """Of the reservations after the head: the work of those with an order key up to `keys_s`,
        and the number of the others."""
        if longest <= FEW_POSITIONS:
            work_s, behind = self.zeros.copy(), self.none
            if counts_behind:
                behind = self._length.copy()
            for position in range(longest):
                is_ahead = self._key_rows_s[position] <= keys_s
                np.putmask(work_s, is_ahead, self._work_rows_s[position])
                if counts_behind:
                    behind -= is_ahead
            return work_s, behind
        ahead = np.add.reduce(self._keys_s[:longest] <= keys_s, 0)
        behind = self._length - ahead if counts_behind else self.none
        ahead *= self._counts
        ahead += self.rows
        return self._work_s.take(ahead), behind

    def compared(self) -> dict[str, Counts | Column | Matrix | Mask]:
        """The columns that a compiled decision reads, by their names in native.c."""
        return {
            "ratio": self.ratio,
            "base_s": self._base_s,
            "per_token_s": self._per_token_s,
            "half_pair_s": self._half_pair_s,
            "block_tokens": self.block_tokens_of,
            "block_bytes": self.block_bytes,
            "busy_until_s": self._busy_until_s,
            "unattributed_until_s": self._unattributed_until_s,
            "head_key_s": self._head_key_s,
            "half_step_s": self._half_step_s,
            "waiting_s": self._waiting_s,
            "rank": self.rank,
            "length": self._length,
            "keys_s": self._keys_s,
            "work_s": self._work_s,
            "has_room": self.has_room,
            "others": self._others,
            "hops_s": self._hops_s,
            "chunk_tokens": self._chunk_tokens,
            "beside_share": self._beside_share,
            "beside_from_tokens": self._beside_from_tokens,
        }

    def check(self, now_s: float, why_not: Callable[[WorkerState, float], str]) -> None:
        super().check(now_s, why_not)
        close = math.isclose
        assert self.full == len(self.workers) - np.count_nonzero(self.has_room)
        prefill_s = self.prefill_s(1_000, 300)
        queues = self.queues(now_s, self.order)
        wait_s, behind = self.position(queues, prefill_s)
        for row, worker in enumerate(self.workers):
            queue, ratio = worker.queue, float(self.ratio[row])
            key_s = self.order.key_s(now_s, float(prefill_s[row]))
            expected_s = (
                queue.work_s(now_s),
                worker.pipeline.seconds(700, 300),
                queue.ahead_s(key_s, now_s),
            )
            columns = (queues.queue_s, prefill_s, wait_s)
            for found, seconds in zip(columns, expected_s, strict=True):
                assert close(found[row], ratio * seconds, rel_tol=1e-6, abs_tol=1e-6), worker.key
            assert behind[row] == queue.behind(key_s), worker.key
            assert behind[row] == self.behind(self.order, now_s, row, float(prefill_s[row])), (
                worker.key
            )
            has_room = queue.requests < worker.info.slots_max
            assert self.has_room[row] == has_room, worker.key
            rank = queue.requests * REQUESTS_RANK + self.routed(worker)
            assert self.rank[row] == rank, worker.key
            assert self._half_step_s[row] == queue.step_s / 2, worker.key
