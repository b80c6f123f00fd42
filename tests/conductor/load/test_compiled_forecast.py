"""A compiled forecast is the one that numpy makes, to the last bit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from conductor.estimates.lengths import OutputLengths
from conductor.load.decode_batch import DecodeBatch
from conductor.load.decode_forecast import DecodeForecast, ExpectedAnswer, ForecastTable
from mooncake_store.native import library
from tests.conductor.fleet import report

TENANTS = ("", "a")


@pytest.mark.slow
@pytest.mark.skipif(library.library() is None, reason=library.why_not())
def test_a_compiled_forecast_is_the_one_that_numpy_makes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        lengths = OutputLengths(rng.choice((20.0, 200.0)))
        sigma = rng.choice((0.0, 1.0))
        tables = [ForecastTable(sigma), ForecastTable(sigma)]
        assert tables[0].compiled is not None
        tables[1].compiled = None
        step_s = rng.choice((0.0, 0.01, 0.3))
        workers: list[list[DecodeBatch]] = [[], []]
        for batches, table in zip(workers, tables, strict=True):
            for _ in range(10):  # more than the table begins with
                batches.append(DecodeBatch())
                batches[-1].forecast = DecodeForecast(table, lengths, step_s)
        now_s, there = 0.0, []
        for number in range(150):
            now_s += rng.choice((0.0, 0.01, 1.3))
            worker = rng.randrange(10)
            drawn = (rng.random(), rng.uniform(-0.5, 5.0), rng.choice(TENANTS), rng.randrange(4))
            tokens = (rng.randint(1, 5_000), rng.randint(1, 80), rng.choice((0, 1, 50, 4_000)))
            chosen = rng.randrange(len(there)) if there else 0
            said = report(
                "d0",
                running=rng.choice((0, 3)),
                context_tokens=rng.randint(0, 9_000),
                pages_used=rng.randint(0, 90),
                step_s=rng.choice((0.0, 0.05)),
            )
            if drawn[0] < 0.1:
                lengths.learn((drawn[3], drawn[2]), tokens[0] / 10, drawn[1] < 0, now_s)
            for batches in workers:
                if drawn[0] < 0.4 or not there:
                    answer = ExpectedAnswer((drawn[3], drawn[2]), tokens[2])
                    end_s = now_s + drawn[1]
                    batches[worker].reserve(f"r{number}", *tokens[:2], end_s, answer, now_s)
                elif drawn[0] < 0.6:
                    batches[there[chosen][1]].join(there[chosen][0], now_s, now_s + 5.0)
                elif drawn[0] < 0.7:
                    batches[there[chosen][1]].drop(there[chosen][0], now_s)
                else:
                    batches[worker].on_report(said, now_s, 0.2)
            if drawn[0] < 0.4 or not there:
                there.append((f"r{number}", worker))
            elif 0.6 <= drawn[0] < 0.7:
                del there[chosen]
            compare(tables, now_s + drawn[1])
        for batch in workers[0]:
            batch.check()


def compare(tables: list[ForecastTable], at_s: float) -> None:
    rows = np.arange(10)
    found, expected = (table.at(rows, at_s) for table in tables)
    assert np.array_equal(found, expected)
    assert np.array_equal(tables[0]._peaks, tables[1]._peaks)
    assert [tables[0].one_at(row, at_s) for row in range(10)] == found.tolist()
