"""All workers of one role in columnar form: one row per worker, one array per value.

A decision compares all workers. Reading an object costs microseconds per worker, and an array
operation costs about one microsecond for all workers. The values that decisions read are therefore
kept as arrays beside the objects (worker.py). Only a pool writes its arrays, after each change of a
worker. A remaining time is stored as the moment at which it ends, so a row is valid until its
worker changes. `check` compares every row with its object.

Two columns are cached, because computing them would cost as much as the decision:

    takers   which workers take requests; recomputed after a change and when a time limit ends
    ratio    speed ratios, which decay; recomputed on each tick and after a measurement
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from conductor.config import ConductorConfig
from conductor.estimates.measured import ratios
from conductor.load.worker import MeasuredPaths, WorkerKey, WorkerState
from mooncake_store.records.membership import WorkerInfo

Column = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

RATIO_FRESH_S = 2.0  # seconds after which ratios are recomputed; their sums have decayed by 4.5 %
# Rank of a worker = its requests x REQUESTS_RANK + the number of the last request routed to it.
REQUESTS_RANK = 2.0**40


@dataclass(frozen=True, slots=True)
class Path:
    """Transfer times from one node to each worker of the pool: latency_s + blocks * block_s."""

    both: npt.NDArray[np.float64]  # matrix whose two rows are block_s and latency_s
    block_s: Column
    latency_s: Column
    own: Sequence[int]  # rows of the workers on that node, which win ties (routing.py)
    address: int  # address of the data of `both`


class Pool:
    """The workers of one role. Empty until the first `build`."""

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        self.order = config.order
        self.workers: list[WorkerState] = []
        self.version = 0  # increases when columns become new arrays

    def build(
        self,
        workers: Sequence[WorkerState],
        is_in: Callable[[WorkerState], bool],
        tokens_max: Callable[[WorkerInfo], int],
    ) -> None:
        """Build the columns. `is_in`: as `Cluster._is_in`. `tokens_max`: most tokens of one request
        that the empty worker can hold."""
        self.version += 1
        infos = [worker.info for worker in workers]
        for row, worker in enumerate(workers):
            worker.row = row
        self.workers = list(workers)
        self.rows = np.arange(len(workers))
        # Constants. Nothing may write to these arrays, and decisions compare them by identity.
        self.zeros, self.none = self._zeros(), np.zeros(len(workers), np.int64)
        self.zeros_address, self.nowhere = self.zeros.ctypes.data, np.full(len(workers), -1)
        self.node_ids = [info.node_id for info in infos]
        tokens = {info.block_tokens for info in infos}
        self.block_tokens_of = np.array([float(info.block_tokens) for info in infos])
        self.block_tokens_max = max(tokens, default=0)
        self.block_tokens = tokens.pop() if len(tokens) == 1 else 0  # 0: block sizes differ
        self.tokens_max = np.array([tokens_max(info) for info in infos])
        self._tokens_max_least = min(self.tokens_max.tolist(), default=0)
        self.block_bytes = np.array([float(info.block_bytes) for info in infos])
        self._paths: dict[str, Path] = {}
        self._far = np.array(
            [
                self.block_bytes / self.config.transfer_bytes_per_s,
                self.zeros + self.config.transfer_latency_s,
            ]
        )
        self._rows_on: dict[str, list[int]] = {}
        for row, node_id in enumerate(self.node_ids):
            self._rows_on.setdefault(node_id, []).append(row)
        self._infos = infos
        self._bound_paths([worker.paths for worker in workers])
        # Workers that never got a request rank before all others, in the order of their names.
        by_name = sorted(range(len(infos)), key=lambda row: infos[row].worker_id)
        self._unrouted = [0.0] * len(infos)
        for order, row in enumerate(by_name):
            self._unrouted[row] = float(order - len(infos))
        self._is_in = np.array([is_in(worker) for worker in workers], bool)
        self._reported_s, self._failed_s = self._zeros(), self._zeros()
        self._is_away = np.zeros(len(workers), bool)
        self._measured, self._estimated, self._measured_s = (self._zeros() for _ in range(3))
        self.ratio = np.ones(len(workers))
        self._takers, self._takers_until_s = np.zeros(len(workers), bool), -math.inf
        self._counted = (self._takers, 0, self.zeros)
        self._allocate(len(workers))
        for worker in workers:
            self._copy_report(worker)
            self._learn(worker)
            self.refresh(worker)

    def _bound_paths(self, measured: Sequence[MeasuredPaths]) -> None:
        """Compute whether the measured paths differ, and lower bounds of all transfers."""
        rates = {rate for paths in measured for rate in paths.rates}
        latencies_s = {latency_s for paths in measured for latency_s in paths.latencies_s}
        self._has_rates, self._has_latencies = bool(rates), bool(latencies_s)
        self.paths_differ = len(rates) > 1 or len(latencies_s) > 1
        # Lower bounds of the transfer time of one block, from its own node and from another node.
        config = self.config
        own_rate = max([paths.own_rate for paths in measured], default=0.0)
        far_rate = max([paths.far_rate_max for paths in measured], default=0.0)
        bytes_least = min([info.block_bytes for info in self._infos], default=0)
        self._own_block_s_least = bytes_least / max(own_rate, config.local_bytes_per_s)
        self._far_block_s_least = bytes_least / max(far_rate, config.transfer_bytes_per_s)
        self._latency_s_least = min([*latencies_s, config.transfer_latency_s])

    def _zeros(self) -> Column:
        return np.zeros(len(self.workers))

    # Updates of rows

    def refresh(self, worker: WorkerState) -> None:
        """Copy the reservations of the worker into its row."""
        raise NotImplementedError

    def _allocate(self, count: int) -> None:
        """Allocate the columns of the role."""
        raise NotImplementedError

    def _scale(self, rows: slice | int) -> None:
        """Recompute the products with `ratio` in these rows."""
        raise NotImplementedError

    def reported(self, worker: WorkerState) -> None:
        """Update the row after a change of the worker's reports, failures or reachability."""
        if worker.row >= 0:
            self._copy_report(worker)
            self.refresh(worker)

    def measured(self, worker: WorkerState, now_s: float) -> None:
        """Update the row after a change of the worker's speed ratio."""
        if worker.row >= 0:
            self._learn(worker)
            self.ratio[worker.row] = worker.speed_ratio(now_s, self.config)
            self._scale(worker.row)

    def _copy_report(self, worker: WorkerState) -> None:
        row, failed_s, is_away = worker.row, worker.last_failed_s, worker.is_away
        self._reported_s[row] = worker.oldest_report_s
        if (
            not self._takers[row]
            or failed_s != self._failed_s[row]
            or is_away != self._is_away[row]
        ):
            self._failed_s[row], self._is_away[row] = failed_s, is_away
            self._takers_until_s = -math.inf

    def _learn(self, worker: WorkerState) -> None:
        row = worker.row
        self._measured[row], self._estimated[row], self._measured_s[row] = worker.speed.sums

    # Columns that decisions read

    def look(self, now_s: float) -> None:
        """Recompute the columns that decay with time."""
        if self.config.learn_speed:
            self.ratio[:] = ratios(self._measured, self._estimated, self._measured_s, now_s)
        self._scale(slice(None))

    def takers(self, now_s: float) -> Mask:
        """Mask of the workers that take requests, as by `Cluster.why_not`. Read-only."""
        if now_s >= self._takers_until_s:
            config = self.config
            expires_s = self._reported_s + config.report_s_max
            is_failed = now_s - self._failed_s < config.failed_mark_s
            is_silent = now_s - self._reported_s > config.report_s_max
            self._takers = self._is_in & ~self._is_away & ~is_failed & ~is_silent
            ends = np.concatenate(
                (expires_s[self._takers], self._failed_s[is_failed] + config.failed_mark_s)
            )
            # `ends` has sums where the masks compare differences, which round differently. The
            # masks are therefore recomputed slightly early.
            self._takers_until_s = float(ends.min(initial=math.inf)) - 1e-6
        return self._takers

    def count(self, mask: Mask) -> int:
        """Number of workers in the mask. The last count is cached, since calls repeat a mask."""
        if mask is not self._counted[0]:
            self._counted = (mask, int(np.count_nonzero(mask)), mask.astype(np.float64))
        return self._counted[1]

    def mean(self, column: Column, mask: Mask) -> float:
        """Mean over the workers of the mask, summed in order to be equal in all versions of numpy.
        The mask has at least one worker."""
        count = self.count(mask)
        return float(np.add.accumulate(column * self._counted[2])[-1]) / count

    def usable(self, now_s: float, tokens: int, excluded: frozenset[WorkerKey]) -> Mask:
        """Mask of the workers that take requests, can hold `tokens` when empty, and are not in
        `excluded`. Read-only."""
        takers = self._takers if now_s < self._takers_until_s else self.takers(now_s)
        if tokens > self._tokens_max_least:
            takers = takers & (self.tokens_max >= tokens)
        if excluded:
            takers = takers & np.array([w.key not in excluded for w in self.workers], bool)
        return takers

    def path(self, node_id: str) -> Path:
        """Transfer times from this node, as each worker measured them, or else as configured."""
        found = self._paths.get(node_id)
        if found is None:
            found = self._paths[node_id] = self._new_path(node_id)
        return found

    def blocks(self, tokens: int) -> float | Column:
        """Number of blocks of these tokens at each worker. A single number if all are equal."""
        if self.block_tokens:
            return float(-(-tokens // self.block_tokens))
        found: Column = np.ceil(tokens / self.block_tokens_of)
        return found

    def paths_s_least(self, tokens: int) -> tuple[float, float]:
        """Lower bounds of a prompt's transfer time: from a worker's own node, from another node."""
        blocks = -(-tokens // self.block_tokens_max)
        far_s = blocks * self._far_block_s_least + self._latency_s_least
        return blocks * self._own_block_s_least, far_s

    def on_node(self, node_id: str) -> Sequence[int]:
        """The rows of the workers on this node."""
        return self._rows_on.get(node_id, ())

    def has_neighbour(self, others: Pool) -> Mask:
        """Mask of the workers that share their node with one of `others`."""
        return np.array([node_id in others._rows_on for node_id in self.node_ids], bool)

    def _new_path(self, node_id: str) -> Path:
        both, own = self._far.copy(), self._rows_on.get(node_id, [])
        block_s, latency_s = both
        for row in own:
            block_s[row] = self.block_bytes[row] / self.config.local_bytes_per_s
        if self._has_rates:
            rates = np.array([i.transfer_bytes_per_s.get(node_id, 0.0) for i in self._infos])
            np.divide(self.block_bytes, rates, out=block_s, where=rates > 0)
        if self._has_latencies:
            found = [info.transfer_latency_s.get(node_id, math.nan) for info in self._infos]
            measured_s = np.array(found)
            np.copyto(latency_s, measured_s, where=~np.isnan(measured_s))
        for row in own:
            latency_s[row] = 0.0  # a worker maps the memory of its own node
        return Path(both, block_s, latency_s, own, both.ctypes.data)

    def prepare(self, node_ids: Iterable[str], count_max: int) -> None:
        """Compute at most `count_max` missing paths before a decision needs them."""
        missing = (node_id for node_id in node_ids if node_id not in self._paths)
        for node_id in islice(missing, count_max):
            self._paths[node_id] = self._new_path(node_id)

    def routed(self, worker: WorkerState) -> float:
        """The last part of a rank: the number of the last request routed to the worker. Negative
        if there is none, so that such workers come first."""
        return float(worker.routed_at) or self._unrouted[worker.row]

    def check(self, now_s: float, why_not: Callable[[WorkerState, float], str]) -> None:
        takers = self.takers(now_s)
        self.look(now_s)
        for row, worker in enumerate(self.workers):
            assert worker.row == row, worker.key
            assert bool(takers[row]) == (not why_not(worker, now_s)), worker.key
            ratio = worker.speed_ratio(now_s, self.config)
            assert math.isclose(self.ratio[row], ratio, rel_tol=0.05), worker.key
