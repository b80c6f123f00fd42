"""The estimate of a pipeline group, against the schedule of its chunks worked out one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.estimates.estimates import PrefillEstimate
from conductor.estimates.pipeline import PipelineEstimate

CHUNK = 512


def scheduled_s(
    stages: Sequence[PrefillEstimate], new: int, prefix: int, hop_s: float
) -> tuple[float, float]:
    """When the last stage ends the last chunk, and when the first one is free: each stage begins a
    chunk when it has come and the one before is done."""
    free_s = [0.0] * len(stages)
    came_s = 0.0
    for start in range(prefix, prefix + new, CHUNK):
        tokens, came_s = min(CHUNK, prefix + new - start), 0.0
        for number, stage in enumerate(stages):
            came_s = max(came_s, free_s[number]) + stage.seconds(tokens, start)
            free_s[number] = came_s
            came_s += hop_s
    return came_s - hop_s, max(free_s[0], 0.0)


def test_two_alike_stages_take_half_of_a_long_prompt_and_half_a_chunk() -> None:
    whole = PrefillEstimate(0.0, 0.001, 0.0)
    half = PrefillEstimate(0.0, 0.0005, 0.0)
    group = PipelineEstimate.of((half, half), CHUNK, hops_s=0.002)
    tokens = 16 * CHUNK
    assert group.work_s(tokens, 0) == pytest.approx(whole.seconds(tokens, 0) / 2)
    assert group.seconds(tokens, 0) == pytest.approx(
        whole.seconds(tokens, 0) / 2 + whole.seconds(CHUNK, 0) / 2 + 0.002
    )


def test_a_prompt_of_one_chunk_takes_as_long_as_on_one_worker_and_the_hops() -> None:
    stages = [PrefillEstimate(0.0, 0.0002, 1e-8)] * 5
    group = PipelineEstimate.of(stages, CHUNK, hops_s=0.004)
    alone = PrefillEstimate(0.0, 0.001, 5e-8)
    assert group.seconds(300, 4_000) == pytest.approx(alone.seconds(300, 4_000) + 0.004)


def test_one_worker_is_a_group_with_nothing_to_fill() -> None:
    alone = PrefillEstimate(0.01, 0.001, 1e-8)
    group = PipelineEstimate.of((alone,), CHUNK)
    assert group.fill_s(700, 300) == 0.0
    assert group.seconds(700, 300) == group.work_s(700, 300) == alone.seconds(700, 300)


def test_nothing_to_compute_takes_no_time() -> None:
    assert PipelineEstimate.of((PrefillEstimate(1.0, 1.0, 1.0),), 0, 1.0).seconds(0, 99) == 0.0


stage_counts = st.integers(1, 8)
scales = st.lists(st.floats(0.2, 2.0), min_size=1, max_size=6)


@given(
    scales=scales,
    new=st.integers(1, 40 * CHUNK),
    prefix=st.integers(0, 100_000),
    pair_s=st.floats(0, 1e-7),
    hop_s=st.floats(0, 0.01),
)
def test_it_is_never_less_than_the_schedule_says_and_at_most_a_chunk_more(
    scales: list[float], new: int, prefix: int, pair_s: float, hop_s: float
) -> None:
    """For stages whose times are in proportion, as those of one model are."""
    stages = [PrefillEstimate(0.0, 1e-3 * scale, pair_s * scale) for scale in scales]
    group = PipelineEstimate.of(stages, CHUNK, hop_s * (len(stages) - 1))
    exact_s, _ = scheduled_s(stages, new, prefix, hop_s)
    longest_s = max(s.seconds(CHUNK, prefix + new) for s in stages)
    assert group.seconds(new, prefix) >= exact_s * (1 - 1e-9)
    assert group.seconds(new, prefix) <= (exact_s + len(stages) * longest_s) * (1 + 1e-9)


@given(stages=stage_counts, chunks=st.integers(1, 60), prefix=st.integers(0, 100_000))
def test_with_stages_alike_and_full_chunks_it_is_the_schedule(
    stages: int, chunks: int, prefix: int
) -> None:
    alike = [PrefillEstimate(0.0, 1e-3, 2e-8)] * stages
    group = PipelineEstimate.of(alike, CHUNK, 0.003 * (stages - 1))
    exact_s, free_s = scheduled_s(alike, chunks * CHUNK, prefix, 0.003)
    assert group.seconds(chunks * CHUNK, prefix) == pytest.approx(exact_s)
    assert group.work_s(chunks * CHUNK, prefix) == pytest.approx(free_s)
