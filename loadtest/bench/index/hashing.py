"""Tokens per second of hashing a prompt into block keys.

From a numpy int32 array, which is how a tokenizer's output crosses Triton, and from a list, whose
integers have to be gathered one by one. The best of several rounds: other work only adds time.

Not here: the keys themselves (mooncake_store/block_keys.py), Dynamo's (peer_client.py).
"""

from __future__ import annotations

import time

import numpy as np

from loadtest.bench.result import Cell, Target
from mooncake_store.block_keys import Tokens, block_keys, chain_seed

PROMPTS_TOKENS = (8_192, 131_072)
BLOCKS_TOKENS = (64, 256, 512)
GOAL_TOKENS_PER_S = 80e6
PROMISED_BLOCKS_TOKENS = (256, 512)


def measure(rounds: int, seed: int) -> tuple[list[dict[str, Cell]], list[Target]]:
    rows: list[dict[str, Cell]] = []
    worst: dict[int, float] = {}
    for prompt_tokens in PROMPTS_TOKENS:
        array = np.random.default_rng(seed).integers(0, 128_000, prompt_tokens, np.int32)
        inputs: dict[str, Tokens] = {"int32 array": array, "list": array.tolist()}
        for block_tokens in BLOCKS_TOKENS:
            for name, tokens in inputs.items():
                rate = prompt_tokens / best_s(tokens, block_tokens, rounds)
                rows.append({
                    "what": "hashing", "input": name, "prompt_tokens": prompt_tokens,
                    "block_tokens": block_tokens, "million_tokens_per_s": round(rate / 1e6, 1),
                })  # fmt: skip
                if name == "int32 array":
                    worst[block_tokens] = min(worst.get(block_tokens, rate), rate)
    targets = [
        Target(
            f"hashing_tokens_per_s_{block_tokens}", round(worst[block_tokens]), ">=",
            GOAL_TOKENS_PER_S, "from a numpy int32 array, the slower of two prompt lengths",
        )
        for block_tokens in PROMISED_BLOCKS_TOKENS
    ]  # fmt: skip
    return rows, targets


def best_s(tokens: Tokens, block_tokens: int, rounds: int) -> float:
    seed, times = chain_seed("bench"), []
    for _ in range(rounds):
        began_s = time.perf_counter()
        block_keys(tokens, block_tokens, seed)
        times.append(time.perf_counter() - began_s)
    return min(times)
