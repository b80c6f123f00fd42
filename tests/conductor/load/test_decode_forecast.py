"""A decode worker's load later: whoever is there leaves as its class does, whoever comes joins."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from conductor.estimates.lengths import OutputLengths
from conductor.load.decode_batch import DecodeBatch, DecodeLoad
from conductor.load.decode_forecast import DecodeForecast, ExpectedAnswer, ForecastTable
from tests.conductor.fleet import report

KEY = (0, "")
STEP_S = 0.1


class Bench:
    """One decode worker with a forecast; answers are of 100 tokens (10 s), unless given."""

    def __init__(self, answers: int = 2_000, tokens: float = 100.0, sigma: float = 0.0) -> None:
        self.lengths = OutputLengths(tokens)
        for _ in range(answers):
            self.lengths.learn(KEY, tokens, False, 0.0)
        self.table = ForecastTable(sigma)
        self.batch = self.worker()

    def worker(self) -> DecodeBatch:
        batch = DecodeBatch()
        batch.forecast = DecodeForecast(self.table, self.lengths, STEP_S)
        return batch

    def reserve(
        self, name: str, end_s: float, now_s: float = 0.0, tokens_max: int = 4_000, pages: int = 5
    ) -> None:
        self.batch.reserve(name, 1_000, pages, end_s, ExpectedAnswer(KEY, tokens_max), now_s)

    def join(self, name: str, now_s: float, **changes: int) -> None:
        self.reserve(name, now_s, now_s, **changes)
        self.batch.join(name, now_s, now_s + 10.0)

    def report(self, now_s: float, running: int, context_tokens: int = 0, pages: int = 0) -> None:
        said = report(
            "d0", running=running, context_tokens=context_tokens, pages_used=pages, step_s=STEP_S
        )
        self.batch.on_report(said, now_s, 0.2)

    def at(self, at_s: float) -> DecodeLoad:
        assert self.batch.forecast is not None
        self.batch.check()
        return DecodeLoad(*self.table.at(np.array([self.batch.forecast.row]), at_s)[0])


def test_whoever_is_there_stays_until_answers_of_its_class_end() -> None:
    bench = Bench()
    bench.join("a", 0.0)
    bench.report(0.5, 1, 1_005, 5)
    assert bench.at(0.5).sequences == pytest.approx(1.0)
    assert bench.at(4.0).sequences > 0.95
    assert bench.at(30.0).sequences < 0.05
    assert bench.at(4.0).context_tokens == pytest.approx(1_040, rel=0.05), "it grows"


def test_one_that_outlived_the_others_is_expected_to_stay() -> None:
    bench = Bench()
    bench.join("a", 0.0)
    bench.report(60.0, 1, 1_600, 5)
    assert bench.at(62.0).sequences > 0.9


def test_nobody_stays_beyond_max_tokens() -> None:
    bench = Bench()
    bench.join("a", 0.0, tokens_max=20)
    bench.report(0.5, 1, 1_005, 5)
    assert bench.at(1.0).sequences > 0.9 and bench.at(4.5).sequences == 0.0


def test_one_that_comes_counts_from_its_prefill_on_and_before_as_the_peak_to_come() -> None:
    bench = Bench()
    bench.report(0.0, 0)
    bench.reserve("a", end_s=4.0)
    assert bench.at(5.0).sequences > 0.9
    assert bench.at(0.0).sequences > 0.9, "who joins before it decodes beside it"
    assert bench.at(40.0).sequences < 0.1, "it has come and gone"


def test_room_that_a_longer_prefill_books_is_not_given_away_twice() -> None:
    bench = Bench()
    bench.join("a", 0.0)
    bench.reserve("b", end_s=8.0)
    bench.report(0.5, 1, 1_005, 5)
    assert bench.at(2.0).sequences > 1.5, "a may still be there when b joins"
    assert bench.at(30.0).sequences < 0.2


def test_a_late_prefill_is_still_coming() -> None:
    bench = Bench()
    bench.reserve("a", end_s=1.0)
    bench.report(20.0, 0)
    assert bench.at(22.0).sequences > 0.9


def test_finished_is_gone_at_once_and_a_lost_finish_with_the_next_report() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(name, 0.0)
    bench.report(0.5, 2, 2_010, 10)
    bench.batch.drop("a", 0.5)
    assert bench.at(0.5).sequences == pytest.approx(1.0)
    bench.report(1.0, 0)
    assert bench.at(1.0).sequences == 0.0


def test_requests_of_other_fronts_leave_as_answers_of_unknown_age_do() -> None:
    bench = Bench()
    bench.report(0.0, 8, 8_000, 80)
    assert bench.at(0.0) == (8, 8_000, 80)
    assert bench.at(5.0).sequences == pytest.approx(4.0, rel=0.2), "of 10 s, 5 are left on average"


def test_pages_count_with_their_uncertainty() -> None:
    plain, careful = Bench(sigma=0.0), Bench(sigma=2.0)
    for bench in (plain, careful):
        for number in range(20):
            bench.join(f"r{number}", 0.0)
        bench.report(0.5, 20, 20_000, 100)
    assert careful.at(0.5).pages == pytest.approx(plain.at(0.5).pages), "now it is certain"
    more = [careful.at(t).pages - plain.at(t).pages for t in np.arange(0.5, 20.0, 0.1)]
    assert min(more) >= 0 and max(more) > 5
    assert max(careful.at(t).pages for t in np.arange(0.5, 20.0, 0.1)) <= 100.0, "all of them"


def test_predicted_sequences_are_those_that_stay(seed: int) -> None:
    rng, bench = random.Random(seed), Bench(answers=0, sigma=0.0)
    lengths = [rng.expovariate(1 / 120) for _ in range(3_000)]
    for tokens in lengths:
        bench.lengths.learn(KEY, tokens, False, 0.0)
    alive = {f"r{n}": rng.choice(lengths) * STEP_S for n in range(400)}
    for name in alive:
        bench.join(name, 0.0)
    for ask_s in (3.0, 6.0):
        for name, end_s in list(alive.items()):
            if end_s <= ask_s:
                bench.batch.drop(name, ask_s - 1.0)
                del alive[name]
        bench.report(ask_s, len(alive), 0, 0)
        for ahead_s in (1.0, 4.0, 10.0):
            left = sum(end_s > ask_s + ahead_s for end_s in alive.values())
            expected = bench.at(ask_s + ahead_s).sequences
            # Each stays or leaves by itself.
            spread = math.sqrt(expected * (1 - expected / len(alive)))
            assert left == pytest.approx(expected, rel=0.05, abs=5 * spread)


def test_a_long_random_life_keeps_its_sums_and_ends_at_nothing(seed: int) -> None:
    rng, bench, now_s = random.Random(seed), Bench(sigma=1.0), 0.0
    alive: list[str] = []
    for number in range(1_500):
        now_s += rng.choice((0.0, 0.01, 0.3))
        step = rng.randrange(5)
        if step == 0:
            bench.reserve(
                f"r{number}",
                now_s + rng.uniform(0, 5),
                now_s,
                rng.randint(0, 900),
                rng.randint(1, 99),
            )
            alive.append(f"r{number}")
        elif step == 1 and alive:
            bench.batch.join(rng.choice(alive), now_s, now_s + 5)
        elif step == 2:
            running = rng.randint(0, 20)
            bench.report(now_s, running, running * 900, running * 9)
        elif alive:
            bench.batch.drop(alive.pop(rng.randrange(len(alive))), now_s)
        assert min(bench.at(now_s + rng.uniform(0, 99))) >= 0
    for name in alive:
        bench.batch.drop(name, now_s)
    bench.report(now_s, 0)
    assert bench.at(now_s) == bench.at(now_s + 50) == (0, 0, 0)


def test_many_workers_are_asked_at_once_and_rows_are_used_again() -> None:
    bench = Bench()
    workers = [bench.worker() for _ in range(20)]
    for number, batch in enumerate(workers):
        for name in range(number):
            batch.reserve(f"r{name}", 10, 1, 0.0, ExpectedAnswer(KEY, 100), 0.0)
    rows = np.array([batch.forecast.row for batch in workers if batch.forecast])
    assert bench.table.at(rows, 0.0)[:, 0].round().tolist() == list(range(20))
    last = workers[-1].forecast
    assert last is not None
    last.close()
    again = bench.worker().forecast
    assert again is not None and again.row == last.row
    assert bench.table.at(np.array([again.row]), 0.0).tolist() == [[0.0, 0.0, 0.0]]


def test_one_request_alone_is_computed_as_many_are(seed: int) -> None:
    rng, bench = random.Random(seed), Bench()
    bench.report(7.0, 0)
    for number in range(30):
        end_s = 7.0 + rng.choice((0.0, 0.4, 5.0))
        bench.reserve(f"r{number}", end_s, 7.0, rng.randint(0, 300), rng.randint(1, 50))
        if end_s == 7.0:
            bench.batch.join(f"r{number}", 7.0, 17.0)
    times = [7.0 + 0.3 * n for n in range(100)]
    alone = [bench.at(at_s) for at_s in times]
    assert bench.batch.forecast is not None
    bench.batch.forecast.renew(7.0, STEP_S)
    bench.batch.forecast.settle(1.0, (0, 0, 0))
    for at_s, found in zip(times, alone, strict=True):
        assert bench.at(at_s) == pytest.approx(found, rel=1e-6, abs=1e-6)
