"""A few seeds of the whole system, and proof that they would notice: planted defects are found.

The long run is `make fuzz-serve`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fuzz_serve import stage
from tests.fuzz_serve.defects import DEFECTS, Plant
from tests.fuzz_serve.simulation import Simulation

COMMON = {
    "blocks adopted",
    "calls of further attempts",
    "commits",
    "evictions",
    "kill",
    "one-sided transfers",
}
SEEDS_UNTIL_FOUND = 200  # most are found by the first or second


@pytest.fixture(autouse=True)
def on_stage() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # every fault has its lines
    with stage.on_stage():
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_no_seed_breaks_a_promise(seed: int) -> None:
    seen: Counter[str] = Counter()
    for number in random.Random(seed).sample(range(10**9), 12):
        outcome = Simulation(number).run()
        assert not outcome.problem, f"python -m tests.fuzz_serve --seed {number}: {outcome.problem}"
        seen += outcome.seen
    assert seen.keys() >= COMMON, f"seeds that never saw {COMMON - seen.keys()}"


@pytest.mark.slow
def test_the_same_seed_is_the_same_order_of_everything(seed: int) -> None:
    first, second = Simulation(seed).run(), Simulation(seed).run()
    assert (first.digest, first.steps, first.ends) == (second.digest, second.steps, second.ends)


@pytest.mark.long
@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(Simulation(number).run().problem for number in range(1, SEEDS_UNTIL_FOUND + 1))
