"""The ideal: what a prefix cache without limits would have found, worked out by hand."""

from __future__ import annotations

import numpy as np

from loadtest.replay.reuse import UnlimitedCache, ideal_cached_tokens


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_only_full_blocks_of_an_earlier_prompt_are_found() -> None:
    prompts = [ids(1, 2, 3, 4, 5), ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 9, 9)]
    assert ideal_cached_tokens(prompts, block_tokens=2) == [0, 4, 2]


def test_at_least_one_token_is_always_computed() -> None:
    assert ideal_cached_tokens([ids(1, 2, 3, 4)] * 2, block_tokens=2) == [0, 3]


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    assert ideal_cached_tokens([ids(1, 2, 3, 4, 0), ids(9, 9, 3, 4, 0)], 2) == [0, 0]


def test_a_hole_in_the_prefix_ends_the_hit() -> None:
    cache = UnlimitedCache(block_tokens=1)
    cache.admit(ids(1, 2))
    assert cache.admit(ids(2, 1, 2)) == 0
