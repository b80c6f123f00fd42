"""Decode gives pages of lower priority to higher: who goes, who comes back, and in which order."""

from __future__ import annotations

import random

from backends.engine.batching.batching import PRIORITY_S, DecodeBatching
from backends.engine.batching.pages import PagePool

BLOCK_TOKENS = 16


def decode(pages: int = 8, slots: int = 8) -> tuple[PagePool, DecodeBatching]:
    pool = PagePool(pages)
    return pool, DecodeBatching(pool, BLOCK_TOKENS, slots, 64)


def add(
    made: DecodeBatching, name: str, pages: int, priority: int = 0, arrived_s: float = 0
) -> None:
    assert made.add(name, 1, pages * BLOCK_TOKENS - 1, arrived_s=arrived_s)
    if priority:
        made.prioritise(name, priority)


def start_all(made: DecodeBatching) -> list[str]:
    names = [admitted.request_id for admitted in made.admit()]
    for name in names:
        made.start(name, 1)
    return names


def preempt_all(pool: PagePool, made: DecodeBatching) -> list[str]:
    chosen = made.to_preempt()
    for name in chosen:
        pool.release(made.preempt(name))
        made.saved(name)
    made.check()
    return chosen


def test_the_last_of_the_lowest_priority_goes_first_and_no_more_than_are_needed() -> None:
    pool, made = decode()
    add(made, "low-old", 2, arrived_s=1)
    add(made, "middle", 2, priority=1, arrived_s=2)
    add(made, "low-new", 2, arrived_s=3)
    add(made, "low-newest", 2, arrived_s=4)
    start_all(made)
    add(made, "high", 3, priority=2, arrived_s=5)
    assert preempt_all(pool, made) == ["low-newest", "low-new"]
    assert start_all(made) == ["high"]


def test_equals_preempt_nobody() -> None:
    pool, made = decode()
    add(made, "first", 8)
    start_all(made)
    add(made, "second", 8)
    assert preempt_all(pool, made) == [] and start_all(made) == []


def test_nobody_goes_in_vain() -> None:
    """The head would not fit all the same."""
    _, made = decode()
    add(made, "high", 5, priority=1)
    add(made, "low", 2)
    start_all(made)
    add(made, "wide", 6, priority=1, arrived_s=1)
    assert made.to_preempt() == []


def test_a_slot_is_given_up_too() -> None:
    pool, made = decode(slots=1)
    add(made, "low", 1)
    start_all(made)
    add(made, "high", 1, priority=1)
    assert preempt_all(pool, made) == ["low"] and start_all(made) == ["high"]


def test_while_pages_are_on_their_way_no_more_are_taken() -> None:
    pool, made = decode()
    for name in ("a", "b"):
        add(made, name, 4)
    start_all(made)
    add(made, "high", 4, priority=1)
    (chosen,) = made.to_preempt()
    pages = made.preempt(chosen)
    assert made.to_preempt() == [] and made.admit() == []
    pool.release(pages)
    made.saved(chosen)
    assert start_all(made) == ["high"]


def test_who_was_preempted_comes_back_at_its_old_place() -> None:
    pool, made = decode()
    add(made, "low", 8, arrived_s=1)
    start_all(made)
    add(made, "high", 8, priority=1, arrived_s=2)
    add(made, "later", 1, arrived_s=3)
    preempt_all(pool, made)
    assert start_all(made) == ["high"]
    pool.release(made.remove("high"))
    assert start_all(made) == ["low"], "it goes before who came later"


def test_a_stream_of_high_priority_starves_nobody(seed: int) -> None:
    """Whoever came PRIORITY_S a level later preempts nobody: it only waits so long."""
    chance = random.Random(seed)
    pool, made = decode()
    add(made, "low", 8, arrived_s=0.0)
    start_all(made)
    preempted, running_s, now_s = 0, 0.0, 0.0
    alive: dict[str, float] = {}
    for number in range(2_000):
        now_s += 0.1
        if number % 3 == 0 and made.has_room:
            add(made, f"high{number}", chance.randint(1, 4), priority=1, arrived_s=now_s)
        for name in [name for name, until_s in alive.items() if until_s <= now_s]:
            del alive[name]
            pool.release(made.remove(name))
        preempted += preempt_all(pool, made).count("low")
        alive |= {name: now_s + chance.random() for name in start_all(made) if name != "low"}
        running_s += 0.1 * ("low" in made.next_step())
    assert preempted >= 1 and now_s - running_s <= PRIORITY_S + 1.0, (preempted, running_s)


def test_two_thousand_random_operations_keep_every_count(seed: int) -> None:
    chance = random.Random(seed)
    pool, made = decode(pages=12, slots=5)
    names: set[str] = set()
    saving: dict[str, list[int]] = {}
    for number in range(2_000):
        kind = chance.random()
        if kind < 0.3 and made.has_room:
            add(made, f"r{number}", chance.randint(1, 8), chance.randint(-1, 2), float(number))
            names.add(f"r{number}")
        elif kind < 0.45 and names:
            name = chance.choice(sorted(names))
            names.remove(name)
            pool.release(made.remove(name))
        elif kind < 0.6:
            for name in made.to_preempt():
                saving[name] = made.preempt(name)
        elif kind < 0.8 and saving:
            name = chance.choice(sorted(saving))
            pool.release(saving.pop(name))
            made.saved(name)
        else:
            start_all(made)
            made.computed(
                name for name in made.next_step() if made._started[name] < made._tokens_max[name]
            )
        made.check()
        pool.check()
