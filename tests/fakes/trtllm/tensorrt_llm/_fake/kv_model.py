"""Not a language model, but one in which KV matters: wrong bytes in a page give wrong tokens.

The state S of a prefix is a weighted sum (mod 2**64) over all bytes of its KV, *read from the
pages*. A token's KV is a function of S, the token and its place: for every layer, K or V, and
head, 64-bit lanes of  x * ODD + constant(layer, K/V, head, lane)  with  x = mix(S, token). The
next token is a function of S after it. So a lost, stale, swapped or torn page, layer or rank
changes what comes out. Heads are divided over ranks as in tensor parallelism: every rank sums its
own lanes, and the sums are added up. Of a latent every rank has all lanes, each in its own pages,
and a rank whose pages differ from the others' gives wrong tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

MASK = 2**64 - 1
ODD = 0x9E3779B97F4A7C15
LANE_BYTES = 8


def mix(value: int) -> int:
    """splitmix64: every input bit changes about half of the output bits."""
    value = (value + ODD) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class KvShape:
    layers: int = 3
    kv_heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"
    tokens_per_block: int = 4
    vocabulary_tokens: int = 2048
    page_order: str = "HND"  # or NHD: tokens before heads
    kv_factor: int = 2  # 1 for MLA

    def __post_init__(self) -> None:
        assert self.head_bytes % LANE_BYTES == 0, "a head must be whole 64-bit lanes"
        assert self.kv_factor == 2 or self.kv_heads == 1, "a latent is of all heads"

    @property
    def head_bytes(self) -> int:
        return self.head_dim * {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}[self.dtype]

    @property
    def flat(self) -> int:
        """Scalars of one layer's K or V in a page, of all heads."""
        return self.kv_heads * self.tokens_per_block * self.head_dim

    @cached_property
    def constants(self) -> np.ndarray[Any, Any]:
        """[layers, kv_factor, heads, lanes] uint64; the same on every rank."""
        size = (self.layers, self.kv_factor, self.kv_heads, self.head_bytes // LANE_BYTES)
        return np.random.default_rng(1).integers(0, 2**64, size, dtype=np.uint64)

    @cached_property
    def weights(self) -> np.ndarray[Any, Any]:
        shape = self.constants.shape
        return np.random.default_rng(2).integers(0, 2**64, shape, dtype=np.uint64) | np.uint64(1)

    @cached_property
    def affine(self) -> tuple[int, int]:
        """(a, b): the weighted sum over the lanes of a token with state x is a * x + b."""
        a = int(self.weights.sum(dtype=np.uint64)) * ODD & MASK
        return a, int((self.weights * self.constants).sum(dtype=np.uint64))


class RankModel:
    """The heads of one rank, over that rank's pages; of a latent (kv_factor 1) all of it."""

    def __init__(self, shape: KvShape, rank: int, tp_size: int, blocks: int) -> None:
        import torch

        if shape.kv_factor == 1:
            rank, tp_size = 0, 1
        assert shape.kv_heads % tp_size == 0, (shape, tp_size)
        self.shape = shape
        heads = shape.kv_heads // tp_size
        self._heads = slice(rank * heads, (rank + 1) * heads)
        dtype = getattr(torch, {"fp8": "float8_e4m3fn"}.get(shape.dtype, shape.dtype))
        self.kv = torch.zeros(
            (blocks, shape.layers, shape.kv_factor, shape.flat // tp_size), dtype=dtype
        )
        lanes = shape.head_bytes // LANE_BYTES
        inner = (heads, shape.tokens_per_block, lanes)
        if shape.page_order == "NHD":
            inner = (shape.tokens_per_block, heads, lanes)
        raw = self.kv.view(torch.uint8).numpy().view(np.uint64)
        view = raw.reshape(blocks, shape.layers, shape.kv_factor, *inner)
        # Always [blocks, layers, kv, heads, tokens, lanes], whatever the order of the bytes.
        self._lanes = view if shape.page_order == "HND" else view.swapaxes(3, 4)

    def state_sum(self, block_ids: Sequence[int], tokens: int) -> int:
        """This rank's part of S over the first `tokens` tokens, read from the pages."""
        if not tokens:
            return 0
        per_block = self.shape.tokens_per_block
        used = list(block_ids[: -(-tokens // per_block)])
        lanes = self._lanes[used].transpose(0, 4, 1, 2, 3, 5)  # blocks, tokens first
        lanes = lanes.reshape(len(used) * per_block, *lanes.shape[2:])[:tokens]
        with np.errstate(over="ignore"):
            of_tokens = (lanes * self.shape.weights[:, :, self._heads]).sum(
                axis=(1, 2, 3, 4), dtype=np.uint64
            )
            return int((of_tokens * _places(0, tokens)).sum(dtype=np.uint64))

    def write(self, block_ids: Sequence[int], start: int, states: Sequence[int]) -> None:
        """The KV of the tokens from `start` on."""
        x = np.array(states, dtype=np.uint64) * np.uint64(ODD)
        with np.errstate(over="ignore"):
            lanes = x[:, None, None, None, None] + self.shape.constants[:, :, self._heads]
        per_block = self.shape.tokens_per_block
        places = np.arange(start, start + len(states))
        blocks = np.array(block_ids)[places // per_block]
        self._lanes[blocks, :, :, :, places % per_block] = lanes


def whole_sum(shape: KvShape, of_ranks: Sequence[int]) -> int:
    """S of the parts of all ranks. Ranks that should be alike and differ give another one."""
    if shape.kv_factor == 1 and len(set(of_ranks)) == 1:
        return of_ranks[0]
    return sum(of_ranks) & MASK


def _places(start: int, stop: int) -> np.ndarray[Any, Any]:
    return np.arange(start, stop, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def advance(shape: KvShape, state: int, start: int, token_ids: Sequence[int]) -> list[int]:
    """The x of each of these tokens, the first of them at place `start`; see next_state."""
    a, b = shape.affine
    found = []
    for place, token in enumerate(token_ids, start):
        x = mix(state ^ mix(token))
        found.append(x)
        state = (state + (2 * place + 1) * (a * x + b)) & MASK
    return found


def next_state(shape: KvShape, state: int, start: int, states: Sequence[int]) -> int:
    a, b = shape.affine
    for place, x in enumerate(states, start):
        state = (state + (2 * place + 1) * (a * x + b)) & MASK
    return state


def next_token(shape: KvShape, state: int) -> int:
    return mix(state) % shape.vocabulary_tokens


def reference_tokens(shape: KvShape, prompt: Sequence[int], tokens_max: int) -> list[int]:
    """What greedy generation must give, computed without any pages."""
    states = advance(shape, 0, 0, prompt)
    state, place, output = next_state(shape, 0, 0, states), len(prompt), []
    while len(output) < tokens_max:
        output.append(next_token(shape, state))
        states = advance(shape, state, place, output[-1:])
        state, place = next_state(shape, state, place, states), place + 1
    return output
