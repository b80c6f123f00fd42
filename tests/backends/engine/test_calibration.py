"""Samples for the machine profile, from an engine that only takes notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from backends.engine.batching.pages import PagePool
from backends.engine.calibration import REPEATS, measure_decode, measure_prefill
from backends.engine.interface import Work
from mooncake_store.layout import KvLayout


class NotingEngine:
    layout = KvLayout(1, 1, 2, "float32", 16)
    context_tokens_max = 1000
    vocabulary_tokens = 10

    def __init__(self, pages: int) -> None:
        self.pages = PagePool(pages)
        self.steps: list[Sequence[Work]] = []

    def forward(
        self, batch: Sequence[Work], on_layer: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        self.steps.append(batch)
        used = [page for work in batch for page in work.pages]
        assert len(used) == len(set(used)), "works must not share pages"
        for work in batch:
            assert work.end <= len(work.pages) * 16
        return np.zeros((len(batch), 10), np.float32)


def test_prefill_points_become_samples_of_what_was_computed() -> None:
    engine = NotingEngine(64)
    samples = measure_prefill(engine, [(64, 0), (16, 512)])  # type: ignore[arg-type]
    assert {sample[:2] for sample in samples} == {(64, 0), (16, 512)}
    assert all(seconds >= 0 for *_, seconds in samples)
    shapes = {(len(work.token_ids), work.start) for [work] in engine.steps}
    assert shapes == {(64, 0), (16, 512)}
    assert len(engine.steps) == 2 * (1 + REPEATS), "one warm-up each"
    assert engine.pages.used_pages == 0


def test_decode_samples_count_the_context_of_the_whole_batch() -> None:
    engine = NotingEngine(64)
    samples = measure_decode(engine, [(1, 100), (4, 50)])  # type: ignore[arg-type]
    assert {sample[:2] for sample in samples} == {(1, 100), (4, 200)}
    assert {len(step) for step in engine.steps} == {1, 4}
    assert all(work.start in (99, 49) for step in engine.steps for work in step)


def test_points_that_do_not_fit_are_left_out() -> None:
    engine = NotingEngine(8)
    samples = measure_decode(engine, [(8, 16), (9, 16), (1, 2000)])  # type: ignore[arg-type]
    assert [sample[:2] for sample in samples] == [(8, 128)]


def test_a_machine_too_busy_for_the_budget_still_gets_a_sample_of_the_cheapest_points() -> None:
    engine = NotingEngine(64)
    points = [(512, 0), (128, 0), (16, 0), (256, 0), (64, 0)]
    samples = measure_prefill(engine, points, budget_s=-1.0)  # type: ignore[arg-type]
    assert [sample[:2] for sample in samples] == [(16, 0), (64, 0), (128, 0)]
    assert engine.pages.free_pages == 64
