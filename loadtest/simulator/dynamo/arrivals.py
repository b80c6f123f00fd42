"""When the requests of a trace arrive: as recorded, faster, or each tick spread out.

The published traces have their timestamps on 3-second ticks, about ten prompts at one instant, so
most of a TTFT at recorded speed is queueing inside a tick. Spread evenly until the next tick, the
same requests show what a policy does about load instead of about ticks.

Not here: reading a trace (loadtest/replay/trace.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from loadtest.replay.trace import TraceRow
from loadtest.simulator.dynamo.job import Job

TICK_MS = 3_000.0


def spread_ticks(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """The requests of each instant, evenly until the next instant or for one tick."""
    ticks = [list(found) for _, found in itertools.groupby(rows, lambda row: row.timestamp_ms)]
    spread = []
    for tick, following in itertools.zip_longest(ticks, ticks[1:]):
        start_ms = tick[0].timestamp_ms
        gap_ms = min(following[0].timestamp_ms - start_ms, TICK_MS) if following else TICK_MS
        spread += [
            replace(row, timestamp_ms=start_ms + gap_ms * place / len(tick))
            for place, row in enumerate(tick)
        ]
    return spread


def jobs_of(rows: Sequence[TraceRow], speed: float) -> list[Job]:
    """One job a request, `speed` times as fast as recorded."""
    assert speed > 0
    return [Job.of(row, row.timestamp_ms / 1e3 / speed) for row in rows]
