"""An idle cluster admits anybody, under every admission, whatever came before."""

from __future__ import annotations

import random

import pytest

from conductor import Conductor, ConductorConfig, Reject, Request, Route
from conductor.config import ADMISSIONS, SHEDDINGS
from mooncake_store.records.events import WorkerReported
from tests.conductor.fleet import fleet, report

TENANTS = ("", "a", "b")


class Storm:
    """Overload of every kind, with wrong predictions; then silence."""

    def __init__(self, seed: int, admission: str, shedding: str) -> None:
        self.rng = random.Random(seed)
        config = ConductorConfig(
            admission=admission,
            shedding=shedding,
            ttft_slo_s=2.0,
            tbt_slo_s=0.04,
            tenant_shares="a:3",
            request_s_max=1e6,
        )
        self.conductor = Conductor(config)
        self.conductor.on_events(fleet(slots_max=6, pages_max=1_700), 0.0)
        self.now_s, self.alive, self.answers = 0.0, list[str](), list[Route | Reject]()

    def ask(self, number: int) -> Route | Reject:
        tokens = int(10 ** self.rng.uniform(0, 4.9))
        request = Request(
            f"r{number}",
            tokens,
            [],
            self.rng.choice((0, 5, 5_000)),
            self.rng.randint(-2, 2),
            tenant=self.rng.choice(TENANTS),
        )
        answer = self.conductor.on_request(request, self.now_s)
        self.answers.append(answer)
        if isinstance(answer, Route):
            self.alive.append(request.request_id)
        return answer

    def rage(self, requests: int) -> None:
        for number in range(requests):
            self.now_s += self.rng.expovariate(4)
            self.ask(number)
            if self.alive and self.rng.random() < 0.6:
                chosen = self.rng.choice(self.alive)
                self.conductor.on_prefill_finished(chosen, self.now_s, 0, self.rng.uniform(0, 9))
                if self.rng.random() < 0.7:
                    self.alive.remove(chosen)
                    self.conductor.on_finished(chosen, self.now_s, self.rng.randrange(5_000))
            if self.rng.random() < 0.1:
                self.conductor.on_worker_refused(f"d{self.rng.randrange(2)}", "w1", self.now_s)
            if number % 5 == 0:
                self.report(self.rng.randrange(8))
        self.conductor.check()

    def report(self, running: int) -> None:
        said = [
            report(
                name,
                running=running,
                queue_requests=running,
                queue_tokens=running * 900,
                context_tokens=running * 5_000,
                pages_used=running * 100,
                step_s=running * self.rng.uniform(0.01, 0.09),
            )
            for name in ("p0", "p1", "d0", "d1")
        ]
        self.conductor.on_events([WorkerReported(one) for one in said], self.now_s)

    def calm(self) -> None:
        for request_id in self.alive:
            self.conductor.on_finished(request_id, self.now_s)
        self.alive.clear()
        self.now_s += 0.5
        self.report(0)
        self.conductor.check()


@pytest.mark.parametrize("shedding", SHEDDINGS)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_idle_cluster_admits_anybody_whom_it_can_hold(
    admission: str, shedding: str, seed: int
) -> None:
    storm = Storm(seed, admission, shedding)
    for number in range(2):
        storm.rage(100)
        for late in range(3):
            storm.calm()
            answer = storm.ask(1_000_000 + 10 * number + late)
            assert isinstance(answer, Route), answer
    assert any(isinstance(answer, Reject) for answer in storm.answers), "it was overload"


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_same_storm_is_answered_the_same_way(admission: str, seed: int) -> None:
    runs = []
    for _ in range(2):
        storm = Storm(seed, admission, "fair_share")
        storm.rage(150)
        runs.append(storm.answers)
    assert runs[0] == runs[1]


def test_every_rejection_for_load_says_which_limit_what_value_and_when_to_return(seed: int) -> None:
    kinds = set()
    for admission in ADMISSIONS:
        storm = Storm(seed, admission, "fair_share")
        storm.rage(150)
        for answer in storm.answers:
            if isinstance(answer, Reject):
                kinds.add(answer.kind)
                assert any(letter.isdigit() for letter in answer.reason), answer.reason
                assert 0.5 <= answer.retry_after_s <= 60.0 or answer.kind == "too_large"
    assert {"ttft_slo", "decode_full", "fair_share"} <= kinds
