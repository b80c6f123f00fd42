"""What a simulated run wasted: every second computed for requests that got no answer."""

from __future__ import annotations

from conductor import Request
from loadtest.simulator.cluster.job import SimulatedJob
from loadtest.simulator.cluster.outcome import outcome_of


def job(number: int, compute_s: float, lost_s: float = 0.0, refused: str = "") -> SimulatedJob:
    made = SimulatedJob(number, Request(f"r{number}", 1_000, [], 10), 10, 0.0, refused=refused)
    made.own_compute_s, made.lost_compute_s = compute_s, lost_s
    return made


def test_a_prefill_that_was_given_up_on_the_way_is_wasted_as_far_as_it_came() -> None:
    answered, refused, given_up, unseen = (
        job(0, 2.0),
        job(1, 3.0, refused="decode_overload"),
        job(2, 1.5, refused="store_full"),
        job(3, 0.0, refused="prefill_queue_full"),
    )
    for prefilled in (answered, refused):
        prefilled.prefilled_s = 5.0
    answered.first_token_s, answered.finished_s = 5.0, 9.0
    found = outcome_of([answered, refused, given_up, unseen])
    assert (found.prefills, found.wasted_prefills) == (3, 2)
    assert (found.prefill_s, found.wasted_prefill_s) == (6.5, 4.5)


def test_what_a_worker_that_died_had_computed_is_wasted_though_the_answer_came() -> None:
    answered = job(0, 3.0, lost_s=1.0)
    answered.prefilled_s = answered.first_token_s = 4.0
    answered.finished_s = 6.0
    found = outcome_of([answered])
    assert found.wasted_prefills == 0 and found.wasted_prefill_s == 1.0
