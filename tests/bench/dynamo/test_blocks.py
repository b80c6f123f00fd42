"""The blocks of a worker in Dynamo's engine: holds, copies, eviction (rules 4 and 5)."""

from __future__ import annotations

import random

import pytest

from bench.dynamo.blocks import PARTIAL, BlockPool, Key


def chain(pool: BlockPool, *keys: int) -> list[int]:
    return [pool.take(key) for key in keys]


def test_a_hit_is_a_run_from_the_start() -> None:
    pool = BlockPool(8)
    blocks = chain(pool, 1, 2, 3)
    assert pool.hits([1, 2, 3, 4]) == blocks
    assert pool.hits([2, 3]) == blocks[1:]
    assert pool.hits([9, 1]) == []


def test_released_blocks_stay_until_their_room_is_needed_and_the_deepest_goes_first() -> None:
    pool = BlockPool(3)
    pool.release(chain(pool, 1, 2, 3))
    assert pool.room == 3 and len(pool.hits([1, 2, 3])) == 3
    pool.take(7)
    assert len(pool.hits([1, 2, 3])) == 2
    pool.check()


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(3)
    first = chain(pool, 1)
    pool.release(chain(pool, 2, 3))
    chain(pool, 4, 5)
    assert pool.room == 0 and pool.hits([1]) == first
    with pytest.raises(KeyError):
        pool.take(6)


def test_the_same_block_computed_twice_is_two_copies_and_the_key_goes_with_the_last() -> None:
    seen: list[tuple[Key, bool]] = []
    pool = BlockPool(2, lambda key, is_there: seen.append((key, is_there)))
    first, second = chain(pool, 1), chain(pool, 1)
    pool.release(first)
    pool.release(second)
    pool.take(2)
    assert pool.hits([1]) == second and seen == [(1, True), (2, True)]
    pool.take(3)
    assert pool.hits([1]) == [] and seen[2] == (1, False)


def test_a_partial_block_is_free_at_once() -> None:
    pool = BlockPool(2)
    blocks = chain(pool, 1, PARTIAL)
    pool.release(blocks)
    pool.take(2)
    assert pool.hits([1]) == blocks[:1]


def test_random_chains_keep_the_books(seed: int) -> None:
    rng = random.Random(seed)
    pool, held = BlockPool(24), list[list[int]]()
    for _ in range(400):
        keys = [100 * rng.randrange(4) + place for place in range(rng.randrange(1, 6))]
        hits = pool.hits(keys)
        if len(keys) - pool.held(hits) <= pool.room and rng.random() < 0.6:
            pool.hold(hits)
            held.append(hits + chain(pool, *keys[len(hits) :]))
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.room == 24
