"""Prompts made from hash ids share exactly what the trace says, at any scale."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.prompts import TokenSource, plan, too_long
from loadtest.replay.reuse import ideal_cached_tokens, leading_hits
from loadtest.replay.trace import TraceRow, scaled_lengths

SPECIAL = frozenset(range(16))
SCALES = st.one_of(
    st.sampled_from([1.0, 0.5, 0.1, 1 / 16, 1 / 128, 0.003, 2.0]),
    st.floats(min_value=0.003, max_value=2.0),
)


def row(hash_ids: list[int], last_tokens: int = 512, line: int = 1, at_ms: float = 0) -> TraceRow:
    return TraceRow(line, at_ms, 512 * (len(hash_ids) - 1) + last_tokens, 10, tuple(hash_ids))


def common_tokens(left: np.ndarray, right: np.ndarray) -> int:
    return leading_hits(list(enumerate(left)), set(enumerate(right)))


def random_rows(rng: random.Random, count: int) -> list[TraceRow]:
    """Conversations: each row continues a random earlier one after some of its blocks."""
    chains: list[list[int]] = [[]]
    rows, fresh = [], 0
    for line in range(1, count + 1):
        past = rng.choice(chains)
        added = rng.randint(1, 4)
        # The last block of a row is partial, so no other row ever continues it.
        chain = past[: rng.randint(0, max(0, len(past) - 1))] + list(range(fresh, fresh + added))
        fresh += added
        chains.append(chain)
        rows.append(row(chain, rng.randint(1, 512), line))
    return rows


@given(rows_seed=st.integers(0, 2**32), scale=SCALES, token_seed=st.integers(0, 2**63))
def test_two_prompts_share_exactly_the_blocks_that_their_rows_share(
    rows_seed: int, scale: float, token_seed: int
) -> None:
    rows = random_rows(random.Random(rows_seed), 12)
    planned = plan(rows, TokenSource(2_048, SPECIAL, token_seed), scale, speed=1.0)
    block = scaled_lengths(rows[0], scale).block_tokens
    for i, j in pairwise(range(len(rows))):
        shared_ids = leading_hits(rows[i].hash_ids, set(rows[j].hash_ids))
        shared = common_tokens(planned[i].prompt_ids, planned[j].prompt_ids)
        assert shared // block == shared_ids or (
            # A row that ends inside the next block cannot show that it is another block.
            shared == min(len(planned[i].prompt_ids), len(planned[j].prompt_ids))
        )
        assert shared >= min(shared_ids * block, len(planned[i].prompt_ids))


@given(rows_seed=st.integers(0, 2**32), scale=st.sampled_from([1.0, 1 / 8, 1 / 64]))
def test_an_unlimited_cache_finds_the_reuse_of_the_ids_at_any_scale(
    rows_seed: int, scale: float
) -> None:
    rows = random_rows(random.Random(rows_seed), 12)
    planned = plan(rows, TokenSource(2_048, SPECIAL), scale, speed=1.0)
    block = scaled_lengths(rows[0], scale).block_tokens
    cached = ideal_cached_tokens((request.prompt_ids for request in planned), block)
    seen: set[int] = set()
    for each, request, tokens in zip(rows, planned, cached, strict=True):
        # Only full blocks are cached, and the last id of a row is full only when it is 512 long.
        hits = min(leading_hits(each.hash_ids, seen), len(request.prompt_ids) // block)
        assert tokens == min(hits * block, len(request.prompt_ids) - 1)
        full = len(request.prompt_ids) // block
        seen.update(each.hash_ids[:full])


def test_a_hash_id_is_the_same_tokens_wherever_it_occurs() -> None:
    first, second = plan([row([3, 4]), row([9, 4])], TokenSource(2_048, SPECIAL), 0.25, 1.0)
    assert np.array_equal(first.prompt_ids[128:], second.prompt_ids[128:])
    assert not np.array_equal(first.prompt_ids[:128], second.prompt_ids[:128])


def test_the_tokens_are_the_same_on_every_machine_and_every_day() -> None:
    block = TokenSource(2_048, SPECIAL, seed=1).block(5, 8)
    assert block.tolist() == [516, 511, 511, 1438, 639, 1189, 450, 1494]


def test_another_seed_gives_other_tokens_from_the_first_block_on() -> None:
    blocks = [TokenSource(2_048, SPECIAL, seed).block(0, 4) for seed in range(3)]
    assert not any(np.array_equal(a, b) for a, b in pairwise(blocks))


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [2, 3, 4])
def test_ids_stay_apart_in_blocks_of_few_tokens(block_tokens: int) -> None:
    source = TokenSource(2_048, SPECIAL)
    blocks = {source.block(hash_id, block_tokens).tobytes() for hash_id in range(50_000)}
    assert len(blocks) == 50_000


def test_special_tokens_and_ids_beyond_the_vocabulary_never_occur() -> None:
    tokens = TokenSource(100, SPECIAL, seed=3).block(12, 10_000)
    assert tokens.dtype == np.int32
    assert set(tokens.tolist()) == set(range(16, 100))


@pytest.mark.parametrize(
    ("input_tokens", "blocks", "scale", "expected"),
    [
        (6_758, 14, 1.0, 6_758),
        (6_758, 14, 0.1, 676),  # 13 blocks of 51, and 13 tokens of the last
        (512 * 28, 28, 0.1, 28 * 51),  # 1,434 would need a 29th block: sharing wins
        (513, 2, 0.01, 6),  # one full block of 5 and at least one token of the next
        (13, 1, 0.01, 1),  # never empty
    ],
)
def test_a_prompt_keeps_all_its_blocks_and_is_as_long_as_they_allow(
    input_tokens: int, blocks: int, scale: float, expected: int
) -> None:
    scaled = scaled_lengths(TraceRow(1, 0, input_tokens, 0, tuple(range(blocks))), scale)
    assert scaled.prompt_tokens == expected
    assert scaled.output_tokens == 1


def test_requests_are_due_at_the_traces_pace_from_its_first_row_on() -> None:
    rows = [row([1], at_ms=5_000), row([2], at_ms=5_000), row([3], at_ms=8_000)]
    planned = plan(rows, TokenSource(2_048), 0.1, speed=2.0)
    assert [request.due_s for request in planned] == [0.0, 0.0, 1.5]


def test_rows_that_do_not_fit_are_named_with_a_scale_at_which_all_fit() -> None:
    rows = [row(list(range(n)), line=n) for n in range(1, 41)]
    problem = too_long(rows, 0.5, context_tokens_max=8_192)
    assert problem is not None
    assert problem.lines == tuple(range(32, 41))
    assert problem.context_tokens == 40 * 256 + 5
    assert 0.35 < problem.length_scale < 0.4
    assert too_long(rows, problem.length_scale, 8_192) is None


@given(rows_seed=st.integers(0, 2**32), limit=st.integers(40, 2_000))
def test_the_scale_that_is_offered_always_fits(rows_seed: int, limit: int) -> None:
    rows = random_rows(random.Random(rows_seed), 12)
    problem = too_long(rows, 1.0, limit)
    assert problem is None or too_long(rows, problem.length_scale, limit) is None
