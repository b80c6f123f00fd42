"""The data sets of the papers as requests: their lengths, and the shared part of each prompt.

The arXiv report, Table 2, gives each data set's mean lengths and its share of cached tokens, but no
distribution. So all requests of one data set are alike. The cached share of each, in whole blocks
of 512 tokens, is one of a few prefixes that were sent before. A request is a row of a trace, whose
ids name its shared blocks. The simulator's experiments offer the rows; `mooncake replay` and
Locust's users send them at any scale. The same seed gives the same requests everywhere.

Ids of prefixes come first, then those of the requests' own whole blocks, request by request. The
last, partial block of a prompt has an id for its tokens too, from LAST_BLOCKS on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadtest.replay.trace import TRACE_BLOCK_TOKENS, TraceRow, TraceSettings, read_trace

PREFIXES = 8
LAST_BLOCKS = 2**31
REQUESTS = 200  # requests drawn at once


@dataclass(frozen=True, slots=True)
class DataSet:
    name: str
    title: str  # its name in the report
    prompt_tokens: int
    output_tokens: int
    cached_share: float  # share of the prompt that one of PREFIXES covers

    @property
    def shared_blocks(self) -> int:
        return int(self.cached_share * self.prompt_tokens) // TRACE_BLOCK_TOKENS

    @property
    def shared_tokens(self) -> int:
        return self.shared_blocks * TRACE_BLOCK_TOKENS

    @property
    def prefixes(self) -> int:
        return PREFIXES if self.shared_blocks else 0

    def prefix(self, number: int) -> tuple[int, ...]:
        first = number * self.shared_blocks
        return tuple(range(first, first + self.shared_blocks))

    def bringing(self, number: int, at_s: float = 0.0) -> TraceRow:
        """The request that caches a prefix: the prefix alone, with an answer of one token."""
        return TraceRow(number, at_s * 1e3, self.shared_tokens, 1, self.prefix(number))

    def request(self, number: int, prefix: int, at_s: float = 0.0) -> TraceRow:
        """The `number`-th request, after one of the prefixes."""
        own = self.prompt_tokens // TRACE_BLOCK_TOKENS - self.shared_blocks
        first = PREFIXES * self.shared_blocks + number * own
        ids = (*self.prefix(prefix), *range(first, first + own))
        if self.prompt_tokens % TRACE_BLOCK_TOKENS:
            ids += (LAST_BLOCKS + number,)
        return TraceRow(number, at_s * 1e3, self.prompt_tokens, self.output_tokens, ids)


SIMULATED_LONG = tuple(
    DataSet(f"{tokens // 1024}k", f"{tokens // 1024}k", tokens, 512, 0.5)
    for tokens in (16_384, 32_768, 65_536, 131_072)
)
ARXIV = DataSet("arxiv", "ArXiv summarization", 8_088, 229, 0.0)
L_EVAL = DataSet("l-eval", "L-Eval", 19_019, 72, 0.8)
DATA_SETS = {data_set.name: data_set for data_set in (ARXIV, L_EVAL, *SIMULATED_LONG)}


def drawn(seed: int, count: int, turn: int = 0) -> tuple[list[float], list[int]]:
    """Gaps between arrivals (mean 1 s), and prefix numbers; `turn` selects the next draw."""
    random = np.random.default_rng([seed, turn] if turn else seed)
    gaps = random.exponential(1.0, count)
    gaps *= count / gaps.sum()  # scales the gaps to the rate
    return [float(gap) for gap in gaps], [int(x) for x in random.integers(PREFIXES, size=count)]


def poisson_rows(
    data_set: DataSet, rate: float, count: int, seed: int, copies: int = 1, every_s: float = 0.0
) -> tuple[list[TraceRow], int]:
    """Rows that cache the prefixes, then rows with Poisson arrivals; the number of the former."""
    brought = [
        data_set.bringing(number // copies, number * every_s)
        for number in range(data_set.prefixes * copies)
    ]
    gaps, prefixes = drawn(seed, count)
    at_s = len(brought) * every_s + np.cumsum(gaps) / rate
    rows = [
        data_set.request(number, prefixes[number], float(at_s[number])) for number in range(count)
    ]
    return [*brought, *rows], len(brought)


def endless(data_set: DataSet, seed: int) -> Iterator[TraceRow]:
    """The same requests without arrival times, for users that send one after the other."""
    turn = 0
    while True:
        _, prefixes = drawn(seed, REQUESTS, turn)
        for place, prefix in enumerate(prefixes):
            yield data_set.request(turn * REQUESTS + place, prefix)
        turn += 1


def rows_of(trace: TraceSettings) -> list[TraceRow]:
    """The rows of the file, or of the data set that is named instead: its prefixes, one a second,
    then Poisson arrivals, one a second on average. TraceError as in `read_trace`."""
    data_set = DATA_SETS.get(str(trace.path))
    if data_set is None or trace.path.exists():
        return read_trace(trace.path, trace.requests_max)
    count = trace.requests_max or REQUESTS
    return poisson_rows(data_set, 1.0, count, trace.seed, every_s=1.0)[0]
