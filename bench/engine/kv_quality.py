"""The distance of the demo checkpoint with KV in fp8 from the same with KV in float32.

Texts are the model's own, sampled after a few words with float32. Then both read the same texts
token by token, and both generate greedily, where one different token changes the remaining text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backends.engine.interface import Work
from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from backends.text.tokenizer import Tokenizer
from bench.harness.generate import generate
from loadtest.harness.result import Cell

TEXTS, TEXT_TOKENS, ANSWER_TOKENS, BLOCK_TOKENS = 16, 256, 128, 64
BEGINNINGS = (
    "It is a truth universally acknowledged",
    "She had been a friend and companion",
    "Call me Ishmael. Some years ago",
    "The evening passed off with",
)


def measure(checkpoint: Path, seed: int) -> dict[str, Cell]:
    """Over TEXTS texts of TEXT_TOKENS tokens."""
    plain, small = (_engine(checkpoint, kv_dtype) for kv_dtype in ("auto", "fp8"))
    tokenizer = Tokenizer.load(checkpoint)
    beginnings = [tokenizer.encode(BEGINNINGS[at % len(BEGINNINGS)]) for at in range(TEXTS)]
    texts = [
        [*ids, *_drawn(plain, ids, seed + at)][:TEXT_TOKENS] for at, ids in enumerate(beginnings)
    ]
    scores = [_logprobs(engine, texts) for engine in (plain, small)]
    best = [found.argmax(axis=2) for found in scores]
    following = np.array([text[1:] for text in texts]).T[:, :, None]
    own = [np.take_along_axis(found[:-1], following, axis=2) for found in scores]
    greedy = SamplingParams(max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS)
    answers = [np.array(generate(engine, beginnings, greedy)) for engine in (plain, small)]
    same = answers[0] == answers[1]
    return {
        "what": "demo checkpoint, KV in fp8 beside float32",
        "next_tokens": best[0].size,
        "equal_best": round(float((best[0] == best[1]).mean()), 4),
        "logprob_difference_mean": round(float(np.abs(own[0] - own[1]).mean()), 5),
        "perplexity_float32": round(float(np.exp(-own[0].mean())), 4),
        "perplexity_fp8": round(float(np.exp(-own[1].mean())), 4),
        "equal_greedy_tokens": round(float(same.mean()), 4),
        "equal_answers": int(same.all(axis=1).sum()),
        "answers": len(same),
    }


def _engine(checkpoint: Path, kv_dtype: str) -> TorchEngine:
    pages = TEXTS * -(-2 * TEXT_TOKENS // BLOCK_TOKENS)
    return TorchEngine.load(checkpoint, pages, BLOCK_TOKENS, kv_dtype=kv_dtype, threads=1)


def _drawn(engine: TorchEngine, ids: list[int], seed: int) -> list[int]:
    params = SamplingParams(
        max_tokens=TEXT_TOKENS, min_tokens=TEXT_TOKENS, temperature=1.0, seed=seed
    )
    return generate(engine, [ids], params)[0]


def _logprobs(engine: TorchEngine, texts: list[list[int]]) -> NDArray[np.float32]:
    """[tokens, texts, vocabulary] of the token after each token."""
    need = -(-TEXT_TOKENS // BLOCK_TOKENS)
    tables = [list(range(at * need, (at + 1) * need)) for at in range(len(texts))]
    found = []
    for position in range(TEXT_TOKENS):
        works = [
            Work([text[position]], position, pages)
            for text, pages in zip(texts, tables, strict=True)
        ]
        logits = engine.forward(works)
        high = logits.max(axis=1, keepdims=True)
        found.append(logits - high - np.log(np.exp(logits - high).sum(axis=1, keepdims=True)))
    return np.stack(found)
