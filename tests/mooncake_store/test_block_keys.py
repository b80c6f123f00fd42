"""Keys: equal exactly for equal prefixes under equal seeds."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.block_keys import (
    SALT_SEPARATOR,
    block_keys,
    chain_seed,
    extend_keys,
    tail_key,
    tenant_of,
)

SEED = chain_seed("print")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_keys_are_the_same_in_every_process_and_release() -> None:
    # Hosts agree on keys without talking: a change here makes every stored block unreachable.
    keys = block_keys(range(8), 4, chain_seed("print", "lora", "salt"))
    assert [key.hex() for key in keys] == [
        "4642284a965402972e17a0a02f4fe2f1",
        "cd33a50a358706be30f3e7dfaac88674",
    ]
    assert tail_key("r1").hex() == "c431fa3467a7b6ffd133aaa46f877a09"


@given(tokens=TOKENS, block_tokens=st.integers(1, 9))
def test_only_full_blocks_have_keys(tokens: list[int], block_tokens: int) -> None:
    keys = block_keys(tokens, block_tokens, SEED)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == 16 for key in keys)
    assert len(set(keys)) == len(keys)


@given(tokens=TOKENS, block_tokens=st.integers(1, 9), salt=st.text(max_size=3))
def test_a_key_is_the_hash_of_its_block_keyed_with_the_key_before(
    tokens: list[int], block_tokens: int, salt: str
) -> None:
    key = chain_seed("print", cache_salt=salt)
    expected = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        raw = b"".join(struct.pack("<I", token) for token in tokens[start : start + block_tokens])
        key = hashlib.blake2b(raw, digest_size=16, key=key).digest()
        expected.append(key)
    assert block_keys(tokens, block_tokens, chain_seed("print", cache_salt=salt)) == expected


def test_the_tenant_of_a_salt_is_before_the_separator() -> None:
    for salt in ("", "a", f"a{SALT_SEPARATOR}", f"a{SALT_SEPARATOR}b{SALT_SEPARATOR}c"):
        assert tenant_of(salt) == salt[:1]


@given(first=TOKENS, second=TOKENS, block_tokens=st.integers(1, 5))
def test_two_prompts_share_keys_exactly_as_far_as_whole_blocks_agree(
    first: list[int], second: list[int], block_tokens: int
) -> None:
    ours, theirs = (block_keys(tokens, block_tokens, SEED) for tokens in (first, second))
    for i, (our_key, their_key) in enumerate(zip(ours, theirs, strict=False)):
        end = (i + 1) * block_tokens
        assert (our_key == their_key) == (first[:end] == second[:end])


@given(tokens=TOKENS, block_tokens=st.integers(1, 5), cut=st.integers(0, 8))
def test_a_chain_can_be_continued(tokens: list[int], block_tokens: int, cut: int) -> None:
    whole = block_keys(tokens, block_tokens, SEED)
    head = whole[:cut]
    last = head[-1] if head else SEED
    rest = tokens[len(head) * block_tokens :]
    assert head + extend_keys(last, rest, block_tokens) == whole


@given(tokens=TOKENS)
def test_lists_and_arrays_give_the_same_keys(tokens: list[int]) -> None:
    expected = block_keys(tokens, 3, SEED)
    for dtype in (np.int64, np.uint32, np.uint64):
        array = np.array(tokens, dtype=dtype)
        assert block_keys(array, 3, SEED) == expected
        assert block_keys(np.repeat(array, 2)[::2], 3, SEED) == expected, "strided"


def test_nothing_is_shared_between_models_adapters_and_tenants() -> None:
    seeds = {
        chain_seed("p"),
        chain_seed("q"),
        chain_seed("p", lora="l"),
        chain_seed("p", cache_salt="l"),
        chain_seed("p", "ab", "c"),
        chain_seed("p", "a", "bc"),
    }
    assert len(seeds) == 6


@pytest.mark.parametrize("tokens", [[1, -1], [2**32], [1.5], ["1"], [None]])
def test_what_is_no_token_id_is_refused(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids must"):
        block_keys(tokens, 1, SEED)  # type: ignore[arg-type]


@pytest.mark.parametrize("array", [np.array([-1]), np.array([2**32]), np.array([1.0]), np.eye(2)])
def test_an_array_without_token_ids_is_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_keys(array, 1, SEED)
