"""Calibration: measures the duration of an engine's steps for the machine profile.

A point is the shape of one step. Each point is computed once as a warm-up, the cheapest first. Then
all points are measured in turn, until each has REPEATS samples or the time budget is spent. The
result is the median of a point's samples. Points without a sample are left out, but the POINTS_MIN
cheapest points are always measured. The steps overwrite free pages.

Not here: the formula that is fitted to the results (conductor/estimates/estimates.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from backends.engine.interface import Engine, Work
from mooncake_store.layout import blocks_touched

REPEATS = 5  # samples per point
POINTS_MIN = 3  # points that are measured even when the budget is spent, because the fit needs them
Point = tuple[int, int]  # (new tokens, prefix tokens), or (sequences, context tokens of each)


def measure_prefill(
    engine: Engine, points: Sequence[Point], budget_s: float = 4.0
) -> list[tuple[int, int, float]]:
    """points (new tokens, prefix tokens) -> (new tokens, prefix tokens, seconds of the step)."""
    seconds = _measure(engine, {point: [point] for point in points}, budget_s)
    return [(*point, step_s) for point, step_s in seconds]


def measure_decode(
    engine: Engine, points: Sequence[Point], budget_s: float = 4.0
) -> list[tuple[int, int, float]]:
    """points (batch, context tokens per sequence) -> (batch, sum of context tokens, seconds)."""
    sequences = {(batch, context): [(1, context - 1)] * batch for batch, context in points}
    seconds = _measure(engine, sequences, budget_s)
    return [(batch, batch * context, step_s) for (batch, context), step_s in seconds]


def _measure(
    engine: Engine, sequences: Mapping[Point, list[tuple[int, int]]], budget_s: float
) -> list[tuple[Point, float]]:
    """Median seconds of one step of each point. At least one page must be free.

    `sequences`: point -> (new tokens, prefix tokens) of each sequence in the batch of this point.
    """
    assert engine.pages.free_pages, "calibration needs free pages"
    pages = engine.pages.take(engine.pages.free_pages) or []

    def cost(point: Point) -> int:
        return sum(new * (new + before) for new, before in sequences[point])

    try:
        by_cost = sorted(sequences, key=cost)
        batches = {point: _batch(engine, sequences[point], pages) for point in by_cost}
        fitting = {point: batch for point, batch in batches.items() if batch is not None}
        return _medians(engine, fitting, budget_s)
    finally:
        engine.pages.release(pages)


def _batch(engine: Engine, sequences: list[tuple[int, int]], pages: list[int]) -> list[Work] | None:
    """A batch of these sequences, without shared pages; None if pages or context are too small."""
    batch, used = [], 0
    for new_tokens, before in sequences:
        if new_tokens + before > engine.context_tokens_max:
            return None
        need = blocks_touched(new_tokens + before, engine.layout.block_tokens)
        if used + need > len(pages):
            return None
        token_ids = [index % engine.vocabulary_tokens for index in range(new_tokens)]
        batch.append(Work(token_ids, before, pages[used : used + need]))
        used += need
    return batch


def _medians(
    engine: Engine, steps: dict[Point, list[Work]], budget_s: float
) -> list[tuple[Point, float]]:
    deadline_s = time.perf_counter() + budget_s
    samples: dict[Point, list[float]] = {point: [] for point in steps}
    warm: list[Point] = []
    for point, batch in steps.items():
        engine.forward(batch)  # libraries choose kernels at the first call of a shape
        warm.append(point)
        if len(warm) >= POINTS_MIN and time.perf_counter() > deadline_s:
            break
    for number in range(REPEATS):
        for index, point in enumerate(warm):
            started_s = time.perf_counter()
            if started_s > deadline_s and (number > 0 or index >= POINTS_MIN):
                break
            engine.forward(steps[point])
            samples[point].append(time.perf_counter() - started_s)
    return [(point, statistics.median(taken)) for point, taken in samples.items() if taken]
