"""What a worker's speed is learned from: each second of computing counts for one prompt only."""

from __future__ import annotations

import random

import pytest

from conductor.estimates.measured import PRIOR
from conductor.load.worker import WorkerState
from tests.conductor.fleet import worker


def ratio(bench: WorkerState) -> float:
    """Measured / estimated of all that was learned, without the prior's pull."""
    measured_s, estimated_s, _ = bench.speed.sums
    return measured_s / estimated_s


@pytest.fixture
def bench() -> WorkerState:
    return WorkerState(worker("p0", "prefill", "s0"), 0.0)


def test_prompts_that_shared_a_step_count_it_once(bench: WorkerState) -> None:
    for _ in range(4):
        bench.prefilled(began_s=0.0, seconds=1.0, estimated_s=0.25, now_s=1.0)
    assert ratio(bench) == pytest.approx(1.0)


def test_a_prompt_that_was_overtaken_on_the_way_still_took_its_own_time(bench: WorkerState) -> None:
    # Ten seconds of computing in two parts; in between, and last of all, short ones of 0.1 s.
    bench.prefilled(began_s=4.0, seconds=0.1, estimated_s=0.1, now_s=4.1)
    bench.prefilled(began_s=9.9, seconds=0.1, estimated_s=0.1, now_s=10.0)
    bench.prefilled(began_s=0.0, seconds=10.0, estimated_s=10.0, now_s=10.2)
    assert ratio(bench) == pytest.approx(1.0)


def test_what_ended_before_a_prompt_began_takes_nothing_from_it(bench: WorkerState) -> None:
    bench.prefilled(began_s=0.0, seconds=2.0, estimated_s=2.0, now_s=2.0)
    bench.prefilled(began_s=1.0, seconds=2.0, estimated_s=1.0, now_s=3.0)  # shared [1, 2]
    assert ratio(bench) == pytest.approx(1.0)


def test_any_order_of_overtaking_gives_the_true_speed(bench: WorkerState, seed: int) -> None:
    """Chunks of random prompts, one per step, shortest remaining first; each step slower by 1.5."""
    rng, now_s = random.Random(seed), 0.0
    left: dict[int, float] = {}
    began_s: dict[int, float] = {}
    whole_s: dict[int, float] = {}
    for number in range(200):
        left[number] = whole_s[number] = rng.choice((0.1, 0.1, 0.3, 2.0, 8.0))
        for _ in range(rng.randrange(0, 12)):
            if not left:
                break
            first = min(left, key=lambda each: (left[each], each))
            began_s.setdefault(first, now_s)
            step_s = min(0.25, left[first])
            now_s += 1.5 * step_s
            left[first] -= step_s
            if left[first] <= 1e-9:
                del left[first]
                its_s = 1.5 * whole_s[first]
                bench.prefilled(began_s[first], its_s, whole_s[first], now_s)
    assert ratio(bench) == pytest.approx(1.5, rel=0.01), f"{now_s:.0f} s, prior {PRIOR}"


def test_prompts_right_behind_each_other_fill_a_group_once(bench: WorkerState) -> None:
    """Two stages of 0.5 s: alone a prompt takes a second, and each one behind it half a second."""
    bench.prefilled(began_s=0.0, seconds=1.0, estimated_s=0.5, now_s=1.0, fill_s=0.5)
    for end_s in (1.5, 2.0, 2.5):
        bench.prefilled(began_s=0.0, seconds=1.0, estimated_s=0.5, now_s=end_s, fill_s=0.5)
    assert ratio(bench) == pytest.approx(1.0)
