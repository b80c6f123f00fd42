"""Forecast of decode batches: survival curves of the reserved answers, plus expected arrivals.

**Reserved requests.** The forecast is a curve over the next minute, at the moments t of a grid. For
each request reserved at the worker, alive(t) is the probability that it decodes at t. S(n) is the
share of answers longer than n tokens (lengths.py), and `step` is the seconds per token:

    decoding, n tokens generated   S(n + (t - now) / step) / S(n)
    in prefill until `end`         0 before `end`, S((t - end) / step) after it
    from max_tokens on             0

The worker's curve has three sums over its requests: sequences, context tokens (prompt and generated
tokens) and reserved pages. A multiple of the standard deviation is added to each sum:

    size(t) = 1, prompt tokens + tokens generated until t, or pages
    load(t) = sum of alive(t) x size(t)
              + decode_room_sigma x sqrt(sum of alive(t) x (1 - alive(t)) x size(t)^2)

*Unattributed* requests are reported but not reserved. They leave according to the residual curve of
all answers. A new request decodes from the end of its prefill, beside requests that join later. The
*peak* of the curve from the end of the prefill on is therefore compared with the limits.

The curves of all workers are rows of one table, which a decision interpolates for all at once.
Reservations and ends of requests update the sums. Each report recomputes the curve with current
ages and without rounding errors of earlier sums. No request waits for a recomputation.

**Expected arrivals** are requests that have not arrived yet, but will join the decode workers
before this request. At each decode worker, the expected number that joins before t is

    expected(t) = expected_arrivals_share x rate x (t - now - d (1 - exp(-(t - now) / d)))

`rate` is the rate of admitted requests / the number of decode workers. d is the mean time from
routing to the end of prefill. Each arrival counts with the mean tokens and pages of recent
requests. Rate and means decay with `demand_half_life_s` (forward_decay.py).

docs/reference/conductor.md ("Decoding at a later moment") gives the limits of both predictions. Not
here: reservations and their reconciliation with reports (decode_batch.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.estimates.forward_decay import ForwardDecay
from conductor.estimates.lengths import EDGES, ClassKey, OutputLengths, Vector, residual
from conductor.load.compiled_forecast import CompiledForecast

GRID_S: Vector = np.array(
    [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0]
)
PER_S = np.append(1 / np.diff(GRID_S), 0.0)  # 1 / distance to the next moment; 0 after the last
GRID, GRID_PER_S = GRID_S.tolist(), PER_S.tolist()
SHOWN = 3  # number of sums: sequences, context tokens, pages
SUMS = 2 * SHOWN  # the sums, and then their variances


class ExpectedAnswer(NamedTuple):
    """Class and max_tokens of an answer, as known at routing."""

    key: ClassKey
    tokens_max: int


class ForecastTable:
    """Peaks of the curves of all decode workers, as an array [worker, moment, sum]."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.compiled = CompiledForecast.of(GRID_S.ctypes.data, EDGES.ctypes.data, len(EDGES))
        self._peaks: Vector = np.zeros((0, len(GRID_S) + 1, SHOWN))
        self._peaks_address = 0
        self._base_s: Vector = np.zeros(0)  # time of the first moment of each row
        self._free: list[int] = []  # rows without a worker

    def take_row(self) -> int:
        if not self._free:
            old, more = len(self._base_s), max(8, len(self._base_s))
            self._peaks = np.concatenate([self._peaks, np.zeros((more, len(GRID_S) + 1, SHOWN))])
            self._base_s = np.concatenate([self._base_s, np.zeros(more)])
            self._peaks_address = self._peaks.ctypes.data
            self._free = list(range(old + more - 1, old - 1, -1))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._peaks[row] = 0.0
        self._free.append(row)

    def put(self, row: int, base_s: float, peaks: Vector) -> None:
        self._base_s[row] = base_s
        self._peaks[row, :-1], self._peaks[row, -1] = peaks, peaks[-1]

    def begin(self, row: int, base_s: float) -> int:
        """Set the start of the row's grid, and return the address of its peaks to be filled."""
        self._base_s[row] = base_s
        return self._peaks_address + row * self._peaks.strides[0]

    def one_at(self, row: int, at_s: float) -> list[float]:
        """As `at`, for one worker."""
        offset_s = max(at_s - self._base_s.item(row), 0.0)
        left = bisect_right(GRID, offset_s) - 1
        part = (offset_s - GRID[left]) * GRID_PER_S[left]
        low, high = self._peaks[row, left : left + 2].tolist()
        return [a + part * (b - a) for a, b in zip(low, high, strict=True)]

    def at(self, rows: npt.NDArray[np.intp], at_s: float) -> Vector:
        """The peaks of the curves from `at_s` on: [worker, (sequences, context tokens, pages)]."""
        offset_s = np.maximum(at_s - self._base_s[rows], 0.0)
        left = GRID_S.searchsorted(offset_s, side="right") - 1
        part = ((offset_s - GRID_S[left]) * PER_S[left])[:, None]
        low, high = self._peaks[rows, left], self._peaks[rows, left + 1]
        return np.asarray(low + part * (high - low))


class _RequestColumns:
    """Columns of the requests of one worker. Free rows have old values, and are in no sum."""

    NAMES = ("began_s", "context_tokens", "pages", "tokens_max")

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.keys: list[ClassKey | None] = []
        self.columns: Vector = np.zeros((0, len(self.NAMES)))
        self.sums: Vector = np.zeros((0, len(GRID_S), SUMS))
        self.sums_address = 0
        self.is_joined: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self.free: list[int] = []

    def add(self, request_id: str, key: ClassKey, *values: float) -> int:
        if not self.free:
            old, more = len(self.keys), max(8, len(self.keys))
            self.keys += [None] * more
            self.columns = np.concatenate([self.columns, np.zeros((more, len(self.NAMES)))])
            self.sums = np.concatenate([self.sums, np.zeros((more, len(GRID_S), SUMS))])
            self.sums_address = self.sums.ctypes.data
            self.is_joined = np.concatenate([self.is_joined, np.zeros(more, dtype=bool)])
            self.free = list(range(old + more - 1, old - 1, -1))
        row = self.numbers[request_id] = self.free.pop()
        self.keys[row], self.columns[row], self.is_joined[row] = key, values, False
        return row

    def remove(self, request_id: str) -> int | None:
        row = self.numbers.pop(request_id, None)
        if row is not None:
            self.keys[row] = None
            self.free.append(row)
        return row


class DecodeForecast:
    """The forecast curve of one decode worker."""

    def __init__(self, table: ForecastTable, lengths: OutputLengths, step_s: float) -> None:
        self._table, self._lengths, self._step_s = table, lengths, max(step_s, 1e-6)
        self.row = table.take_row()
        self._requests = _RequestColumns()
        self._base_s = -math.inf
        # Index 0: requests in prefill; index 1: joined requests.
        self._sums: Vector = np.zeros((2, len(GRID_S), SUMS))
        self._most: Vector = np.zeros(SHOWN)  # upper bound of the sums: no request leaves
        self._unattributed_alive: Vector = np.ones(len(GRID_S))
        # Addresses of these four arrays, which are never replaced.
        self._addresses = (
            self._sums[0].ctypes.data,
            self._sums[1].ctypes.data,
            self._most.ctypes.data,
            self._unattributed_alive.ctypes.data,
        )

    def reserve(
        self,
        request_id: str,
        answer: ExpectedAnswer,
        context_tokens: int,
        pages: int,
        end_s: float,
        now_s: float,
    ) -> None:
        """Add a routed request. `end_s`: predicted end of its prefill, at which it joins."""
        if self._base_s == -math.inf:
            self._base_s = now_s
        row = self._requests.add(
            request_id, answer.key, end_s, context_tokens, pages, answer.tokens_max
        )
        self._most += (1.0, context_tokens + answer.tokens_max, pages)
        self._count(row, now_s)

    def join(self, request_id: str, now_s: float) -> None:
        row = self._requests.numbers.get(request_id)
        if row is not None and not self._requests.is_joined[row]:
            self._sums[0] -= self._requests.sums[row]
            self._requests.is_joined[row], self._requests.columns[row, 0] = True, now_s
            self._count(row, now_s)

    def drop(self, request_id: str) -> None:
        row = self._requests.remove(request_id)
        if row is not None:
            self._sums[int(self._requests.is_joined[row])] -= self._requests.sums[row]
            _, context_tokens, pages, tokens_max = self._requests.columns[row]
            self._most -= (1.0, context_tokens + tokens_max, pages)

    def settle(self, share: float, unattributed: tuple[float, float, float]) -> None:
        """Recompute the peaks. `share`: the part of the joined requests that is still in the batch.
        `unattributed`: sequences, context tokens and pages of the unattributed requests."""
        if self._table.compiled is not None:
            peaks_address = self._table.begin(self.row, self._base_s)
            self._table.compiled.settle(
                self._addresses, peaks_address, self._table.sigma, share, unattributed
            )
            return
        total = np.maximum(self._sums[0] + share * self._sums[1], 0.0)
        doubt = self._table.sigma * np.sqrt(total[:, SHOWN:])
        total = np.minimum(total[:, :SHOWN] + doubt, np.maximum(self._most, 0.0))
        if any(unattributed):
            total += self._unattributed_alive[:, None] * np.array(unattributed)
        peak = np.maximum.accumulate(total[::-1])[::-1]
        self._table.put(self.row, self._base_s, peak)

    def renew(self, now_s: float, step_s: float) -> None:
        """Restart the grid at `now_s`. `step_s`: new step time; 0 keeps the known one. The caller
        must call `settle` afterwards."""
        self._base_s = now_s
        if step_s > 0:
            self._step_s = step_s
        rows = np.array(sorted(self._requests.numbers.values()), dtype=np.intp)
        self._sums.fill(0.0)
        if len(rows):
            self._requests.sums[rows] = self._curves(rows, now_s)
            for is_joined in (0, 1):
                chosen = rows[self._requests.is_joined[rows] == bool(is_joined)]
                self._sums[is_joined] = self._requests.sums[chosen].sum(axis=0)
        curve = residual(self._lengths.curve(None, now_s))
        self._unattributed_alive[:] = np.interp(GRID_S / self._step_s, EDGES, curve)

    def close(self) -> None:
        self._table.give_back(self.row)

    def _count(self, row: int, now_s: float) -> None:
        """Add the curve of a request without generated tokens, with the result of `_curves`."""
        requests = self._requests
        began_s, context, pages, tokens_max = requests.columns[row].tolist()
        key, is_joined = requests.keys[row], requests.is_joined.item(row)
        assert key is not None, f"row {row} is free"
        since_s, curve = self._base_s - max(began_s, now_s), self._lengths.curve(key, now_s)
        tokens_max = max(tokens_max, 1.0)
        if self._table.compiled is not None:
            sums_address = requests.sums_address + row * requests.sums.strides[0]
            self._table.compiled.count(
                curve.ctypes.data,
                is_joined,
                (sums_address, self._addresses[is_joined]),
                since_s,
                self._step_s,
                context,
                pages,
                tokens_max,
            )
            return
        tokens = (GRID_S + since_s) / self._step_s
        right = np.clip(np.searchsorted(EDGES, tokens, side="right"), 1, len(EDGES) - 1)
        left_edge, low = EDGES[right - 1], curve[right - 1]
        part = np.clip((tokens - left_edge) / (EDGES[right] - left_edge), 0.0, 1.0)
        alive = low + part * (curve[right] - low)
        alive[tokens >= tokens_max] = 0.0
        if not is_joined:
            alive[tokens < 0.0] = 0.0
        sums = requests.sums[row]
        sums[:, 0] = alive
        sums[:, 1] = alive * (context + np.maximum(tokens, 0.0))
        sums[:, 2] = alive * pages
        sums[:, SHOWN:] = sums[:, :SHOWN] ** 2 * _odds_of_leaving(alive)[:, None]
        self._sums[int(is_joined)] += sums

    def _curves(self, rows: npt.NDArray[np.intp], now_s: float) -> Vector:
        """[request, moment, sum] for all requests in `rows` at once."""
        keys = [self._requests.keys[row] for row in rows]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        curves = np.array([self._lengths.curve(key, now_s) for key in numbers if key is not None])
        kind = np.array([numbers[key] for key in keys])[:, None]
        began_s, context, pages, tokens_max = self._requests.columns[rows].T[:, :, None]
        is_joined = self._requests.is_joined[rows][:, None]
        # A prefill that should have ended is assumed to end now.
        began_s = np.where(is_joined, began_s, np.maximum(began_s, now_s))
        tokens = (self._base_s + GRID_S - began_s) / self._step_s
        # A request that should have reached max_tokens is assumed to be at its last token.
        had = np.clip((now_s - began_s) / self._step_s, 0.0, np.maximum(tokens_max - 1, 0.0))
        later = np.maximum(tokens, had)
        alive = np.minimum(_height(curves, kind, later) / _height(curves, kind, had), 1.0)
        alive *= (is_joined | (tokens >= 0.0)) & (later < np.maximum(tokens_max, 1.0))
        means = np.stack([alive, alive * (context + later), alive * pages], axis=-1)
        variances = means**2 * _odds_of_leaving(alive)[..., None]
        return np.concatenate([means, variances], axis=-1)

    def check(self) -> None:
        for is_joined in (0, 1):
            numbers = self._requests.numbers.values()
            rows = [row for row in numbers if self._requests.is_joined[row] == bool(is_joined)]
            found = self._requests.sums[rows]
            expected = self._sums[is_joined]
            assert np.allclose(found.sum(axis=0), expected, rtol=1e-6, atol=1e-3), is_joined
            alive = found[:, :, 0]
            assert alive.min(initial=0.0) >= 0 and alive.max(initial=0.0) <= 1 + 1e-9


def _odds_of_leaving(alive: Vector) -> Vector:
    """variance / mean^2 of a value that is present with probability p: (1 - p) / p; 0 if p is 0."""
    return np.divide(1.0 - alive, alive, out=np.zeros_like(alive), where=alive > 0.0)


def _height(curves: Vector, kind: npt.NDArray[np.intp], tokens: Vector) -> Vector:
    """The survival of each request at each of its lengths. `kind`: index of its curve."""
    right = np.clip(np.searchsorted(EDGES, tokens, side="right"), 1, len(EDGES) - 1)
    left_edge = EDGES[right - 1]
    part = np.minimum((tokens - left_edge) / (EDGES[right] - left_edge), 1.0)
    low, high = curves[kind, right - 1], curves[kind, right]
    return np.asarray(low + part * (high - low))


DELAY_S_MIN = 1e-6


class ExpectedArrivals:
    """Counts admitted requests, and estimates how many later requests join until a moment."""

    def __init__(self, share: float, half_life_s: float) -> None:
        self._share = share
        self._window_s = half_life_s / math.log(2.0)  # seconds that a decayed sum represents
        self._decay = ForwardDecay(half_life_s)
        # Decayed sums over the admitted requests.
        self._requests = self._delay_s = self._context_tokens = self._pages = 0.0

    def admitted(self, delay_s: float, context_tokens: int, pages: int, now_s: float) -> None:
        """Count a request. `delay_s`: seconds until its prefill is predicted to end."""
        shrink = self._decay.rescaled(now_s)
        weight = self._decay.weight(now_s)
        self._requests = self._requests / shrink + weight
        self._delay_s = self._delay_s / shrink + weight * delay_s
        self._context_tokens = self._context_tokens / shrink + weight * context_tokens
        self._pages = self._pages / shrink + weight * pages

    def expected(self, at_s: float, now_s: float, workers: int) -> tuple[float, float, float]:
        """(sequences, context tokens, pages) expected to join each of the workers until `at_s`."""
        ahead_s = at_s - now_s
        if not self._requests or ahead_s <= 0:
            return 0.0, 0.0, 0.0
        delay_s = max(self._delay_s / self._requests, DELAY_S_MIN)
        effective_s = max(0.0, ahead_s + delay_s * math.expm1(-ahead_s / delay_s))
        per_sum = self._share * effective_s / (self._decay.weight(now_s) * self._window_s * workers)
        return per_sum * self._requests, per_sum * self._context_tokens, per_sum * self._pages
