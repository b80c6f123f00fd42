"""The randomized walk, short, and proof that it would notice: planted defects are caught.

The long one is `make fuzz`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.fuzz.defects import DEFECTS
from tests.fuzz.walk import Walk

STEPS_UNTIL_CAUGHT = 15_000  # most are in less than 1,000
FEWEST_WALKS = 6
MOST_WALKS = 100  # one walk in seven sees the rarest of COMMON
COMMON = {
    "abandoned",
    "adopted whole",
    "blocks found again",
    "commits",
    "copies",
    "evictions",
    "directories restarted",
    "inventories",
    "late commits",
    "late reads",
    "late writes",
    "leased reads",
    "misses noticed",
    "nodes killed",
    "pinned hard",
    "removed",
    "restores",
    "spills kept",
    "writers quarantined",
    "commits of an earlier epoch",
    "writers too late to begin",
    "reserved slots committed",
    "reserved slots not needed",
    "reserved slots refused",
    "reservations lost",
}


@pytest.mark.slow
def test_random_life_keeps_every_promise_and_gives_all_memory_back(seed: int) -> None:
    seen: set[str] = set()
    for made, number in enumerate(random.Random(seed).sample(range(10**9), MOST_WALKS), 1):
        walk = Walk(number)
        walk.run(1_500)
        walk.finish()
        seen |= walk.world.seen.keys()
        if made >= FEWEST_WALKS and seen >= COMMON:
            return
    assert seen >= COMMON, f"walks that never saw {COMMON - seen.keys()}"


def test_the_same_seed_gives_the_same_walk(seed: int) -> None:
    first, second = Walk(seed), Walk(seed)
    first.run(500)
    second.run(500)
    now_s = first.world.now_s
    assert first.world.directory.snapshot(now_s) == second.world.directory.snapshot(now_s)
    assert first.world.directory.stats(now_s) == second.world.directory.stats(now_s)
    assert first.world.seen == second.world.seen


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=f"seed {number}, step"):
        Walk(number).run(STEPS_UNTIL_CAUGHT)
