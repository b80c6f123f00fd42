"""The batch's counts: coming, joined, reported; and what is left of them at a later moment."""

from __future__ import annotations

import random

import pytest

from conductor.load.decode_batch import DecodeBatch
from tests.conductor.fleet import report


def joined(*request_ids: str, now_s: float = 0.0, leave_s: float = 100.0) -> DecodeBatch:
    made = DecodeBatch()
    for request_id in request_ids:
        made.reserve(request_id, 100, 2, now_s)
        made.join(request_id, now_s, leave_s)
    return made


def test_a_request_in_prefill_is_reserved_but_not_in_the_batch() -> None:
    made = DecodeBatch()
    made.reserve("a", 100, 2, 5.0)
    assert made.load_now().sequences == 0 and made.load_reserved().sequences == 1
    made.join("a", 5.0, 9.0)
    assert made.load_now() == (1, 100, 2) and made.load_reserved().sequences == 1


def test_a_report_counts_a_known_request_once() -> None:
    made = joined("a", "b")
    made.on_report(report("d0", running=2, context_tokens=230, pages_used=4), 1.0, 0.2)
    assert made.load_now() == (2, 230, 4)


def test_a_request_that_joined_just_before_a_report_counts_once_whether_it_is_in_it_or_not() -> (
    None
):
    for known in (0, 1):
        made = joined("a", now_s=0.9)
        said = report("d0", running=known, context_tokens=100 * known, pages_used=2 * known)
        made.on_report(said, 1.0, 0.2)
        assert made.load_now() == (1, 100, 2)


def test_pages_that_are_reserved_while_the_prefill_runs_count_once() -> None:
    made = DecodeBatch()
    made.reserve("a", 100, 7, 5.0)
    made.on_report(report("d0", pages_used=7), 1.0, 0.2)
    assert made.load_now() == (0, 0, 0) and made.load_reserved() == (1, 100, 7)


def test_a_finished_request_leaves_at_once_although_it_was_reported() -> None:
    made = joined("a", "b")
    made.on_report(report("d0", running=2, context_tokens=200, pages_used=4), 1.0, 0.2)
    made.drop("a", 1.0)
    assert made.load_now() == (1, 100, 2)
    made.drop("b", 1.0)
    assert made.load_now() == (0, 0, 0)


def test_a_finish_that_was_lost_is_cured_by_the_next_report() -> None:
    made = joined("a", "b")
    made.on_report(report("d0"), 1.0, 0.2)
    assert made.load_now() == (0, 0, 0) and len(made) == 2
    made.drop("a", 1.0)
    assert made.load_now() == (0, 0, 0), "never below zero"


def test_a_report_from_just_before_a_finish_brings_nobody_back() -> None:
    made = joined("a", "b")
    for request_id in "ab":
        made.drop(request_id, 1.0)
    said = report("d0", running=2, context_tokens=230, pages_used=4)
    made.on_report(said, 1.05, 0.2)
    assert made.load_now() == (0, 0, 0)
    made.on_report(said, 1.3, 0.2)
    assert made.load_now() == (2, 230, 4), "they are somebody else's: this one knew of the end"


def test_a_report_from_just_before_a_finish_tells_of_others_all_the_same() -> None:
    made = joined("a", "b")
    made.drop("a", 1.0)
    made.on_report(report("d0", running=3, context_tokens=330, pages_used=6), 1.05, 0.2)
    assert made.load_now() == (2, 220, 4), "b, and one that is not ours"
    made.check()


def test_a_request_that_waits_in_the_workers_queue_takes_room_too() -> None:
    made = DecodeBatch()
    made.on_report(report("d0", running=4, queue_requests=3), 1.0, 0.2)
    assert made.load_now().sequences == 7


def test_the_load_at_prefill_end_adds_who_comes_and_takes_away_who_leaves() -> None:
    made = joined("a", "b", leave_s=4.0)
    made.reserve("c", 300, 5, 3.0)
    made.reserve("d", 300, 5, 8.0)
    assert made.load_at(3.5, 0.0, 10.0) == (3, 500, 9)
    assert made.load_at(4.0, 0.0, 10.0).sequences == 1
    assert made.load_at(9.0, 0.0, 10.0).sequences == 2
    assert made.load_at(13.5, 0.0, 10.0).sequences == 1, "c has come and gone"


def test_one_that_outlived_its_expectation_is_assumed_to_stay() -> None:
    made = joined("a", leave_s=4.0)
    assert made.load_at(6.0, 5.0, 10.0).sequences == 1


def test_those_of_a_report_have_had_a_token_a_step_since_then() -> None:
    made = joined("a", "b", now_s=0.0)
    said = report("d0", running=2, context_tokens=230, pages_used=4, step_s=0.010)
    made.on_report(said, 1.0, 0.2)
    made.reserve("c", 100, 2, 1.5)
    made.join("c", 1.5, 100.0)  # not in the report, so not counted among those who had tokens
    assert made.load_at(2.0, 1.5, 50.0).context_tokens == pytest.approx(230 + 100 + 2 * 100)
    assert made.load_now().context_tokens == 330, "what was reported, for whoever asks about now"


def test_requests_of_other_fronts_leave_evenly_over_the_expected_time() -> None:
    made = DecodeBatch()
    made.on_report(report("d0", running=8, context_tokens=800), 0.0, 0.2)
    assert made.load_at(5.0, 0.0, 10.0).sequences == pytest.approx(4)
    assert made.load_at(50.0, 0.0, 10.0).sequences == 0
    assert made.leave_times(0.0, 10.0)[0] == pytest.approx(1.25)


def test_a_long_random_life_keeps_its_counts_and_ends_at_zero(seed: int) -> None:
    rng, made, now_s, number = random.Random(seed), DecodeBatch(), 0.0, 0
    alive: list[str] = []
    for _ in range(2_000):
        now_s += rng.choice((0.0, 0.01, 0.3))
        step = rng.randrange(5)
        if step == 0:
            number += 1
            made.reserve(f"r{number}", rng.randint(1, 9_000), rng.randint(1, 90), now_s + 1)
            alive.append(f"r{number}")
        elif step == 1 and alive:
            made.join(rng.choice(alive), now_s, now_s + rng.uniform(0, 5))
        elif step == 2:
            running = rng.randint(0, 20)
            tokens, pages = running * rng.randint(0, 900), running * rng.randint(0, 9)
            said = report("d0", running=running, context_tokens=tokens, pages_used=pages)
            made.on_report(said, now_s, 0.2)
        elif alive:
            gone = alive.pop(rng.randrange(len(alive)))
            assert made.drop(gone, now_s) and not made.drop(gone, now_s)
        made.check()
        assert min(made.load_now()) >= 0 and min(made.load_at(now_s + 2, now_s, 3.0)) >= 0
    for request_id in alive:
        made.drop(request_id, now_s)
    made.on_report(report("d0"), now_s, 0.2)
    assert made.load_now() == (0, 0, 0) and made.load_reserved().sequences == 0
