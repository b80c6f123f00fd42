"""One process's part of a trace or of a data set: the rows it sends, and the users that it needs.

Workers take rows in turn (row i belongs to worker i modulo their number), so all send at the
trace's own times without communication. A prompt is made when its row is taken, because a whole
trace of prompts would not fit in memory.

A data set has no end and no times: its users take one request after the other. Pure.

Not here: waiting for a row's time (users.py), asking Locust for users (session.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.replay.datasets import DATA_SETS, DataSet, endless
from loadtest.replay.prompts import (
    PlannedRequest,
    TokenSource,
    due_times_s,
    planned_request,
    too_long,
)
from loadtest.replay.trace import TraceRow, TraceSettings
from loadtest.users.settings import LoadSettings
from loadtest.users.text import ServerFacts

AHEAD_S = 6.0  # users exist this long before their row is due: a worker reports every 3 s
LEAD_S = 3.0  # the same for the first rows: Locust asks a shape once a second
USERS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class TraceProgress:
    sent: int = 0
    sending: int = 0
    is_over: bool = False


def due_after_start_s(rows: Sequence[TraceRow], speed: float) -> list[float]:
    """Due time of each row; the first is due at LEAD_S."""
    return [LEAD_S + due_s for due_s in due_times_s(rows, speed)]


class TraceShare:
    """Rows in order of arrival; each is taken once."""

    def __init__(
        self,
        rows: Sequence[TraceRow],
        source: TokenSource,
        length_scale: float,
        speed: float,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        assert 0 <= part < parts
        self._rows = rows
        self._source = source
        self._length_scale = length_scale
        self._due_s = due_after_start_s(rows, speed)
        self._indices = range(part, len(rows), parts)
        self._taken = 0
        self.sent = 0
        self.sending = 0

    def take(self) -> PlannedRequest | None:
        """The next row as a request; None when no row is left."""
        if self._taken == len(self._indices):
            return None
        index = self._indices[self._taken]
        self._taken += 1
        return planned_request(
            self._rows[index], index, self._due_s[index], self._source, self._length_scale
        )

    @property
    def is_over(self) -> bool:
        return self.sent == len(self._indices) and self.sending == 0

    def progress(self) -> TraceProgress:
        return TraceProgress(self.sent, self.sending, self.is_over)


def trace_share(
    trace: TraceSettings, facts: ServerFacts, rows: Sequence[TraceRow], part: int, parts: int
) -> TraceShare:
    source = TokenSource.of_server(facts, trace.seed)
    return TraceShare(rows, source, trace.length_scale, trace.speed, part, parts)


class DataSetShare:
    """Requests of a data set for all users of this process; `seed` fixes them and their order."""

    def __init__(
        self,
        data_set: DataSet,
        facts: ServerFacts,
        seed: int,
        length_scale: float,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        assert 0 <= part < parts
        self._data_set, self._length_scale = data_set, length_scale
        self._source = TokenSource.of_server(facts, seed)
        self._rows = itertools.islice(endless(data_set, seed), part, None, parts)

    def take(self) -> PlannedRequest:
        return self._planned(next(self._rows))

    def bringing(self) -> Iterator[PlannedRequest]:
        for number in range(self._data_set.prefixes):
            yield self._planned(self._data_set.bringing(number))

    def _planned(self, row: TraceRow) -> PlannedRequest:
        return planned_request(row, row.line, 0.0, self._source, self._length_scale)


def data_set_shares(
    settings: LoadSettings, facts: ServerFacts, part: int = 0, parts: int = 1
) -> dict[str, DataSetShare]:
    """A share of each data set in the mix."""
    return {
        name: DataSetShare(
            DATA_SETS[name], facts, settings.seed, settings.length_scale, part, parts
        )
        for name in settings.mix
        if name in DATA_SETS
    }


def data_set_too_long(data_set: DataSet, length_scale: float, facts: ServerFacts) -> str | None:
    """Why its requests do not fit the context, and the scale that does; None if they fit."""
    row = data_set.request(0, 0)
    problem = too_long([row], length_scale, facts.context_tokens_max)
    if problem is None:
        return None
    return (
        f"{data_set.name}: prompt and answer have {problem.context_tokens:,} tokens at "
        f"--length-scale {length_scale:g}, the server's context {facts.context_tokens_max:,}; they "
        f"fit at --length-scale {problem.length_scale:g}"
    )


def users_needed(due_s: Sequence[float], parts: Sequence[TraceProgress], now_s: float) -> int:
    """Users that are sending or whose row is due soon, in the busiest process, times the number of
    processes: Locust spreads users evenly."""
    needed = 1
    for number, part in enumerate(parts):
        due_soon = bisect_right(due_s[number :: len(parts)], now_s + AHEAD_S) - part.sent
        needed = max(needed, part.sending + due_soon)
    return min(USERS_MAX, needed * len(parts))
