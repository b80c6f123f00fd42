"""The queue's seconds: reserved at once, replaced by what a report knows, never below zero."""

from __future__ import annotations

import random

import pytest

from conductor.estimates.estimates import PrefillEstimate
from conductor.estimates.pipeline import PipelineEstimate
from conductor.load.prefill_queue import PrefillQueue

ONE_MS_A_TOKEN = PipelineEstimate.of((PrefillEstimate(0.0, 0.001, 0.0),))


def queue() -> PrefillQueue:
    return PrefillQueue(ONE_MS_A_TOKEN, 0.0)


def test_a_reservation_counts_at_once_and_only_its_uncached_tokens() -> None:
    made = queue()
    made.reserve("a", 300, 700, 0.0)
    made.reserve("b", 200, 0, 0.0)
    assert made.work_s(0.0) == pytest.approx(0.5)


def test_a_request_that_overruns_does_not_eat_the_time_of_those_behind_it() -> None:
    made = queue()
    made.reserve("a", 300, 0, 0.0)
    made.reserve("b", 200, 0, 0.0)
    assert made.work_s(0.1) == pytest.approx(0.4)
    assert made.work_s(9.0) == pytest.approx(0.2)


def test_a_report_shrinks_the_first_reservations_first() -> None:
    made = queue()
    made.reserve("a", 300, 0, 0.0)
    made.reserve("b", 200, 0, 0.0)
    made.on_report(250, 2, 1.0, 0.2)
    assert made.work_s(1.0) == pytest.approx(0.25)
    made.drop("a", 1.0)
    assert made.work_s(1.0) == pytest.approx(0.2), "b had not begun"


def test_a_report_does_not_replace_what_it_cannot_know_yet() -> None:
    made = queue()
    made.reserve("a", 300, 0, 0.9)
    made.on_report(0, 0, 1.0, 0.2)
    assert made.work_s(1.0) == pytest.approx(0.2), "reserved 0.1 s ago, running since"
    made.on_report(0, 0, 1.2, 0.2)
    assert made.work_s(1.2) == 0.0


def test_work_of_other_fronts_comes_first_and_fades() -> None:
    made = queue()
    made.on_report(1_000, 2, 1.0, 0.2)
    made.reserve("a", 300, 0, 1.0)
    assert made.work_s(1.0) == pytest.approx(1.3) and made.requests == 3
    assert made.work_s(1.5) == pytest.approx(0.8)
    assert made.work_s(2.1) == pytest.approx(0.2), "ours began when the unattributed work was done"


def test_a_prompt_that_the_worker_has_not_looked_up_yet_is_not_taken_for_unattributed_work() -> (
    None
):
    made = queue()
    made.reserve("running", 300, 0, 0.0)
    made.reserve("cached", 1, 999, 0.0)
    made.on_report(300 + 1_000, 2, 0.2, 0.2)
    assert made.requests == 2
    assert made.work_s(0.2) == pytest.approx(0.101), "time has passed, nothing else is known"


def test_fewer_requests_than_reservations_means_that_the_first_are_done() -> None:
    made = queue()
    made.reserve("a", 300, 0, 0.0)
    made.reserve("b", 200, 0, 0.0)
    made.reserve("c", 100, 900, 0.0)
    made.on_report(1_000, 1, 0.2, 0.2)
    assert made.work_s(0.2) == pytest.approx(0.1), "only c is left"


@pytest.mark.parametrize("preempts", [True, False])
def test_a_long_random_life_never_goes_below_zero_and_ends_at_zero(
    seed: int, preempts: bool
) -> None:
    rng, now_s, number = random.Random(seed), 0.0, 0
    made = PrefillQueue(ONE_MS_A_TOKEN, 0.0, preempts)
    alive: list[str] = []
    for _ in range(2_000):
        now_s += rng.choice((0.0, 0.01, 0.3))
        step = rng.randrange(4)
        if step <= 1:
            number += 1
            key_s = now_s + rng.uniform(0.0, 5.0)
            made.reserve(f"r{number}", rng.randint(1, 5_000), rng.randint(0, 5_000), now_s, key_s)
            alive.append(f"r{number}")
        elif step == 2:
            made.on_report(rng.randint(0, 9_000), rng.randint(0, 9), now_s, 0.2)
        elif alive:
            gone = alive.pop(rng.randrange(len(alive)))
            assert made.drop(gone, now_s) and not made.drop(gone, now_s)
        made.check()
        assert 0.0 <= made.work_s(now_s + 1.0) <= made.work_s(now_s)
    for request_id in alive:
        made.drop(request_id, now_s)
    made.on_report(0, 0, now_s, 0.2)
    assert made.work_s(now_s) == 0.0 and made.requests == 0


def keyed(preempts: bool) -> PrefillQueue:
    """`a` has begun; `b` has a late key and `c` an early one."""
    made = PrefillQueue(ONE_MS_A_TOKEN, 0.0, preempts)
    made.reserve("a", 300, 0, 0.0, key_s=5.0)
    made.reserve("b", 200, 0, 0.0, key_s=9.0)
    made.reserve("c", 100, 0, 0.1, key_s=1.0)
    return made


def test_what_is_ahead_and_behind_goes_by_the_keys() -> None:
    made = keyed(preempts=True)
    assert made.ahead_s(0.5, 0.1) == 0.0 and made.behind(0.5) == 3
    assert made.ahead_s(1.0, 0.1) == pytest.approx(0.1) and made.behind(1.0) == 2
    assert made.ahead_s(6.0, 0.1) == pytest.approx(0.1 + 0.2) and made.behind(6.0) == 1
    assert made.ahead_s(9.0, 0.1) == pytest.approx(made.work_s(0.1)) == pytest.approx(0.5)


def test_an_engine_that_finishes_what_it_began_is_overtaken_only_in_its_queue() -> None:
    made = keyed(preempts=False)
    assert made.ahead_s(0.5, 0.1) == pytest.approx(0.2) and made.behind(0.5) == 2
    assert made.ahead_s(1.0, 0.1) == pytest.approx(0.3) and made.behind(1.0) == 1


def test_what_an_overtaken_prompt_has_computed_stays_computed() -> None:
    made = keyed(preempts=True)  # a computed for 0.1 s when c came
    made.drop("c", 0.2)
    assert made.work_s(0.2) == pytest.approx(0.2 + 0.2)
    made.on_report(350, 2, 0.4, 0.2)
    assert made.work_s(0.4) == pytest.approx(0.35), "the report knows better"


def test_half_a_step_is_waited_for_and_no_more_than_the_head_has_left() -> None:
    made = keyed(preempts=True)
    made.step_s = 0.08
    assert made.ahead_s(0.5, 0.1) == pytest.approx(0.04)
    assert made.ahead_s(0.5, 0.19) == pytest.approx(0.01)


@pytest.mark.parametrize("preempts", [True, False])
def test_ahead_and_behind_agree_with_a_walk_over_the_line(seed: int, preempts: bool) -> None:
    rng = random.Random(seed)
    made = PrefillQueue(ONE_MS_A_TOKEN, 0.0, preempts)
    keys = {f"r{n}": rng.uniform(0, 9) for n in range(30)}
    for name, key_s in keys.items():
        made.reserve(name, 100, 0, 0.0, key_s)
    head = min(keys, key=keys.__getitem__) if preempts else "r0"
    for probe_s in (*keys.values(), -1.0, 99.0):
        ahead = sum(key_s <= probe_s for name, key_s in keys.items() if name != head)
        if not preempts or keys[head] <= probe_s:
            ahead += 1
        assert made.ahead_s(probe_s, 0.0) == pytest.approx(0.1 * ahead)
        assert made.behind(probe_s) == len(keys) - ahead


def test_the_next_prompt_of_a_group_begins_while_the_last_chunk_passes_the_other_stages() -> None:
    half = PrefillEstimate(0.0, 0.0005, 0.0)
    made = PrefillQueue(PipelineEstimate.of((half, half), chunk_tokens=100), 0.0)
    made.reserve("a", 1_000, 0, 0.0)
    made.reserve("b", 1_000, 0, 0.0)
    assert made.work_s(0.0) == pytest.approx(1.0), "two halves, one after the other"
    made.drop("a", 0.55)  # 0.5 s of work, and the last 100 tokens once more
    assert made.work_s(0.55) == pytest.approx(0.45)
    made.drop("b", 0.8)
    assert made.work_s(0.8) == 0.0
    made.check()


def test_a_cancelled_prompt_of_a_group_does_not_give_the_next_one_a_start() -> None:
    half = PrefillEstimate(0.0, 0.0005, 0.0)
    made = PrefillQueue(PipelineEstimate.of((half, half), chunk_tokens=100), 0.0)
    made.reserve("a", 1_000, 0, 0.0)
    made.reserve("b", 1_000, 0, 0.0)
    made.drop("a", 0.2)
    assert made.work_s(0.2) == pytest.approx(0.5)
